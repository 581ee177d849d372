//! The operators on ONNX Runtime's CUDA provider, one entry for each operator and element type.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::LazyLock;

use moa_cuda::Element;
use moa_cuda_driver::has_archive;
use moa_schema::{FloatType, NodeTypes, OPERATORS, Operator};
use ort_sys::{OrtApi, OrtCustomOp, OrtKernelContext, OrtKernelInfo, OrtStatusPtr};

use super::api::{Api, KernelInfo};
use super::device_call::DeviceCall;
use super::library::{Entry, or_else};
use crate::attributes;
use crate::failure::catch_at_node;
use crate::gpu::GpuKernel;

const PROVIDER: &CStr = c"CUDAExecutionProvider";

/// One operator on one element type.
#[repr(C)]
struct CudaEntry {
    /// First, so that a pointer to this is a pointer to an entry, whose callbacks serve it too.
    entry: Entry,
    element: Element,
}

/// The kernel of one node.
struct CudaKernel {
    api: Api,
    operator: &'static Operator,
    types: NodeTypes,
    node: String,
    gpu: GpuKernel,
}

static ENTRIES: LazyLock<Vec<CudaEntry>> = LazyLock::new(|| {
    let of = |operator| Element::ALL.into_iter().map(move |element| CudaEntry::new(operator, element));
    OPERATORS.into_iter().filter(|operator| !operator.is_for_processors).flat_map(of).collect()
});

/// Activations and weights are of one type on a GPU.
fn types_of(element: Element) -> NodeTypes {
    let float = match element {
        Element::F32 => FloatType::F32,
        Element::F16 => FloatType::F16,
        Element::Bf16 => FloatType::Bf16,
    };
    NodeTypes::floats(float, float)
}

/// What to register besides the CPU's entries: nothing where this process has no kernels for a GPU, so that a session
/// leaves the nodes to the CPU provider. The driver is not touched before a session makes a node for the GPU.
pub(super) fn entries() -> impl Iterator<Item = *const OrtCustomOp> {
    let entries: &[CudaEntry] = if has_archive() { &ENTRIES } else { &[] };
    // The pointer is made from the whole entry, so that callbacks may read past its first field.
    entries.iter().map(|entry| (&raw const *entry).cast())
}

impl CudaEntry {
    fn new(operator: Operator, element: Element) -> Self {
        let mut entry = Entry::new(operator, types_of(element));
        entry.callbacks.GetExecutionProviderType = Some(provider);
        entry.callbacks.CreateKernelV2 = Some(create);
        entry.callbacks.KernelComputeV2 = Some(run);
        entry.callbacks.KernelDestroy = Some(destroy);
        Self { entry, element }
    }
}

/// The entry behind the pointer that the runtime hands to a callback.
///
/// # Safety
///
/// `op` must be one of [`entries`].
unsafe fn cuda_entry(op: *const OrtCustomOp) -> &'static CudaEntry {
    // SAFETY: registered pointers point to whole entries in a static.
    unsafe { &*op.cast::<CudaEntry>() }
}

unsafe extern "system" fn provider(_: *const OrtCustomOp) -> *const c_char {
    PROVIDER.as_ptr()
}

/// Reads the attributes of a node and loads the kernels of its element type.
unsafe extern "system" fn create(
    op: *const OrtCustomOp,
    api: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: the runtime passes its table, in the version that the operator declares.
    let Some(api) = (unsafe { Api::from_table(api) }) else { return OrtStatusPtr(null_mut()) };
    // SAFETY: the runtime passes what was registered and the info of the kernel being created.
    let (entry, info) = unsafe { (cuda_entry(op), KernelInfo::new(api, info)) };
    let (operator, types) = (&entry.entry.operator, entry.entry.types);
    let node = or_else(String::new(), || info.node_name());
    let result = catch_at_node(operator.name, &node, || {
        let (attributes, _) = attributes::read(operator, &info)?;
        let gpu = GpuKernel::new(&attributes, entry.element)?;
        Ok(Box::new(CudaKernel { api, operator, types, node: node.clone(), gpu }))
    });
    api.status(result.map(|made| {
        // SAFETY: the runtime passes a place for the kernel; `destroy` takes it back.
        unsafe { *kernel = Box::into_raw(made).cast() };
    }))
}

/// Puts a node on the stream of its run.
unsafe extern "system" fn run(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: the runtime passes what `create` made; kernels are only read, so threads may share one.
    let kernel = unsafe { &*kernel.cast::<CudaKernel>() };
    kernel.api.status(catch_at_node(kernel.operator.name, &kernel.node, || {
        // SAFETY: the runtime passes the context of this call.
        let call = unsafe { DeviceCall::new(kernel.api, context, kernel.operator, kernel.types) }?;
        kernel.gpu.compute(&call)
    }))
}

unsafe extern "system" fn destroy(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: the runtime passes what `create` made, once.
        or_else((), || drop(unsafe { Box::from_raw(kernel.cast::<CudaKernel>()) }));
    }
}

#[cfg(test)]
mod tests;
