//! The library, and TensorRT behind it.

use std::{
    ffi::{CString, c_char, c_void},
    mem::{ManuallyDrop, zeroed},
    path::{Path, PathBuf},
    ptr::{NonNull, null, null_mut},
    rc::Rc,
};

use super::{
    Code, DoorError, Engine, c_path, c_text, checked, copied,
    ffi::{self, Opaque, Table},
    made, owned_text, shape_of, struct_size, text_of,
};
use crate::{
    backend::{cut_off::cut_off, runtime_library::said_of},
    engine::{InputShapes, ShapeProfile},
};

/// `libmoa_tensorrt`, loaded. It stays loaded: TensorRT's threads and exit handlers run until the process ends.
struct Loaded {
    table: Table,
    _library: ManuallyDrop<libloading::Library>,
}

/// What `libmoa_tensorrt` was compiled for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::backend) struct Target {
    /// Major, minor and patch number of TensorRT's headers.
    pub(in crate::backend) header: [u32; 3],
    /// 3 for `IPluginV3`, 2 for `IPluginV2DynamicExt`.
    pub(in crate::backend) plugin_interface: u32,
}

/// TensorRT as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::backend) struct Versions {
    /// Major, minor, patch and build number.
    pub(in crate::backend) numbers: [u32; 4],
    /// `libnvinfer`.
    pub(in crate::backend) nvinfer: Option<PathBuf>,
    /// `libnvonnxparser`.
    pub(in crate::backend) parser: Option<PathBuf>,
}

/// A CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::backend) struct CudaDevice {
    pub(in crate::backend) name: String,
    /// Compute capability.
    pub(in crate::backend) capability: (u32, u32),
    /// Newest CUDA that the driver serves, major and minor number.
    pub(in crate::backend) driver: (u32, u32),
}

/// The plugin library; a cheap handle.
#[derive(Clone)]
pub(in crate::backend) struct Library(Rc<Loaded>);

/// Is told a step of a build (phase, step, steps), and says whether it is to end. Called from TensorRT's threads, one
/// at a time.
pub(in crate::backend) type OnProgress<'a> = &'a (dyn Fn(&str, i32, i32) -> bool + Sync);

/// How an engine is built.
pub(in crate::backend) struct BuildRequest<'a> {
    /// The model, encoded.
    pub(in crate::backend) model: &'a [u8],
    /// Where files of weights are looked for, if the model has some.
    pub(in crate::backend) model_path: Option<&'a Path>,
    pub(in crate::backend) profiles: &'a [ShapeProfile],
    pub(in crate::backend) tf32: bool,
    pub(in crate::backend) workspace_bytes: Option<u64>,
    pub(in crate::backend) optimization_level: Option<u32>,
    pub(in crate::backend) timing_cache: Option<&'a [u8]>,
    pub(in crate::backend) progress: Option<OnProgress<'a>>,
}

/// What a build gave.
pub(in crate::backend) struct Built {
    pub(in crate::backend) plan: Vec<u8>,
    pub(in crate::backend) timing_cache: Vec<u8>,
}

impl Library {
    /// Loads the library at `path`.
    pub(in crate::backend) fn load(path: &Path) -> Result<Self, DoorError> {
        let missing = |why: String| DoorError { code: Code::Missing, text: format!("{}: {why}", path.display()) };
        if let Some(why) = cut_off(path) {
            return Err(missing(why));
        }
        // SAFETY: the library's initialisers make empty containers and call nothing of TensorRT or CUDA.
        let library = unsafe { libloading::Library::new(path) };
        let library = ManuallyDrop::new(library.map_err(|error| missing(said_of(path, &error)))?);
        // SAFETY: only a build of `libmoa_tensorrt` exports this name; others are refused.
        let version = unsafe { ffi::abi_version(&library) }
            .map_err(|_| missing("it is no libmoa_tensorrt with an engine interface".into()))?;
        if version != ffi::ABI_VERSION {
            let needed = ffi::ABI_VERSION;
            return Err(missing(format!("its engine interface has version {version}, and version {needed} is needed")));
        }
        // SAFETY: the version says that the functions have the types of the header; the library is never unloaded.
        let table = unsafe { Table::of(&library) }.map_err(|error| missing(error.to_string()))?;
        Ok(Self(Rc::new(Loaded { table, _library: library })))
    }

