//! The kernels of one device context.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::{Arc, Mutex, PoisonError};

use moa_cuda::archive::Archive;
use moa_cuda::{Device, Element, Options, SOURCE_HASH};
use moa_schema::{MULTIPROCESSORS_VARIABLE, WGMMA_VARIABLE, is_wgmma_off, multiprocessors};

use crate::context::Entered;
use crate::error::{DriverError, Error};
use crate::ffi::{Context, DeviceAttribute, Driver, Function, FunctionAttribute, Module};
use crate::node::Node;
use crate::plan::BoundPlan;

/// Bytes of dynamic shared memory that every kernel may use without asking.
const SHARED_BYTES_OF_ALL: u32 = 48 * 1024;

/// Set to `0`, it keeps each kernel from starting before the one in front of it has ended
/// (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`), for comparison. Read when a kernel set is made.
pub const OVERLAP_VARIABLE: &str = "MOA_CUDA_OVERLAP";

/// First version of the driver's API whose graphs hold such a start: CUDA 12.3. With an older one no kernels overlap,
/// since any stream may be captured.
const OVERLAP_VERSION: u32 = 12_030;

/// First version of the driver's API that knows the archive's PTX: that of the compiler, CUDA 12.9 and PTX 8.8. A
/// driver runs machine code of newer compilers of its major version, and no PTX of theirs.
const PTX_VERSION: u32 = 12_090;

/// What a device is, as its driver states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFacts {
    /// What plans depend on.
    pub device: Device,
    /// Bytes of the last-level cache.
    pub l2_bytes: u32,
    /// Compute capability of the device itself, which kernels of an older architecture may be run on.
    pub capability: (u32, u32),
}

/// The loaded kernels of one element type.
struct Loaded {
    module: Module,
    functions: HashMap<String, Function>,
    /// Whether the warpgroup products of compute capability 9.0 are among them.
    has_wgmma: bool,
}

/// The kernels of one context of one device. Any thread may use it; it must be dropped when no work that it enqueued
/// is pending and no graph that holds such work will be launched again.
pub struct KernelSet {
    driver: Arc<Driver>,
    context: Context,
    /// The device whose primary context was retained.
    retained: Option<i32>,
    facts: DeviceFacts,
    archive: Cow<'static, [u8]>,
    loaded: Mutex<[Option<Arc<Loaded>>; Element::ALL.len()]>,
    status: u64,
    overlaps: bool,
    wgmma: bool,
}

impl KernelSet {
    /// Kernels for the primary context of device `ordinal`, the context that the CUDA runtime works in.
    ///
    /// `capability` runs the kernels of an older architecture, by their PTX.
    ///
    /// # Errors
    ///
    /// The driver refuses the device.
    pub fn on_device(
        driver: Arc<Driver>,
        archive: Cow<'static, [u8]>,
        ordinal: i32,
        capability: Option<(u32, u32)>,
    ) -> Result<Self, Error> {
        let (context, device) = driver.retain_primary(ordinal)?;
        let made = Self::make(Arc::clone(&driver), archive, context, capability);
        match made {
            Ok(mut kernels) => {
                kernels.retained = Some(device);
                Ok(kernels)
            }
            Err(error) => {
                let _ = driver.release_primary(device);
                Err(error)
            }
        }
    }

    /// Kernels for the context that is current on the calling thread; else as [`Self::on_device`].
    ///
    /// # Errors
    ///
    /// There is no current context, or the driver refuses it.
    pub fn in_current_context(
        driver: Arc<Driver>,
        archive: Cow<'static, [u8]>,
        capability: Option<(u32, u32)>,
    ) -> Result<Self, Error> {
        let context = driver.current_context()?.ok_or(Error::NoContext)?;
        Self::make(driver, archive, context, capability)
    }

    fn make(
        driver: Arc<Driver>,
        archive: Cow<'static, [u8]>,
        context: Context,
        capability: Option<(u32, u32)>,
    ) -> Result<Self, Error> {
        let found = Archive::parse(&archive)?.manifest().source_hash.clone();
        if found != SOURCE_HASH {
            return Err(Error::OtherSources { found });
        }
        let version = driver.version()?;
        let entered = Entered::new(&driver, context)?;
        let facts = facts(&driver, capability)?;
        let status = driver.allocate_zero_word()?;
        drop(entered);
        let asked = std::env::var_os(OVERLAP_VARIABLE).is_none_or(|value| value != "0");
        let overlaps = asked && version >= OVERLAP_VERSION;
        let wgmma = !is_wgmma_off(std::env::var_os(WGMMA_VARIABLE).as_deref());
        Ok(Self { driver, context, retained: None, facts, archive, loaded: Mutex::default(), status, overlaps, wgmma })
    }

