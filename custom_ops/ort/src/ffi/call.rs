//! Inputs and outputs of one call of a kernel.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::ptr::{null, null_mut};

use half::{bf16, f16};
use moa_kernels::{Int4, Scalar, WeightData};
use moa_schema::{FloatType, IntegerType, NodeTypes, Operator, Parameter};
use ort_sys::{OrtKernelContext, OrtValue};

use super::api::{Api, ort};
use super::kind::Kind;
use super::pool::OrtPool;
use super::shape::{Shape, checked_shape, output_memory};
use crate::failure::{Failure, Fault};
use crate::prepare::Constant;

/// One call of a kernel, whose shapes are known and whose outputs are not allocated yet.
pub(crate) struct Call<'a> {
    inputs: Inputs<'a>,
    outputs: OutputSlots<'a>,
    pool: OrtPool<'a>,
}

impl<'a> Call<'a> {
    /// Reads the inputs of a call and checks their element types; `constants` are the shapes of those that were checked
    /// when the kernel was created.
    ///
    /// # Safety
    ///
    /// `raw` must be the context of a running call of a kernel of `operator`, valid for `'a`, and this must be the
    /// only `Call` made from it. An input with a shape in `constants` must be a constant of that shape and of its
    /// parameter's type.
    pub(crate) unsafe fn new(
        api: Api,
        raw: *mut OrtKernelContext,
        operator: &'a Operator,
        types: NodeTypes,
        constants: &[Option<Shape>],
    ) -> Result<Self, Failure> {
        let mut count = 0;
        // SAFETY: `raw` is valid by the caller's promise.
        unsafe { ort!(api, KernelContext_GetInputCount(raw, &mut count)) }.check()?;
        let mut tensors = Vec::with_capacity(operator.inputs.len());
        for (index, parameter) in operator.inputs.iter().enumerate() {
            let mut value = null();
            if index < count {
                // SAFETY: `raw` is valid and has an input `index`; an absent one yields null.
                unsafe { ort!(api, KernelContext_GetInput(raw, index, &mut value)) }.check()?;
            }
            let known = constants.get(index).copied().flatten();
            // SAFETY: `value` is null or an input, which the runtime keeps unchanged during the call; a known shape is
            // its own by the caller's promise.
            tensors.push(unsafe { read_tensor(api, value, parameter, types, known) }?);
        }
        let lifetime = PhantomData;
        Ok(Self {
            inputs: Inputs { operator, tensors },
            outputs: OutputSlots { api, raw, operator, types, lifetime },
            // SAFETY: `raw` is the context of a running call, valid for the lifetime.
            pool: unsafe { OrtPool::new(api, raw) },
        })
    }

    /// Shapes of the inputs by position, `None` where one is absent.
    pub(crate) fn shapes(&self) -> Vec<Option<&[usize]>> {
        self.inputs.tensors.iter().map(|tensor| tensor.as_ref().map(|tensor| tensor.shape.as_slice())).collect()
    }

    /// Allocates output `i` with shape `shapes[i]`; outputs that the node does not have stay absent.
    ///
    /// `in_place` are inputs and the outputs that may have their memory; an input that gives its memory is absent
    /// afterwards.
    pub(crate) fn allocate(
        mut self,
        shapes: &[impl Deref<Target = [usize]>],
        in_place: &[(usize, usize)],
    ) -> Result<(Inputs<'a>, Outputs<'a>, OrtPool<'a>), Failure> {
        let outputs = self.outputs.allocate(&mut self.inputs, shapes, in_place)?;
        Ok((self.inputs, outputs, self.pool))
    }
}