    fn table(&self) -> &Table {
        &self.0.table
    }

    /// What the library was compiled for; needs neither TensorRT nor a GPU.
    pub(in crate::backend) fn built_for(&self) -> Result<Target, DoorError> {
        // SAFETY: zeros are a value of a structure of numbers.
        let mut target: ffi::Target = unsafe { zeroed() };
        target.struct_size = struct_size::<ffi::Target>();
        // SAFETY: `target` is writable and begins with its size.
        checked(|error| unsafe { (self.table().built_for)(&raw mut target, error) })?;
        Ok(Target { header: target.header, plugin_interface: target.plugin_interface })
    }

    /// The CUDA device of `ordinal`; needs no TensorRT.
    pub(in crate::backend) fn device(&self, ordinal: i32) -> Result<CudaDevice, DoorError> {
        // SAFETY: zeros are a value of a structure of numbers.
        let mut device: ffi::Device = unsafe { zeroed() };
        device.struct_size = struct_size::<ffi::Device>();
        // SAFETY: `device` is writable and begins with its size.
        checked(|error| unsafe { (self.table().get_device)(ordinal, &raw mut device, error) })?;
        Ok(CudaDevice {
            name: text_of(&device.name),
            capability: (device.compute_major, device.compute_minor),
            driver: (device.driver_version / 1000, device.driver_version % 1000 / 10),
        })
    }

    /// Opens `libnvinfer`, in `folder` or where the loader looks, for the device of `ordinal`.
    pub(in crate::backend) fn open(&self, folder: Option<&Path>, ordinal: i32) -> Result<TensorRt, DoorError> {
        let folder = folder.map(c_path).transpose()?;
        let options = ffi::OpenOptions {
            struct_size: struct_size::<ffi::OpenOptions>(),
            device: ordinal,
            folder: folder.as_ref().map_or(null(), |folder| folder.as_ptr()),
            log: None,
            log_severity: 0,
            reserved: 0,
            user: null_mut(),
        };
        let handle = made(|handle, error| {
            // SAFETY: `options` and the text that it points to live during the call, which is all that the library
            // asks.
            unsafe { (self.table().open)(&raw const options, handle, error) }
        })?;
        Ok(TensorRt(Rc::new(Open { library: self.clone(), handle })))
    }
}

/// A handle of `moa_trt_open`.
struct Open {
    library: Library,
    handle: NonNull<Opaque>,
}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: the handle came from `open`, and ends here alone.
        unsafe { (self.library.table().close)(self.handle.as_ptr()) }
    }
}

/// TensorRT, opened with our plugins; a cheap handle.
#[derive(Clone)]
pub(in crate::backend) struct TensorRt(Rc<Open>);

impl TensorRt {
    pub(super) fn table(&self) -> &Table {
        self.0.library.table()
    }

    fn handle(&self) -> *mut Opaque {
        self.0.handle.as_ptr()
    }

    /// What was opened.
    pub(in crate::backend) fn versions(&self) -> Result<Versions, DoorError> {
        // SAFETY: zeros are a value: numbers and null pointers.
        let mut versions: ffi::Versions = unsafe { zeroed() };
        versions.struct_size = struct_size::<ffi::Versions>();
        // SAFETY: the handle is open; `versions` is writable and begins with its size.
        checked(|error| unsafe { (self.table().get_versions)(self.handle(), &raw mut versions, error) })?;
        // SAFETY: the texts are the library's, which is open.
        let path = |text: *const c_char| unsafe { owned_text(text) }.map(PathBuf::from);
        let (nvinfer, parser) = (path(versions.nvinfer_path), path(versions.parser_path));
        Ok(Versions { numbers: versions.numbers, nvinfer, parser })
    }

