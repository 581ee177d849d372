//! Types and dimensions of tensors, without an allocation.

use std::ffi::c_void;
use std::ptr::null_mut;

use moa_schema::{NodeTypes, Parameter};
use ort_sys::{ONNXTensorElementDataType, OrtKernelContext, OrtTensorTypeAndShapeInfo, OrtValue};

use super::api::{Api, ort, ort_plain};
use super::kind::{element_code, element_name};
use crate::failure::Failure;

/// Most dimensions of a tensor; the operators' own have fewer.
pub(super) const MAX_RANK: usize = 8;

/// The dimensions of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    rank: usize,
    dims: [usize; MAX_RANK],
}

impl Shape {
    #[cfg(test)]
    pub(crate) fn of(sizes: &[usize]) -> Self {
        let mut dims = [0; MAX_RANK];
        dims[..sizes.len()].copy_from_slice(sizes);
        Self { rank: sizes.len(), dims }
    }

    pub(crate) fn as_slice(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

/// The shape of a tensor that has the parameter's type of element.
///
/// # Safety
///
/// `value` must be a tensor.
pub(super) unsafe fn checked_shape(
    api: Api,
    value: *const OrtValue,
    parameter: &Parameter,
    types: NodeTypes,
) -> Result<Shape, Failure> {
    // SAFETY: by the caller's promise.
    let (code, shape) = unsafe { type_and_shape(api, value, parameter.name) }?;
    let wanted = element_code(parameter.element, types) as i32;
    if code == wanted {
        return Ok(shape);
    }
    let (name, wanted, found) = (parameter.name, element_name(wanted), element_name(code));
    Err(Failure::argument(format!("input `{name}` must hold {wanted} elements, found {found}")))
}

/// Element code and shape of the input `name`.
///
/// # Safety
///
/// `value` must be a tensor.
unsafe fn type_and_shape(api: Api, value: *const OrtValue, name: &str) -> Result<(i32, Shape), Failure> {
    let mut info = null_mut();
    // SAFETY: `value` is a tensor; `info` is ours until it is released below.
    unsafe { ort!(api, GetTensorTypeAndShape(value, &mut info)) }.check()?;
    // SAFETY: `info` was made above.
    let result = unsafe { read_info(api, info, name) };
    // SAFETY: `info` was made above and is not used again.
    unsafe { ort_plain!(api, ReleaseTensorTypeAndShapeInfo(info)) };
    result
}

/// Element code and shape that an info tells of the input `name`.
///
/// # Safety
///
/// `info` must be an info of the runtime of `api` that is not released yet.
unsafe fn read_info(api: Api, info: *mut OrtTensorTypeAndShapeInfo, name: &str) -> Result<(i32, Shape), Failure> {
    let (mut code, mut rank) = (0i32, 0);
    let code_out = (&raw mut code).cast::<ONNXTensorElementDataType>();
    // SAFETY: as above. The code is kept as the i32 that a C enum is: a newer runtime may know more codes.
    unsafe { ort!(api, GetTensorElementType(info, code_out)) }.check()?;
    // SAFETY: by the caller's promise.
    unsafe { ort!(api, GetDimensionsCount(info, &mut rank)) }.check()?;
    let (mut shape, mut dims) = (Shape { rank, dims: [0; MAX_RANK] }, [0i64; MAX_RANK]);
    if rank > MAX_RANK {
        return Err(Failure::argument(format!("input `{name}` has {rank} dimensions; the most are {MAX_RANK}")));
    }
    // SAFETY: by the caller's promise; `dims` holds `rank` elements.
    unsafe { ort!(api, GetDimensions(info, dims.as_mut_ptr(), rank)) }.check()?;
    for (size, dim) in shape.dims.iter_mut().zip(&dims[..rank]) {
        let negative = |_| Failure::runtime(format!("input `{name}` has the shape {:?}", &dims[..rank]));
        *size = usize::try_from(*dim).map_err(negative)?;
    }
    Ok((code, shape))
}

/// Memory of output `index` of this shape, null where the node does not have it.
///
/// # Safety
///
/// `raw` must be the context of a running call.
pub(super) unsafe fn output_memory(
    api: Api,
    raw: *mut OrtKernelContext,
    index: usize,
    shape: &[usize],
) -> Result<*mut c_void, Failure> {
    let refused = || Failure::argument(format!("an output cannot have the shape {shape:?}"));
    let mut dims = [0i64; MAX_RANK];
    let dims = dims.get_mut(..shape.len()).ok_or_else(refused)?;
    for (out, &dim) in dims.iter_mut().zip(shape) {
        *out = i64::try_from(dim).map_err(|_| refused())?;
    }
    let (mut count, mut value, mut data) = (0, null_mut(), null_mut());
    // SAFETY: by the caller's promise; `dims` holds as many elements as said; an absent output yields null.
    unsafe {
        ort!(api, KernelContext_GetOutputCount(raw, &mut count)).check()?;
        if index < count {
            ort!(api, KernelContext_GetOutput(raw, index, dims.as_ptr(), dims.len(), &mut value)).check()?;
        }
        if !value.is_null() {
            ort!(api, GetTensorMutableData(value, &mut data)).check()?;
        }
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use ort_sys::{OrtApi, OrtStatusPtr};

    use super::super::api::tests::fake;
    use super::*;

    /// Rank 3 with one dimension that is not told.
    unsafe extern "system" fn dims(_: *const OrtTensorTypeAndShapeInfo, out: *mut i64, rank: usize) -> OrtStatusPtr {
        for (index, dim) in [4, 5, -1].into_iter().enumerate().take(rank) {
            // SAFETY: called with room for `rank` numbers.
            unsafe { *out.add(index) = dim };
        }
        OrtStatusPtr(null_mut())
    }

    unsafe extern "system" fn element_type(
        _: *const OrtTensorTypeAndShapeInfo,
        out: *mut ONNXTensorElementDataType,
    ) -> OrtStatusPtr {
        // SAFETY: called with a place for the answer.
        unsafe { *out = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT };
        OrtStatusPtr(null_mut())
    }

    /// The rank stands where the info would be.
    unsafe extern "system" fn rank(info: *const OrtTensorTypeAndShapeInfo, out: *mut usize) -> OrtStatusPtr {
        // SAFETY: called with a place for the answer.
        unsafe { *out = info.addr() };
        OrtStatusPtr(null_mut())
    }

    #[test]
    fn shapes_are_read_and_bounded() {
        let api = fake(OrtApi {
            GetTensorElementType: element_type,
            GetDimensionsCount: rank,
            GetDimensions: dims,
            ..ort_sys::stub::api()
        });
        // SAFETY: the fake runtime does not look behind the info.
        let read = |rank| unsafe { read_info(api, std::ptr::without_provenance_mut(rank), "key") };
        for rank in 0..3 {
            let (code, shape) = read(rank).unwrap();
            assert_eq!((code, shape.as_slice()), (1, &[4, 5][..rank]));
        }
        assert_eq!(read(3).unwrap_err(), Failure::runtime("input `key` has the shape [4, 5, -1]"));
        assert_eq!(read(9).unwrap_err(), Failure::argument("input `key` has 9 dimensions; the most are 8"));
    }
}
