//! Calls of ONNX Runtime that the crate `ort` does not have, or does more after.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::path::Path;
use std::ptr::null;

use libloading::{Library, Symbol};
use ort::AsPointer;
use ort::session::{IoBinding, Session};
use ort::sys::OrtApiBase;

/// [`Session::run_binding`] where every output is bound to a value that the caller has; that function makes a second
/// handle of each, with name, type, shape and allocator.
pub(super) fn run_bound(session: &mut Session, binding: &IoBinding) -> Result<(), ort::Error> {
    // SAFETY: both pointers are valid while they are borrowed, and no other run uses them; null stands for the default
    // options. The binding holds what is bound, and the status that comes back is ours.
    unsafe {
        let status = (ort::api().RunWithBinding)(session.ptr().cast_mut(), null(), binding.ptr());
        ort::Error::result_from_status(status)
    }
}

/// What the ONNX Runtime at `path`, which is loaded, says is its version, such as `1.32.0`.
pub(super) fn version_of(path: &Path) -> Option<String> {
    // SAFETY: nothing of the library runs by another handle of it, since it is loaded. Every ONNX Runtime exports this
    // function with this signature; what it points to, and the text, live as long as the library.
    unsafe {
        let library = Library::new(path).ok()?;
        let base: Symbol<'_, unsafe extern "system" fn() -> *const OrtApiBase> = library.get(b"OrtGetApiBase").ok()?;
        let base = base().as_ref()?;
        Some(CStr::from_ptr((base.GetVersionString)()).to_string_lossy().into_owned())
    }
}
