//! What is timed: models, their parts, and operators cut out of them.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use super::{
    LatencyError,
    cut::{CutOperator, cut_operators},
    shapes::{Grid, Point, axes, check_fixed, check_length},
    steering::Choice,
};
use crate::{
    backend::{BackendError, add_implied},
    file_names::{Part, graphs_in},
    onnx::{OnnxFile, read_model},
    provenance::{ModelFile, ProvenanceError},
    tensor::NamedTensors,
};

/// An exported graph, or the graphs of an exported folder.
#[derive(Debug, Clone)]
pub struct Model {
    /// How results call it.
    pub label: String,
    /// Where it was read from.
    pub path: PathBuf,
    /// Each graph, and which one it is.
    pub parts: Vec<(Part, OnnxFile)>,
}

impl Model {
    /// Reads the graphs at `path`, a file or a folder.
    ///
    /// # Errors
    ///
    /// Where there is none, or one cannot be read.
    pub fn open(path: &Path) -> Result<Self, LatencyError> {
        let label = path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into());
        let read = |path: &Path| read_model(path).map(|file| (file.part(), file));
        let parts = match path.is_dir() {
            true => graphs_in(path)?.iter().map(|(_, path)| read(path)).collect::<Result<_, _>>()?,
            false => vec![read(path)?],
        };
        Ok(Self { label, path: path.to_path_buf(), parts })
    }

    /// Reads several models; those of the same name are told apart by their paths, then by numbers.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_all(paths: &[PathBuf]) -> Result<Vec<Self>, LatencyError> {
        let mut models = paths.iter().map(|path| Self::open(path)).collect::<Result<Vec<_>, _>>()?;
        let labels: Vec<String> = models.iter().map(|model| model.label.clone()).collect();
        for (model, label) in models.iter_mut().zip(&labels) {
            if labels.iter().filter(|other| *other == label).count() > 1 {
                model.label = model.path.display().to_string();
            }
        }
        for index in 1..models.len() {
            let (before, rest) = models.split_at_mut(index);
            let label = rest[0].label.clone();
            let twins = before.iter().filter(|model| model.path == rest[0].path).count();
            if twins > 0 {
                rest[0].label = format!("{label} ({})", twins + 1);
            }
        }
        Ok(models)
    }

    fn part(&self, part: Part) -> Option<&OnnxFile> {
        self.parts.iter().find(|(known, _)| *known == part).map(|(_, file)| file)
    }

    /// Size and hash of every file of the model, data files included.
    ///
    /// # Errors
    ///
    /// Where one cannot be read.
    pub fn files(&self) -> Result<Vec<ModelFile>, ProvenanceError> {
        let paths: BTreeSet<PathBuf> = self.parts.iter().flat_map(|(_, file)| file.files()).collect();
        paths.iter().map(|path| ModelFile::of(&self.label, path)).collect()
    }
}

/// One model's share of a [`Job`].
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// Place of the model.
    pub model: usize,
    /// Its graph.
    pub file: OnnxFile,
    /// The operator that the graph consists of, where it was cut out.
    pub operator: Option<CutOperator>,
}

/// Graphs that are timed beside each other.
#[derive(Debug, Clone)]
pub(super) struct Job {
    /// Part of the models.
    pub part: Part,
    /// Layer, where its operator was cut out.
    pub module: Option<String>,
    /// The graphs, model by model.
    pub members: Vec<Member>,
    /// Shapes.
    pub points: Vec<Point>,
}

/// What there is to time at random inputs: whole graphs, or with a steered `choice` every operator by itself.
///
/// # Errors
///
/// Where the models have no part in common, a size is missing or unused, or a row is too long for a graph.
pub(super) fn jobs(models: &[Model], grid: &Grid, choice: &Choice) -> Result<Vec<Job>, LatencyError> {
    let mut jobs = Vec::new();
    for (part, members) in common_parts(models)? {
        if *choice == Choice::Data {
            jobs.push(Job { part, module: None, members, points: Vec::new() });
        } else {
            jobs.extend(cut_jobs(part, &members)?);
        }
    }
    let mut known = Vec::new();
    for job in &mut jobs {
        job.members.iter().try_for_each(|member| check_fixed(&member.file))?;
        let axes: BTreeSet<String> = job.members.iter().flat_map(|member| axes(&member.file)).collect();
        job.points = grid.points(&axes)?;
        for point in &job.points {
            job.members.iter().try_for_each(|member| check_length(&member.file, point))?;
        }
        known.push(axes);
    }
    match grid.unused_axis(&known) {
        Some(axis) => Err(LatencyError::UnusedAxis { axis: axis.to_owned() }),
        None => Ok(jobs),
    }
}

