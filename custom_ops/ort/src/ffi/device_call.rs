//! Inputs, outputs, stream and memory of one call of a kernel on a GPU. Tensors stay on the device: only their
//! addresses and shapes are looked at.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{NonNull, null, null_mut};

use moa_cuda::WORKSPACE_ALIGNMENT;
use moa_cuda_driver::Stream;
use moa_schema::{NodeTypes, Operator};
use ort_sys::{OrtAllocator, OrtKernelContext, OrtMemoryInfo, OrtValue};

use super::api::{Api, ort, ort_plain};
use super::shape::{Shape, checked_shape, output_memory};
use crate::failure::Failure;

/// A tensor on the device.
#[derive(Debug)]
struct DeviceTensor {
    shape: Shape,
    address: u64,
}

/// One call.
pub(crate) struct DeviceCall<'a> {
    api: Api,
    raw: *mut OrtKernelContext,
    inputs: Vec<Option<DeviceTensor>>,
    /// Where the first input lies; `None` where there is no input.
    memory: Option<NonNull<OrtMemoryInfo>>,
    lifetime: PhantomData<&'a OrtKernelContext>,
}

impl DeviceCall<'_> {
    /// Reads addresses and shapes of the inputs and checks their element types.
    ///
    /// # Safety
    ///
    /// `raw` must be the context of a running call of a kernel of `operator`, valid for the lifetime of the result.
    pub(super) unsafe fn new(
        api: Api,
        raw: *mut OrtKernelContext,
        operator: &Operator,
        types: NodeTypes,
    ) -> Result<Self, Failure> {
        let (mut count, mut memory) = (0, None);
        let mut inputs = Vec::with_capacity(operator.inputs.len());
        // SAFETY: `raw` is valid by the caller's promise, and so is what it hands out during the call.
        unsafe {
            ort!(api, KernelContext_GetInputCount(raw, &mut count)).check()?;
            for (index, parameter) in operator.inputs.iter().enumerate() {
                let mut value: *const OrtValue = null();
                if index < count {
                    ort!(api, KernelContext_GetInput(raw, index, &mut value)).check()?;
                }
                if value.is_null() {
                    inputs.push(None);
                    continue;
                }
                let shape = checked_shape(api, value, parameter, types)?;
                let mut data = null_mut();
                ort!(api, GetTensorMutableData(value.cast_mut(), &mut data)).check()?;
                if memory.is_none() {
                    let mut info: *const OrtMemoryInfo = null();
                    ort!(api, GetTensorMemoryInfo(value, &mut info)).check()?;
                    memory = NonNull::new(info.cast_mut());
                }
                inputs.push(Some(DeviceTensor { shape, address: data.addr() as u64 }));
            }
        }
        Ok(Self { api, raw, inputs, memory, lifetime: PhantomData })
    }

    /// Shapes of the inputs by position, `None` where one is absent.
    pub(crate) fn shapes(&self) -> Vec<Option<&[usize]>> {
        self.inputs.iter().map(|tensor| tensor.as_ref().map(|tensor| tensor.shape.as_slice())).collect()
    }

    /// Addresses of the inputs by position, 0 where one is absent.
    pub(crate) fn addresses(&self) -> Vec<u64> {
        self.inputs.iter().map(|tensor| tensor.as_ref().map_or(0, |tensor| tensor.address)).collect()
    }

    /// What the runtime says about the memory of the inputs.
    fn memory(&self) -> Result<*const OrtMemoryInfo, Failure> {
        let memory = self.memory.map(|memory| memory.as_ptr().cast_const());
        memory.ok_or_else(|| Failure::argument("no input says on which device the node runs"))
    }

    /// The device that holds the inputs.
    pub(crate) fn device(&self) -> Result<i32, Failure> {
        let (memory, mut ordinal) = (self.memory()?, 0);
        // SAFETY: the memory of an input, which lives as long as the input.
        unsafe { ort!(self.api, MemoryInfoGetId(memory, &mut ordinal)) }.check()?;
        Ok(ordinal)
    }

    /// The stream of the session's run.
    pub(crate) fn stream(&self) -> Result<Stream, Failure> {
        let mut stream: *mut c_void = null_mut();
        // SAFETY: `raw` is the context of a running call.
        unsafe { ort!(self.api, KernelContext_GetGPUComputeStream(self.raw, &mut stream)) }.check()?;
        Ok(Stream(stream.addr()))
    }

    /// Allocates output `i` with shape `shapes[i]`: its address, `None` where the node does not have it or it is empty.
    pub(crate) fn outputs(&self, shapes: &[impl Deref<Target = [usize]>]) -> Result<Vec<Option<u64>>, Failure> {
        let address = |index: usize, shape: &[usize]| {
            // SAFETY: `raw` is the context of a running call.
            let memory = unsafe { output_memory(self.api, self.raw, index, shape) }?;
            Ok(NonNull::new(memory).map(|memory| memory.addr().get() as u64))
        };
        shapes.iter().enumerate().map(|(index, shape)| address(index, shape)).collect()
    }

    /// Memory of the device from the session's allocator; it is given back when the value is dropped.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<DeviceMemory, Failure> {
        let (memory, mut allocator) = (self.memory()?, null_mut());
        // SAFETY: `raw` and the memory of an input are valid during the call.
        let status = unsafe { ort!(self.api, KernelContext_GetAllocator(self.raw, memory, &mut allocator)) };
        status.check()?;
        let Some(allocator) = NonNull::new(allocator) else {
            return Err(Failure::runtime("the runtime has no allocator for the device"));
        };
        let mut memory = DeviceMemory { api: self.api, allocator, start: null_mut(), bytes };
        // SAFETY: the allocator came from the call above; its memory is never looked at on the host.
        let status = unsafe {
            ort!(self.api, AllocatorAlloc(allocator.as_ptr(), bytes + WORKSPACE_ALIGNMENT, &mut memory.start))
        };
        status.check()?;
        Ok(memory)
    }
}

/// Device memory that belongs to a kernel.
pub(crate) struct DeviceMemory {
    api: Api,
    allocator: NonNull<OrtAllocator>,
    start: *mut c_void,
    bytes: usize,
}

// SAFETY: an address on the device, and an allocator that any thread may use.
unsafe impl Send for DeviceMemory {}

impl DeviceMemory {
    /// The first address that is a multiple of [`WORKSPACE_ALIGNMENT`].
    pub(crate) fn address(&self) -> u64 {
        (self.start.addr() as u64).next_multiple_of(WORKSPACE_ALIGNMENT as u64)
    }

    /// Bytes from that address on.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the memory came from this allocator, and neither is used again.
        unsafe {
            if !self.start.is_null() {
                let _ = ort!(self.api, AllocatorFree(self.allocator.as_ptr(), self.start)).check();
            }
            ort_plain!(self.api, ReleaseAllocator(self.allocator.as_ptr()));
        }
    }
}