/// The elements of an input.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Elements<'a> {
    Float(&'a [f32]),
    Half(&'a [f16]),
    Brain(&'a [bf16]),
    Byte(&'a [i8]),
    /// Two int4 in each.
    Nibbles(&'a [u8]),
    Int(&'a [i32]),
    Long(&'a [i64]),
}

/// The type of a node's activations.
pub(crate) trait Activation: Scalar {
    /// The elements of an input where they have this type.
    fn of(elements: Elements<'_>) -> Option<&[Self]>;

    /// The elements of an output where they have this type.
    fn of_mut(buffer: Buffer<'_>) -> Option<&mut [Self]>;
}

impl Activation for f32 {
    fn of(elements: Elements<'_>) -> Option<&[Self]> {
        if let Elements::Float(values) = elements { Some(values) } else { None }
    }

    fn of_mut(buffer: Buffer<'_>) -> Option<&mut [Self]> {
        if let Buffer::Float(values) = buffer { Some(values) } else { None }
    }
}

impl Activation for f16 {
    fn of(elements: Elements<'_>) -> Option<&[Self]> {
        if let Elements::Half(values) = elements { Some(values) } else { None }
    }

    fn of_mut(buffer: Buffer<'_>) -> Option<&mut [Self]> {
        if let Buffer::Half(values) = buffer { Some(values) } else { None }
    }
}

#[derive(Debug)]
struct Tensor<'a> {
    shape: Shape,
    elements: Elements<'a>,
}

/// # Safety
///
/// `value` must be null or a tensor in CPU memory that nobody writes during `'a`; its shape must be `known` where there
/// is one, and its type then that of the parameter.
unsafe fn read_tensor<'a>(
    api: Api,
    value: *const OrtValue,
    parameter: &Parameter,
    types: NodeTypes,
    known: Option<Shape>,
) -> Result<Option<Tensor<'a>>, Failure> {
    if value.is_null() {
        return Ok(None);
    }
    let shape = match known {
        Some(shape) => shape,
        // SAFETY: `value` is a tensor.
        None => unsafe { checked_shape(api, value, parameter, types) }?,
    };
    let mut data = null_mut();
    // SAFETY: `value` is a tensor; the pointer is only read from.
    unsafe { ort!(api, GetTensorMutableData(value.cast_mut(), &mut data)) }.check()?;
    let len: usize = shape.as_slice().iter().product();
    let kind = Kind::of(parameter.element, types);
    check_aligned("input", parameter, data, kind.bytes())?;
    // SAFETY: the data of a tensor of this type holds `len` elements, every one of them initialised; they are aligned.
    let elements = unsafe {
        match kind {
            Kind::Float(FloatType::F32) => Elements::Float(slice(data, len)),
            Kind::Float(FloatType::F16) => Elements::Half(slice(data, len)),
            Kind::Float(FloatType::Bf16) => Elements::Brain(slice(data, len)),
            Kind::Integer(IntegerType::Int8) => Elements::Byte(slice(data, len)),
            Kind::Integer(IntegerType::Int4) => Elements::Nibbles(slice(data, len.div_ceil(2))),
            Kind::Int32 => Elements::Int(slice(data, len)),
            Kind::Int64 => Elements::Long(slice(data, len)),
        }
    };
    Ok(Some(Tensor { shape, elements }))
}

/// Refuses a tensor whose elements of `bytes` bytes are not aligned: the runtime takes any memory that it is given,
/// such as external data at an odd offset, or a part of a buffer.
fn check_aligned(kind: &str, parameter: &Parameter, data: *const c_void, bytes: usize) -> Result<(), Failure> {
    if data.addr().is_multiple_of(bytes) {
        return Ok(());
    }
    Err(Failure::argument(format!(
        "{kind} `{}` begins at an address that is no multiple of its elements' {bytes} bytes; give it aligned memory",
        parameter.name
    )))
}

/// A tensor; `None` where it is absent.
///
/// # Safety
///
/// As [`read_tensor`].
pub(super) unsafe fn read_constant<'a>(
    api: Api,
    value: *const OrtValue,
    parameter: &Parameter,
    types: NodeTypes,
) -> Result<Option<Constant<'a>>, Failure> {
    // SAFETY: by the caller's promise.
    let tensor = unsafe { read_tensor(api, value, parameter, types, None) }?;
    Ok(tensor.map(|Tensor { shape, elements }| Constant { shape, elements }))
}

/// # Safety
///
/// `data` must point to `len` aligned elements that nobody writes during `'a`; it may be anything where `len` is 0.
unsafe fn slice<'a, T>(data: *mut c_void, len: usize) -> &'a [T] {
    // SAFETY: by the caller's promise.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data.cast(), len) } }
}

/// # Safety
///
/// `data` must point to `len` aligned elements that nobody else reads or writes during `'a`; it may be anything where
/// `len` is 0.
unsafe fn slice_mut<'a, T>(data: *mut c_void, len: usize) -> &'a mut [T] {
    // SAFETY: by the caller's promise.
    if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(data.cast(), len) } }
}

/// Inputs of one call, by position; they can be read once the outputs are there.
pub(crate) struct Inputs<'a> {
    operator: &'a Operator,
    tensors: Vec<Option<Tensor<'a>>>,
}

