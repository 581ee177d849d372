//! The function table of a runtime, statuses, and what a runtime tells about a node.
//!
//! Fields of `OrtApi` are read through a raw pointer, never through a reference to the whole table: the table of an
//! old runtime is shorter than the struct of a build that enables a newer API.

use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;
use std::ptr::{NonNull, null, null_mut};

use moa_schema::{AttributeSource, NodeTypes, Parameter};
use ort_sys::{OrtApi, OrtApiBase, OrtErrorCode, OrtKernelInfo, OrtStatusPtr, OrtValue};

use super::call::read_constant;
use super::shape::{Shape, checked_shape};
use crate::failure::{Failure, Fault};
use crate::prepare::Constant;

/// Version of the C API that this library asks for, whatever the build enables. ONNX Runtime 1.17 has all that is
/// called here, but its type inference refuses the decoders of translation models.
pub(crate) const API_VERSION: u32 = 18;

/// Oldest C API; its first entry makes a status.
const OLDEST_API_VERSION: u32 = 1;

/// The function table of one runtime; it lives as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Api(NonNull<OrtApi>);

// SAFETY: the table is constant, and its functions may be called from any thread.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// Calls a function of the table that returns a status, and makes a [`Status`] of it. Must stand in an `unsafe` block.
macro_rules! ort {
    ($api:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::ffi::api::Status::new($api, ((*$api.table().as_ptr()).$function)($($argument),*))
    };
}
pub(crate) use ort;

/// Calls a function of the table that returns something else. Must stand in an `unsafe` block.
macro_rules! ort_plain {
    ($api:expr, $function:ident($($argument:expr),* $(,)?)) => {
        ((*$api.table().as_ptr()).$function)($($argument),*)
    };
}
pub(crate) use ort_plain;

/// What a call of the runtime returned; the value owns it and releases it.
#[must_use]
pub(crate) struct Status {
    api: Api,
    raw: OrtStatusPtr,
}

impl Status {
    /// # Safety
    ///
    /// `raw` must be null or a status of the runtime of `api` that nobody else reads or releases.
    pub(crate) unsafe fn new(api: Api, raw: OrtStatusPtr) -> Self {
        Self { api, raw }
    }

    /// Success is the null status.
    pub(crate) fn check(self) -> Result<(), Failure> {
        if self.raw.0.is_null() {
            return Ok(());
        }
        // SAFETY: the status is ours and not null; its text lives until it is released.
        Err(Failure::runtime(unsafe { text(ort_plain!(self.api, GetErrorMessage(self.raw.0))) }))
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        if !self.raw.0.is_null() {
            // SAFETY: the status is ours and not used again.
            unsafe { ort_plain!(self.api, ReleaseStatus(self.raw.0)) };
        }
    }
}

/// What a runtime can do for us.
pub(crate) enum Support {
    /// Everything, but for int4 where the runtime does not know that type.
    Full { api: Api, int4: bool },
    /// Too old; `Api` may only make statuses.
    TooOld(Api, Failure),
}

impl Api {
    /// Asks a runtime for our version of its table; `None` where it has no table at all.
    ///
    /// # Safety
    ///
    /// `base` must be null or the `OrtApiBase` of a runtime.
    pub(crate) unsafe fn from_base(base: *const OrtApiBase) -> Option<Support> {
        // SAFETY: the caller gives null or a valid base.
        let base = unsafe { base.as_ref() }?;
        // SAFETY: `GetApi` accepts every number.
        let table = |version| NonNull::new(unsafe { (base.GetApi)(version) }.cast_mut()).map(Self);
        // SAFETY: the function returns null or a text of static lifetime.
        let version = unsafe { text((base.GetVersionString)()) };
        if let Some(api) = table(API_VERSION) {
            return Some(Support::Full { api, int4: knows_int4(&version) });
        }
        let failure = Failure::runtime(format!(
            "the ai.moa operators need ONNX Runtime 1.{API_VERSION} or newer, this is {version}"
        ));
        table(OLDEST_API_VERSION).map(|api| Support::TooOld(api, failure))
    }

    /// The table that a callback gets; `None` for null.
    ///
    /// # Safety
    ///
    /// `table` must be null or a table of our version or a newer one.
    pub(crate) unsafe fn from_table(table: *const OrtApi) -> Option<Self> {
        NonNull::new(table.cast_mut()).map(Self)
    }