    /// What the device is.
    pub const fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The driver behind these kernels.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(crate) const fn context(&self) -> Context {
        self.context
    }

    pub(crate) const fn status_address(&self) -> u64 {
        self.status
    }

    pub(crate) const fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// Loads the kernels of `element`, unless they are loaded already.
    ///
    /// # Errors
    ///
    /// The archive has none for this device, or the driver refuses them.
    pub fn load(&self, element: Element) -> Result<(), Error> {
        self.loaded(element).map(drop)
    }

    fn loaded(&self, element: Element) -> Result<Arc<Loaded>, Error> {
        let mut slots = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut slots[element as usize];
        if let Some(loaded) = slot {
            return Ok(Arc::clone(loaded));
        }
        let loaded = Arc::new(self.load_module(element)?);
        *slot = Some(Arc::clone(&loaded));
        Ok(loaded)
    }

    fn load_module(&self, element: Element) -> Result<Loaded, Error> {
        let archive = Archive::parse(&self.archive)?;
        let (name, wanted) = (element.module(), self.facts.device.compute_capability);
        let older = wanted != self.facts.capability;
        let image = if older { archive.select_ptx(name, wanted) } else { archive.select(name, wanted) };
        let image = image.ok_or(Error::NoImage { module: name, major: wanted.0, minor: wanted.1 })?;
        let _entered = Entered::new(&self.driver, self.context)?;
        let loaded = self.driver.load_module(archive.bytes(image));
        let module = loaded.map_err(|error| self.explained(error, image.is_ptx(), name))?;
        let has_wgmma = image.kernels.iter().any(|kernel| kernel.name.contains("_wgmma_"));
        let mut loaded = Loaded { module, functions: HashMap::new(), has_wgmma };
        for kernel in &image.kernels {
            match self.prepare(module, &kernel.name) {
                Ok(function) => drop(loaded.functions.insert(kernel.name.clone(), function)),
                Err(error) => {
                    let _ = self.driver.unload_module(module);
                    return Err(error);
                }
            }
        }
        Ok(loaded)
    }

    /// What the driver says about an image, with the driver that it needs where that is why.
    fn explained(&self, source: DriverError, is_ptx: bool, module: &'static str) -> Error {
        match self.driver.version() {
            Ok(version) if is_ptx && version < PTX_VERSION => {
                Error::OldDriverForPtx { source, module, major: version / 1000, minor: version % 1000 / 10 }
            }
            _ => source.into(),
        }
    }

    /// Resolves a kernel, which makes the driver load its code now, and allows it all shared memory of the device.
    ///
    /// All ask for as much of a multiprocessor's cache as shared memory: where two kernels wanted different shares, the
    /// second could not begin beside the first.
    fn prepare(&self, module: Module, name: &str) -> Result<Function, Error> {
        let function = self.driver.function(module, name)?;
        self.driver.function_attribute(function, FunctionAttribute::Registers)?;
        let fixed = self.driver.function_attribute(function, FunctionAttribute::StaticSharedBytes)?;
        let most = self.facts.device.shared_bytes_per_block.saturating_sub(fixed);
        if most > SHARED_BYTES_OF_ALL {
            self.driver.set_function_attribute(function, FunctionAttribute::MaxDynamicSharedBytes, most)?;
        }
        self.driver.set_function_attribute(function, FunctionAttribute::PreferredSharedCarveout, 100)?;
        Ok(function)
    }

    /// Proves the shapes of a node, plans its launches and binds them to functions.
    ///
    /// `inputs[i]` is the shape of input `i`, `None` where it is absent; `wanted[i]` says whether somebody asks for
    /// output `i`. Loads the kernels of `element` where [`Self::load`] has not, and those of f32 for a router with an
    /// input of its own.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit, that have no plan, or a plan that names a kernel which the archive lacks;
    /// [`MULTIPROCESSORS_VARIABLE`] is no number from 1 on.
    pub fn plan(
        self: &Arc<Self>,
        node: &Node,
        element: Element,
        inputs: &[Option<&[usize]>],
        wanted: &[bool],
        options: Options,
    ) -> Result<BoundPlan, Error> {
        let loaded = self.loaded(element)?;
        let options = Options { wgmma: (options.wgmma || self.wgmma) && loaded.has_wgmma, ..options };
        let plan = node.plan(inputs, wanted, element, &planned_for(self.facts.device)?, options)?;
        let functions = plan.launches.iter().map(|launch| {
            let module = launch.element.module();
            let lacks = || Error::NoKernel { module, kernel: launch.kernel.clone() };
            self.loaded(launch.element)?.functions.get(&launch.kernel).copied().ok_or_else(lacks)
        });
        let functions = functions.collect::<Result<_, _>>()?;
        BoundPlan::new(Arc::clone(self), node, element, plan, functions, inputs, wanted)
    }