impl<'a> Inputs<'a> {
    pub(crate) fn floats(&self, index: usize) -> Result<&'a [f32], Failure> {
        if let Some(Elements::Float(values)) = self.elements(index) { Ok(values) } else { self.absent(index) }
    }

    pub(crate) fn activations<T: Activation>(&self, index: usize) -> Result<&'a [T], Failure> {
        match self.elements(index).and_then(T::of) {
            Some(values) => Ok(values),
            None => self.absent(index),
        }
    }

    /// A matrix; input `scale` holds its scales where it is one of integers.
    pub(crate) fn weights(&self, index: usize, scale: usize) -> Result<WeightData<'a>, Failure> {
        let Some(matrix) = self.tensor(index) else { return self.absent(index) };
        let scales = self.tensor(scale);
        let name = |index: usize| self.operator.inputs[index].name;
        match matrix.elements.weights(scales.map(|scales| scales.elements)) {
            Some(values) => match (matrix.elements.integers(), scales) {
                (Some(integers), Some(scales)) => {
                    check_scales(integers, name(scale), matrix.shape, scales.shape).map(|()| values)
                }
                _ => Ok(values),
            },
            None if scales.is_none() => self.absent(scale),
            None => Err(Failure::argument(format!(
                "input `{}` is there, and `{}` holds floats, which have none",
                name(scale),
                name(index)
            ))),
        }
    }

    pub(crate) fn ints(&self, index: usize) -> Result<&'a [i32], Failure> {
        if let Some(Elements::Int(values)) = self.elements(index) { Ok(values) } else { self.absent(index) }
    }

    pub(crate) fn longs(&self, index: usize) -> Result<&'a [i64], Failure> {
        if let Some(Elements::Long(values)) = self.elements(index) { Ok(values) } else { self.absent(index) }
    }

    /// Reads an input with `read`, one of the functions above, where it is present.
    pub(crate) fn optional<T>(
        &self,
        index: usize,
        read: fn(&Self, usize) -> Result<T, Failure>,
    ) -> Result<Option<T>, Failure> {
        if self.elements(index).is_some() { read(self, index).map(Some) } else { Ok(None) }
    }

    fn elements(&self, index: usize) -> Option<Elements<'a>> {
        self.tensor(index).map(|tensor| tensor.elements)
    }

    fn tensor(&self, index: usize) -> Option<&Tensor<'a>> {
        self.tensors.get(index)?.as_ref()
    }

    fn absent<T>(&self, index: usize) -> Result<T, Failure> {
        Err(Failure::argument(format!("input `{}` is absent", self.operator.inputs[index].name)))
    }

    /// Takes an input away whose memory is exactly `range`, so that an output can have it.
    fn give_up(&mut self, index: usize, range: &Range<usize>) {
        if let Some(tensor) = self.tensors.get_mut(index) {
            tensor.take_if(|tensor| tensor.elements.addresses() == *range);
        }
    }

    /// Name of an input whose memory meets `range`.
    fn sharing(&self, range: &Range<usize>) -> Option<&'static str> {
        let mut parameters = self.operator.inputs.iter().zip(&self.tensors);
        let meets = |tensor: &Tensor<'_>| meet(&tensor.elements.addresses(), range);
        parameters.find(|(_, tensor)| tensor.as_ref().is_some_and(meets)).map(|(parameter, _)| parameter.name)
    }
}

/// Refuses scales that are not those of a matrix of `integers`: their number may be the same.
fn check_scales(integers: IntegerType, name: &str, matrix: Shape, scales: Shape) -> Result<(), Failure> {
    let (matrix, found) = (matrix.as_slice(), scales.as_slice());
    if integers.fits(found, matrix) {
        return Ok(());
    }
    let expected = integers.scale_shape(matrix);
    Err(Failure::argument(format!("input `{name}` of {integers} weights must be {expected:?}, found {found:?}")))
}

impl<'a> Elements<'a> {
    /// The type of integers that these are, if they may be a matrix.
    fn integers(self) -> Option<IntegerType> {
        match self {
            Self::Byte(_) => Some(IntegerType::Int8),
            Self::Nibbles(_) => Some(IntegerType::Int4),
            _ => None,
        }
    }

    /// A matrix as a kernel takes it; `None` where it holds no weights, has no scales and needs them, or has scales and
    /// needs none.
    pub(crate) fn weights(self, scales: Option<Self>) -> Option<WeightData<'a>> {
        match (self, scales) {
            (Self::Float(values), None) => Some(WeightData::F32(values)),
            (Self::Half(values), None) => Some(WeightData::F16(values)),
            (Self::Brain(values), None) => Some(WeightData::Bf16(values)),
            (Self::Byte(values), Some(Self::Float(scales))) => Some(WeightData::I8 { values, scales }),
            (Self::Nibbles(values), Some(Self::Brain(scales))) => Some(WeightData::I4(Int4 { values, scales })),
            _ => None,
        }
    }

    fn addresses(&self) -> Range<usize> {
        match self {
            Self::Float(values) => addresses(values),
            Self::Half(values) => addresses(values),
            Self::Brain(values) => addresses(values),
            Self::Byte(values) => addresses(values),
            Self::Nibbles(values) => addresses(values),
            Self::Int(values) => addresses(values),
            Self::Long(values) => addresses(values),
        }
    }
}

fn addresses<T>(values: &[T]) -> Range<usize> {
    let range = values.as_ptr_range();
    range.start.addr()..range.end.addr()
}

