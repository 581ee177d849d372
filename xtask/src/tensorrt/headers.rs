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

/// Header of the ONNX parser.
const PARSER: &str = "NvOnnxParser.h";

/// Where a clone of github.com/NVIDIA/TensorRT before 11 has that header: in a submodule.
const IN_CLONE: &str = "parsers/onnx";

/// Headers of one release.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) folder: PathBuf,
    /// Where the header of the parser lies.
    pub(super) parser: PathBuf,
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl Headers {
    /// Those of `TENSORRT_ROOT`, where it is set.
    pub(super) fn named() -> Result<Option<Self>, String> {
        let Some(root) = env::var_os(VARIABLE).filter(|root| !root.is_empty()) else { return Ok(None) };
        Self::of_root(Path::new(&root)).map(Some).map_err(|why| format!("{VARIABLE}: {why}"))
    }

    /// Those that Cargo fetches; the error says why there are none.
    pub(super) fn fetched(project: &Project) -> Result<Self, String> {
        let read = fetch(project).and_then(|package| {
            let folder = package.join(IN_CRATE);
            Self::read(folder.clone(), folder)
        });
        read.map_err(|why| format!("no TensorRT headers: {why}"))
    }

    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.major, self.minor)
    }

    /// Those of an installation, or of a clone of github.com/NVIDIA/TensorRT.
    fn of_root(root: &Path) -> Result<Self, String> {
        let folder = root.join("include");
        let submodule = root.join(IN_CLONE);
        let found = [&folder, &submodule].into_iter().find(|place| file(&place.join(PARSER)).is_some()).cloned();
        let has_parser = found.is_some();
        let read = Self::read(folder, found.unwrap_or_default())?;
        if has_parser {
            return Ok(read);
        }
        Err(format!(
            "{} has the headers of TensorRT {}, and {PARSER} neither in include nor in {IN_CLONE}; in a clone of \
             github.com/NVIDIA/TensorRT, `git submodule update --init {IN_CLONE}` brings it",
            root.display(),
            read.version()
        ))
    }

    fn read(folder: PathBuf, parser: PathBuf) -> Result<Self, String> {
        for name in ["NvInfer.h", "NvInferVersion.h"] {
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
        Ok(Self { folder, parser, major, minor })
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
    use crate::check::planted;

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
    fn the_parser_is_found_in_an_installation_and_in_a_clone() {
        let version = "#define NV_TENSORRT_MAJOR 8\n#define NV_TENSORRT_MINOR 6\n";
        let headers = [("include/NvInfer.h", ""), ("include/NvInferVersion.h", version)];
        let read = |more: &[(&str, &str)]| {
            let tree = planted(&[&headers[..], more].concat());
            let root = tree.path();
            Headers::of_root(root).map(|headers| headers.parser.strip_prefix(root).unwrap().to_path_buf())
        };
        let (inside, submodule) = (("include/NvOnnxParser.h", ""), ("parsers/onnx/NvOnnxParser.h", ""));
        assert_eq!(read(&[inside]), Ok("include".into()));
        assert_eq!(read(&[submodule]), Ok("parsers/onnx".into()));
        assert_eq!(read(&[inside, submodule]), Ok("include".into()));
        let why = read(&[]).unwrap_err();
        assert!(
            why.contains("TensorRT 8.6, and NvOnnxParser.h neither") && why.contains("git submodule update"),
            "{why}"
        );
        assert!(read(&[("include/NvInferVersion.h", "")]).unwrap_err().contains("does not define NV_TENSORRT_MAJOR"));
    }

    #[test]
    fn the_package_is_found_among_others() {
        let metadata = r#"{"packages":[{"name":"other","manifest_path":"/r/o/Cargo.toml"},
            {"name":"trtx-sys","manifest_path":"/r/trtx-sys-0.9.1/Cargo.toml"}]}"#;
        assert_eq!(package_folder(metadata, "trtx-sys"), Some(PathBuf::from("/r/trtx-sys-0.9.1")));
        assert_eq!(package_folder(metadata, "absent"), None);
    }
}
