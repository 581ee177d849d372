//! Values of a constant that are others than the checkpoint's.

use half::{bf16, f16};

use crate::onnx::proto::tensor_proto::DataType;

/// How many values differ, and the first of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OtherValues {
    /// Its place in row-major order.
    pub(super) first: usize,
    pub(super) found: String,
    pub(super) expected: String,
    pub(super) count: usize,
}

impl OtherValues {
    /// The values of a block that are others, in two halves of little-endian bytes of `kind`; the block begins at value
    /// `start`.
    pub(super) fn of_block(kind: DataType, start: usize, [found, expected]: [&[u8]; 2]) -> Option<Self> {
        if found == expected {
            return None;
        }
        let width = kind.bits()?;
        let values = 8 * expected.len() / width;
        let mut others = (0..values).filter(|place| {
            let [found, expected] = [found, expected].map(|bytes| value_at(bytes, width, *place));
            found != expected
        });
        let first = others.next()?;
        let [found, expected] = [found, expected].map(|bytes| shown(kind, value_at(bytes, width, first)));
        Some(Self { first: start + first, found, expected, count: 1 + others.count() })
    }
}

/// The bits of value `place`, each `width` bits wide.
fn value_at(bytes: &[u8], width: usize, place: usize) -> u64 {
    let (start, end) = (place * width, (place + 1) * width);
    let bytes = bytes.get(start / 8..end.div_ceil(8)).unwrap_or_default();
    let whole = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    (whole >> (start % 8)) & (u64::MAX >> (64 - width.clamp(1, 64)))
}

fn shown(kind: DataType, bits: u64) -> String {
    let [a, b, c, d, ..] = bits.to_le_bytes();
    match kind {
        DataType::Float => format!("{:?}", f32::from_le_bytes([a, b, c, d])),
        DataType::Double => format!("{:?}", f64::from_bits(bits)),
        DataType::Float16 => format!("{:?}", f16::from_le_bytes([a, b])),
        DataType::Bfloat16 => format!("{:?}", bf16::from_le_bytes([a, b])),
        DataType::Int8 => i8::from_le_bytes([a]).to_string(),
        DataType::Int4 => (i8::from_le_bytes([a << 4]) >> 4).to_string(),
        _ => i64::from_le_bytes(bits.to_le_bytes()).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_other_value_is_shown_in_its_type() {
        let of = |kind, found: &[u8], expected: &[u8]| {
            let others = OtherValues::of_block(kind, 10, [found, expected]).unwrap();
            (others.first, others.found, others.expected, others.count)
        };
        let told = |first, found: &str, expected: &str, count| (first, found.to_owned(), expected.to_owned(), count);
        let floats = |values: [f32; 3]| values.map(f32::to_le_bytes).concat();
        let (found, expected) = (floats([1.0, 1e-5, f32::NAN]), floats([1.0, 1e-6, 3.0]));
        assert_eq!(of(DataType::Float, &found, &expected), told(11, "1e-5", "1e-6", 2));
        assert_eq!(of(DataType::Float16, &[0, 0x3c, 0, 0xbc], &[0, 0x3c, 0, 0x3c]), told(11, "-1.0", "1.0", 1));
        assert_eq!(of(DataType::Bfloat16, &[0x80, 0x3f], &[0x80, 0xbf]), told(10, "1.0", "-1.0", 1));
        assert_eq!(of(DataType::Int8, &[0xff], &[1]), told(10, "-1", "1", 1));
        assert_eq!(of(DataType::Int4, &[0xf7, 0x21], &[0x77, 0x31]), told(11, "-1", "7", 2));
        assert_eq!(of(DataType::Int64, &[0xff; 8], &[0; 8]), told(10, "-1", "0", 1));
        assert_eq!(OtherValues::of_block(DataType::Int4, 0, [&[3], &[3]]), None);
    }
}
