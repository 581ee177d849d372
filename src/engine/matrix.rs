//! Which TensorRT release, CUDA toolkit and dtype serve which GPU.
//!
//! Sources: NVIDIA's support matrices of TensorRT 8.6, 10.0 and 10.1, its release notes of 10.4 (Volta is deprecated),
//! 10.5 (Volta is removed), 10.7 (a plugin goes before a body), 10.8 (Blackwell is added) and 10.13.2 (CUDA 11 is
//! dropped, 13.0 is added), the headers and change log of 11.1, and the architectures of each CUDA toolkit's compiler.

use std::{fmt, str::FromStr};

/// Major and minor number: of a release, or a compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl FromStr for Version {
    type Err = String;

    /// Reads a version such as `10.4`; what follows is left out.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = text.split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Self(major, minor)),
            _ => Err("expected a version such as 10.4".into()),
        }
    }
}

/// Number of a TensorRT release: major, minor and patch. One that is given by two numbers is the last of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReleaseNumber(pub u16, pub u16, pub u16);

impl fmt::Display for ReleaseNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self(major, minor, u16::MAX) => write!(f, "{major}.{minor}"),
            Self(major, minor, patch) => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

impl FromStr for ReleaseNumber {
    type Err = String;

    /// Reads a release such as `10.4` or `10.13.0.35`; what follows the third number is left out.
    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<_>, _> = text.split('.').take(3).map(u16::from_str).collect();
        match numbers.as_deref() {
            Ok([major, minor]) => Ok(Self(*major, *minor, u16::MAX)),
            Ok([major, minor, patch]) => Ok(Self(*major, *minor, *patch)),
            _ => Err("expected a release such as 10.4 or 10.13.0".into()),
        }
    }
}

/// A type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    Fp32,
    /// IEEE 754 binary16.
    Fp16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fp32, Self::Fp16, Self::Bf16];

    /// As users type it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        }
    }
}

/// A GPU that engines are built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu {
    /// As users type it.
    pub name: &'static str,
    /// What it computes with.
    pub capability: Version,
    /// Oldest and newest CUDA toolkit that compiles for it; `None`: no newest is known.
    pub cuda: (Version, Option<Version>),
}

impl Gpu {
    /// The GPU of this name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        GPUS.into_iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name))
    }
}

const fn gpu(name: &'static str, capability: Version, from: Version, to: Option<Version>) -> Gpu {
    Gpu { name, capability, cuda: (from, to) }
}

/// The GPUs that engines are built for, by compute capability.
pub const GPUS: [Gpu; 16] = [
    gpu("v100", Version(7, 0), Version(9, 0), Some(Version(12, 9))),
    gpu("t4", Version(7, 5), Version(10, 0), None),
    gpu("a100", Version(8, 0), Version(11, 0), None),
    gpu("a30", Version(8, 0), Version(11, 0), None),
    gpu("a10", Version(8, 6), Version(11, 1), None),
    gpu("a40", Version(8, 6), Version(11, 1), None),
    gpu("rtx3090", Version(8, 6), Version(11, 1), None),
    gpu("l4", Version(8, 9), Version(11, 8), None),
    gpu("l40", Version(8, 9), Version(11, 8), None),
    gpu("l40s", Version(8, 9), Version(11, 8), None),
    gpu("rtx4090", Version(8, 9), Version(11, 8), None),
    gpu("h100", Version(9, 0), Version(11, 8), None),
    gpu("h200", Version(9, 0), Version(11, 8), None),
    gpu("b200", Version(10, 0), Version(12, 8), None),
    gpu("gb200", Version(10, 0), Version(12, 8), None),
    gpu("rtx5090", Version(12, 0), Version(12, 8), None),
];

/// What a plugin of a release derives from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plugin {
    /// `IPluginV2DynamicExt`.
    V2DynamicExt,
    /// `IPluginV3`.
    V3,
}

impl Plugin {
    /// Name of the class.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V2DynamicExt => "IPluginV2DynamicExt",
            Self::V3 => "IPluginV3",
        }
    }
}

