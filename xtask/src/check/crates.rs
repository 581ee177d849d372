//! Which crate of the workspace may depend on which, by the dependency lists.

use std::{collections::BTreeSet, fs, io, path::Path};

/// A crate of the workspace.
struct Crate {
    folder: &'static str,
    /// Our crates that it may depend on.
    ours: &'static [&'static str],
    /// Our crates that its tests may depend on besides.
    tests: &'static [&'static str],
    /// Crates of others that it may not depend on.
    never: &'static [&'static str],
}

const RUNTIMES: &[&str] = &["ort", "ort-sys", "tract-onnx"];
const FORMATS_AND_RUNTIMES: &[&str] = &["ort", "ort-sys", "prost", "safetensors", "tempfile", "tract-onnx"];

/// The table of ARCHITECTURE.md.
const CRATES: [Crate; 10] = [
    Crate { folder: ".", ours: &["moa-graphs", "moa-schema"], tests: &[], never: &["ort-sys"] },
    Crate { folder: "graphs", ours: &["moa-schema"], tests: &[], never: FORMATS_AND_RUNTIMES },
    Crate { folder: "custom_ops/schema", ours: &[], tests: &[], never: FORMATS_AND_RUNTIMES },
    Crate { folder: "custom_ops/kernels", ours: &["moa-schema"], tests: &[], never: RUNTIMES },
    Crate { folder: "custom_ops/cuda", ours: &["moa-schema"], tests: &[], never: RUNTIMES },
    Crate {
        folder: "custom_ops/cuda/driver",
        ours: &["moa-cuda", "moa-schema"],
        tests: &["moa-cuda-fake"],
        never: RUNTIMES,
    },
    Crate {
        folder: "custom_ops/cuda/c",
        ours: &["moa-cuda", "moa-cuda-driver", "moa-schema"],
        tests: &["moa-cuda-fake"],
        never: RUNTIMES,
    },
    Crate { folder: "custom_ops/cuda/fake", ours: &["moa-cuda", "moa-cuda-driver"], tests: &[], never: RUNTIMES },
    Crate {
        folder: "custom_ops/ort",
        ours: &["moa-cuda", "moa-cuda-driver", "moa-kernels", "moa-schema"],
        tests: &["moa-cuda-fake"],
        never: &["ort", "tract-onnx"],
    },
    Crate { folder: "xtask", ours: &["moa-cuda", "moa-schema"], tests: &[], never: RUNTIMES },
];

/// Every broken rule.
pub(super) fn check(root: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in members(&fs::read_to_string(root.join("Cargo.toml"))?) {
        let Some(rules) = CRATES.iter().find(|entry| entry.folder == folder) else {
            found.push(format!("{folder}/Cargo.toml: the crate is not in the table of layers"));
            continue;
        };
        let manifest = fs::read_to_string(root.join(&folder).join("Cargo.toml"))?;
        for Dependency { name, of_tests } in dependencies(&manifest) {
            let name = name.as_str();
            let is_ours = name.starts_with("moa-") || name == "xtask";
            let is_for_tests = rules.tests.contains(&name);
            let is_refused = rules.never.contains(&name);
            if is_refused || (is_ours && !rules.ours.contains(&name) && !(is_for_tests && of_tests)) {
                let but = if is_for_tests { ", but in its dev-dependencies" } else { "" };
                found.push(format!("{folder}/Cargo.toml: may not depend on `{name}`{but}"));
            }
        }
    }
    Ok(found)
}

/// Members of the workspace.
fn members(manifest: &str) -> Vec<String> {
    let list = manifest.split_once("\nmembers").and_then(|(_, rest)| rest.split_once('[')?.1.split_once(']'));
    let quoted = list.map_or("", |(list, _)| list).split('"').skip(1).step_by(2);
    quoted.map(str::to_owned).collect()
}

/// A crate that a manifest lists.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Dependency {
    name: String,
    /// Whether tests, examples and benchmarks alone depend on it.
    of_tests: bool,
}

/// The dependencies of every kind, under their real names where they are renamed.
fn dependencies(manifest: &str) -> BTreeSet<Dependency> {
    let mut found = BTreeSet::new();
    let mut section = "";
    for line in manifest.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = header;
            if let Some((_, name)) = header.rsplit_once('.').filter(|(kind, _)| lists_dependencies(kind)) {
                found.insert(Dependency { name: unquoted(name), of_tests: is_of_tests(header) });
            }
            continue;
        }
        let listed = lists_dependencies(section);
        let detailed = section.rsplit_once('.').is_some_and(|(kind, _)| lists_dependencies(kind));
        if let Some((key, value)) = line.split_once('=').filter(|_| listed || detailed) {
            let of_tests = is_of_tests(section);
            if listed {
                let name = unquoted(key.split('.').next().unwrap_or(key));
                found.insert(Dependency { name, of_tests });
            }
            let renamed = if detailed && key.trim() == "package" { Some(value) } else { behind_package(value) };
            let name = renamed.and_then(|value| value.split('"').nth(1)).map(str::to_owned);
            found.extend(name.map(|name| Dependency { name, of_tests }));
        }
    }
    found
}

