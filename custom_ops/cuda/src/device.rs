//! What a plan depends on besides shapes.

use moa_schema::{FloatType, MatrixType, NodeTypes};

/// Element type of activations and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Element {
    /// Every type, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// The element type of a node whose activations and weights have one type; `None` where they differ, which these
    /// kernels do not take.
    pub fn of(types: NodeTypes) -> Option<Self> {
        let element = match types.activations {
            FloatType::F32 => Self::F32,
            FloatType::F16 => Self::F16,
            FloatType::Bf16 => Self::Bf16,
        };
        (types.weights == MatrixType::Float(types.activations)).then_some(element)
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Name of the module that holds the kernels of this type.
    pub const fn module(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// Properties of a GPU, as the driver states them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Compute capability, `(major, minor)`: `(8, 0)` for an A100.
    ///
    /// A lower value than the device's own makes a plan for an older architecture's kernels.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of one block in bytes, after opting in
    /// (`CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`).
    pub shared_bytes_per_block: u32,
}

/// Choices between kernels, which change rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Whether products of f32 tensors may round their factors to TF32 (10 bits), where the device can.
    pub tf32: bool,
    /// Whether large products, and attention of many queries, use warpgroup products (`wgmma`) on 16-bit elements,
    /// where the device has them: compute capability 9.0; else they run the path of 8.0.
    pub wgmma: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_types_have_no_element() {
        let found: Vec<_> = NodeTypes::ALL.into_iter().filter_map(Element::of).collect();
        assert_eq!(found, [Element::F32, Element::F16]);
    }
}
