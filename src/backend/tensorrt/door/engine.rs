//! A loaded plan, and running it.

use std::{
    mem::zeroed,
    ptr::{NonNull, null},
    rc::Rc,
    time::Duration,
};

use super::{
    DoorError, TensorRt, c_text, checked,
    ffi::{self, Opaque, Table},
    internal, made, owned_text, shape_of, sizes, struct_size,
};
use crate::engine::InputShapes;

/// An input or output of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::backend) struct EngineTensor {
    pub(in crate::backend) name: String,
    pub(in crate::backend) is_input: bool,
    /// Whether its values are shapes, in the memory of the host.
    pub(in crate::backend) is_on_host: bool,
    /// A number of ONNX's `TensorProto.DataType`.
    pub(in crate::backend) element: i32,
    /// Sizes; `None` is known at run time alone.
    pub(in crate::backend) dims: Vec<Option<usize>>,
}

/// A handle of `moa_trt_engine_create`.
struct Loaded {
    tensorrt: TensorRt,
    handle: NonNull<Opaque>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: the handle came from `engine`, and ends here alone.
        unsafe { (self.tensorrt.table().engine_destroy)(self.handle.as_ptr()) }
    }
}

/// A loaded plan; a cheap handle.
#[derive(Clone)]
pub(in crate::backend) struct Engine(Rc<Loaded>);

impl Engine {
    pub(super) fn new(tensorrt: TensorRt, handle: NonNull<Opaque>) -> Self {
        Self(Rc::new(Loaded { tensorrt, handle }))
    }

    fn table(&self) -> &Table {
        self.0.tensorrt.table()
    }

    fn handle(&self) -> *mut Opaque {
        self.0.handle.as_ptr()
    }

    fn info(&self) -> Result<ffi::EngineInfo, DoorError> {
        // SAFETY: zeros are a value of a structure of numbers.
        let mut info: ffi::EngineInfo = unsafe { zeroed() };
        info.struct_size = struct_size::<ffi::EngineInfo>();
        // SAFETY: the engine is loaded; `info` is writable and begins with its size.
        checked(|error| unsafe { (self.table().get_engine_info)(self.handle(), &raw mut info, error) })?;
        Ok(info)
    }

    /// Number of optimisation profiles, at least one.
    pub(in crate::backend) fn profile_count(&self) -> Result<u32, DoorError> {
        Ok(self.info()?.profile_count)
    }

    /// Inputs and outputs, in the model's order.
    pub(in crate::backend) fn tensors(&self) -> Result<Vec<EngineTensor>, DoorError> {
        (0..self.info()?.tensor_count).map(|index| self.tensor(index)).collect()
    }

    fn tensor(&self, index: u32) -> Result<EngineTensor, DoorError> {
        // SAFETY: zeros are a value: numbers and a null pointer.
        let mut tensor: ffi::Tensor = unsafe { zeroed() };
        tensor.struct_size = struct_size::<ffi::Tensor>();
        // SAFETY: the engine is loaded; `tensor` is writable and begins with its size.
        checked(|error| unsafe { (self.table().get_tensor)(self.handle(), index, &raw mut tensor, error) })?;
        Ok(EngineTensor {
            // SAFETY: the name is the engine's, which is loaded.
            name: unsafe { owned_text(tensor.name) }.unwrap_or_default(),
            is_input: tensor.is_input != 0,
            is_on_host: tensor.is_on_host != 0,
            element: tensor.element,
            dims: sizes(&tensor.shape).iter().map(|size| usize::try_from(*size).ok()).collect(),
        })
    }

    /// The shapes that `profile` of the engine serves of an input.
    pub(in crate::backend) fn range(&self, profile: u32, input: &str) -> Result<InputShapes, DoorError> {
        let name = c_text(input)?;
        // SAFETY: zeros are a value: numbers and a null pointer.
        let mut range: ffi::Range = unsafe { zeroed() };
        checked(|error| {
            // SAFETY: the engine is loaded, the name a C string, and `range` writable.
            unsafe { (self.table().get_range)(self.handle(), profile, name.as_ptr(), &raw mut range, error) }
        })?;
        let dims = |shape| sizes(shape).iter().map(|size| u64::try_from(*size).unwrap_or(0)).collect();
        Ok(InputShapes { name: input.to_owned(), min: dims(&range.min), opt: dims(&range.opt), max: dims(&range.max) })
    }

