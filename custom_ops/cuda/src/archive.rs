//! The file that holds the compiled kernels of every architecture.
//!
//! Layout, little-endian: the 8 bytes `MOACUDA1`, the length of the manifest as `u64`, the manifest (JSON), then the
//! images one after another. Offsets in the manifest count from the first byte behind it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// First bytes of an archive.
pub const MAGIC: [u8; 8] = *b"MOACUDA1";

/// Why an archive cannot be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ArchiveError {
    /// The first bytes are not [`MAGIC`].
    #[error("the kernel archive does not begin with MOACUDA1")]
    Magic,
    /// The file ends before what it announces.
    #[error("the kernel archive ends early: {0}")]
    Truncated(&'static str),
    /// The manifest is not what it should be.
    #[error("the manifest of the kernel archive is malformed: {0}")]
    Manifest(String),
}

/// What an archive says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// SHA-256 of the kernel sources in hexadecimal.
    pub source_hash: String,
    /// SHA-256 of the script that wrote the archive, in hexadecimal.
    #[serde(default)]
    pub script_hash: Option<String>,
    /// Compiler and its version.
    pub compiler: String,
    /// What counted the instructions, and its version.
    #[serde(default)]
    pub disassembler: Option<String>,
    /// The images, by module, then target.
    pub images: Vec<Image>,
}

/// One module compiled for one target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Module: `f32`, `f16` or `bf16` ([`crate::Element::module`]).
    pub module: String,
    /// `sm_80`, `sm_90a`, … for machine code, `compute_80`, … for PTX.
    pub target: String,
    /// Bytes from the end of the manifest to the image.
    pub offset: u64,
    /// Bytes of the image. PTX ends with a NUL.
    pub bytes: u64,
    /// Entry points, by name. Resource figures are 0 in PTX.
    pub kernels: Vec<KernelResources>,
}

impl Image {
    /// Whether the driver compiles it when it is loaded.
    pub fn is_ptx(&self) -> bool {
        self.target.starts_with("compute_")
    }
}

/// What one entry point needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelResources {
    /// Symbol.
    pub name: String,
    /// Registers of one thread.
    pub registers: u32,
    /// Static shared memory of one block in bytes; dynamic memory is the plan's.
    pub shared_bytes: u32,
    /// Local memory of one thread in bytes: spilled registers and stack.
    pub local_bytes: u32,
    /// Largest number of threads of one block.
    pub max_threads: u32,
    /// What its machine code holds; `None` in PTX.
    #[serde(default)]
    pub instructions: Option<Instructions>,
}

/// How many instructions the machine code of one entry point holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instructions {
    /// All of them.
    pub all: u32,
    /// Those of each form that occurs, modifiers included (`HMMA.16816.F32.BF16`): products of tensor cores, copies to
    /// shared memory, loads of matrices, local memory, atomic operations and what orders grids; and `FFMA` of any form.
    pub forms: BTreeMap<String, u32>,
}

/// A parsed archive.
#[derive(Debug, Clone)]
pub struct Archive<'a> {
    manifest: Manifest,
    images: &'a [u8],
}

