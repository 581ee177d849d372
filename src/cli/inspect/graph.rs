//! `moa-export inspect` of ONNX files.

use std::path::Path;

use super::{InspectArguments, PART_HEADER, conventions, grouped, lengths_count, line, right, stored};
use crate::{
    checkpoint,
    cli::{
        Failure,
        document::{Kind, document},
        note, on_one_line,
        table::{counted, table},
    },
    inspect::{File, GraphInspection, GraphPart, Lengths, Signature, inspect_graphs, model_files},
    onnx::{
        OnnxFile,
        read::{begins_as_model, dims_text, read_model_without_data},
    },
};

/// Whether `path` is a graph by its name or its first bytes, or a folder with some and without a checkpoint.
pub(super) fn is_exported(path: &Path) -> bool {
    if !path.is_dir() {
        let is_named = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("onnx"));
        return is_named || begins_as_model(path);
    }
    let is_checkpoint = checkpoint::models().any(|name| path.join(name).exists());
    !is_checkpoint && model_files(path).is_ok_and(|files| !files.model.is_empty())
}

pub(super) fn print(path: &Path, lengths: Lengths, arguments: &InspectArguments) -> Result<String, Failure> {
    let paths = model_files(path).map_err(|error| Failure::io(&error, &path.display().to_string()))?;
    for other in &paths.others {
        note(&format!("{} is not counted; give the file itself", other.display()));
    }
    let files = paths.model.iter().map(|path| read_model_without_data(path)).collect::<Result<Vec<_>, _>>()?;
    for absent in files.iter().flat_map(OnnxFile::absent_data_files) {
        note(&format!("{} is not there; what is shown of its weights is what the model says", absent.display()));
    }
    lengths_count(arguments, |lengths| inspect_graphs(&files, lengths).total)?;
    let inspection = inspect_graphs(&files, lengths);
    Ok(match arguments.json {
        true => document(Kind::InspectGraphs, &inspection),
        false => text(&inspection),
    })
}

fn text(inspection: &GraphInspection) -> String {
    let unknown = "unknown";
    let mut text = line("family", inspection.family.as_deref().unwrap_or(unknown));
    text.push_str(&line("form", inspection.form.as_deref().unwrap_or(unknown)));
    for (name, value) in inspection.sizes.lines() {
        text.push_str(&line(name, &value));
    }
    if let Some(bytes) = inspection.cache_bytes_per_token.filter(|bytes| *bytes > 0) {
        text.push_str(&line("cache", &format!("{} bytes per token", grouped(bytes))));
    }
    if inspection.parts.is_empty() {
        text.push_str(&line("parameters", &grouped(inspection.total.parameters)));
    } else {
        let rows: Vec<_> = inspection.parts.iter().chain([&inspection.total]).map(row).collect();
        text.push_str(&format!("\n{}", table(&PART_HEADER, &rows)));
    }
    if inspection.total.paper_macs.is_some() {
        text.push_str(&format!("\n{}", conventions(inspection.lengths)));
    }
    for what in &inspection.not_told {
        text.push_str(&format!("\nnot told by the graph: {what}\n"));
    }
    for file in &inspection.files {
        text.push_str(&file_text(file));
    }
    text
}

fn row(part: &GraphPart) -> Vec<String> {
    let number = |number: Option<u64>| right(&number.map_or_else(|| "–".to_owned(), grouped));
    let numbers = [Some(part.parameters), part.active_parameters, part.paper_macs, part.full_macs];
    std::iter::once(part.name.to_owned()).chain(numbers.map(number)).collect()
}

fn file_text(file: &File) -> String {
    let mut text = format!("\n{}\n", file.name);
    let mut add = |name: &str, value: &str| text.push_str(&format!("  {}", line(name, value)));
    if !file.producer.is_empty() {
        add("written by", &file.producer);
    }
    let opsets: Vec<_> = file.opsets.iter().map(|(domain, version)| format!("{domain} {version}")).collect();
    add("opsets", &format!("{}; IR {}", opsets.join(", "), file.ir_version));
    for weights in &file.weights {
        let beside = match weights.external_bytes {
            0 => String::new(),
            bytes => format!(", {} of them beside the model", grouped(bytes)),
        };
        let (values, tensors) = stored(weights.values, weights.tensors);
        let bytes = grouped(weights.bytes);
        add("weights", &format!("{values} in {tensors} of {}, {bytes} bytes{beside}", weights.dtype));
    }
    for (name, values) in [("input", &file.inputs), ("output", &file.outputs)] {
        folded(values).iter().for_each(|value| add(name, value));
    }
    let operators = file.operators.iter().map(|operator| match operator.domain.as_str() {
        "ai.onnx" => format!("{} {}", operator.nodes, operator.operator),
        domain => format!("{} {domain}.{}", operator.nodes, operator.operator),
    });
    add("operators", &operators.collect::<Vec<_>>().join(", "));
    for function in &file.functions {
        add("function", &format!("{}.{}, {}", function.domain, function.operator, counted(function.nodes, "node")));
    }
    for (key, value) in &file.metadata {
        add("metadata", &format!("{key} = {}", on_one_line(value)));
    }
    text
}

/// Values of one type whose names differ in their first number alone, which counts up from one to the next.
struct Series<'a> {
    before: &'a str,
    first: &'a str,
    last: &'a str,
    after: String,
}

impl Series<'_> {
    fn goes_on_with(&self, number: &str) -> bool {
        self.last.parse::<u64>().is_ok_and(|last| number == last.saturating_add(1).to_string())
    }

    fn line(&self) -> String {
        let Self { before, first, last, after } = self;
        if first == last { format!("{before}{first}{after}") } else { format!("{before}{{{first}..{last}}}{after}") }
    }
}

/// One line a value, or a series of them.
fn folded(values: &[Signature]) -> Vec<String> {
    let mut all: Vec<Series> = Vec::new();
    for value in values {
        let (before, number, after) = first_number(&value.name);
        let shape = match &value.shape {
            None => "of unknown rank".into(),
            Some(dims) => dims_text(dims),
        };
        let after = format!("{after} {} {shape}", value.dtype);
        let mut series = all.iter_mut().filter(|series| series.before == before && series.after == after);
        match series.find(|series| series.goes_on_with(number)) {
            Some(series) => series.last = number,
            None => all.push(Series { before, first: number, last: number, after }),
        }
    }
    all.iter().map(Series::line).collect()
}

/// What stands before, in and after the first number of a name.
fn first_number(name: &str) -> (&str, &str, &str) {
    let start = name.find(|letter: char| letter.is_ascii_digit()).unwrap_or(name.len());
    let (before, rest) = name.split_at(start);
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    let (number, after) = rest.split_at(end);
    (before, number, after)
}
