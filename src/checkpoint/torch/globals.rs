//! The few classes and functions whose meaning is known. None of them is ever called.

use crate::{checkpoint::dtype::Dtype, files::escaped};

/// Module and name.
pub(super) type Global<'a> = (&'a str, &'a str);

pub(super) const ORDERED_DICT: Global<'_> = ("collections", "OrderedDict");
pub(super) const NAMESPACE: Global<'_> = ("argparse", "Namespace");

/// How a function makes a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rebuild {
    /// From storage, offset, shape and strides.
    Tensor,
    /// As `Tensor`, and the seventh argument is the element type.
    TypedTensor,
    /// From another tensor, its first argument.
    Parameter,
    /// By another of these functions: function, class, its arguments, state.
    FromType,
}

/// The function that makes tensors under this name.
pub(super) fn rebuild(global: Global<'_>) -> Option<Rebuild> {
    match global {
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Some(Rebuild::Tensor),
        ("torch._utils", "_rebuild_tensor_v3") => Some(Rebuild::TypedTensor),
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Some(Rebuild::Parameter),
        ("torch._tensor", "_rebuild_from_type_v2") => Some(Rebuild::FromType),
        _ => None,
    }
}

/// What a tensor is that PyTorch makes with this function, where its values are not read.
pub(super) fn unread((module, name): Global<'_>) -> Option<&'static str> {
    if module != "torch._utils" {
        return None;
    }
    Some(match name {
        "_rebuild_qtensor" => "is quantized",
        "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor" => "is sparse",
        "_rebuild_nested_tensor" => "is nested",
        "_rebuild_meta_tensor_no_storage" => "is on the device `meta`, without values",
        "_rebuild_wrapper_subclass" => "is of a subclass of torch.Tensor",
        "_rebuild_device_tensor_from_numpy" | "_rebuild_device_tensor_from_cpu_tensor" => "is on an accelerator",
        _ => return None,
    })
}

/// Whether a class is `torch.Tensor` or `torch.nn.Parameter`.
pub(super) fn is_tensor_class(global: Global<'_>) -> bool {
    matches!(global, ("torch", "Tensor") | ("torch.nn.parameter", "Parameter"))
}

/// What a storage class says about its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Elements {
    /// They have this type.
    Typed(Dtype),
    /// Nothing: it counts bytes, and the tensor states the type.
    Bytes,
    /// They have a type that cannot be described.
    Unknown,
}

/// The storage class under this name.
pub(super) fn storage(global: Global<'_>) -> Option<Elements> {
    let (module, name) = global;
    if module == "torch.storage" {
        return matches!(name, "UntypedStorage" | "TypedStorage").then_some(Elements::Bytes);
    }
    if module != "torch" || !name.ends_with("Storage") {
        return None;
    }
    let dtype = match name {
        "UntypedStorage" => return Some(Elements::Bytes),
        "DoubleStorage" => Dtype::F64,
        "FloatStorage" => Dtype::F32,
        "HalfStorage" => Dtype::F16,
        "BFloat16Storage" => Dtype::BF16,
        "LongStorage" => Dtype::I64,
        "IntStorage" => Dtype::I32,
        "ShortStorage" => Dtype::I16,
        "CharStorage" => Dtype::I8,
        "ByteStorage" => Dtype::U8,
        "BoolStorage" => Dtype::Bool,
        "ComplexFloatStorage" => Dtype::C64,
        _ => return Some(Elements::Unknown),
    };
    Some(Elements::Typed(dtype))
}

/// The element type under this name.
pub(super) fn dtype((module, name): Global<'_>) -> Option<Dtype> {
    if module != "torch" {
        return None;
    }
    Some(match name {
        "float64" => Dtype::F64,
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        "float8_e4m3fn" => Dtype::F8_E4M3,
        "float8_e5m2" => Dtype::F8_E5M2,
        "float8_e4m3fnuz" => Dtype::F8_E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8_E5M2Fnuz,
        "float8_e8m0fnu" => Dtype::F8_E8M0,
        "complex64" => Dtype::C64,
        "int64" => Dtype::I64,
        "int32" => Dtype::I32,
        "int16" => Dtype::I16,
        "int8" => Dtype::I8,
        "uint64" => Dtype::U64,
        "uint32" => Dtype::U32,
        "uint16" => Dtype::U16,
        "uint8" => Dtype::U8,
        "bool" => Dtype::Bool,
        _ => return None,
    })
}

/// Whether the description of tensors may name this global.
pub(super) fn is_allowed(global: Global<'_>) -> bool {
    global == ORDERED_DICT
        || rebuild(global).is_some()
        || is_tensor_class(global)
        || storage(global).is_some()
        || dtype(global).is_some()
}

/// A global as messages show it: dotted, escaped, cut where it is long.
pub(super) fn shown((module, name): Global<'_>) -> String {
    const LONGEST: usize = 160;
    escaped(&format!("{module}.{name}"), LONGEST)
}