    /// All layers, as the JSON of TensorRT's inspector.
    pub(in crate::backend) fn layers(&self) -> Result<String, DoorError> {
        let mut text = null();
        // SAFETY: the engine is loaded, and the pointer writable.
        checked(|error| unsafe { (self.table().engine_layers)(self.handle(), &raw mut text, error) })?;
        // SAFETY: the text is the engine's, which is loaded.
        Ok(unsafe { owned_text(text) }.unwrap_or_default())
    }

    /// A context that works in `profile`, on a stream and buffers of its own.
    pub(in crate::backend) fn context(&self, profile: u32) -> Result<Context, DoorError> {
        let handle = made(|context, error| {
            // SAFETY: the engine is loaded.
            unsafe { (self.table().context_create)(self.handle(), profile, context, error) }
        })?;
        Ok(Context { engine: self.clone(), handle })
    }
}

/// An engine that runs.
pub(in crate::backend) struct Context {
    engine: Engine,
    handle: NonNull<Opaque>,
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the handle came from `context`, and ends here alone.
        unsafe { (self.engine.table().context_destroy)(self.handle.as_ptr()) }
    }
}

impl Context {
    fn table(&self) -> &Table {
        self.engine.table()
    }

    /// Sets the shape of an input.
    pub(in crate::backend) fn set_shape(&mut self, input: &str, dims: &[usize]) -> Result<(), DoorError> {
        let (name, dims) = (c_text(input)?, dims.iter().map(|size| *size as u64).collect::<Vec<_>>());
        let shape = shape_of(&dims)?;
        // SAFETY: the context is alive; name and shape live during the call.
        checked(|error| unsafe {
            (self.table().set_shape)(self.handle.as_ptr(), name.as_ptr(), &raw const shape, error)
        })
    }

    /// The shape of an input or output, once those of all inputs are set.
    pub(in crate::backend) fn shape(&mut self, name: &str) -> Result<Vec<usize>, DoorError> {
        let c_name = c_text(name)?;
        let mut shape = ffi::Shape { rank: 0, reserved: 0, dims: [0; ffi::MAX_RANK] };
        checked(|error| {
            // SAFETY: the context is alive, the name a C string, and `shape` writable.
            unsafe { (self.table().tensor_shape)(self.handle.as_ptr(), c_name.as_ptr(), &raw mut shape, error) }
        })?;
        let unknown = || internal(format!("the shape of `{name}` is not known"));
        sizes(&shape).iter().map(|size| usize::try_from(*size).map_err(|_| unknown())).collect()
    }

    /// Copies the values of an input to the device.
    pub(in crate::backend) fn upload(&mut self, input: &str, values: &[u8]) -> Result<(), DoorError> {
        let (name, count) = (c_text(input)?, values.len() as u64);
        checked(|error| {
            // SAFETY: the context is alive; name and values live during the call, which reads `count` bytes.
            unsafe { (self.table().upload)(self.handle.as_ptr(), name.as_ptr(), values.as_ptr().cast(), count, error) }
        })
    }

    /// One inference on what is uploaded; returns when it has ended.
    pub(in crate::backend) fn run(&mut self) -> Result<(), DoorError> {
        // SAFETY: the context is alive.
        checked(|error| unsafe { (self.table().run)(self.handle.as_ptr(), error) })
    }

    /// The same, and the time between two CUDA events around it.
    pub(in crate::backend) fn run_timed(&mut self) -> Result<Duration, DoorError> {
        let mut milliseconds = 0.0_f32;
        // SAFETY: the context is alive, and the number writable.
        checked(|error| unsafe { (self.table().run_timed)(self.handle.as_ptr(), &raw mut milliseconds, error) })?;
        let seconds = f64::from(milliseconds) / 1e3;
        Duration::try_from_secs_f64(seconds).map_err(|_| internal(format!("a run took {milliseconds} ms")))
    }

    /// Copies an output of the last run from the device.
    pub(in crate::backend) fn download(&mut self, output: &str, values: &mut [u8]) -> Result<(), DoorError> {
        let (name, count) = (c_text(output)?, values.len() as u64);
        checked(|error| {
            // SAFETY: the context is alive; name and values live during the call, which writes `count` bytes.
            unsafe {
                (self.table().download)(self.handle.as_ptr(), name.as_ptr(), values.as_mut_ptr().cast(), count, error)
            }
        })
    }
}
