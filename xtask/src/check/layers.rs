//! Which module of `src/` may name which, and what some crates may not name at all.

use std::{fs, io, path::Path};

use super::{
    paths::{NamedPath, named_paths},
    size::rust_sources,
};

/// A module of `src/`.
struct Module {
    name: &'static str,
    /// Modules and crates of ours that it may name.
    may_name: &'static [&'static str],
    /// Paths in those crates that it may not name.
    never: &'static [&'static str],
}

const fn module(name: &'static str, may_name: &'static [&'static str], never: &'static [&'static str]) -> Module {
    Module { name, may_name, never }
}

/// What of `onnx` a module may name that may name `onnx::read`, which is what ARCHITECTURE.md calls reading.
const ONNX_READING: [&str; 8] =
    ["InlineError", "OnnxFile", "ReadError", "expose_routing", "inline", "proto", "read", "read_model"];

/// The table of ARCHITECTURE.md.
const MODULES: [Module; 27] = [
    module("file_names", &["moa_graphs"], &["moa_graphs::graph", "moa_graphs::lower", "moa_graphs::model"]),
    module("file_kind", &[], &[]),
    module("files", &[], &[]),
    module("shell", &[], &[]),
    module("metadata", &[], &[]),
    module("checkpoint", &["file_kind", "file_names", "files", "moa_graphs", "shell"], &[]),
    module("onnx", &["file_kind", "files", "metadata", "moa_graphs", "moa_schema", "scratch"], &[]),
    module("digest", &[], &[]),
    module("provenance", &["digest", "files"], &[]),
    module("random", &[], &[]),
    module("scratch", &[], &[]),
    module("tensor", &[], &[]),
    module("tensor_file", &["file_kind", "files", "tensor"], &[]),
    module("text", &["files"], &[]),
    module("side_files", &["file_names", "files", "moa_graphs", "moa_schema", "text"], &[]),
    module("source", &["checkpoint", "digest", "moa_graphs", "moa_schema"], &[]),
    module("engine", &["digest", "files", "moa_schema", "onnx", "scratch"], &[]),
    module(
        "export",
        &["checkpoint", "file_names", "files", "metadata", "moa_graphs", "moa_schema", "onnx", "side_files", "source"],
        &[],
    ),
    module(
        "inspect",
        &["file_names", "files", "metadata", "moa_graphs", "moa_schema", "onnx::read"],
        &["moa_graphs::graph", "moa_graphs::lower"],
    ),
    module("report", &[], &[]),
    module("reference", &["moa_graphs", "moa_schema", "tensor"], &["moa_graphs::graph", "moa_graphs::lower"]),
    module("backend", &["digest", "engine", "files", "moa_schema", "onnx::read", "scratch", "tensor"], &[]),
    module(
        "parity",
        &[
            "backend",
            "checkpoint",
            "file_names",
            "metadata",
            "moa_graphs",
            "moa_schema",
            "onnx",
            "random",
            "reference",
            "source",
            "tensor",
        ],
        &[],
    ),
    module("profile", &["backend", "file_names", "moa_schema", "onnx::read", "tensor"], &[]),
    module(
        "latency",
        &["backend", "file_names", "moa_schema", "onnx::read", "parity", "provenance", "random", "tensor"],
        &[],
    ),
    module(
        "generate",
        &["backend", "file_names", "files", "metadata", "moa_schema", "onnx::read", "random", "text"],
        &[],
    ),
    module(
        "cli",
        &[
            "backend",
            "checkpoint",
            "engine",
            "export",
            "file_names",
            "files",
            "generate",
            "inspect",
            "latency",
            "metadata",
            "moa_graphs",
            "moa_schema",
            "onnx",
            "parity",
            "profile",
            "provenance",
            "reference",
            "report",
            "shell",
            "side_files",
            "source",
            "tensor",
            "tensor_file",
            "text",
        ],
        &[],
    ),
];

/// Commands of `src/cli`: a file or a folder each.
const COMMANDS: [&str; 12] = [
    "baseline", "bench", "build", "export", "generate", "inspect", "ops", "plan", "prepare", "profile", "run", "verify",
];

/// Files of `src/cli` that name every command.
const NAME_ALL_COMMANDS: [&str; 2] = ["args", "mod"];

/// A command, and another one that it may name, since an option of it does what that one does.
const DOES_ANOTHER: [(&str, &str); 1] = [("export", "verify")];

/// Our crates, which a module names where its list has them.
const CRATES: [&str; 2] = ["moa_graphs", "moa_schema"];

/// Nothing in `src/` may name these.
const NEVER_IN_SRC: &[&str] = &["moa_kernels", "moa_ort"];

/// Folders of other crates, and paths that they may not name.
const OTHER_CRATES: [(&str, &[&str]); 6] = [
    ("graphs/src", &["std::fs", "std::path", "prost"]),
    ("custom_ops/schema/src", &["std::fs", "ort_sys", "ort"]),
    ("custom_ops/kernels/src", &["std::fs", "ort_sys", "ort"]),
    ("custom_ops/cuda/src", &["std::fs", "ort_sys", "ort"]),
    ("custom_ops/cuda/driver/src", &["ort_sys", "ort"]),
    ("custom_ops/cuda/c/src", &["std::fs", "ort_sys", "ort"]),
];

/// Every broken rule, and every row of ARCHITECTURE.md that says something else.
pub(super) fn check(root: &Path) -> io::Result<Vec<String>> {
    let mut found = broken_rules(root)?;
    let document = fs::read_to_string(root.join("ARCHITECTURE.md"))?;
    found.extend(MODULES.iter().filter_map(|module| other_row(module, &document)));
    Ok(found)
}

/// What the row of `module` in the table of ARCHITECTURE.md has to say and does not.
fn other_row(module: &Module, document: &str) -> Option<String> {
    let row = document.lines().find(|line| line.starts_with(&format!("| `src/{}` |", module.name)));
    let Some(last) = row.and_then(|row| row.trim_end_matches('|').rsplit('|').next()) else {
        return Some(format!("ARCHITECTURE.md: the table has no row for `src/{}` alone", module.name));
    };
    let exact = last.replace("`onnx` (reading)", "`onnx::read`").replace("`graphs`", "`moa_graphs`");
    let exact = exact.replace("`schema`", "`moa_schema`");
    let without_notes: String = exact.split('(').map(|part| part.rsplit(')').next().unwrap_or(part)).collect();
    let mut named: Vec<_> = without_notes.split('`').skip(1).step_by(2).collect();
    named.sort_unstable();
    let rules = module.may_name.join(", ");
    (named != module.may_name).then(|| {
        format!("ARCHITECTURE.md: `src/{}` may name {rules}, the table says {}", module.name, named.join(", "))
    })
}

fn broken_rules(root: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let sources = rust_sources(root)?;
    for (file, source) in &sources {
        let Ok(inner) = file.strip_prefix("src") else { continue };
        let first = inner.components().next().map(|part| part.as_os_str().to_string_lossy().into_owned());
        let first = first.unwrap_or_default();
        if first == "lib.rs" || first == "main.rs" {
            continue;
        }
        let name = first.strip_suffix(".rs").unwrap_or(&first);
        let place = file.display();
        let Some(module) = MODULES.iter().find(|module| module.name == name) else {
            found.push(format!("{place}: `{name}` is not in the table of layers"));
            continue;
        };
        let at_top = inner.components().count() == 1 || inner == Path::new(name).join("mod.rs");
        for path in named_paths(source) {
            let broken = broken(module, &path, at_top).or_else(|| other_command(inner, &path));
            found.extend(broken.map(|why| format!("{place}:{}: {why}", path.line)));
        }
    }
    for (folder, never) in OTHER_CRATES {
        for (file, source) in sources.iter().filter(|(file, _)| file.starts_with(folder)) {
            let place = file.display();
            for path in named_paths(source) {
                found.extend(
                    forbidden(&path, never).map(|never| format!("{place}:{}: may not name `{never}`", path.line)),
                );
            }
        }
    }
    Ok(found)
}

/// Which rule `path` breaks in a file of `module`. In a file `at_top`, `super` is the root of the crate.
fn broken(module: &Module, path: &NamedPath<'_>, at_top: bool) -> Option<String> {
    let name = module.name;
    if path.parts.iter().filter(|part| **part == "super").count() > 1 {
        return Some("`super::super` hides what is named; write `crate::…`".into());
    }
    if let Some(never) = forbidden(path, module.never).or_else(|| forbidden(path, NEVER_IN_SRC)) {
        return Some(format!("`{name}` may not name `{never}`"));
    }
    if let Some(first) = path.parts.first().filter(|part| CRATES.contains(part) && !module.may_name.contains(part)) {
        return Some(format!("`{name}` may not name `{first}`"));
    }
    let in_table = |other: &str| MODULES.iter().any(|module| module.name == other);
    let (other, inner) = match path.parts[..] {
        ["crate" | "moa_export"] => return None,
        ["crate" | "moa_export", other, ref inner @ ..] if in_table(other) => (other, inner),
        ["crate" | "moa_export", other, ..] => return Some(format!("`{other}` is not in the table of layers")),
        ["super", other, ref inner @ ..] if at_top && in_table(other) => (other, inner),
        _ => return None,
    };
    if other == name || module.may_name.contains(&other) {
        return None;
    }
    if other != "onnx" || !module.may_name.contains(&"onnx::read") {
        return Some(format!("`{name}` may not name `{other}`"));
    }
    let reads = inner.first().is_some_and(|first| ONNX_READING.contains(first));
    let named = [&[other], inner].concat().join("::");
    (!reads).then(|| format!("`{name}` may not name `{named}`: it only reads ONNX"))
}

/// Why `path` may not stand in the file `inner` of `src`: it leads from a file of the command line to a command that
/// the file is no part of.
fn other_command(inner: &Path, path: &NamedPath<'_>) -> Option<String> {
    let inner = inner.strip_prefix("cli").ok()?;
    let own = inner.components().next()?.as_os_str().to_str()?.trim_end_matches(".rs");
    let in_cli = inner.components().count() == 1 || inner == Path::new(own).join("mod.rs");
    let named = match path.parts[..] {
        ["crate" | "moa_export", "cli", named, ..] => named,
        ["super", named, ..] if in_cli => named,
        _ => return None,
    };
    let may = NAME_ALL_COMMANDS.contains(&own) || own == named || DOES_ANOTHER.contains(&(own, named));
    let is_other = COMMANDS.contains(&named) && !may;
    is_other.then(|| format!("`{own}` may not name the command `{named}`; what both need stands in a file of its own"))
}

/// The first of `never` that `path` lies in, or whose parent it imports as a whole.
fn forbidden(path: &NamedPath<'_>, never: &'static [&'static str]) -> Option<&'static str> {
    let parts = path.parts.strip_suffix(&["*"]).unwrap_or(&path.parts);
    never.iter().copied().find(|never| parts.iter().zip(never.split("::")).all(|(part, never)| *part == never))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::planted;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        broken_rules(planted(files).path()).unwrap()
    }

    fn assert_found(path: &str, source: &str, expected: &str) {
        assert_eq!(found(&[(path, source)]), [expected], "{path}: {source}");
    }

    #[test]
    fn a_module_below_may_not_name_one_above() {
        assert_found("src/onnx/encode.rs", "use crate::export;", "src/onnx/encode.rs:1: `onnx` may not name `export`");
        assert_found(
            "src/checkpoint/a/b.rs",
            "use std::io;\nfn f() { crate::onnx::encode(); }",
            "src/checkpoint/a/b.rs:2: `checkpoint` may not name `onnx`",
        );
        assert_found(
            "src/reference/mod.rs",
            "use crate::{\n    tensor::Tensor,\n    backend::Runner,\n};",
            "src/reference/mod.rs:1: `reference` may not name `backend`",
        );
        assert_found("src/parity/mod.rs", "use crate::cli;", "src/parity/mod.rs:1: `parity` may not name `cli`");
    }

    #[test]
    fn super_is_no_way_around() {
        assert_found("src/tensor.rs", "use super::onnx::X;", "src/tensor.rs:1: `tensor` may not name `onnx`");
        assert_found(
            "src/backend/mod.rs",
            "use super::export;",
            "src/backend/mod.rs:1: `backend` may not name `export`",
        );
        let message = "src/backend/ort.rs:1: `super::super` hides what is named; write `crate::…`";
        assert_found("src/backend/ort.rs", "use super::super::export;", message);
        assert_found("src/backend/ort.rs", "use super::{super::export};", message);
        assert_found("src/onnx/a.rs", "use moa_export::cli;", "src/onnx/a.rs:1: `onnx` may not name `cli`");
        assert_found("src/onnx/a.rs", "use crate::*;", "src/onnx/a.rs:1: `*` is not in the table of layers");
    }

    #[test]
    fn who_only_reads_onnx_names_nothing_that_writes_it() {
        for (source, named) in [
            ("use crate::onnx::Staging;", "onnx::Staging"),
            ("use crate::onnx::{read::Dim, encode};", "onnx::encode"),
            ("use crate::onnx;", "onnx"),
            ("use crate::onnx::{self, read_model};", "onnx"),
            ("use crate::onnx::*;", "onnx::*"),
        ] {
            let message = format!("src/backend/ort.rs:1: `backend` may not name `{named}`: it only reads ONNX");
            assert_found("src/backend/ort.rs", source, &message);
        }
    }

    #[test]
    fn other_crates_have_layers_too() {
        assert_found(
            "src/backend/ort.rs",
            "use moa_graphs::Form;",
            "src/backend/ort.rs:1: `backend` may not name `moa_graphs`",
        );
        for source in ["use moa_graphs::{model, graph::Graph};", "use moa_graphs::*;", "use moa_graphs as g;"] {
            let message = "src/reference/a.rs:1: `reference` may not name `moa_graphs::graph`";
            assert_found("src/reference/a.rs", source, message);
        }
        let message = "src/cli/run.rs:1: `cli` may not name `moa_kernels`";
        assert_found("src/cli/run.rs", "moa_kernels::run()", message);
        for (name, source) in [
            ("std::fs", "use std::{fs, io};"),
            ("std::path", "x(std::path::Path::new(y))"),
            ("prost", "use prost::Message;"),
        ] {
            let message = format!("graphs/src/lower/a.rs:1: may not name `{name}`");
            assert_found("graphs/src/lower/a.rs", source, &message);
        }
    }

    #[test]
    fn a_command_may_not_name_another_one() {
        for (file, source, own, other) in [
            ("prepare.rs", "use super::run::only_graph;", "prepare", "run"),
            ("build.rs", "use super::{Failure, plan::PlanDtype};", "build", "plan"),
            ("profile/inputs.rs", "use crate::cli::{note, generate::failure_in};", "profile", "generate"),
            ("bench/mod.rs", "use super::verify;", "bench", "verify"),
            ("bench/html.rs", "use crate::cli::profile::report::page;", "bench", "profile"),
            ("verify.rs", "fn f() { super::export::run() }", "verify", "export"),
            ("table.rs", "use super::ops;", "table", "ops"),
        ] {
            let message = format!(
                "src/cli/{file}:1: `{own}` may not name the command `{other}`; what both need stands in a file of its own"
            );
            assert_found(&format!("src/cli/{file}"), source, &message);
        }
    }

    #[test]
    fn the_document_says_what_the_rules_say() {
        let module = module("text", &["files", "moa_graphs", "onnx::read"], &[]);
        let found = |row: &str| other_row(&module, &format!("| where |\n{row}\n"));
        for row in ["`files`, `graphs` (its `Config`), `onnx` (reading)", "`onnx` (reading), `files`; and `graphs`"] {
            assert_eq!(found(&format!("| `src/text` | what | {row} |")), None, "{row}");
        }
        for row in
            ["`files`, `graphs`, `onnx`", "`files`, `onnx` (reading)", "`cli`, `files`, `graphs`, `onnx` (reading)"]
        {
            assert!(found(&format!("| `src/text` | what | {row} |")).is_some(), "{row}");
        }
        assert!(found("| `src/text`, `src/x` | what | – |").is_some_and(|why| why.contains("no row")));
    }

    #[test]
    fn a_module_that_is_not_in_the_table_is_found() {
        assert_found("src/helpers.rs", "", "src/helpers.rs: `helpers` is not in the table of layers");
        assert_found("src/util/mod.rs", "", "src/util/mod.rs: `util` is not in the table of layers");
        assert_found("src/onnx/a.rs", "use crate::Thing;", "src/onnx/a.rs:1: `Thing` is not in the table of layers");
    }

    #[test]
    fn what_the_table_allows_passes() {
        let files = [
            ("src/lib.rs", "pub mod anything; pub use onnx::X;"),
            ("src/main.rs", "moa_export::cli::main()"),
            (
                "src/cli/export.rs",
                "use super::{exported, verify}; use crate::{export, parity::verify}; pub(crate) fn f() {}",
            ),
            ("src/cli/profile/report.rs", "use super::{names, args::X}; use crate::cli::{Failure, profile::names};"),
            ("src/cli/bench/html.rs", "use super::text::duration; use crate::cli::table::counted;"),
            ("src/cli/args.rs", "use super::plan::PlanArguments;"),
            ("src/cli/mod.rs", "mod tests { use super::run; }"),
            ("src/onnx/read.rs", "use crate::onnx::proto; use super::write; // crate::cli"),
            ("src/backend/ort.rs", "use crate::onnx::{OnnxFile, inline::inline_functions, read::Dim};"),
            ("src/engine/cache.rs", "use crate::onnx::Staging;"),
            ("src/tensor_file.rs", "use crate::tensor::Tensor; const X: &str = \"crate::cli\";"),
            ("src/reference/a.rs", "use moa_graphs::{Weight, model}; use crate::tensor::Tensor;"),
            ("src/backend/mod.rs", "mod tests { use super::backend; use super::Runner; }"),
            ("graphs/src/lib.rs", "use std::{fmt, io::Error}; fn path() {}"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }
}