impl<'a> Archive<'a> {
    /// Reads an archive and proves that every image lies inside it.
    ///
    /// # Errors
    ///
    /// [`ArchiveError`] where `bytes` is no whole archive.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ArchiveError> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(ArchiveError::Magic)?;
        let (length, rest) = rest.split_first_chunk().ok_or(ArchiveError::Truncated("length of the manifest"))?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (manifest, images) = rest.split_at_checked(length).ok_or(ArchiveError::Truncated("manifest"))?;
        let manifest: Manifest =
            serde_json::from_slice(manifest).map_err(|error| ArchiveError::Manifest(error.to_string()))?;
        let fits = |image: &Image| image.offset.checked_add(image.bytes).is_some_and(|end| end <= images.len() as u64);
        if !manifest.images.iter().all(fits) {
            return Err(ArchiveError::Truncated("image"));
        }
        Ok(Self { manifest, images })
    }

    /// What the archive says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bytes of one image of this archive's manifest; what `cuModuleLoadData` takes.
    pub fn bytes(&self, image: &Image) -> &'a [u8] {
        let start = usize::try_from(image.offset).unwrap_or(usize::MAX);
        let length = usize::try_from(image.bytes).unwrap_or(usize::MAX);
        self.images.get(start..).and_then(|rest| rest.get(..length)).unwrap_or_default()
    }

    /// The image of `module` for a device: machine code of the same major version and the highest minor version that
    /// does not exceed the device's, else the newest PTX that the device can run.
    ///
    /// `sm_90a` is taken for compute capability 9.0 alone.
    pub fn select(&self, module: &str, (major, minor): (u32, u32)) -> Option<&Image> {
        let images = || self.manifest.images.iter().filter(|image| image.module == module);
        let code = images()
            .filter_map(|image| Some((Target::parse(&image.target)?, image)))
            .filter(|(target, _)| !target.ptx && target.major == major)
            .filter(|(target, _)| if target.exact { target.minor == minor } else { target.minor <= minor })
            .max_by_key(|(target, _)| (target.minor, target.exact));
        let ptx = || {
            images()
                .filter_map(|image| Some((Target::parse(&image.target)?, image)))
                .filter(|(target, _)| target.ptx && !target.exact && (target.major, target.minor) <= (major, minor))
                .max_by_key(|(target, _)| (target.major, target.minor))
        };
        code.or_else(ptx).map(|(_, image)| image)
    }

    /// The PTX image of `module` for exactly `compute_{major}{minor}`, to run an older path on a newer device.
    pub fn select_ptx(&self, module: &str, (major, minor): (u32, u32)) -> Option<&Image> {
        let target = format!("compute_{major}{minor}");
        self.manifest.images.iter().find(|image| image.module == module && image.target == target)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target {
    ptx: bool,
    major: u32,
    minor: u32,
    /// Whether the code uses features of this architecture alone.
    exact: bool,
}

impl Target {
    fn parse(text: &str) -> Option<Self> {
        let (ptx, rest) = match text.strip_prefix("sm_") {
            Some(rest) => (false, rest),
            None => (true, text.strip_prefix("compute_")?),
        };
        let digits = rest.trim_end_matches('a');
        let number: u32 = digits.parse().ok()?;
        Some(Self { ptx, major: number / 10, minor: number % 10, exact: digits.len() < rest.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(targets: &[&str]) -> Vec<u8> {
        let image = |(index, target): (usize, &&str)| Image {
            module: "f16".into(),
            target: (*target).to_owned(),
            offset: index as u64,
            bytes: 1,
            kernels: Vec::new(),
        };
        let images = targets.iter().enumerate().map(image).collect();
        let manifest = Manifest {
            source_hash: String::new(),
            script_hash: None,
            compiler: String::new(),
            disassembler: None,
            images,
        };
        let json = serde_json::to_vec(&manifest).unwrap();
        let length = (json.len() as u64).to_le_bytes();
        let payload: Vec<u8> = (0..targets.len() as u8).collect();
        [&MAGIC[..], &length, &json, &payload].concat()
    }

    #[test]
    fn the_nearest_image_is_selected() {
        let bytes = archive(&[
            "sm_70",
            "sm_75",
            "sm_80",
            "sm_86",
            "sm_90a",
            "compute_70",
            "compute_80",
            "compute_90",
            "sm_100",
        ]);
        let archive = Archive::parse(&bytes).unwrap();
        let target = |capability| archive.select("f16", capability).map(|image| image.target.as_str());
        assert_eq!(target((7, 0)), Some("sm_70"));
        assert_eq!(target((7, 2)), Some("sm_70"));
        assert_eq!(target((8, 7)), Some("sm_86"));
        assert_eq!(target((9, 0)), Some("sm_90a"));
        assert_eq!(target((10, 3)), Some("sm_100"));
        assert_eq!(target((11, 0)), Some("compute_90"));
        assert_eq!(target((6, 1)), None);
        assert_eq!(archive.select("f32", (8, 0)), None);
        assert_eq!(archive.bytes(archive.select("f16", (8, 0)).unwrap()), [2]);
        assert_eq!(archive.select_ptx("f16", (8, 0)).unwrap().target, "compute_80");
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = archive(&["sm_70", "compute_70"]);
        for length in 0..bytes.len() {
            assert!(Archive::parse(&bytes[..length]).is_err(), "{length} bytes passed");
        }
    }
}
