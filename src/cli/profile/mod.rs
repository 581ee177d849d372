//! `moa-export profile`.

mod args;
mod inputs;
mod report;
mod vocabulary;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use args::InputFormat;
pub(super) use args::ProfileArguments;
use inputs::{batches, folder};
use serde_json::{Value, json};
use vocabulary::{Vocabulary, check_dictionaries};

use super::{
    Failure,
    apart::keep_apart,
    backends::{BackendOptions, backend, check_ort_options},
    document::{Kind, document},
    interrupt::Ending,
    module_labels::labels,
    must_be_open,
    output_file::{OutputFile, PAGE, commit_all, own_ending},
    print_result, progress,
    table::{counted, table},
    tensorrt_args::TensorRtArguments,
};
use crate::{
    backend::Ranges,
    profile::{ModuleProfile, Profile, ProfileError, Profiler},
    text::Dictionary,
};

/// Loads of so many experts stand in a row of the table.
const LOADS: usize = 8;

/// A profile with all that its readers need.
pub(super) struct Profiled<'a> {
    pub(super) arguments: &'a ProfileArguments,
    pub(super) backend: &'static str,
    pub(super) runs: usize,
    pub(super) profile: Profile,
    /// What stands in the page's receipt; empty where there is no page.
    pub(super) receipt: Vec<(String, String)>,
    vocabulary: Option<Vocabulary>,
    dictionary: Option<Dictionary>,
}

pub(super) fn run(arguments: &ProfileArguments) -> Result<ExitCode, Failure> {
    check_line_options(arguments)?;
    let ending = Ending::at_once([&arguments.model].into_iter().chain(&arguments.report).map(PathBuf::as_path))?;
    keep_apart(&[arguments.report.as_deref()], arguments.inputs())?;
    own_ending(arguments.report.as_deref(), PAGE)?;
    let page = OutputFile::of_option(arguments.report.as_deref(), arguments.force)?;
    must_be_open(&arguments.model)?;
    check_ort_options(&[arguments.backend], arguments.library.as_deref(), arguments.threads)?;
    check_lists(arguments)?;
    let dictionary = arguments.dict.as_deref().map(Dictionary::read).transpose()?;
    let vocabulary = Vocabulary::find(&folder(&arguments.model), arguments.reads_text())?;
    let options = BackendOptions {
        threads: arguments.threads,
        library: arguments.library.clone(),
        tensorrt: TensorRtArguments::default().options(Ranges::default()),
    };
    let backend = backend(arguments.backend, &options)?;
    let mut profiler = Profiler::open(&arguments.model, backend.as_ref())?;
    check_ids(arguments, &profiler)?;
    if let Some((path, dictionary)) = arguments.dict.as_deref().zip(dictionary.as_ref()) {
        check_dictionaries(path, |_| dictionary, &profiler)?;
    } else if let Some(vocabulary) = &vocabulary {
        vocabulary.check(&folder(&arguments.model), &profiler)?;
    }
    let batches = batches(arguments, &profiler, vocabulary.as_ref())?;
    let receipt = match page {
        Some(_) => report::receipt(arguments, std::slice::from_ref(&backend), &profiler)?,
        None => Vec::new(),
    };
    let progress = progress::batches(batches.len());
    for (path, batch) in &batches {
        profiler.add(batch).map_err(|error| of_inputs(error, path))?;
        progress.inc(1);
    }
    drop(progress);
    let profile = profiler.finish(arguments.pmi_options());
    if profile.modules.iter().all(|module| module.tokens == 0) {
        return Err(Failure::malformed("every token of the inputs is padding", "check the attention masks"));
    }
    let (backend, runs) = (backend.name(), batches.len());
    let profiled = Profiled { arguments, backend, runs, profile, receipt, vocabulary, dictionary };
    let printed = print_result(&match arguments.json {
        true => document(Kind::Profile, profiled.json()),
        false => profiled.text(),
    });
    let page = page.map(|page| page.fill(report::page(&profiled).to_html()));
    let written = commit_all([page], &ending);
    printed.and(written)?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses what is about lines where no input has them.
fn check_line_options(arguments: &ProfileArguments) -> Result<(), Failure> {
    let has_lines = || arguments.inputs.iter().any(|path| arguments.format_of(path) != InputFormat::Tensors);
    let given = [("--batch", arguments.batch.is_some()), ("--skip-long", arguments.skip_long)];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) if !has_lines() => {
            let message = format!("{flag} is for lines, and tensor files are batches already");
            Err(Failure::usage(message, "leave it out, or give --inputs a file of lines"))
        }
        _ => Ok(()),
    }
}

/// Refuses what changes lists of tokens alone where none is printed or written.
fn check_lists(arguments: &ProfileArguments) -> Result<(), Failure> {
    let ProfileArguments { min_count, top, pmi, json, report, .. } = arguments;
    let given = [("--min-count", min_count.is_some()), ("--top", top.is_some())];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) if !pmi && !json && report.is_none() => {
            let message = format!("{flag} changes the tokens that are listed for an expert, and none are listed");
            Err(Failure::usage(message, "add --pmi, --json or --report FILE.html"))
        }
        _ => Ok(()),
    }
}

/// Refuses what is about token ids where the model takes none.
fn check_ids(arguments: &ProfileArguments, profiler: &Profiler) -> Result<(), Failure> {
    let ProfileArguments { min_count, top, pmi, dict, .. } = arguments;
    let given =
        [("--pmi", *pmi), ("--min-count", min_count.is_some()), ("--top", top.is_some()), ("--dict", dict.is_some())];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) if profiler.symbols().next().is_none() => {
            let message = format!("{flag} is about token ids, and {} takes none", arguments.model.display());
            Err(Failure::usage(message, "leave it out"))
        }
        _ => Ok(()),
    }
}