    /// Builds an engine; takes minutes.
    pub(in crate::backend) fn build(&self, request: &BuildRequest<'_>) -> Result<Built, DoorError> {
        let path = request.model_path.map(c_path).transpose()?;
        let ranges = request.profiles.iter().map(|profile| Ranges::of(profile)).collect::<Result<Vec<_>, _>>()?;
        let profiles: Vec<ffi::Profile> = ranges.iter().map(Ranges::profile).collect();
        let timing_cache = request.timing_cache.unwrap_or_default();
        let options = ffi::BuildOptions {
            struct_size: struct_size::<ffi::BuildOptions>(),
            flags: if request.tf32 { ffi::TF32 } else { 0 },
            model: request.model.as_ptr().cast(),
            model_bytes: request.model.len() as u64,
            model_path: path.as_ref().map_or(null(), |path| path.as_ptr()),
            profiles: profiles.as_ptr(),
            profile_count: profiles.len(),
            workspace_bytes: request.workspace_bytes.unwrap_or(0),
            optimization_level: request.optimization_level.map_or(0, |level| i32::try_from(level).unwrap_or(5)),
            is_detailed: 1,
            timing_cache: timing_cache.as_ptr().cast(),
            timing_cache_bytes: timing_cache.len() as u64,
            progress: request.progress.is_some().then_some(tell_progress as ffi::Progress),
            parser_error: None,
            user: request.progress.as_ref().map_or(null_mut(), |tell| std::ptr::from_ref(tell).cast_mut().cast()),
        };
        let plan = made(|plan, error| {
            // SAFETY: the handle is open; everything that `options` points to lives during the call, and `user` is what
            // `tell_progress` expects.
            unsafe { (self.table().build)(self.handle(), &raw const options, plan, error) }
        })?;
        let table = self.table();
        // SAFETY: the plan is not destroyed before its bytes are copied.
        let built = unsafe {
            Built {
                plan: copied((table.plan_data)(plan.as_ptr()), (table.plan_bytes)(plan.as_ptr())),
                timing_cache: copied(
                    (table.plan_timing_cache)(plan.as_ptr()),
                    (table.plan_timing_cache_bytes)(plan.as_ptr()),
                ),
            }
        };
        // SAFETY: the plan came from `build`, and ends here alone.
        unsafe { (table.plan_destroy)(plan.as_ptr()) };
        Ok(built)
    }

    /// Loads a plan, which is code: callers have proved that it is what they mean.
    pub(in crate::backend) fn engine(&self, plan: &[u8]) -> Result<Engine, DoorError> {
        let handle = made(|engine, error| {
            // SAFETY: the handle is open, and the plan lives during the call.
            unsafe {
                (self.table().engine_create)(self.handle(), plan.as_ptr().cast(), plan.len() as u64, engine, error)
            }
        })?;
        Ok(Engine::new(self.clone(), handle))
    }
}

/// The shapes of one profile, with the names that they point to.
struct Ranges {
    _names: Vec<CString>,
    ranges: Vec<ffi::Range>,
}

impl Ranges {
    fn of(profile: &[InputShapes]) -> Result<Self, DoorError> {
        let names = profile.iter().map(|input| c_text(&input.name)).collect::<Result<Vec<_>, _>>()?;
        let range = |(input, name): (&InputShapes, &CString)| {
            let [min, opt, max] = [&input.min, &input.opt, &input.max].map(|dims| shape_of(dims));
            Ok(ffi::Range { input: name.as_ptr(), min: min?, opt: opt?, max: max? })
        };
        let ranges = profile.iter().zip(&names).map(range).collect::<Result<_, DoorError>>()?;
        Ok(Self { _names: names, ranges })
    }

    /// Valid as long as `self` lives.
    const fn profile(&self) -> ffi::Profile {
        ffi::Profile { ranges: self.ranges.as_ptr(), range_count: self.ranges.len() }
    }
}

/// Hands a step on to the closure behind `user`.
///
/// # Safety
///
/// `user` points to an [`OnProgress`] that lives during the build, and the texts are C strings.
unsafe extern "C" fn tell_progress(
    user: *mut c_void,
    phase: *const c_char,
    _parent: *const c_char,
    step: i32,
    steps: i32,
) -> i32 {
    // SAFETY: as the caller promises.
    let (tell, phase) = unsafe { (&*user.cast::<OnProgress<'_>>(), owned_text(phase)) };
    let told = || tell(&phase.unwrap_or_default(), step, steps);
    // A panic of ours ends the build, and never unwinds into TensorRT.
    i32::from(std::panic::catch_unwind(std::panic::AssertUnwindSafe(told)).unwrap_or(true))
}