/// Releases of TensorRT that agree in what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// First and last, as NVIDIA numbers them.
    pub name: &'static str,
    /// First release.
    pub first: ReleaseNumber,
    /// Lowest and highest compute capability.
    pub capability: (Version, Version),
    /// Oldest and newest CUDA toolkit that it is built for.
    pub cuda: (Version, Version),
    /// Whether it computes with bfloat16.
    pub bf16: bool,
    /// What our plugin derives from.
    pub plugin: Plugin,
    /// Whether its ONNX parser takes an operator's body before a plugin of the same name, so that only the form
    /// `fused` reaches the plugin.
    pub body_first: bool,
    /// Whether the types of the graph are the only ones: there is no flag for lower precision.
    pub strongly_typed_only: bool,
}

impl Release {
    /// The first and the last of the releases that its name holds, as NVIDIA numbers them.
    pub fn range(&self) -> [&'static str; 2] {
        self.name.split_once(" to ").map_or([self.name; 2], |(first, last)| [first, last])
    }
}

const OLDER: Release = Release {
    name: "8.6",
    first: ReleaseNumber(8, 6, 0),
    capability: (Version(6, 0), Version(9, 0)),
    cuda: (Version(11, 0), Version(12, 1)),
    bf16: false,
    plugin: Plugin::V2DynamicExt,
    body_first: true,
    strongly_typed_only: false,
};

const WITH_VOLTA: Release = Release {
    name: "10.0 to 10.4",
    first: ReleaseNumber(10, 0, 0),
    capability: (Version(7, 0), Version(9, 0)),
    cuda: (Version(11, 8), Version(12, 9)),
    bf16: true,
    plugin: Plugin::V3,
    ..OLDER
};

const WITHOUT_VOLTA: Release = Release {
    name: "10.5 to 10.6",
    first: ReleaseNumber(10, 5, 0),
    capability: (Version(7, 5), Version(9, 0)),
    ..WITH_VOLTA
};

/// The releases that our plugin serves, oldest first.
pub const RELEASES: [Release; 7] = [
    OLDER,
    WITH_VOLTA,
    WITHOUT_VOLTA,
    Release { name: "10.7", first: ReleaseNumber(10, 7, 0), body_first: false, ..WITHOUT_VOLTA },
    Release {
        name: "10.8 to 10.13.0",
        first: ReleaseNumber(10, 8, 0),
        capability: (Version(7, 5), Version(12, 0)),
        body_first: false,
        ..WITH_VOLTA
    },
    Release {
        name: "10.13.2 to 10.16",
        first: ReleaseNumber(10, 13, 2),
        capability: (Version(7, 5), Version(12, 0)),
        cuda: (Version(12, 0), Version(13, 0)),
        body_first: false,
        ..WITH_VOLTA
    },
    Release {
        name: "11.0 to 11.4",
        first: ReleaseNumber(11, 0, 0),
        capability: (Version(7, 5), Version(12, 0)),
        cuda: (Version(12, 9), Version(13, 3)),
        body_first: false,
        strongly_typed_only: true,
        ..WITH_VOLTA
    },
];

/// Toolkits that serve a GPU and a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fit {
    /// Oldest and newest CUDA toolkit.
    pub cuda: (Version, Version),
}

/// Why a GPU, a release and a dtype do not go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misfit {
    /// The release has dropped the GPU.
    #[error("TensorRT {release} serves compute capability {from} and newer")]
    Dropped {
        /// Name of the release.
        release: &'static str,
        /// Lowest that it serves.
        from: Version,
    },
    /// The release is older than the GPU.
    #[error("TensorRT {release} serves compute capabilities up to {to}")]
    TooNew {
        /// Name of the release.
        release: &'static str,
        /// Highest that it serves.
        to: Version,
    },
    /// No toolkit serves both.
    #[error("TensorRT {release} needs CUDA {from} or newer, and this GPU is compiled for up to {to}")]
    Cuda {
        /// Name of the release.
        release: &'static str,
        /// Oldest of the release.
        from: Version,
        /// Newest for the GPU.
        to: Version,
    },
    /// The GPU has no bfloat16.
    #[error("compute capability {capability} has no bfloat16; it begins with 8.0")]
    GpuBf16 {
        /// That of the GPU.
        capability: Version,
    },
    /// The release has no bfloat16.
    #[error("TensorRT {release} has no bfloat16; it begins with 10.0")]
    ReleaseBf16 {
        /// Name of the release.
        release: &'static str,
    },
}

