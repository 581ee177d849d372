//! Constant tensors: their one data field, its type and its size.

use prost::bytes::{BufMut, Bytes, BytesMut};

use super::error::{Fault, shown};
use crate::onnx::proto::TensorProto;
use crate::onnx::proto::tensor_proto::{DataLocation, DataType};

impl DataType {
    /// Bits of one value; `None` where the values have no fixed size or no agreed layout.
    pub const fn bits(self) -> Option<usize> {
        Some(match self {
            Self::Undefined | Self::String | Self::Float6e2m3 | Self::Float6e3m2 => return None,
            Self::Uint2 | Self::Int2 => 2,
            Self::Uint4 | Self::Int4 | Self::Float4e2m1 => 4,
            Self::Uint8
            | Self::Int8
            | Self::Bool
            | Self::Float8e4m3fn
            | Self::Float8e4m3fnuz
            | Self::Float8e5m2
            | Self::Float8e5m2fnuz
            | Self::Float8e8m0 => 8,
            Self::Uint16 | Self::Int16 | Self::Float16 | Self::Bfloat16 => 16,
            Self::Float | Self::Int32 | Self::Uint32 => 32,
            Self::Int64 | Self::Double | Self::Uint64 | Self::Complex64 => 64,
            Self::Complex128 => 128,
        })
    }

    /// Element type as messages name it.
    pub const fn type_name(self) -> &'static str {
        match self {
            Self::Undefined => "undefined",
            Self::Float => "float32",
            Self::Uint8 => "uint8",
            Self::Int8 => "int8",
            Self::Uint16 => "uint16",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::String => "string",
            Self::Bool => "bool",
            Self::Float16 => "float16",
            Self::Double => "float64",
            Self::Uint32 => "uint32",
            Self::Uint64 => "uint64",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
            Self::Bfloat16 => "bfloat16",
            Self::Float8e4m3fn => "float8e4m3fn",
            Self::Float8e4m3fnuz => "float8e4m3fnuz",
            Self::Float8e5m2 => "float8e5m2",
            Self::Float8e5m2fnuz => "float8e5m2fnuz",
            Self::Uint4 => "uint4",
            Self::Int4 => "int4",
            Self::Float4e2m1 => "float4e2m1",
            Self::Float8e8m0 => "float8e8m0",
            Self::Uint2 => "uint2",
            Self::Int2 => "int2",
            Self::Float6e2m3 => "float6e2m3",
            Self::Float6e3m2 => "float6e3m2",
        }
    }
}

/// Whether the values of a tensor may lie in a file of their own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum External {
    Allowed,
    Refused,
}

/// The element type that `number` stands for.
pub(super) fn data_type(number: i32) -> Result<DataType, Fault> {
    match DataType::try_from(number) {
        Ok(DataType::Undefined) => Err(Fault::malformed("has no element type".into())),
        Ok(data_type) => Ok(data_type),
        Err(_) => Err(Fault::malformed(format!("has the unknown element type {number}"))),
    }
}

/// Checks a tensor.
pub(super) fn check(tensor: &TensorProto, external: External) -> Result<(), Fault> {
    let name = || shown(&tensor.name);
    let data_type = data_type(tensor.data_type).map_err(|fault| fault.within(&format!("tensor {}", name())))?;
    if tensor.segment.is_some() {
        return Err(Fault::unsupported(format!("tensor {} is stored in segments", name())));
    }
    let elements = elements(tensor)?;
    let stored_externally = tensor.data_location == DataLocation::External as i32;
    if stored_externally && external == External::Refused {
        return Err(Fault::unsupported(format!("tensor {} has external data, but is no weight of the graph", name())));
    }
    if stored_externally == tensor.external_data.is_empty() || DataLocation::try_from(tensor.data_location).is_err() {
        return Err(Fault::malformed(format!("tensor {}: data location and external data disagree", name())));
    }
    let fields = data_fields(tensor);
    match fields.as_slice() {
        [] if elements == 0 => Ok(()),
        [] => Err(Fault::malformed(format!("tensor {} has no data", name()))),
        ["external_data"] => byte_size(tensor).map(drop),
        ["raw_data"] => {
            let expected = byte_size(tensor)?;
            let found = tensor.raw_data.as_ref().map_or(0, Bytes::len);
            if found == expected {
                return Ok(());
            }
            Err(Fault::malformed(format!("tensor {} holds {found} bytes, its shape needs {expected}", name())))
        }
        [field] => check_typed(tensor, data_type, field, elements),
        _ => Err(Fault::malformed(format!("tensor {} has ambiguous data: {}", name(), fields.join(", ")))),
    }
}

