//! The operators on ONNX Runtime's CUDA provider, one entry for each operator and element type.

use std::ffi::CStr;
use std::sync::LazyLock;

use moa_cuda::Element;
use moa_cuda_driver::has_archive;
use moa_schema::{FloatType, NodeTypes, OPERATORS, Operator};
use ort_sys::{OrtCustomOp, OrtKernelContext};

use super::api::KernelInfo;
use super::device_call::DeviceCall;
use super::library::Entry;
use super::node_kernel::{Node, NodeKernel};
use crate::attributes;
use crate::failure::Failure;
use crate::gpu::GpuKernel;

/// One operator on one element type.
#[repr(C)]
pub(super) struct CudaEntry {
    /// First, so that a pointer to this is a pointer to an entry, whose callbacks serve it too.
    entry: Entry,
    element: Element,
}

// SAFETY: the first field of its entry is one.
unsafe impl NodeKernel for GpuKernel {
    type Entry = CudaEntry;

    const PROVIDER: &'static CStr = c"CUDAExecutionProvider";

    /// Loads the kernels of its element type too.
    fn make(node: &Node, entry: &CudaEntry, info: &KernelInfo) -> Result<Self, Failure> {
        let (attributes, _) = attributes::read(node.operator, info)?;
        Self::new(&attributes, entry.element)
    }

    /// Puts a node on the stream of its run.
    unsafe fn run(&self, node: &Node, context: *mut OrtKernelContext) -> Result<(), Failure> {
        // SAFETY: the caller's promise about the context is passed on.
        let call = unsafe { DeviceCall::new(node.api, context, node.operator, node.types) }?;
        self.compute(&call)
    }
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
        // SAFETY: whole entries of this type are registered.
        Self { entry: unsafe { Entry::new::<GpuKernel>(operator, types_of(element)) }, element }
    }
}

#[cfg(test)]
mod tests;