    pub(crate) fn table(self) -> NonNull<OrtApi> {
        self.0
    }

    /// Turns a result into a status; success is the null status.
    pub(crate) fn status(self, result: Result<(), Failure>) -> OrtStatusPtr {
        let Err(failure) = result else { return OrtStatusPtr(null_mut()) };
        let code = match failure.fault {
            Fault::Argument => OrtErrorCode::ORT_INVALID_ARGUMENT,
            Fault::Runtime => OrtErrorCode::ORT_FAIL,
            Fault::Bug => OrtErrorCode::ORT_RUNTIME_EXCEPTION,
        };
        let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the text ends with a zero; the runtime copies it.
        unsafe { ort_plain!(self, CreateStatus(code, text.as_ptr())) }
    }
}

/// A copy of a C string.
///
/// # Safety
///
/// `pointer` must be null or point to a text that ends with a zero.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::from("(no text)");
    }
    // SAFETY: not null, and a text by the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Whether a runtime of version `version` has the type int4: 1.18, which has not, refuses any operator that names it.
fn knows_int4(version: &str) -> bool {
    !version.starts_with("1.18.")
}

/// What the runtime knows about a node when it creates its kernel.
pub(crate) struct KernelInfo<'a> {
    api: Api,
    raw: *const OrtKernelInfo,
    lifetime: PhantomData<&'a OrtKernelInfo>,
}

impl KernelInfo<'_> {
    /// # Safety
    ///
    /// `raw` must be the info of a kernel that is being created, valid for the lifetime.
    pub(crate) unsafe fn new(api: Api, raw: *const OrtKernelInfo) -> Self {
        Self { api, raw, lifetime: PhantomData }
    }

    /// Name of the node, empty where it has none.
    pub(crate) fn node_name(&self) -> String {
        // SAFETY: `raw` is valid; the buffer is null or `size` bytes long.
        self.string_of(|out, size| unsafe { ort!(self.api, KernelInfo_GetNodeName(self.raw, out, size)) })
            .unwrap_or_default()
    }

    /// An input that never changes; `None` where it may change, is absent or has another type.
    pub(crate) fn constant(&self, index: usize, parameter: &Parameter, types: NodeTypes) -> Option<Constant<'_>> {
        let value = self.constant_value(index)?;
        // SAFETY: `value` is a constant tensor, which lives longer than the info and is never written.
        unsafe { read_constant(self.api, value, parameter, types) }.ok()?
    }

    /// The shape of an input that never changes; `None` as for [`Self::constant`].
    pub(crate) fn constant_shape(&self, index: usize, parameter: &Parameter, types: NodeTypes) -> Option<Shape> {
        let value = self.constant_value(index)?;
        // SAFETY: `value` is a tensor.
        unsafe { checked_shape(self.api, value, parameter, types) }.ok()
    }

    /// The tensor of a constant input.
    fn constant_value(&self, index: usize) -> Option<*const OrtValue> {
        let (mut count, mut is_constant, mut value) = (0, 0, null());
        // SAFETY: `raw` is valid.
        unsafe { ort!(self.api, KernelInfo_GetInputCount(self.raw, &mut count)) }.check().ok()?;
        if index >= count {
            return None;
        }
        let (flag, out) = (&mut is_constant, &mut value);
        // SAFETY: `raw` is valid and has an input `index`.
        let status = unsafe { ort!(self.api, KernelInfoGetConstantInput_tensor(self.raw, index, flag, out)) };
        status.check().ok()?;
        (is_constant != 0 && !value.is_null()).then_some(value)
    }

    /// Runs one of the functions that first tell the size of a text, then fill a buffer.
    fn string_of(&self, call: impl Fn(*mut c_char, *mut usize) -> Status) -> Option<String> {
        let mut size = 0;
        call(null_mut(), &mut size).check().ok()?;
        let mut buffer = vec![0u8; size];
        call(buffer.as_mut_ptr().cast(), &mut size).check().ok()?;
        let text = CStr::from_bytes_until_nul(&buffer).ok()?;
        Some(text.to_string_lossy().into_owned())
    }
}

