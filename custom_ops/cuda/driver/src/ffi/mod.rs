//! The door to the CUDA driver: the only module of this crate with `unsafe` code.
//!
//! `table` names the functions of `libcuda.so.1` and loads them at run time, `layout` holds the two structures that
//! they read. Handles leave as opaque numbers; what leaves the module is safe to call with any of them, because the
//! driver itself refuses a handle it never gave.
#![allow(unsafe_code)]

mod layout;
mod table;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::{Arc, Mutex, PoisonError};

use layout::{LaunchAttribute, LaunchConfig};
use table::Table;

use crate::error::{DriverError, Error};
use crate::launch::{Launch, PARAMETER_BYTES};

/// `CUcontext`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context(usize);

/// `CUstream`; 0 is the legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(pub usize);

/// `CUmodule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Module(usize);

/// `CUfunction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Function(usize);

/// What [`Driver::device_attribute`] can be asked for; the numbers of `CUdevice_attribute`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DeviceAttribute {
    Multiprocessors = 16,
    L2Bytes = 38,
    Major = 75,
    Minor = 76,
    SharedBytesPerBlock = 97,
}

/// What [`Driver::function_attribute`] can be asked for; the numbers of `CUfunction_attribute`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FunctionAttribute {
    StaticSharedBytes = 1,
    Registers = 4,
    MaxDynamicSharedBytes = 8,
    PreferredSharedCarveout = 9,
}

/// The driver library of this process.
pub struct Driver {
    table: Table,
}

/// Room for what the driver says about PTX that it cannot compile.
const JIT_LOG_BYTES: usize = 2048;
/// `CU_JIT_ERROR_LOG_BUFFER`.
const JIT_ERROR_LOG_BUFFER: c_int = 5;
/// `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;

/// The error with the first line of a log that ends with a zero.
fn with_log(mut error: DriverError, log: &[u8]) -> DriverError {
    let text = CStr::from_bytes_until_nul(log).map(CStr::to_string_lossy).unwrap_or_default();
    if let Some(line) = text.lines().find(|line| !line.trim().is_empty()) {
        error.text = format!("{}: {}", error.text, line.trim());
    }
    error
}

impl Driver {
    /// The driver of this system, `libcuda.so.1`, loaded at the first request.
    ///
    /// # Errors
    ///
    /// As [`Self::open`]. A failure is not kept: the next request tries again.
    pub fn system() -> Result<Arc<Self>, Error> {
        static SYSTEM: Mutex<Option<Arc<Driver>>> = Mutex::new(None);
        let mut slot = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = &*slot {
            return Ok(Arc::clone(driver));
        }
        let driver = Arc::new(Self::open(Path::new("libcuda.so.1"))?);
        *slot = Some(Arc::clone(&driver));
        Ok(driver)
    }