/// A graph that is not timed, since a file of inputs lacks one of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Part of the models.
    pub part: Part,
    /// The graph.
    pub graph: PathBuf,
    /// Name of the input.
    pub input: String,
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\", which {} takes", self.input, self.graph.display())
    }
}

/// Those of `inputs` that `file` takes, with what follows from them.
///
/// # Errors
///
/// As of [`add_implied`].
pub fn own_inputs(file: &OnnxFile, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
    let declared = file.inputs();
    let given = declared.iter().filter_map(|input| Some((input.name.clone(), inputs.get(&input.name)?.clone())));
    let mut own = given.collect();
    add_implied(&declared, &mut own)?;
    Ok(own)
}

/// Graphs that `inputs` leave out.
///
/// # Errors
///
/// Where no graph takes one of `inputs`, and where every graph lacks one.
pub fn left_out(models: &[Model], inputs: &NamedTensors) -> Result<Vec<LeftOut>, LatencyError> {
    let mut known: Vec<String> = Vec::new();
    for input in models.iter().flat_map(|model| &model.parts).flat_map(|(_, file)| file.inputs()) {
        if !known.contains(&input.name) {
            known.push(input.name);
        }
    }
    if let Some(name) = inputs.keys().find(|name| !known.contains(name)) {
        let expected = format!("one of {}", known.join(", "));
        return Err(BackendError::Input { name: name.clone(), expected, found: "an unknown name".into() }.into());
    }
    let common = common_files(models);
    let mut graphs = Vec::new();
    for (part, files) in &common {
        for file in files {
            let own = own_inputs(file, inputs)?;
            if let Some(input) = file.inputs().into_iter().find(|input| !own.contains_key(&input.name)) {
                graphs.push(LeftOut { part: *part, graph: file.path().to_path_buf(), input: input.name });
                break;
            }
        }
    }
    if !graphs.is_empty() && graphs.len() == common.len() {
        return Err(LatencyError::MissingInput { graphs });
    }
    Ok(graphs)
}

/// The graphs of each part that every model has, model by model.
fn common_files(models: &[Model]) -> Vec<(Part, Vec<&OnnxFile>)> {
    let files = |part| Some((part, models.iter().map(|model| model.part(part)).collect::<Option<_>>()?));
    Part::ALL.into_iter().filter_map(files).collect()
}

/// Parts that every model has; all of them where there is one model.
pub(super) fn common_parts(models: &[Model]) -> Result<Vec<(Part, Vec<Member>)>, LatencyError> {
    let member = |(model, file): (usize, &OnnxFile)| Member { model, file: file.clone(), operator: None };
    let members = |files: Vec<&OnnxFile>| files.into_iter().enumerate().map(member).collect();
    let common: Vec<_> = common_files(models).into_iter().map(|(part, files)| (part, members(files))).collect();
    if common.is_empty() {
        let parts = |model: &Model| model.parts.iter().map(|(part, _)| part.as_str()).collect::<Vec<_>>().join(" and ");
        let texts: Vec<_> = models.iter().map(|model| format!("{} holds {}", model.label, parts(model))).collect();
        return Err(LatencyError::NothingInCommon { parts: texts.join(", ") });
    }
    Ok(common)
}

/// One job for every layer of the first model that all others have too.
fn cut_jobs(part: Part, members: &[Member]) -> Result<Vec<Job>, LatencyError> {
    let mut cut: Vec<(usize, Vec<CutOperator>)> = Vec::new();
    for member in members {
        cut.push((member.model, cut_operators(&member.file)?));
    }
    let Some((_, first)) = cut.first() else { return Ok(Vec::new()) };
    let modules: Vec<String> = first.iter().map(|operator| operator.module.clone()).collect();
    let mut jobs = Vec::new();
    for module in modules {
        let member = |(model, operators): &(usize, Vec<CutOperator>)| {
            let operator = operators.iter().find(|operator| operator.module == module)?.clone();
            Some(Member { model: *model, file: operator.file.clone(), operator: Some(operator) })
        };
        if let Some(members) = cut.iter().map(member).collect::<Option<Vec<_>>>() {
            jobs.push(Job { part, module: Some(module), members, points: Vec::new() });
        }
    }
    Ok(jobs)
}