impl AttributeSource for KernelInfo<'_> {
    fn int(&self, name: &str) -> Option<i64> {
        let (name, mut value) = (CString::new(name).ok()?, 0);
        // SAFETY: `raw` is valid, the name ends with a zero, `value` is an i64.
        let status = unsafe { ort!(self.api, KernelInfoGetAttribute_int64(self.raw, name.as_ptr(), &mut value)) };
        status.check().ok().map(|()| value)
    }

    fn float(&self, name: &str) -> Option<f32> {
        let (name, mut value) = (CString::new(name).ok()?, 0.0);
        // SAFETY: `raw` is valid, the name ends with a zero, `value` is an f32.
        let status = unsafe { ort!(self.api, KernelInfoGetAttribute_float(self.raw, name.as_ptr(), &mut value)) };
        status.check().ok().map(|()| value)
    }

    fn string(&self, name: &str) -> Option<String> {
        let name = CString::new(name).ok()?;
        // SAFETY: `raw` is valid, the name ends with a zero; the buffer is null or `size` bytes long.
        self.string_of(|out, size| unsafe {
            ort!(self.api, KernelInfoGetAttribute_string(self.raw, name.as_ptr(), out, size))
        })
    }

    fn has(&self, name: &str) -> bool {
        let (Ok(name), mut size) = (CString::new(name), 0) else { return false };
        let array = |out| {
            // SAFETY: `raw` is valid, the name ends with a zero; without a buffer the runtime tells the size alone.
            unsafe { ort!(self.api, KernelInfoGetAttributeArray_int64(self.raw, name.as_ptr(), null_mut(), out)) }
        };
        // The runtime fails where there is no such attribute, and takes one of another type for an empty array.
        array(&mut size).check().is_ok()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, PoisonError};

    use ort_sys::OrtStatus;

    use super::*;

    #[test]
    fn runtimes_from_1_19_on_know_int4() {
        let known = ["1.18.0", "1.18.1", "1.19.0", "1.32.0", "2.0.0", ""].map(knows_int4);
        assert_eq!(known, [false, false, true, true, true, true]);
    }

    /// A table that lives as long as the process, and is found there, so that it is not taken for a leak.
    pub(crate) fn kept(table: OrtApi) -> &'static OrtApi {
        static TABLES: Mutex<Vec<&OrtApi>> = Mutex::new(Vec::new());
        let table = Box::leak(Box::new(table));
        TABLES.lock().unwrap_or_else(PoisonError::into_inner).push(table);
        table
    }

    /// A runtime that answers every call it does not know with an error.
    pub(crate) fn fake(table: OrtApi) -> Api {
        Api(NonNull::from(kept(table)))
    }

    #[test]
    fn failures_travel_through_a_status_and_back() {
        let api = fake(ort_sys::stub::api());
        // SAFETY: a status that was made here.
        let back = |result| unsafe { Status::new(api, api.status(result)) }.check();
        assert_eq!(back(Ok(())), Ok(()));
        for fault in [Fault::Argument, Fault::Runtime, Fault::Bug] {
            let failure = Failure { fault, text: String::from("a\0b") };
            assert_eq!(back(Err(failure)), Err(Failure::runtime("a b")));
        }
    }

    static RELEASED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "system" fn refuse(_: *const OrtKernelInfo, _: *mut usize) -> OrtStatusPtr {
        OrtStatusPtr(std::ptr::dangling_mut())
    }

    unsafe extern "system" fn message(_: *const OrtStatus) -> *const c_char {
        c"refused".as_ptr()
    }

    unsafe extern "system" fn release(_: *mut OrtStatus) {
        RELEASED.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_status_is_released_once_whether_it_is_checked_or_not() {
        let api = fake(OrtApi {
            KernelInfo_GetInputCount: refuse,
            GetErrorMessage: message,
            ReleaseStatus: release,
            ..ort_sys::stub::api()
        });
        // SAFETY: the fake runtime does not look at the info.
        let status = || unsafe { ort!(api, KernelInfo_GetInputCount(null(), null_mut())) };
        assert_eq!(status().check(), Err(Failure::runtime("refused")));
        assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
        drop(status());
        assert_eq!(RELEASED.load(Ordering::Relaxed), 2);
    }
}
