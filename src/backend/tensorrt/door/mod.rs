//! The door to `libmoa_tensorrt`: the only module of this backend with `unsafe` code.
//!
//! `ffi` names the functions of `moa_tensorrt_engine.h` and loads them at run time. Handles stay inside: each is owned
//! by one value here, which keeps the table of functions alive and ends the handle when it is dropped.
#![allow(unsafe_code)]

mod engine;
mod ffi;
mod library;

use std::{
    ffi::{CStr, CString, c_char, c_void},
    mem::size_of,
    path::Path,
    ptr::{NonNull, null_mut},
};

use ffi::Opaque;

pub(in crate::backend) use engine::{Context, Engine, EngineTensor};
pub(in crate::backend) use library::OnProgress;
pub(in crate::backend) use library::{BuildRequest, CudaDevice, Library, TensorRt};

/// Class of a [`DoorError`], as the header numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Code {
    Argument,
    Missing,
    Incompatible,
    Model,
    Profile,
    Plan,
    Unsupported,
    Cancelled,
    Memory,
    Runtime,
    Driver,
    Internal,
}

impl Code {
    const fn of(number: i32) -> Self {
        match number {
            1 => Self::Argument,
            2 => Self::Missing,
            3 => Self::Incompatible,
            4 => Self::Model,
            5 => Self::Profile,
            6 => Self::Plan,
            7 => Self::Unsupported,
            8 => Self::Cancelled,
            9 => Self::Memory,
            10 => Self::Runtime,
            11 => Self::Driver,
            _ => Self::Internal,
        }
    }
}

/// What the library refused, and its words: the first line says it all, further ones are TensorRT's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::backend) struct DoorError {
    pub(in crate::backend) code: Code,
    pub(in crate::backend) text: String,
}

fn internal(text: String) -> DoorError {
    DoorError { code: Code::Internal, text }
}

/// Calls a function that fills an error where it fails.
fn checked(call: impl FnOnce(*mut ffi::ErrorText) -> i32) -> Result<(), DoorError> {
    let mut error = Box::new(ffi::ErrorText { text: [0; 8192] });
    let code = call(&raw mut *error);
    if code == ffi::OK {
        return Ok(());
    }
    let text = match text_of(&error.text) {
        text if text.is_empty() => format!("it says no more than code {code}"),
        text => text,
    };
    Err(DoorError { code: Code::of(code), text })
}

/// Calls a function that makes a handle.
fn made(call: impl FnOnce(*mut *mut Opaque, *mut ffi::ErrorText) -> i32) -> Result<NonNull<Opaque>, DoorError> {
    let mut handle = null_mut();
    checked(|error| call(&raw mut handle, error))?;
    NonNull::new(handle).ok_or_else(|| internal("it gave no handle".into()))
}

fn struct_size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

fn c_text(text: &str) -> Result<CString, DoorError> {
    CString::new(text).map_err(|_| DoorError { code: Code::Argument, text: format!("{text:?} holds a zero byte") })
}

#[cfg(unix)]
fn c_path(path: &Path) -> Result<CString, DoorError> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| DoorError { code: Code::Argument, text: format!("{} holds a zero byte", path.display()) })
}

#[cfg(not(unix))]
fn c_path(path: &Path) -> Result<CString, DoorError> {
    c_text(&path.to_string_lossy())
}

/// The text in an array that a zero ends.
fn text_of(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A copy of a C string; `None` where there is none.
///
/// # Safety
///
/// `text` is null or a C string that lives during the call.
unsafe fn owned_text(text: *const c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// A copy of `count` bytes.
///
/// # Safety
///
/// `bytes` is null or points to as many bytes, which live during the call.
unsafe fn copied(bytes: *const c_void, count: u64) -> Vec<u8> {
    match usize::try_from(count) {
        // SAFETY: as the caller promises.
        Ok(count) if !bytes.is_null() => unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), count) }.to_vec(),
        _ => Vec::new(),
    }
}

fn shape_of(dims: &[u64]) -> Result<ffi::Shape, DoorError> {
    let mut shape = ffi::Shape { rank: 0, reserved: 0, dims: [0; ffi::MAX_RANK] };
    if dims.len() > ffi::MAX_RANK {
        let text = format!("TensorRT takes up to {} dimensions, and not {dims:?}", ffi::MAX_RANK);
        return Err(DoorError { code: Code::Unsupported, text });
    }
    for (place, size) in shape.dims.iter_mut().zip(dims) {
        *place = i64::try_from(*size).unwrap_or(i64::MAX);
        shape.rank += 1;
    }
    Ok(shape)
}

fn sizes(shape: &ffi::Shape) -> &[i64] {
    let rank = usize::try_from(shape.rank).unwrap_or(0).min(ffi::MAX_RANK);
    &shape.dims[..rank]
}