/// What stands behind `package =` in an inline table.
fn behind_package(value: &str) -> Option<&str> {
    value.split_once("package").map(|(_, rest)| rest).filter(|rest| rest.trim_start().starts_with('='))
}

fn unquoted(name: &str) -> String {
    name.trim().trim_matches('"').to_owned()
}

/// Whether `section` lists dependencies, of the workspace itself excepted.
fn lists_dependencies(section: &str) -> bool {
    let last = section.rsplit('.').next().unwrap_or(section);
    matches!(last, "dependencies" | "dev-dependencies" | "build-dependencies") && !section.starts_with("workspace")
}

/// Whether `section`, or that of one dependency, lists what tests alone depend on.
fn is_of_tests(section: &str) -> bool {
    section.split('.').any(|part| part == "dev-dependencies")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::planted;

    const ROOT: &str = "[workspace]\nmembers = [\".\", \"graphs\",\n    \"custom_ops/kernels\"]\n
        [workspace.dependencies]\nmoa-kernels = { path = \"custom_ops/kernels\" }\n";

    fn found(root: &str, graphs: &str, kernels: &str) -> Vec<String> {
        let root = format!("{ROOT}{root}");
        let files =
            [("Cargo.toml", root.as_str()), ("graphs/Cargo.toml", graphs), ("custom_ops/kernels/Cargo.toml", kernels)];
        check(planted(&files).path()).unwrap()
    }

    #[test]
    fn the_compiler_may_not_depend_on_kernels() {
        let message = ["./Cargo.toml: may not depend on `moa-kernels`"];
        for list in [
            "[dependencies]\nmoa-kernels.workspace = true",
            "[dev-dependencies]\nmoa-kernels = { path = \"x\" }",
            "[dependencies.moa-kernels]\npath = \"x\"",
            "[target.'cfg(unix)'.dependencies]\nmoa-kernels.workspace = true",
            "[dependencies]\nfast = { path = \"x\", package = \"moa-kernels\" }",
            "[dependencies.fast]\npackage = \"moa-kernels\"",
        ] {
            assert_eq!(found(list, "", ""), message, "{list}");
        }
    }

    #[test]
    fn crates_for_tests_are_dev_dependencies_alone() {
        let driver = |list: &str| {
            let files = [
                ("Cargo.toml", "[workspace]\nmembers = [\"custom_ops/cuda/driver\"]\n"),
                ("custom_ops/cuda/driver/Cargo.toml", list),
            ];
            check(planted(&files).path()).unwrap()
        };
        for list in [
            "[dev-dependencies]\nmoa-cuda-fake.workspace = true",
            "[dev-dependencies.moa-cuda-fake]\nworkspace = true",
            "[target.'cfg(unix)'.dev-dependencies]\nmoa-cuda-fake.workspace = true",
        ] {
            assert_eq!(driver(list), [""; 0], "{list}");
        }
        let refused =
            "custom_ops/cuda/driver/Cargo.toml: may not depend on `moa-cuda-fake`, but in its dev-dependencies";
        for list in [
            "[dependencies]\nmoa-cuda-fake.workspace = true",
            "[build-dependencies]\nmoa-cuda-fake.workspace = true",
            "[dependencies.moa-cuda-fake]\nworkspace = true",
            "[target.'cfg(unix)'.dependencies]\nfast = { path = \"x\", package = \"moa-cuda-fake\" }",
            "[dev-dependencies]\nmoa-cuda-fake.workspace = true\n[dependencies]\nmoa-cuda-fake.workspace = true",
        ] {
            assert_eq!(driver(list), [refused], "{list}");
        }
        let other = driver("[dev-dependencies]\nmoa-kernels.workspace = true");
        assert_eq!(other, ["custom_ops/cuda/driver/Cargo.toml: may not depend on `moa-kernels`"]);
    }

    #[test]
    fn crates_below_may_not_depend_on_crates_above() {
        let found = found("", "[dependencies]\nprost = \"0.14\"", "[build-dependencies]\nort-sys = \"2\"");
        assert_eq!(
            found,
            [
                "graphs/Cargo.toml: may not depend on `prost`",
                "custom_ops/kernels/Cargo.toml: may not depend on `ort-sys`",
            ]
        );
    }

    #[test]
    fn a_crate_that_is_not_in_the_table_is_found() {
        let files = [("Cargo.toml", "[workspace]\nmembers = [\"extra\"]\n"), ("extra/Cargo.toml", "")];
        let found = check(planted(&files).path()).unwrap();
        assert_eq!(found, ["extra/Cargo.toml: the crate is not in the table of layers"]);
    }

    #[test]
    fn what_the_table_allows_passes() {
        let root = "[dependencies]\nmoa-schema.workspace = true\nort = { version = \"2\", optional = true }
            [features]\nort = [\"dep:ort\"]";
        let kernels = "[package]\nname = \"moa-kernels\"\n[dependencies]\nmoa-schema.workspace = true # moa-graphs";
        assert_eq!(found(root, "[dependencies]\nserde = \"1\"", kernels), [""; 0]);
    }
}