impl Misfit {
    /// Whether a model of another type fits.
    pub const fn is_of_dtype(&self) -> bool {
        matches!(self, Self::GpuBf16 { .. } | Self::ReleaseBf16 { .. })
    }
}

/// Whether a GPU, a release and a dtype go together.
///
/// # Errors
///
/// The first reason why they do not.
pub fn fit(gpu: &Gpu, release: &Release, dtype: Dtype) -> Result<Fit, Misfit> {
    let (Release { name, capability: (lowest, highest), .. }, capability) = (*release, gpu.capability);
    if capability < lowest {
        return Err(Misfit::Dropped { release: name, from: lowest });
    }
    if capability > highest {
        return Err(Misfit::TooNew { release: name, to: highest });
    }
    let newest = gpu.cuda.1.map_or(release.cuda.1, |newest| newest.min(release.cuda.1));
    let cuda = (gpu.cuda.0.max(release.cuda.0), newest);
    if cuda.0 > cuda.1 {
        return Err(Misfit::Cuda { release: name, from: cuda.0, to: cuda.1 });
    }
    if dtype == Dtype::Bf16 && capability < Version(8, 0) {
        return Err(Misfit::GpuBf16 { capability });
    }
    if dtype == Dtype::Bf16 && !release.bf16 {
        return Err(Misfit::ReleaseBf16 { release: name });
    }
    Ok(Fit { cuda })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(name: &str) -> Gpu {
        GPUS.into_iter().find(|gpu| gpu.name == name).unwrap()
    }

    fn releases(name: &str, dtype: Dtype) -> Vec<&'static str> {
        RELEASES.iter().filter(|release| fit(&find(name), release, dtype).is_ok()).map(|release| release.name).collect()
    }

    #[test]
    fn volta_ends_with_10_4_and_has_no_bf16() {
        for dtype in [Dtype::Fp32, Dtype::Fp16] {
            assert_eq!(releases("v100", dtype), ["8.6", "10.0 to 10.4"]);
        }
        assert!(releases("v100", Dtype::Bf16).is_empty());
        let newer = fit(&find("v100"), &RELEASES[2], Dtype::Fp16).unwrap_err();
        assert_eq!(newer.to_string(), "TensorRT 10.5 to 10.6 serves compute capability 7.5 and newer");
        let bf16 = fit(&find("v100"), &RELEASES[1], Dtype::Bf16).unwrap_err();
        assert_eq!(bf16.to_string(), "compute capability 7.0 has no bfloat16; it begins with 8.0");
    }

    #[test]
    fn hopper_has_bf16_from_10_0_on() {
        assert_eq!(releases("h200", Dtype::Fp16).len(), RELEASES.len());
        assert_eq!(releases("h200", Dtype::Bf16).len(), RELEASES.len() - 1);
        let cuda = fit(&find("h200"), &RELEASES[0], Dtype::Fp16).unwrap().cuda;
        assert_eq!(cuda, (Version(11, 8), Version(12, 1)));
    }

    #[test]
    fn blackwell_begins_with_10_8() {
        assert_eq!(releases("b200", Dtype::Bf16), ["10.8 to 10.13.0", "10.13.2 to 10.16", "11.0 to 11.4"]);
        let cuda = fit(&find("b200"), &RELEASES[4], Dtype::Bf16).unwrap().cuda;
        assert_eq!(cuda, (Version(12, 8), Version(12, 9)));
    }

    #[test]
    fn releases_are_in_order_and_their_ranges_are_not_empty() {
        assert!(RELEASES.windows(2).all(|pair| pair[0].first < pair[1].first));
        for release in RELEASES {
            assert!(release.capability.0 <= release.capability.1 && release.cuda.0 <= release.cuda.1);
            assert!(release.plugin == Plugin::V3 || release.first < ReleaseNumber(10, 0, 0));
        }
    }
}
