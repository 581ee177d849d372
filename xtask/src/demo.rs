//! `cargo xtask demo`: the bundled trained model from checkpoint to translation.

use std::{fs, path::Path};

use crate::{
    process::{self, stage},
    project::Project,
    python::{Packages, Python},
};

const MODEL: &str = "tests/data/nmt";
const SENTENCES: usize = 3;
const FORMS: [&str; 2] = ["function", "standard"];
const BACKENDS: &str = "ort,ort-function,tract";

/// A sentence that the model never saw in training.
struct Pair {
    english: String,
    german: String,
}

/// Runs everything; true where every translation is the expected one.
pub(crate) fn run(project: &Project) -> Result<bool, String> {
    let python = Python::find(project)?;
    stage("fetch ONNX Runtime", || python.install(Packages::Runtime)).0?;
    stage("build", || project.build()).0?;
    stage("export", || FORMS.iter().try_for_each(|form| export(project, form))).0?;
    stage("verify", || FORMS.iter().try_for_each(|form| verify(project, &python, form))).0?;
    let same = stage("translate", || translate(project, &python)).0?;
    print_next(project, &python)?;
    Ok(same)
}

/// Where the demo exports to.
fn folder(project: &Project, form: &str) -> String {
    project.shown(&project.target.join("demo").join(form))
}

fn export(project: &Project, form: &str) -> Result<(), String> {
    let mut command = project.command(project.program());
    process::run(command.args([MODEL, "-o", &folder(project, form), "--form", form, "--force"]))
}

fn verify(project: &Project, python: &Python, form: &str) -> Result<(), String> {
    let mut command = project.command(project.program());
    command.args(["verify", &folder(project, form), "--checkpoint", MODEL, "--backends", BACKENDS]);
    command.env("ORT_DYLIB_PATH", python.onnxruntime(Packages::Runtime)?);
    process::run(command.env("MOA_ORT_LIBRARY", project.operator_library()))
}

fn translate(project: &Project, python: &Python) -> Result<bool, String> {
    let pairs = unseen_pairs(&project.root.join(MODEL).join("unseen_pairs.tsv"))?;
    let mut command = python.command(project, &[Packages::Runtime])?;
    command.args(script_arguments(project)).args(pairs.iter().map(|pair| &pair.english));
    let text = process::output(&mut command)?;
    let found: Vec<_> = text.lines().filter_map(|line| Some(line.split_once('\t')?.1)).collect();
    if found.len() != pairs.len() {
        return Err(format!("{} translations of {} sentences:\n{text}", found.len(), pairs.len()));
    }
    let mut all_same = true;
    for (pair, found) in pairs.iter().zip(found) {
        let same = pair.german == found;
        let verdict = if same { "the same" } else { "DIFFERS" };
        println!("{}\n  → {found}\n  expected: {} ({verdict})", pair.english, pair.german);
        all_same &= same;
    }
    Ok(all_same)
}

/// What translates with the function form and the operator library.
fn script_arguments(project: &Project) -> Vec<String> {
    let library = project.shown(&project.operator_library());
    let mut words = vec!["examples/greedy_translate.py".to_owned(), folder(project, "function")];
    words.extend(["--library".into(), library]);
    words
}

fn unseen_pairs(path: &Path) -> Result<Vec<Pair>, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let pair = |line: &str| {
        let mut fields = line.split('\t').skip(1).map(str::to_owned);
        Some(Pair { english: fields.next()?, german: fields.next()? })
    };
    let pairs: Vec<_> = text.lines().filter_map(pair).take(SENTENCES).collect();
    if pairs.is_empty() { Err(format!("{} holds no sentence", path.display())) } else { Ok(pairs) }
}

fn print_next(project: &Project, python: &Python) -> Result<(), String> {
    let program = project.shown(&project.program());
    let runtime = project.shown(&python.onnxruntime(Packages::Runtime)?);
    let packages = project.shown(&python.packages(Packages::Runtime));
    let folder = folder(project, "function");
    println!(
        "
== next
export ORT_DYLIB_PATH={runtime}
{program} CHECKPOINT -o OUT
{program} verify OUT --checkpoint CHECKPOINT
{program} generate {folder} --input 'nine hundred ninety-nine' --beam 4
{program} inspect {MODEL}
{program} ops
PYTHONPATH={packages} python3 {} 'nine hundred ninety-nine'
cargo xtask test",
        script_arguments(project).join(" ")
    );
    Ok(())
}
