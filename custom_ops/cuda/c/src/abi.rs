//! The exported functions.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ffi::c_void;
use std::sync::Arc;

use moa_cuda_driver::{BoundPlan, Buffers, Driver, KernelSet, Stream, find_archive};

use crate::convert;
use crate::failure::{Code, Failure, catch};
use crate::types::{ERROR_BYTES, RawDevice, RawError, RawNode, RawOptions, RawPlanInfo, RawShape, Sized32};

/// `MOA_CUDA_ABI_VERSION`.
const ABI_VERSION: u32 = 1;

/// More tensors than any operator has.
const MAX_TENSORS: usize = 64;

/// `moa_cuda_kernels`.
pub(crate) struct Kernels(Arc<KernelSet>);

/// `moa_cuda_plan`.
pub(crate) struct Plan(BoundPlan);

/// What an exported function returns: its code, and its text where the caller wants it.
///
/// # Safety
///
/// `error` must be null or point to a `moa_cuda_error` that nobody else uses.
unsafe fn answer(error: *mut RawError, outcome: Result<(), Failure>) -> i32 {
    let Err(failure) = outcome else { return Code::Ok as i32 };
    // SAFETY: by the caller's promise.
    if let Some(error) = unsafe { error.as_mut() } {
        let mut text = failure.text.replace('\0', " ").into_bytes();
        text.truncate(ERROR_BYTES - 1);
        // A character that was cut in half goes.
        let whole = std::str::from_utf8(&text).map_or_else(|error| error.valid_up_to(), str::len);
        error.text.fill(0);
        error.text[..whole].copy_from_slice(&text[..whole]);
    }
    failure.code as i32
}

/// A copy of a structure, with defaults for the fields that an older caller does not know.
///
/// # Safety
///
/// `pointer` must be null or point to as many bytes as its first field says.
unsafe fn read<T: Sized32>(pointer: *const T) -> Result<T, Failure> {
    let mut value = T::DEFAULT;
    // SAFETY: the caller's promise holds for the size field and for the bytes that it counts; a `T` of any bytes is
    // valid, and no more than its own size is copied.
    unsafe {
        let size = known_size(pointer)?;
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut value).cast::<u8>(), size);
    }
    Ok(value)
}

/// Fills a structure of the caller as far as it goes.
///
/// # Safety
///
/// As [`read`], for writing.
unsafe fn write<T: Sized32>(pointer: *mut T, value: &T) -> Result<(), Failure> {
    const SIZE_FIELD: usize = size_of::<u32>();
    // SAFETY: as in `read`; the size field stays the caller's.
    unsafe {
        let size = known_size(pointer)?;
        let from = std::ptr::from_ref(value).cast::<u8>().add(SIZE_FIELD);
        std::ptr::copy_nonoverlapping(from, pointer.cast::<u8>().add(SIZE_FIELD), size - SIZE_FIELD);
    }
    Ok(())
}

/// # Safety
///
/// `pointer` must be null or point to a structure that begins with its size.
unsafe fn known_size<T: Sized32>(pointer: *const T) -> Result<usize, Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("`{}` is null", T::NAME)));
    }
    // SAFETY: not null, and the size comes first.
    let size = unsafe { pointer.cast::<u32>().read() } as usize;
    if (T::OLDEST..=size_of::<T>()).contains(&size) {
        return Ok(size);
    }
    Err(Failure::argument(format!("`{}` has struct_size {size}, this library knows {}", T::NAME, size_of::<T>())))
}

/// # Safety
///
/// `pointer` must be null, or point to `count` values that nobody writes during `'a`.
unsafe fn array<'a, T>(what: &str, pointer: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count > MAX_TENSORS || (pointer.is_null() && count > 0) {
        return Err(Failure::argument(format!("`{what}` has {count} members, or is null")));
    }
    // SAFETY: by the caller's promise.
    Ok(if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, count) } })
}

/// The bytes of the caller from the address `start` on.
///
/// # Safety
///
/// `start` must be the address of `count` bytes that nobody writes during `'a`, unless `count` is more than any memory
/// has.
unsafe fn bytes<'a>(what: &str, start: usize, count: u64) -> Result<&'a [u8], Failure> {
    let Ok(length) = isize::try_from(count) else {
        return Err(Failure::argument(format!("`{what}` is {count}, and the most are {}", isize::MAX)));
    };
    let start = std::ptr::with_exposed_provenance::<u8>(start);
    // SAFETY: by the caller's promise; the length is one of memory.
    Ok(unsafe { std::slice::from_raw_parts(start, length.unsigned_abs()) })
}