fn check_typed(tensor: &TensorProto, data_type: DataType, field: &str, elements: usize) -> Result<(), Fault> {
    let (expected_field, per_value) = typed_field(data_type);
    if field != expected_field {
        let text = format!(
            "tensor {} of type {} has its values in {field}, not {expected_field}",
            shown(&tensor.name),
            data_type.type_name()
        );
        return Err(Fault::malformed(text));
    }
    let found = match field {
        "float_data" => tensor.float_data.len(),
        "double_data" => tensor.double_data.len(),
        "int32_data" => tensor.int32_data.len(),
        "int64_data" => tensor.int64_data.len(),
        "uint64_data" => tensor.uint64_data.len(),
        _ => tensor.string_data.len(),
    };
    let expected = match per_value {
        PerValue::Entries(entries) => elements.checked_mul(entries).ok_or_else(|| too_large(tensor))?,
        PerValue::Shared(values) => elements.div_ceil(values),
    };
    if found == expected {
        return Ok(());
    }
    let text = format!("tensor {} holds {found} entries, its shape needs {expected}", shown(&tensor.name));
    Err(Fault::malformed(text))
}

enum PerValue {
    Entries(usize),
    Shared(usize),
}

/// The typed field that stores values of `data_type`.
const fn typed_field(data_type: DataType) -> (&'static str, PerValue) {
    match data_type {
        DataType::Float => ("float_data", PerValue::Entries(1)),
        DataType::Complex64 => ("float_data", PerValue::Entries(2)),
        DataType::Double => ("double_data", PerValue::Entries(1)),
        DataType::Complex128 => ("double_data", PerValue::Entries(2)),
        DataType::Int64 => ("int64_data", PerValue::Entries(1)),
        DataType::Uint32 | DataType::Uint64 => ("uint64_data", PerValue::Entries(1)),
        DataType::String => ("string_data", PerValue::Entries(1)),
        DataType::Uint4 | DataType::Int4 | DataType::Float4e2m1 => ("int32_data", PerValue::Shared(2)),
        DataType::Uint2 | DataType::Int2 => ("int32_data", PerValue::Shared(4)),
        _ => ("int32_data", PerValue::Entries(1)),
    }
}

/// Names of the data fields that are set.
fn data_fields(tensor: &TensorProto) -> Vec<&'static str> {
    let fields = [
        ("external_data", !tensor.external_data.is_empty()),
        ("raw_data", tensor.raw_data.is_some()),
        ("float_data", !tensor.float_data.is_empty()),
        ("int32_data", !tensor.int32_data.is_empty()),
        ("string_data", !tensor.string_data.is_empty()),
        ("int64_data", !tensor.int64_data.is_empty()),
        ("double_data", !tensor.double_data.is_empty()),
        ("uint64_data", !tensor.uint64_data.is_empty()),
    ];
    fields.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).collect()
}

/// Number of values.
fn elements(tensor: &TensorProto) -> Result<usize, Fault> {
    let mut size = 1usize;
    for dim in &tensor.dims {
        let Ok(dim) = usize::try_from(*dim) else {
            return Err(Fault::malformed(format!("tensor {} has the dimension {dim}", shown(&tensor.name))));
        };
        size = size.checked_mul(dim).ok_or_else(|| too_large(tensor))?;
    }
    Ok(size)
}

/// Number of bytes that the values take.
pub(super) fn byte_size(tensor: &TensorProto) -> Result<usize, Fault> {
    let data_type = data_type(tensor.data_type)?;
    let Some(bits) = data_type.bits() else {
        let text = format!("tensor {} of type {} as plain bytes", shown(&tensor.name), data_type.type_name());
        return Err(Fault::unsupported(text));
    };
    let bits = elements(tensor)?.checked_mul(bits).ok_or_else(|| too_large(tensor))?;
    Ok(bits.div_ceil(8))
}

fn too_large(tensor: &TensorProto) -> Fault {
    Fault::malformed(format!("the size of tensor {} overflows", shown(&tensor.name)))
}

/// The values of a checked tensor that is not stored externally, little-endian and packed as in `raw_data`.
pub(super) fn inline_values(tensor: &TensorProto) -> Result<Bytes, Fault> {
    if let Some(raw) = &tensor.raw_data {
        return Ok(raw.clone());
    }
    let size = byte_size(tensor)?;
    let mut out = BytesMut::with_capacity(size);
    tensor.float_data.iter().for_each(|value| out.put_f32_le(*value));
    tensor.double_data.iter().for_each(|value| out.put_f64_le(*value));
    tensor.int64_data.iter().for_each(|value| out.put_i64_le(*value));
    let narrow = size.checked_div(tensor.int32_data.len()).unwrap_or(0).clamp(1, 4);
    tensor.int32_data.iter().for_each(|value| out.put_slice(&value.to_le_bytes()[..narrow]));
    let wide = size.checked_div(tensor.uint64_data.len()).unwrap_or(0).clamp(1, 8);
    tensor.uint64_data.iter().for_each(|value| out.put_slice(&value.to_le_bytes()[..wide]));
    Ok(out.freeze())
}