fn meet(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// The right to allocate the outputs of one call, once.
struct OutputSlots<'a> {
    api: Api,
    raw: *mut OrtKernelContext,
    operator: &'a Operator,
    types: NodeTypes,
    lifetime: PhantomData<&'a OrtKernelContext>,
}

/// The elements of an output.
pub(crate) enum Buffer<'a> {
    Float(&'a mut [f32]),
    Half(&'a mut [f16]),
    Long(&'a mut [i64]),
}

/// Outputs of one call, by position; each can be taken once.
pub(crate) struct Outputs<'a> {
    operator: &'a Operator,
    buffers: Vec<Option<Buffer<'a>>>,
}

impl<'a> OutputSlots<'a> {
    /// See [`Call::allocate`]; nobody has read from `inputs` before.
    fn allocate(
        self,
        inputs: &mut Inputs<'_>,
        shapes: &[impl Deref<Target = [usize]>],
        in_place: &[(usize, usize)],
    ) -> Result<Outputs<'a>, Failure> {
        let mut buffers = Vec::with_capacity(shapes.len());
        let mut used: Vec<Range<usize>> = Vec::new();
        for (index, (parameter, shape)) in self.operator.outputs.iter().zip(shapes).enumerate() {
            // SAFETY: `raw` is the context of a running call.
            let data = unsafe { output_memory(self.api, self.raw, index, shape) }?;
            let len: usize = shape.iter().product();
            if data.is_null() || len == 0 {
                buffers.push(None);
                continue;
            }
            let kind = Kind::of(parameter.element, self.types);
            check_aligned("output", parameter, data, kind.bytes())?;
            let range = data.addr()..data.addr() + len * kind.bytes();
            if let Some((input, _)) = in_place.iter().find(|(_, output)| *output == index) {
                inputs.give_up(*input, &range);
            }
            if let Some(input) = inputs.sharing(&range) {
                return Err(Failure::argument(format!(
                    "output `{}` shares memory with input `{input}`; bind them to different buffers",
                    parameter.name
                )));
            }
            if used.iter().any(|other| meet(other, &range)) {
                return Err(Failure::argument(format!("output `{}` shares memory with another", parameter.name)));
            }
            used.push(range);
            // SAFETY: the runtime allocated `len` elements of this type, which are aligned; they meet no input that is
            // still there and no other output, `allocate` cannot run twice, and no slice of an input has left `inputs`
            // yet. Nobody need have written them since, but they come from code that the compiler does not see, so it
            // takes their bytes for initialised, every pattern of them is a number, and kernels write an element before
            // they read it.
            buffers.push(Some(unsafe {
                match kind {
                    Kind::Float(FloatType::F32) => Buffer::Float(slice_mut(data, len)),
                    Kind::Float(FloatType::F16) => Buffer::Half(slice_mut(data, len)),
                    Kind::Int64 => Buffer::Long(slice_mut(data, len)),
                    Kind::Float(FloatType::Bf16) | Kind::Integer(_) | Kind::Int32 => {
                        let text = format!("output `{}` is of a type that no kernel writes", parameter.name);
                        return Err(Failure { fault: Fault::Bug, text });
                    }
                }
            }));
        }
        Ok(Outputs { operator: self.operator, buffers })
    }
}

impl<'a> Outputs<'a> {
    pub(crate) fn required<T: Activation>(&mut self, index: usize) -> Result<&'a mut [T], Failure> {
        match self.activations(index)? {
            Some(values) => Ok(values),
            None => Err(Failure::argument(format!("output `{}` is absent", self.operator.outputs[index].name))),
        }
    }

    pub(crate) fn activations<T: Activation>(&mut self, index: usize) -> Result<Option<&'a mut [T]>, Failure> {
        match self.take(index) {
            None => Ok(None),
            Some(buffer) => T::of_mut(buffer).map_or_else(|| self.other_type(index), |values| Ok(Some(values))),
        }
    }

    pub(crate) fn floats(&mut self, index: usize) -> Result<Option<&'a mut [f32]>, Failure> {
        self.activations(index)
    }

    pub(crate) fn longs(&mut self, index: usize) -> Result<Option<&'a mut [i64]>, Failure> {
        match self.take(index) {
            None => Ok(None),
            Some(Buffer::Long(values)) => Ok(Some(values)),
            Some(_) => self.other_type(index),
        }
    }

    fn take(&mut self, index: usize) -> Option<Buffer<'a>> {
        self.buffers.get_mut(index).and_then(Option::take)
    }

    fn other_type<T>(&self, index: usize) -> Result<T, Failure> {
        let text = format!("output `{}` has another element type", self.operator.outputs[index].name);
        Err(Failure { fault: Fault::Bug, text })
    }
}

#[cfg(test)]
mod tests;