    /// Loads the library at `path` and initialises it. It stays loaded for the rest of the process, as the kernels'
    /// code and the threads of the driver do.
    ///
    /// # Errors
    ///
    /// The library is not there, lacks a function (the driver is too old), or finds no device.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let table = Table::load(path)?;
        let driver = Self { table };
        // SAFETY: `cuInit` takes no pointer; 0 is the only value it accepts.
        driver.check("cuInit", unsafe { (driver.table.init)(0) })?;
        Ok(driver)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        Err(DriverError {
            call,
            code,
            name: self.describe(self.table.error_name, code),
            text: self.describe(self.table.error_string, code),
        })
    }

    fn describe(&self, ask: table::Describe, code: c_int) -> String {
        let mut text: *const c_char = null();
        // SAFETY: the function writes a static text, or null for a code that it does not know.
        let known = unsafe { ask(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: not null, and a text of static lifetime.
        if known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { String::from("unknown") }
    }

    /// Version of the CUDA API that the driver serves: 1000 · major + 10 · minor.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn version(&self) -> Result<u32, DriverError> {
        let mut version = 0;
        // SAFETY: the driver writes one integer.
        self.check("cuDriverGetVersion", unsafe { (self.table.version)(&raw mut version) })?;
        Ok(version.unsigned_abs())
    }

    /// The context of the calling thread, if it has one.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn current_context(&self) -> Result<Option<Context>, DriverError> {
        let mut raw = null_mut();
        // SAFETY: the driver writes one handle, null where the thread has no context.
        self.check("cuCtxGetCurrent", unsafe { (self.table.current_context)(&raw mut raw) })?;
        Ok((!raw.is_null()).then(|| Context(raw.addr())))
    }

    /// Retains the primary context of a device, the one that the CUDA runtime works in.
    pub(crate) fn retain_primary(&self, ordinal: i32) -> Result<(Context, i32), DriverError> {
        let (mut device, mut raw) = (0, null_mut());
        // SAFETY: the driver writes a device and then a handle.
        unsafe {
            self.check("cuDeviceGet", (self.table.device)(&raw mut device, ordinal))?;
            self.check("cuDevicePrimaryCtxRetain", (self.table.retain_primary)(&raw mut raw, device))?;
        }
        Ok((Context(raw.addr()), device))
    }

    pub(crate) fn release_primary(&self, device: i32) -> Result<(), DriverError> {
        // SAFETY: takes no pointer.
        self.check("cuDevicePrimaryCtxRelease", unsafe { (self.table.release_primary)(device) })
    }

    pub(crate) fn push_context(&self, context: Context) -> Result<(), DriverError> {
        // SAFETY: the driver checks the handle, and does not read memory of ours.
        self.check("cuCtxPushCurrent", unsafe { (self.table.push_context)(without_provenance_mut(context.0)) })
    }

    pub(crate) fn pop_context(&self) -> Result<(), DriverError> {
        let mut old = null_mut();
        // SAFETY: the driver writes one handle.
        self.check("cuCtxPopCurrent", unsafe { (self.table.pop_context)(&raw mut old) })
    }

    /// Device of the current context.
    pub(crate) fn current_device(&self) -> Result<i32, DriverError> {
        let mut device = 0;
        // SAFETY: the driver writes one integer.
        self.check("cuCtxGetDevice", unsafe { (self.table.current_device)(&raw mut device) })?;
        Ok(device)
    }

    pub(crate) fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        let code = unsafe { (self.table.device_attribute)(&raw mut value, attribute as c_int, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value.unsigned_abs())
    }

    /// Loads machine code, or PTX, into the current context.
    pub(crate) fn load_module(&self, image: &[u8]) -> Result<Module, DriverError> {
        let mut raw = null_mut();
        // The driver reads PTX up to a zero.
        let terminated = [image, &[0]].concat();
        let mut log = [0u8; JIT_LOG_BYTES];
        let mut options = [JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), without_provenance_mut(JIT_LOG_BYTES)];
        // SAFETY: the image is whole and ends with a zero; options and values are as many as said, and the log holds as
        // many bytes as its option says.
        let code = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            (self.table.load_module)(&raw mut raw, terminated.as_ptr().cast(), 2, options, values)
        };
        self.check("cuModuleLoadDataEx", code).map_err(|error| with_log(error, &log))?;
        Ok(Module(raw.addr()))
    }

    pub(crate) fn unload_module(&self, module: Module) -> Result<(), DriverError> {
        // SAFETY: the driver checks the handle.
        self.check("cuModuleUnload", unsafe { (self.table.unload_module)(without_provenance_mut(module.0)) })
    }

    pub(crate) fn function(&self, module: Module, name: &str) -> Result<Function, DriverError> {
        let (mut raw, text) = (null_mut(), CString::new(name).unwrap_or_default());
        // SAFETY: the name ends with a zero; the driver checks the module.
        let code = unsafe { (self.table.function)(&raw mut raw, without_provenance_mut(module.0), text.as_ptr()) };
        self.check("cuModuleGetFunction", code)?;
        Ok(Function(raw.addr()))
    }

    pub(crate) fn function_attribute(
        &self,
        function: Function,
        attribute: FunctionAttribute,
    ) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        let code = unsafe {
            (self.table.function_attribute)(&raw mut value, attribute as c_int, without_provenance_mut(function.0))
        };
        self.check("cuFuncGetAttribute", code)?;
        Ok(value.unsigned_abs())
    }

    /// Sets an attribute of a function.
    pub(crate) fn set_function_attribute(
        &self,
        function: Function,
        attribute: FunctionAttribute,
        value: u32,
    ) -> Result<(), DriverError> {
        // SAFETY: takes no pointer to memory of ours.
        let code = unsafe {
            (self.table.set_function_attribute)(
                without_provenance_mut(function.0),
                attribute as c_int,
                value.cast_signed(),
            )
        };
        self.check("cuFuncSetAttribute", code)
    }

    /// Whether work on `stream` is being captured into a graph.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool, DriverError> {
        let mut status = 0;
        // SAFETY: the driver writes one integer.
        let code = unsafe { (self.table.is_capturing)(without_provenance_mut(stream.0), &raw mut status) };
        self.check("cuStreamIsCapturing", code)?;
        Ok(status != 0)
    }

    /// Allocates one word of device memory in the current context, which is 0 for every stream from now on.
    pub(crate) fn allocate_zero_word(&self) -> Result<u64, DriverError> {
        let (mut address, bytes) = (0, size_of::<u32>());
        // SAFETY: the driver writes one address.
        self.check("cuMemAlloc", unsafe { (self.table.allocate)(&raw mut address, bytes) })?;
        // SAFETY: the memory was allocated above and is `bytes` long.
        let set = self.check("cuMemsetD8", unsafe { (self.table.set_bytes)(address, 0, bytes) });
        // Non-blocking streams do not wait for the legacy stream, where memory is set; the copy does, and so the
        // caller.
        if let Err(error) = set.and_then(|()| self.read_word(address)) {
            let _ = self.free(address);
            return Err(error);
        }
        Ok(address)
    }

    /// Gives memory of [`Self::allocate_zero_word`] back.
    pub(crate) fn free(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: the driver refuses an address that it did not allocate.
        self.check("cuMemFree", unsafe { (self.table.free)(address) })
    }

    /// Reads one word of device memory, after all work of the legacy stream.
    pub(crate) fn read_word(&self, address: u64) -> Result<u32, DriverError> {
        let mut word = 0u32;
        // SAFETY: the driver writes four bytes, and refuses an address that is not the device's.
        let code = unsafe { (self.table.copy_to_host)((&raw mut word).cast(), address, size_of::<u32>()) };
        self.check("cuMemcpyDtoH", code).map(|()| word)
    }

    /// Enqueues one kernel. The driver copies the parameters before it returns.
    pub(crate) fn launch(&self, stream: Stream, function: Function, launch: &Launch<'_>) -> Result<(), DriverError> {
        let mut attribute = LaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION;
        let stream = without_provenance_mut(stream.0);
        let config = LaunchConfig::new(launch, stream, &raw mut attribute, u32::from(launch.overlap));
        let mut buffer = layout::ParameterBuffer([0; PARAMETER_BYTES]);
        let length = launch.parameters.len().min(PARAMETER_BYTES);
        buffer.0[..length].copy_from_slice(&launch.parameters[..length]);
        let mut pointers: [*mut c_void; 1] = [(&raw mut buffer).cast()];
        // SAFETY: configuration, attribute and pointers live through the call. Every kernel has one parameter, and the
        // buffer behind its pointer is as large as the parameters of a kernel can be: the driver reads memory of ours
        // whatever size the kernel declares.
        let code = unsafe {
            (self.table.launch)(
                &raw const config,
                without_provenance_mut(function.0),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        self.check("cuLaunchKernelEx", code)
    }
}
