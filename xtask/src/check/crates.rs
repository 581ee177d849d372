//! Which crate of the workspace may depend on which, by the dependency lists.

use std::io;

use serde_json::Value;

use crate::{process, project::Project};

/// A crate of the workspace.
struct Crate {
    name: &'static str,
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
    Crate { name: "moa-export", ours: &["moa-graphs", "moa-schema"], tests: &[], never: &["ort-sys"] },
    Crate { name: "moa-graphs", ours: &["moa-schema"], tests: &[], never: FORMATS_AND_RUNTIMES },
    Crate { name: "moa-schema", ours: &[], tests: &[], never: FORMATS_AND_RUNTIMES },
    Crate { name: "moa-kernels", ours: &["moa-schema"], tests: &[], never: RUNTIMES },
    Crate { name: "moa-cuda", ours: &["moa-schema"], tests: &[], never: RUNTIMES },
    Crate { name: "moa-cuda-driver", ours: &["moa-cuda", "moa-schema"], tests: &["moa-cuda-fake"], never: RUNTIMES },
    Crate {
        name: "moa-cuda-c",
        ours: &["moa-cuda", "moa-cuda-driver", "moa-schema"],
        tests: &["moa-cuda-fake"],
        never: RUNTIMES,
    },
    Crate { name: "moa-cuda-fake", ours: &["moa-cuda", "moa-cuda-driver"], tests: &[], never: RUNTIMES },
    Crate {
        name: "moa-ort",
        ours: &["moa-cuda", "moa-cuda-driver", "moa-kernels", "moa-schema"],
        tests: &["moa-cuda-fake"],
        never: &["ort", "tract-onnx"],
    },
    Crate { name: "xtask", ours: &["moa-cuda", "moa-schema"], tests: &[], never: RUNTIMES },
];

/// Every broken rule. Cargo reads the lists, so a crate has its own name however it is renamed.
pub(super) fn check(project: &Project) -> io::Result<Vec<String>> {
    let mut metadata = project.cargo(["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&process::output(&mut metadata).map_err(io::Error::other)?)?;
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let crate_name = package["name"].as_str().unwrap_or_default();
        let Some(rules) = CRATES.iter().find(|entry| entry.name == crate_name) else {
            found.push(format!("{crate_name}: the crate is not in the table of layers"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let name = dependency["name"].as_str().unwrap_or_default();
            let is_ours = name.starts_with("moa-") || name == "xtask";
            let is_for_tests = rules.tests.contains(&name);
            let of_tests = dependency["kind"] == "dev";
            let is_refused = rules.never.contains(&name);
            if is_refused || (is_ours && !rules.ours.contains(&name) && !(is_for_tests && of_tests)) {
                let but = if is_for_tests { ", but in its dev-dependencies" } else { "" };
                found.push(format!("{crate_name}: may not depend on `{name}`{but}"));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::planted;

    /// What is found in a workspace of these crates and their lists.
    fn found(crates: &[(&str, &str)]) -> Vec<String> {
        let root = "[workspace]\nmembers = [\"*\"]\nresolver = \"3\"\n[workspace.dependencies]\n\
            moa-cuda-fake = \"1\"\nmoa-kernels = \"1\"\nmoa-schema = \"1\"\n\
            fast = { version = \"1\", package = \"moa-kernels\" }\n";
        let manifests = crates.iter().map(|(name, lists)| {
            let text = format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n[lib]\npath = \"lib.rs\"\n{lists}");
            (format!("{name}/Cargo.toml"), text)
        });
        let files: Vec<_> = manifests.chain([("Cargo.toml".to_owned(), root.to_owned())]).collect();
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        let tree = planted(&files);
        check(&Project { root: tree.path().into(), target: tree.path().join("target") }).unwrap()
    }

    #[test]
    fn the_compiler_may_not_depend_on_kernels() {
        for list in [
            "[dependencies]\nmoa-kernels.workspace = true",
            "[dev-dependencies]\nmoa-kernels = { version = \"1\" }",
            "[dependencies.moa-kernels]\nversion = \"1\"",
            "[target.'cfg(unix)'.dependencies]\nmoa-kernels.workspace = true",
            "[dependencies]\nquick = { version = \"1\", package = \"moa-kernels\" }",
            "[dependencies.quick]\nversion = \"1\"\npackage = \"moa-kernels\"",
            "[dependencies]\nfast.workspace = true",
        ] {
            assert_eq!(found(&[("moa-export", list)]), ["moa-export: may not depend on `moa-kernels`"], "{list}");
        }
    }

    #[test]
    fn crates_for_tests_are_dev_dependencies_alone() {
        let driver = |list: &str| found(&[("moa-cuda-driver", list)]);
        for list in [
            "[dev-dependencies]\nmoa-cuda-fake.workspace = true",
            "[target.'cfg(unix)'.dev-dependencies]\nmoa-cuda-fake.workspace = true",
        ] {
            assert_eq!(driver(list), [""; 0], "{list}");
        }
        for list in [
            "[dependencies]\nmoa-cuda-fake.workspace = true",
            "[build-dependencies]\nmoa-cuda-fake.workspace = true",
            "[dev-dependencies]\nmoa-cuda-fake.workspace = true\n[dependencies]\nmoa-cuda-fake.workspace = true",
        ] {
            let refused = "moa-cuda-driver: may not depend on `moa-cuda-fake`, but in its dev-dependencies";
            assert_eq!(driver(list), [refused], "{list}");
        }
        let other = driver("[dev-dependencies]\nmoa-kernels.workspace = true");
        assert_eq!(other, ["moa-cuda-driver: may not depend on `moa-kernels`"]);
    }

    #[test]
    fn crates_below_may_not_depend_on_crates_above() {
        let found = found(&[
            ("moa-graphs", "[dependencies]\nprost = \"0.14\""),
            ("moa-kernels", "[build-dependencies]\nort-sys = \"2\""),
        ]);
        assert_eq!(found, ["moa-graphs: may not depend on `prost`", "moa-kernels: may not depend on `ort-sys`"]);
    }

    #[test]
    fn a_crate_that_is_not_in_the_table_is_found() {
        assert_eq!(found(&[("extra", "")]), ["extra: the crate is not in the table of layers"]);
    }

    #[test]
    fn what_the_table_allows_passes() {
        let export = "[dependencies]\nmoa-schema.workspace = true\nort = { version = \"2\", optional = true }\n\
            [features]\nort = [\"dep:ort\"]";
        let kernels = "[dependencies]\nmoa-schema.workspace = true # moa-graphs";
        let graphs = "[dependencies]\nserde = \"1\"";
        assert_eq!(found(&[("moa-export", export), ("moa-graphs", graphs), ("moa-kernels", kernels)]), [""; 0]);
    }
}
