//! What commands print as JSON is what `docs/json.md` says.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{
    common::data,
    scene::{Scene, require_runtime},
};

const REFERENCE: &str = include_str!("../../docs/json.md");

/// Objects whose keys are names of the model.
const NAMED: [&str; 3] = ["point", "opsets", "metadata"];

/// Keys of what no command here comes to: GPUs, faults, other machines.
const ELSEWHERE: [&str; 8] = [
    "backends[].graphs[].routing.unexplained.",
    "parity[].verdict.why",
    "parity[].verdict.fault",
    "rows[].device.",
    "skipped[].",
    "backends[].skipped.",
    "engine_cache.",
    "receipt.*.ticks.",
];

/// The paths of the tables under the heading that names `kind`.
fn documented(kind: &str) -> Vec<&'static str> {
    let mut sections = REFERENCE.split("\n## ");
    let section =
        sections.find(|section| section.lines().next().is_some_and(|line| line.contains(&format!("`{kind}`"))));
    let section = section.unwrap_or_else(|| panic!("{kind} has no section"));
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let keys = rows.filter_map(|row| row.split('|').nth(1));
    keys.flat_map(|keys| keys.split(',').map(|key| key.trim().trim_matches('`'))).collect()
}

fn matches(pattern: &str, path: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == path };
    let Some(left) = path.strip_prefix(start) else { return false };
    (0..=left.len()).any(|end| left.is_char_boundary(end) && matches(rest, &left[end..]))
}

/// The path of every key in `value`.
fn paths(value: &Value, path: &str, all: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) if NAMED.iter().all(|name| !path.ends_with(name)) => {
            for (key, value) in object {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                paths(value, &path, all);
                all.insert(path);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| paths(value, &format!("{path}[]"), all)),
        _ => {}
    }
}

/// Keys of `documents`, each of which is described; all that is described is among them, apart from what is not to be
/// had here.
pub(crate) fn assert_described(kind: &str, documents: &[Value]) {
    let mut found = BTreeSet::new();
    documents.iter().for_each(|document| paths(document, "", &mut found));
    let patterns = documented(kind);
    let unknown: Vec<_> = found.iter().filter(|path| !patterns.iter().any(|pattern| matches(pattern, path))).collect();
    assert!(unknown.is_empty(), "docs/json.md does not describe {unknown:#?} of {kind}");
    let is_absent = |pattern: &&&str| !found.iter().any(|path| matches(pattern, path));
    let is_elsewhere = |pattern: &&&str| ELSEWHERE.iter().any(|known| pattern.starts_with(known));
    let stale: Vec<_> = patterns.iter().filter(is_absent).filter(|pattern| !is_elsewhere(pattern)).collect();
    assert!(stale.is_empty(), "docs/json.md describes {stale:#?}, which {kind} does not have");
}

/// A document without what all begin with.
fn document(scene: &Scene, line: &str, kind: &str) -> Value {
    let outcome = scene.moa(line);
    assert_eq!(outcome.code, Some(0), "{line}: {}", outcome.stderr);
    let printed = outcome.stdout;
    let start = format!("{{\n  \"kind\": \"{kind}\",\n  \"format\": 1,\n");
    assert!(printed.starts_with(&start), "{line}: {printed}");
    let mut value: Value = serde_json::from_str(&printed).unwrap();
    let object = value.as_object_mut().unwrap();
    object.retain(|key, _| key != "kind" && key != "format");
    value
}

#[test]
fn every_key_is_described() {
    require_runtime();
    let scene = Scene::with_fixture("mlm");
    let exported = document(&scene, "ck -o m.onnx --verify --json", "export");
    let verified = exported["verification"].clone();
    let bare = document(&scene, "ck -o again.onnx --json", "export");
    let baseline = document(&scene, "baseline --config ck/config.json -o base.onnx --json", "baseline");
    assert!(bare["verification"].is_null());
    assert_described("export", &[bare, baseline]);
    scene.accepts("ck -o i.onnx --dtype int8");
    let rounded = document(&scene, "verify i.onnx --checkpoint ck --backends ort-function --json -", "verify");
    assert_described("verify", &[verified, rounded]);
    let line = "bench m.onnx --samples 12 --warm-up 0.05 --seq 6";
    scene.accepts(&format!("{line} --json before.json"));
    assert_described(
        "bench",
        &[document(&scene, &format!("{line} --compare before.json --threshold 1e9 --json -"), "bench")],
    );
    let checkpoint = document(&scene, "inspect ck --json", "inspect_checkpoint");
    let graphs = document(&scene, "inspect m.onnx --json", "inspect_graphs");
    assert_described("inspect_graphs", &[checkpoint, graphs]);
    let paper = document(&scene, "inspect --table 1 --json", "inspect_paper");
    let presets = document(&scene, "inspect --preset list --json", "inspect_presets");
    assert_described("inspect_paper", &[paper, presets]);
    let line = "run m.onnx --random --seq 5 --save-inputs in.safetensors --json";
    let alone = document(&scene, line, "run");
    scene.accepts("run m.onnx --inputs in.safetensors --outputs out.safetensors");
    let line = "run m.onnx --inputs in.safetensors --expect out.safetensors --backend ort-function --json";
    assert_described("run", &[alone, document(&scene, line, "run")]);
    let line = "profile m.onnx --inputs in.safetensors --min-count 1 --json";
    assert_described("profile", &[document(&scene, line, "profile")]);
    assert_described("ops", &[document(&scene, "ops --json", "ops")]);
    assert_described("plan", &[document(&scene, "plan --gpu a100 --json", "plan")]);
    let line = "prepare m.onnx -o p.onnx --gpu h100 --json";
    assert_described("prepare", &[document(&scene, line, "prepare")]);
}

#[test]
fn every_key_of_a_generated_line_is_described() {
    require_runtime();
    let line = |fixture: &str, options: &str| -> Value {
        let scene = Scene::new();
        let folder = data(fixture).display().to_string();
        scene.accepts(&format!("{folder} -o out"));
        serde_json::from_str(&scene.moa(&format!("generate out --json {options}")).stdout).unwrap()
    };
    let translated = line("nmt", "--input nine --max-len-b 1");
    assert_eq!(translated["translations"][0]["finish"], "length");
    let continued = line("jetmoe/bf16", "--input 5 --token-ids --max-new 2");
    assert_described("generate", &[translated, continued]);
}