    /// The bits of [`moa_cuda::Fault`] that kernels have set since the set was made. Waits for the device's legacy
    /// stream; it is for tests and for looking into a result that holds NaN.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn faults(&self) -> Result<u32, Error> {
        let _entered = Entered::new(&self.driver, self.context)?;
        Ok(self.driver.read_word(self.status)?)
    }
}

impl Drop for KernelSet {
    /// What the driver refuses here it refuses because it is shutting down.
    fn drop(&mut self) {
        if let Ok(_entered) = Entered::new(&self.driver, self.context) {
            let slots = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
            for loaded in slots.iter().flatten() {
                let _ = self.driver.unload_module(loaded.module);
            }
            let _ = self.driver.free(self.status);
        }
        if let Some(device) = self.retained {
            let _ = self.driver.release_primary(device);
        }
    }
}

/// The device that plans are made for.
fn planned_for(device: Device) -> Result<Device, Error> {
    with_multiprocessors(device, std::env::var_os(MULTIPROCESSORS_VARIABLE).as_deref())
}

fn with_multiprocessors(device: Device, value: Option<&OsStr>) -> Result<Device, Error> {
    let asked = multiprocessors(value).map_err(Error::Argument)?;
    Ok(Device { multiprocessors: asked.unwrap_or(device.multiprocessors), ..device })
}

/// Largest shared memory of one block on devices of an older capability, for plans that are to run there too.
const fn shared_bytes_of((major, minor): (u32, u32)) -> u32 {
    match (major, minor) {
        (7, 0..5) => 96 << 10,
        (7, _) => 64 << 10,
        (8, 6 | 9) => 99 << 10,
        (8, _) => 163 << 10,
        _ => u32::MAX,
    }
}

/// Facts of the device of the current context; `capability` replaces its own where that is older, with its memory.
fn facts(driver: &Driver, capability: Option<(u32, u32)>) -> Result<DeviceFacts, Error> {
    let device = driver.current_device()?;
    let ask = |attribute| driver.device_attribute(device, attribute);
    let own = (ask(DeviceAttribute::Major)?, ask(DeviceAttribute::Minor)?);
    let wanted = capability.unwrap_or(own);
    if wanted > own {
        let ((major, minor), (found_major, found_minor)) = (wanted, own);
        return Err(Error::Argument(format!(
            "kernels of compute capability {major}.{minor} cannot run on a device of {found_major}.{found_minor}"
        )));
    }
    let most = if wanted < own { shared_bytes_of(wanted) } else { u32::MAX };
    Ok(DeviceFacts {
        device: Device {
            compute_capability: wanted,
            multiprocessors: ask(DeviceAttribute::Multiprocessors)?,
            shared_bytes_per_block: ask(DeviceAttribute::SharedBytesPerBlock)?.min(most),
        },
        l2_bytes: ask(DeviceAttribute::L2Bytes)?,
        capability: own,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_ptx_is_that_of_the_compiler() {
        let requirements = include_str!("../../../../tools/requirements-cuda.txt");
        let (major, minor) = (PTX_VERSION / 1000, PTX_VERSION % 1000 / 10);
        assert!(requirements.contains(&format!("nvidia-cuda-nvrtc-cu{major}=={major}.{minor}.")), "{requirements}");
    }

    #[test]
    fn a_number_of_multiprocessors_is_one_from_1_on() {
        let device = Device { compute_capability: (9, 0), multiprocessors: 132, shared_bytes_per_block: 232_448 };
        let planned =
            |text: Option<&str>| with_multiprocessors(device, text.map(OsStr::new)).map_err(|error| error.to_string());
        assert_eq!(planned(Some("7")), Ok(Device { multiprocessors: 7, ..device }));
        assert_eq!((planned(None), planned(Some(""))), (Ok(device), Ok(device)));
        let expected = "MOA_CUDA_MULTIPROCESSORS must be a number from 1 on, found 0";
        assert_eq!(planned(Some("0")), Err(expected.to_owned()));
    }
}
