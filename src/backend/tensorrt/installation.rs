//! TensorRT, our plugin and the GPU, as they are found on this machine.

use std::path::{Path, PathBuf};

use super::{
    EngineError,
    door::{CudaDevice, DoorError, Library, TensorRt},
    error::EngineStage,
};
use crate::{
    backend::{
        BackendError,
        libraries::{
            find_cuda_kernels, find_tensorrt_plugin, kernel_switches, misnamed, named_archive, tensorrt_folder,
        },
    },
    digest::sha256_of_file,
    engine::{Device, Machine, Plugin, PluginHash, Release, ReleaseNumber, Version, release_of},
};

/// The first device that CUDA shows; `CUDA_VISIBLE_DEVICES` chooses another.
const ORDINAL: i32 = 0;

/// Everything that engines are built and run with.
pub struct Installation {
    pub(super) tensorrt: TensorRt,
    machine: Machine,
    device: Device,
    plugin: PluginHash,
    release: &'static Release,
    driver: (u32, u32),
    /// Whether the release tells how far a build is.
    tells_progress: bool,
}

impl Installation {
    /// Finds and opens all of it.
    ///
    /// # Errors
    ///
    /// Where the plugin, TensorRT, the driver or a device is missing, and where they do not go together; where a
    /// variable names what is not there.
    pub fn open() -> Result<Self, BackendError> {
        if let Some((variable, path)) = misnamed() {
            return Err(EngineError::Misnamed { variable, path }.into());
        }
        let path = find_tensorrt_plugin()?;
        Ok(Self::with(&path)?)
    }

    fn with(path: &Path) -> Result<Self, EngineError> {
        let library = Library::load(path).map_err(at(EngineStage::LoadPlugin))?;
        let tensorrt = library.open(tensorrt_folder().as_deref(), ORDINAL).map_err(at(EngineStage::Open))?;
        let numbers = tensorrt.versions().map_err(at(EngineStage::Open))?.numbers;
        let [major, minor, patch] = [numbers[0], numbers[1], numbers[2]].map(short);
        let release = release_of(ReleaseNumber(major, minor, patch))?;
        let found = library.device(ORDINAL).map_err(at(EngineStage::FindDevice))?;
        let device = device(&found);
        Ok(Self {
            tensorrt,
            machine: Machine {
                tensorrt: version_text(numbers),
                device: device.name.clone(),
                compute_capability: device.capability.to_string(),
            },
            device,
            plugin: hashes(path)?,
            release,
            driver: found.driver,
            tells_progress: release.plugin == Plugin::V3,
        })
    }

    /// Version of TensorRT and the GPU.
    pub const fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The GPU.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Hashes of the libraries that compute our operators.
    pub const fn plugin(&self) -> &PluginHash {
        &self.plugin
    }

    /// What the table knows of this TensorRT.
    pub const fn release(&self) -> &'static Release {
        self.release
    }

    /// Whether a build tells its steps, and so can be told to end.
    pub const fn tells_progress(&self) -> bool {
        self.tells_progress
    }

    /// Newest CUDA that the driver serves.
    pub fn driver(&self) -> String {
        format!("{}.{}", self.driver.0, self.driver.1)
    }
}

fn at(stage: EngineStage) -> impl Fn(DoorError) -> EngineError {
    move |error| EngineError::of(stage, error)
}

fn short(number: u32) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

fn device(found: &CudaDevice) -> Device {
    let (major, minor) = found.capability;
    Device { name: found.name.clone(), capability: Version(short(major), short(minor)) }
}

fn hashes(plugin: &Path) -> Result<PluginHash, EngineError> {
    let hash = |path: &Path| match sha256_of_file(path) {
        Ok((sha256, _)) => Ok(sha256),
        Err(source) => Err(EngineError::Io { path: path.to_path_buf(), source }),
    };
    Ok(PluginHash {
        library_sha256: hash(plugin)?,
        kernels_sha256: find_cuda_kernels(plugin).map(|path| hash(&path)).transpose()?,
        archive_sha256: named_archive().map(|path| hash(&path)).transpose()?,
        switches: kernel_switches(),
    })
}

/// What there is of TensorRT on this machine, for people: each part, or why it is not there.
#[derive(Debug)]
pub struct Survey {
    /// Where the plugin is.
    pub plugin: Result<PathBuf, BackendError>,
    /// What the plugin was compiled for.
    pub built_for: Result<String, String>,
    /// Version of TensorRT, and where `libnvinfer` is.
    pub tensorrt: Result<(String, Option<PathBuf>), String>,
    /// The first GPU.
    pub device: Result<Device, String>,
}

impl Survey {
    /// Looks at everything, and stops at nothing.
    pub fn make() -> Self {
        let plugin = find_tensorrt_plugin();
        let library = match &plugin {
            Ok(path) => Library::load(path).map_err(|error| at(EngineStage::LoadPlugin)(error).to_string()),
            Err(_) => Err("there is no plugin to ask".to_owned()),
        };
        let built_for = ask(&library, |library| {
            let target = library.built_for()?;
            let [major, minor, patch] = target.header;
            let interface = if target.plugin_interface == 2 { Plugin::V2DynamicExt } else { Plugin::V3 };
            Ok(format!("TensorRT {major}.{minor}.{patch}, {}", interface.name()))
        });
        let tensorrt = ask(&library, |library| {
            let versions = library.open(tensorrt_folder().as_deref(), ORDINAL)?.versions()?;
            Ok((version_text(versions.numbers), versions.nvinfer))
        });
        let device = ask(&library, |library| Ok(device(&library.device(ORDINAL)?)));
        Self { plugin, built_for, tensorrt, device }
    }
}

fn ask<T>(
    library: &Result<Library, String>,
    question: impl FnOnce(&Library) -> Result<T, DoorError>,
) -> Result<T, String> {
    let library = library.as_ref().map_err(Clone::clone)?;
    question(library).map_err(|error| at(EngineStage::Open)(error).to_string())
}

fn version_text([major, minor, patch, build]: [u32; 4]) -> String {
    format!("{major}.{minor}.{patch}.{build}")
}