/// # Safety
///
/// `pointer` must be null or a live handle of this library.
unsafe fn handle<'a, T>(what: &str, pointer: *const T) -> Result<&'a T, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(format!("`{what}` is null")))
}

/// # Safety
///
/// `pointer` must be null or a handle of this library that is not used again.
unsafe fn destroy<T>(pointer: *mut T) {
    if !pointer.is_null() {
        let _ = catch(|| {
            // SAFETY: by the caller's promise.
            drop(unsafe { Box::from_raw(pointer) });
            Ok(())
        });
    }
}

fn place<T>(what: &str, pointer: *mut *mut T) -> Result<*mut *mut T, Failure> {
    if pointer.is_null() { Err(Failure::argument(format!("`{what}` is null"))) } else { Ok(pointer) }
}

/// The version of this interface.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn moa_cuda_abi_version() -> u32 {
    ABI_VERSION
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_create(
    options: *const RawOptions,
    kernels: *mut *mut Kernels,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        let target = place("kernels", kernels)?;
        let options = match options.is_null() {
            true => RawOptions::DEFAULT,
            // SAFETY: the header asks for a structure of as many bytes as it says.
            false => unsafe { read(options) }?,
        };
        let archive = match options.archive {
            0 => find_archive()?,
            // SAFETY: the header asks for an archive of `archive_bytes` bytes, which nobody writes during the call.
            start => Cow::Owned(unsafe { bytes("archive_bytes", start, options.archive_bytes) }?.to_vec()),
        };
        let forced = (options.compute_major != 0).then_some((options.compute_major, options.compute_minor));
        let driver = Driver::system()?;
        let made = if options.device < 0 {
            KernelSet::in_current_context(driver, archive, forced)?
        } else {
            KernelSet::on_device(driver, archive, options.device, forced)?
        };
        // SAFETY: not null, and the header asks for room for a handle.
        unsafe { target.write(Box::into_raw(Box::new(Kernels(Arc::new(made))))) };
        Ok(())
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_destroy(kernels: *mut Kernels) {
    // SAFETY: the handle came from this library and is not used again.
    unsafe { destroy(kernels) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_load(kernels: *mut Kernels, element: u32, error: *mut RawError) -> i32 {
    let outcome = catch(|| {
        // SAFETY: the header asks for a handle of this library that nobody destroys meanwhile.
        let kernels = unsafe { handle("kernels", kernels) }?;
        Ok(kernels.0.load(convert::element(element)?)?)
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_device_facts(
    kernels: *const Kernels,
    device: *mut RawDevice,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        // SAFETY: the header asks for a handle of this library that nobody destroys meanwhile.
        let facts = unsafe { handle("kernels", kernels) }?.0.facts();
        let found = RawDevice {
            compute: facts.device.compute_capability.into(),
            device: facts.capability.into(),
            multiprocessors: facts.device.multiprocessors,
            shared_bytes_per_block: facts.device.shared_bytes_per_block,
            l2_bytes: facts.l2_bytes,
            ..RawDevice::DEFAULT
        };
        // SAFETY: the header asks for a structure of as many bytes as it says.
        unsafe { write(device, &found) }
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_faults(
    kernels: *const Kernels,
    faults: *mut u32,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        // SAFETY: the header asks for a handle of this library that nobody destroys meanwhile.
        let found = unsafe { handle("kernels", kernels) }?.0.faults()?;
        // SAFETY: the header asks for a number of the caller.
        let target = unsafe { faults.as_mut() }.ok_or_else(|| Failure::argument("`faults` is null"))?;
        *target = found;
        Ok(())
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// The dimensions of `count` shapes.
///
/// # Safety
///
/// As [`array`].
unsafe fn shapes(pointer: *const RawShape, count: usize) -> Result<Vec<Option<Vec<usize>>>, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { array("inputs", pointer, count) }?.iter().map(RawShape::dims).collect()
}

fn borrowed(shapes: &[Option<Vec<usize>>]) -> Vec<Option<&[usize]>> {
    shapes.iter().map(Option::as_deref).collect()
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_output_shapes(
    node: *const RawNode,
    inputs: *const RawShape,
    input_count: usize,
    outputs: *mut RawShape,
    output_count: usize,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        // SAFETY: the header asks for a structure of as many bytes as it says.
        let node = unsafe { read(node) }?.node()?;
        // SAFETY: the header asks for `input_count` shapes, which nobody writes during the call.
        let given = unsafe { shapes(inputs, input_count) }?;
        let found = node.output_shapes(&borrowed(&given)).map_err(|error| Failure::argument(error.to_string()))?;
        if outputs.is_null() || output_count != found.len() {
            let (name, count) = (node.operator().name, found.len());
            return Err(Failure::argument(format!("{name} has {count} outputs, `outputs` has {output_count}")));
        }
        for (index, dims) in found.iter().enumerate() {
            // SAFETY: not null, and the header asks for room for `output_count` shapes, as many as are found.
            unsafe { outputs.add(index).write(RawShape::of(dims)) };
        }
        Ok(())
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_plan_create(
    kernels: *mut Kernels,
    node: *const RawNode,
    inputs: *const RawShape,
    input_count: usize,
    wanted: *const u8,
    wanted_count: usize,
    plan: *mut *mut Plan,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        let target = place("plan", plan)?;
        // SAFETY: the header asks for a handle of this library that nobody destroys meanwhile.
        let kernels = unsafe { handle("kernels", kernels) }?;
        // SAFETY: the header asks for a structure of as many bytes as it says.
        let raw = unsafe { read(node) }?;
        // SAFETY: the header asks for `input_count` shapes, which nobody writes during the call.
        let given = unsafe { shapes(inputs, input_count) }?;
        let wanted: Vec<bool> = match wanted.is_null() {
            true => vec![true],
            // SAFETY: the header asks for `wanted_count` bytes, which nobody writes during the call.
            false => unsafe { array("wanted", wanted, wanted_count) }?.iter().map(|flag| *flag != 0).collect(),
        };
        let made = kernels.0.plan(&raw.node()?, raw.element()?, &borrowed(&given), &wanted, raw.options())?;
        // SAFETY: not null, and the header asks for room for a handle.
        unsafe { target.write(Box::into_raw(Box::new(Plan(made)))) };
        Ok(())
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_plan_destroy(plan: *mut Plan) {
    // SAFETY: the handle came from this library and is not used again.
    unsafe { destroy(plan) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_plan_describe(
    plan: *const Plan,
    info: *mut RawPlanInfo,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        // SAFETY: the header asks for a handle of this library that nobody destroys meanwhile.
        let plan = &unsafe { handle("plan", plan) }?.0;
        let found = RawPlanInfo {
            launches: u32::try_from(plan.launches()).unwrap_or(u32::MAX),
            regime: convert::regime(plan.regime()),
            workspace_bytes: plan.workspace_bytes() as u64,
            ..RawPlanInfo::DEFAULT
        };
        // SAFETY: the header asks for a structure of as many bytes as it says.
        unsafe { write(info, &found) }
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_plan_workspace_bytes(plan: *const Plan) -> usize {
    // SAFETY: the caller passes null or a live plan.
    unsafe { plan.as_ref() }.map_or(0, |plan| plan.0.workspace_bytes())
}

/// Device addresses behind an array of pointers.
///
/// # Safety
///
/// As [`array`].
unsafe fn addresses(what: &str, pointers: *const *const c_void, count: usize) -> Result<Addresses, Failure> {
    // SAFETY: by the caller's promise.
    let pointers = unsafe { array(what, pointers, count) }?;
    let mut found = Addresses { values: [0; MAX_TENSORS], count };
    for (address, pointer) in found.values.iter_mut().zip(pointers) {
        *address = pointer.addr() as u64;
    }
    Ok(found)
}

/// Addresses on the stack: a call on a stream allocates nothing for them.
struct Addresses {
    values: [u64; MAX_TENSORS],
    count: usize,
}

/// # Safety
///
/// As `moa_cuda.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn moa_cuda_enqueue(
    plan: *const Plan,
    inputs: *const *const c_void,
    input_count: usize,
    outputs: *const *const c_void,
    output_count: usize,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
    error: *mut RawError,
) -> i32 {
    let outcome = catch(|| {
        // SAFETY: the header asks for a handle of this library that nobody destroys meanwhile.
        let plan = &unsafe { handle("plan", plan) }?.0;
        // SAFETY: the header asks for `input_count` addresses, which nobody writes during the call.
        let given = unsafe { addresses("inputs", inputs, input_count) }?;
        // SAFETY: the header asks for `output_count` addresses, which nobody writes during the call.
        let wanted = unsafe { addresses("outputs", outputs, output_count) }?;
        let buffers = Buffers {
            inputs: &given.values[..given.count],
            outputs: &wanted.values[..wanted.count],
            workspace: workspace.addr() as u64,
            workspace_bytes,
        };
        Ok(plan.enqueue(&buffers, Stream(stream.addr()))?)
    });
    // SAFETY: the header asks for null or an error of the caller.
    unsafe { answer(error, outcome) }
}

#[cfg(test)]
mod tests;
