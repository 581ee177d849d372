//! A call of ONNX Runtime without what the crate `ort` does after it.
#![allow(unsafe_code)]

use std::ptr::null;

use ort::AsPointer;
use ort::session::{IoBinding, Session};

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