/// What is wrong with inputs names the file that they come from.
fn of_inputs(error: ProfileError, path: &Path) -> Failure {
    match error {
        ProfileError::Backend(error) => Failure::of_inputs(error, path),
        ProfileError::Input { .. } => Failure::from(error).of_file(path),
        error => error.into(),
    }
}

impl Profiled<'_> {
    /// What stands for a token in a module's graph: its symbol, or its id where no dictionary names it.
    pub(super) fn symbol(&self, module: &ModuleProfile, id: i64) -> String {
        let beside = || self.vocabulary.as_ref()?.symbol(module.part, id);
        let named = match &self.dictionary {
            Some(dictionary) => Some(dictionary.symbol(id).to_owned()),
            None => beside(),
        };
        named.unwrap_or_else(|| id.to_string())
    }

    fn json(&self) -> Value {
        let mut modules = serde_json::to_value(&self.profile.modules).unwrap_or_default();
        for (value, module) in modules.as_array_mut().into_iter().flatten().zip(&self.profile.modules) {
            let experts = value.get_mut("pmi").and_then(Value::as_array_mut).into_iter().flatten();
            for token in experts.filter_map(Value::as_array_mut).flatten() {
                let symbol = token["token"].as_i64().map(|id| self.symbol(module, id));
                token["symbol"] = symbol.into();
            }
        }
        let inputs: Vec<_> = self.arguments.inputs.iter().map(|path| path.display().to_string()).collect();
        json!({
            "model": self.arguments.model.display().to_string(),
            "inputs": inputs,
            "backend": self.backend,
            "runs": self.runs,
            "min_count": self.arguments.pmi_options().min_count,
            "modules": modules,
        })
    }

    fn text(&self) -> String {
        let modules = &self.profile.modules;
        let header =
            ["module", "tokens", "k/E", "max/mean", "CV", "entropy", "idle", "margin p10", "p50", "load %, sorted"];
        let rows: Vec<_> =
            labels(names(modules)).iter().zip(modules).map(|(label, module)| row(label, module)).collect();
        let runs = counted(self.runs, "run");
        let mut text = format!("{} on {}, {runs}\n\n", self.arguments.model.display(), self.backend);
        text.push_str(&table(&header, &rows));
        if let Some(apart) = apart_from_scores(modules) {
            text.push_str(&format!("\n{apart}\n"));
        }
        if self.arguments.pmi {
            text.push_str(&self.pmi_text());
        }
        text
    }

    fn pmi_text(&self) -> String {
        let mut text = String::new();
        for (label, module) in labels(names(&self.profile.modules)).iter().zip(&self.profile.modules) {
            let Some(experts) = &module.pmi else { continue };
            let row = |(expert, tokens): (usize, &Vec<_>)| {
                let load = format!("{:.1}", module.load_percent[expert]);
                vec![expert.to_string(), load, self.tokens(module, tokens)]
            };
            let rows: Vec<_> = experts.iter().enumerate().map(row).collect();
            text.push_str(&format!("\n{label}\n{}", table(&["expert", "load %", "tokens (PMI, bits)"], &rows)));
        }
        text
    }

    /// Tokens with their information, such as `hundred (1.2)`; `-` where there are none.
    pub(super) fn tokens(&self, module: &ModuleProfile, tokens: &[crate::profile::TokenPmi]) -> String {
        let one = |token: &crate::profile::TokenPmi| format!("{} ({:.1})", self.symbol(module, token.token), token.pmi);
        if tokens.is_empty() { "-".to_owned() } else { tokens.iter().map(one).collect::<Vec<_>>().join("  ") }
    }
}

/// How many choices the scores do not explain, and how far they are from it.
pub(super) fn apart_from_scores(modules: &[ModuleProfile]) -> Option<String> {
    let apart: u64 = modules.iter().map(|module| module.tokens_apart_from_scores).sum();
    let gap = modules.iter().map(|module| module.largest_gap_apart).fold(0.0, f64::max);
    (apart > 0).then(|| format!("{apart} choices differ from the recomputed scores, by scores {gap:.1e} apart at most"))
}

fn row(label: &str, module: &ModuleProfile) -> Vec<String> {
    let balance = &module.balance;
    let margin = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2e}"));
    let loads = sorted_loads(module);
    let mut shown: Vec<_> = loads.iter().take(LOADS).map(|load| format!("{load:.1}")).collect();
    if loads.len() > LOADS {
        let last = format!("{:.1}", loads[loads.len() - 1]);
        shown.splice(LOADS - 1.., ["…".to_owned(), last]);
    }
    vec![
        label.to_owned(),
        module.tokens.to_string(),
        format!("{}/{}", module.top_k, module.counts.len()),
        format!("{:.2}", balance.max_over_mean),
        format!("{:.2}", balance.coefficient_of_variation),
        format!("{:.3}", balance.normalized_entropy),
        balance.idle.to_string(),
        margin(module.margin.p10),
        margin(module.margin.p50),
        shown.join(" "),
    ]
}

/// Loads in per cent, largest first.
pub(super) fn sorted_loads(module: &ModuleProfile) -> Vec<f64> {
    let mut loads = module.load_percent.clone();
    loads.sort_by(|a, b| b.total_cmp(a));
    loads
}

/// Names of the modules.
pub(super) fn names(modules: &[ModuleProfile]) -> impl Iterator<Item = &str> {
    modules.iter().map(|module| module.module.as_str())
}
