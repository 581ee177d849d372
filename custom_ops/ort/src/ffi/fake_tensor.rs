//! Tensors of fake runtimes, for tests.

use std::ffi::c_void;

use ort_sys::{ONNXTensorElementDataType, OrtApi, OrtTensorTypeAndShapeInfo, OrtValue};

/// A tensor of a fake runtime, and what it knows about its shape.
pub(super) struct Tensor {
    pub(super) code: i32,
    pub(super) dims: Vec<i64>,
    pub(super) data: *mut c_void,
}

/// Functions of a fake runtime that answer through their last argument and never fail. A body may use each pointer as
/// the table of the runtime says: values, infos and contexts are those that the test handed out.
macro_rules! answers {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {
        $(
            unsafe extern "system" fn $name($($argument: $kind),*) -> ort_sys::OrtStatusPtr {
                // SAFETY: only the code under test calls it, with what the test handed out and places for answers.
                unsafe { $body }
                ort_sys::OrtStatusPtr(std::ptr::null_mut())
            }
        )*
    };
}
pub(super) use answers;

answers! {
    shape(value: *const OrtValue, out: *mut *mut OrtTensorTypeAndShapeInfo) { *out = value.cast_mut().cast(); }
    kind(info: *const OrtTensorTypeAndShapeInfo, out: *mut ONNXTensorElementDataType) {
        *out.cast::<i32>() = (*info.cast::<Tensor>()).code;
    }
    rank(info: *const OrtTensorTypeAndShapeInfo, out: *mut usize) { *out = (*info.cast::<Tensor>()).dims.len(); }
    dims(info: *const OrtTensorTypeAndShapeInfo, out: *mut i64, count: usize) {
        std::slice::from_raw_parts_mut(out, count).copy_from_slice(&(*info.cast::<Tensor>()).dims);
    }
    data(value: *mut OrtValue, out: *mut *mut c_void) { *out = (*value.cast::<Tensor>()).data; }
}

unsafe extern "system" fn release_shape(_: *mut OrtTensorTypeAndShapeInfo) {}

/// The table of a runtime whose values are [`Tensor`]s; nothing else works in it.
pub(super) fn table() -> OrtApi {
    OrtApi {
        GetTensorTypeAndShape: shape,
        GetTensorElementType: kind,
        GetDimensionsCount: rank,
        GetDimensions: dims,
        ReleaseTensorTypeAndShapeInfo: release_shape,
        GetTensorMutableData: data,
        ..ort_sys::stub::api()
    }
}
