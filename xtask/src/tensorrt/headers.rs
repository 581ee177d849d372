//! Finding TensorRT's headers. None is kept here; where there are none, nothing is built.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use super::file;
use crate::{process, project::Project};

/// Root of an installed TensorRT, with `include`.
const VARIABLE: &str = "TENSORRT_ROOT";

/// A crate whose package holds the headers of TensorRT 11.4.
const CRATE: (&str, &str) = ("trtx-sys", "0.9.1");

/// Their folder in that package.
const IN_CRATE: &str = "TensorRT-Headers/TRT-Enterprise-11.4";

/// Headers of one release.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) folder: PathBuf,
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl Headers {
    /// Those of `TENSORRT_ROOT`, where it is set.
    pub(super) fn named() -> Result<Option<Self>, String> {
        let Some(root) = env::var_os(VARIABLE).filter(|root| !root.is_empty()) else { return Ok(None) };
        let folder = PathBuf::from(root).join("include");
        Self::read(folder).map(Some).map_err(|why| format!("{VARIABLE}: {why}"))
    }

    /// Those that Cargo fetches; the error says why there are none.
    pub(super) fn fetched(project: &Project) -> Result<Self, String> {
        let read = fetch(project).and_then(|package| Self::read(package.join(IN_CRATE)));
        read.map_err(|why| format!("no TensorRT headers: {why}"))
    }

    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.major, self.minor)
    }

    fn read(folder: PathBuf) -> Result<Self, String> {
        for name in ["NvInfer.h", "NvInferVersion.h", "NvOnnxParser.h"] {
            if file(&folder.join(name)).is_none() {
                return Err(format!("{} lacks {name}", folder.display()));
            }
        }
        let path = folder.join("NvInferVersion.h");
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let number =
            |name: &str| version_number(&text, name).ok_or(format!("{} does not define {name}", path.display()));
        let (major, minor) = (number("NV_TENSORRT_MAJOR")?, number("NV_TENSORRT_MINOR")?);
        if (major, minor) < (8, 6) {
            return Err(format!("{} is TensorRT {major}.{minor}, and 8.6 is the oldest", folder.display()));
        }
        Ok(Self { folder, major, minor })
    }
}

/// The number behind `#define NAME`, which may be another name.
fn version_number(text: &str, name: &str) -> Option<u32> {
    let defined = |name: &str| {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("#define") && words.next() == Some(name)).then(|| words.next())?
        })
    };
    let value = defined(name)?;
    value.parse().ok().or_else(|| defined(value)?.parse().ok())
}

/// Folder of the crate's package, fetched by name through a manifest that is thrown away.
fn fetch(project: &Project) -> Result<PathBuf, String> {
    let folder = project.target.join("tensorrt/headers");
    let at = |error| format!("{}: {error}", folder.display());
    fs::create_dir_all(folder.join("src")).map_err(at)?;
    let (name, version) = CRATE;
    let manifest = format!(
        "[package]\nname = \"headers\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [dependencies]\n{name} = {{ version = \"={version}\", default-features = false }}\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest).map_err(at)?;
    fs::write(folder.join("src/lib.rs"), "").map_err(at)?;
    let manifest = folder.join("Cargo.toml").display().to_string();
    let why = |error: String| format!("the crate {name} {version} cannot be fetched ({error})");
    process::run(&mut project.cargo(["fetch", "--quiet", "--manifest-path", &manifest])).map_err(why)?;
    let arguments = ["metadata", "--format-version", "1", "--offline", "--manifest-path", &manifest];
    let metadata = process::output(&mut project.cargo(arguments)).map_err(why)?;
    package_folder(&metadata, name).ok_or_else(|| format!("Cargo does not say where {name} lies"))
}

/// Folder of the manifest of `name` in what `cargo metadata` writes.
fn package_folder(metadata: &str, name: &str) -> Option<PathBuf> {
    let metadata: serde_json::Value = serde_json::from_str(metadata).ok()?;
    let package = metadata["packages"].as_array()?.iter().find(|package| package["name"] == name)?;
    Path::new(package["manifest_path"].as_str()?).parent().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_both_kinds_of_headers() {
        let plain = "#define NV_TENSORRT_MAJOR 8 //!< major\n#define NV_TENSORRT_MINOR 6\n";
        let named = "#define TRT_MAJOR_ENTERPRISE 11\n#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< major\n";
        assert_eq!(version_number(plain, "NV_TENSORRT_MAJOR"), Some(8));
        assert_eq!(version_number(plain, "NV_TENSORRT_MINOR"), Some(6));
        assert_eq!(version_number(named, "NV_TENSORRT_MAJOR"), Some(11));
        assert_eq!(version_number(named, "NV_TENSORRT_MINOR"), None);
    }

    #[test]
    fn the_package_is_found_among_others() {
        let metadata = r#"{"packages":[{"name":"other","manifest_path":"/r/o/Cargo.toml"},
            {"name":"trtx-sys","manifest_path":"/r/trtx-sys-0.9.1/Cargo.toml"}]}"#;
        assert_eq!(package_folder(metadata, "trtx-sys"), Some(PathBuf::from("/r/trtx-sys-0.9.1")));
        assert_eq!(package_folder(metadata, "absent"), None);
    }
}
