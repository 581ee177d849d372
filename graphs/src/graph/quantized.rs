//! Trained matrices in integers: their scales, and the integers block by block.

use std::{
    iter,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use moa_schema::{BLOCK, IntegerType};

use super::{Blocks, Buffers, WeightExpr};
use crate::{
    WeightError,
    quantization::{farther, quantized, scale},
};

/// Matrices `[.., inner, columns]` that are stored in integers, with their scales; see [`crate::quantization`].
///
/// The scales are found in a pass over all weights when scales or integers are first read, and kept until the scales
/// are read.
#[derive(Debug)]
pub struct Quantization {
    expr: WeightExpr,
    integers: IntegerType,
    inner: usize,
    columns: usize,
    /// Rows of a matrix that share their scales.
    rows: usize,
    scales: Mutex<Option<Arc<Vec<f32>>>>,
}

impl Quantization {
    /// Of `expr`, whose last two axes are those of the matrices; a tensor with one axis is one row.
    pub fn new(expr: WeightExpr, integers: IntegerType) -> Self {
        let shape = expr.shape();
        let (inner, columns) = match shape.as_slice() {
            [] => (1, 1),
            [columns] => (1, *columns),
            [.., inner, columns] => (*inner, *columns),
        };
        let rows = match integers {
            IntegerType::Int8 => inner,
            IntegerType::Int4 => BLOCK,
        };
        Self { expr, integers, inner, columns, rows, scales: Mutex::default() }
    }

    /// The weights.
    pub const fn expr(&self) -> &WeightExpr {
        &self.expr
    }

    /// Type of the integers.
    pub const fn integers(&self) -> IntegerType {
        self.integers
    }

    /// Dimensions of the scales.
    pub fn scale_shape(&self) -> Vec<usize> {
        self.integers.scale_shape(&self.expr.shape())
    }

    /// The scales, row-major, for which the weights are read in blocks of `limit` elements where they are not known.
    pub(super) fn scales(&self, limit: usize, buffers: &mut Buffers) -> Result<Arc<Vec<f32>>, WeightError> {
        let mut known = self.scales.lock().unwrap_or_else(PoisonError::into_inner);
        let scales = match known.take() {
            Some(scales) => scales,
            None => Arc::new(self.find_scales(limit, buffers)?),
        };
        Ok(known.insert(scales).clone())
    }

    /// As [`Self::scales`], and forgets them: they stand behind their integers, and large models have a gigabyte of
    /// them.
    pub(super) fn last_scales(&self, limit: usize, buffers: &mut Buffers) -> Result<Arc<Vec<f32>>, WeightError> {
        let scales = self.scales(limit, buffers);
        self.scales.lock().unwrap_or_else(PoisonError::into_inner).take();
        scales
    }

    fn find_scales(&self, limit: usize, buffers: &mut Buffers) -> Result<Vec<f32>, WeightError> {
        let mut farthest = vec![0f32; self.scale_shape().iter().product()];
        let (mut blocks, mut start) = (Blocks::of_f32(&self.expr, limit, buffers), 0);
        while let Some(block) = blocks.next_block()? {
            let values = block.as_chunks::<4>().0;
            for (piece, places) in self.pieces(start..start + values.len()) {
                let values = &values[piece.start - start..piece.end - start];
                for (farthest, value) in farthest[places].iter_mut().zip(values) {
                    *farthest = farther(*farthest, f32::from_le_bytes(*value));
                }
            }
            start += values.len();
        }
        Ok(farthest.into_iter().map(|farthest| scale(self.integers, farthest)).collect())
    }

    /// Appends the integers for the weights `block`, f32, of which the first has the index `start`; each in a byte.
    #[allow(clippy::cast_sign_loss)]
    pub(super) fn append(&self, block: &[u8], start: usize, scales: &[f32], out: &mut Vec<u8>) {
        let values = block.as_chunks::<4>().0;
        for (piece, places) in self.pieces(start..start + values.len()) {
            let values = &values[piece.start - start..piece.end - start];
            let pairs = values.iter().zip(&scales[places]);
            out.extend(pairs.map(|(value, scale)| quantized(self.integers, f32::from_le_bytes(*value), *scale) as u8));
        }
    }

    /// Stores integers of [`Self::append`] as their type does: those of 4 bits two in a byte. One that has no other to
    /// share a byte with is given back, unless it `is_last`.
    pub(super) fn pack(&self, integers: &mut Vec<u8>, is_last: bool) -> Option<u8> {
        if self.integers == IntegerType::Int8 {
            return None;
        }
        let single = if is_last || integers.len().is_multiple_of(2) { None } else { integers.pop() };
        let bytes = integers.len().div_ceil(2);
        for byte in 0..bytes {
            let upper = integers.get(2 * byte + 1).map_or(0, |upper| upper << 4);
            integers[byte] = integers[2 * byte] & 0xF | upper;
        }
        integers.truncate(bytes);
        single
    }

    /// The elements `range` cut where rows end, each piece with the places of its scales.
    fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let Self { inner, columns, rows, .. } = *self;
        let scales = inner.div_ceil(rows.max(1));
        let mut at = range.start;
        iter::from_fn(move || {
            if at == range.end {
                return None;
            }
            let (row, column) = (at / columns, at % columns);
            let piece = at..range.end.min(at - column + columns);
            let scale = (row / inner * scales + row % inner / rows) * columns + column;
            at = piece.end;
            Some((piece.clone(), scale..scale + piece.len()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ops::ControlFlow,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use half::bf16;

    use super::*;
    use crate::{
        FloatType, Rounding, Runs, TensorSource, Weight,
        graph::{DType, Data},
    };

    /// Values in memory, and how many of them were read.
    struct Values(Vec<f32>, Arc<AtomicUsize>);

    impl TensorSource for Values {
        fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
            Ok(self.0.clone())
        }

        fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
            Ok(self.0.iter().map(|value| f64::from(*value)).collect())
        }

        fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
            self.1.fetch_add(runs.elements(), Ordering::Relaxed);
            for run in 0..runs.count {
                let start = runs.start + run * runs.stride;
                to.append(&self.0[start..start + runs.length], out).map_err(|fault| WeightError::NonFinite {
                    origin: "memory".into(),
                    tensor: "w".into(),
                    count: 1,
                    first: start + fault.index,
                })?;
            }
            Ok(())
        }

        fn stored_type(&self) -> &'static str {
            "F32"
        }

        fn stored_bytes(&self) -> u64 {
            self.0.len() as u64 * 4
        }

        fn read_bytes(&self, _: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
            panic!("values are read by runs")
        }
    }

    fn stored(shape: &[usize], values: Vec<f32>) -> (WeightExpr, Arc<AtomicUsize>) {
        let read = Arc::new(AtomicUsize::new(0));
        let source = Arc::new(Values(values, read.clone()));
        (WeightExpr::Stored(Weight::new("w", shape.to_vec(), "memory", source)), read)
    }

    /// Values of either sign and of many magnitudes.
    fn scattered(shape: &[usize]) -> WeightExpr {
        let mut state = 12345u32;
        let value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(state & 0x8fff_ffff | 0x3800_0000)
        };
        stored(shape, std::iter::repeat_with(value).take(shape.iter().product()).collect()).0
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// The scale of weights that share one.
    fn naive_scale(integers: IntegerType, weights: &[f32]) -> f32 {
        let largest = weights.iter().map(|weight| weight.abs()).fold(0.0, f32::max);
        match integers {
            IntegerType::Int8 => largest / 127.0,
            IntegerType::Int4 if weights.contains(&largest) => bf16::from_f32(largest / -8.0).to_f32(),
            IntegerType::Int4 => bf16::from_f32(largest / 8.0).to_f32(),
        }
    }

    /// Integers and scales of matrices `[.., inner, columns]`, one by one.
    fn naive(expr: &WeightExpr, integers: IntegerType) -> (Vec<i8>, Vec<f32>) {
        let shape = expr.shape();
        let (inner, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let (rows, least, most) = match integers {
            IntegerType::Int8 => (inner, -127.0, 127.0),
            IntegerType::Int4 => (32, -8.0, 7.0),
        };
        let values = floats(&Data::Weight(expr.clone(), FloatType::F32).to_bytes().unwrap());
        let (mut stored, mut scales) = (vec![0; values.len()], Vec::new());
        for start in (0..values.len()).step_by(inner * columns) {
            for first in (0..inner).step_by(rows) {
                for column in 0..columns {
                    let places = (first..inner.min(first + rows)).map(|row| start + row * columns + column);
                    let weights: Vec<_> = places.clone().map(|place| values[place]).collect();
                    let scale = naive_scale(integers, &weights);
                    scales.push(scale);
                    for place in places.filter(|_| scale != 0.0) {
                        stored[place] = (values[place] / scale).round_ties_even().clamp(least, most) as i8;
                    }
                }
            }
        }
        (stored, scales)
    }

    /// What ONNX has as raw data of integers.
    fn stored_bytes(values: &[i8], integers: IntegerType) -> Vec<u8> {
        match integers {
            IntegerType::Int8 => values.iter().map(|value| *value as u8).collect(),
            IntegerType::Int4 => {
                let half = |value: &i8| *value as u8 & 0xF;
                values.chunks(2).map(|pair| half(&pair[0]) | pair.get(1).map_or(0, half) << 4).collect()
            }
        }
    }

    fn scale_bytes(scales: &[f32], integers: IntegerType) -> Vec<u8> {
        let mut bytes = Vec::new();
        integers.scales().append(scales, &mut bytes).unwrap();
        bytes
    }

    /// Both initializers of one weight.
    fn pair(expr: &WeightExpr, integers: IntegerType) -> [Data; 2] {
        let matrices = Arc::new(Quantization::new(expr.clone(), integers));
        [Data::Integers(matrices.clone()), Data::Scales(matrices)]
    }

    fn in_blocks(data: &Data, limit: usize) -> Result<Vec<u8>, WeightError> {
        let mut buffers = Buffers::default();
        let (mut blocks, mut bytes) = (data.blocks(&mut buffers), Vec::new());
        blocks.limit = limit;
        while let Some(block) = blocks.next_block()? {
            assert!(!block.is_empty());
            bytes.extend_from_slice(block);
        }
        Ok(bytes)
    }

    fn expressions() -> Vec<WeightExpr> {
        let side_by_side = [[5, 7], [3, 7]].map(|shape| scattered(&shape).transposed(&[1, 0]));
        vec![
            scattered(&[2, 5, 37]),
            scattered(&[2, 37, 5]).transposed(&[0, 2, 1]),
            scattered(&[3, 70, 40]).transposed(&[0, 2, 1]),
            scattered(&[9, 4]),
            WeightExpr::Columns(side_by_side.to_vec()),
            scattered(&[4, 6, 5]).transposed(&[2, 1, 0]),
            scattered(&[3, 33, 3]),
            scattered(&[5, 7, 3]).transposed(&[0, 2, 1]),
            scattered(&[3, 3, 65]).transposed(&[0, 2, 1]),
            scattered(&[64, 5]),
            scattered(&[1, 1]),
            WeightExpr::Columns([[3, 35], [4, 35]].map(|shape| scattered(&shape).transposed(&[1, 0])).to_vec()),
        ]
    }

    #[test]
    fn integers_and_scales_do_not_depend_on_blocks() {
        for (expr, integers) in expressions().iter().flat_map(|expr| IntegerType::ALL.map(|integers| (expr, integers)))
        {
            let (values, scales) = naive(expr, integers);
            let expected = [stored_bytes(&values, integers), scale_bytes(&scales, integers)];
            for limit in [1, 2, 7, 64, 100, 1500, 1 << 20] {
                for reverse in [false, true] {
                    let [first, second] = pair(expr, integers);
                    let order = if reverse { [&second, &first] } else { [&first, &second] };
                    let mut found = order.map(|data| in_blocks(data, limit).unwrap());
                    if reverse {
                        found.reverse();
                    }
                    assert!(found == expected, "{expr:?} as {integers} in blocks of {limit}");
                }
            }
        }
    }

    #[test]
    fn of_two_weights_with_the_largest_magnitude_the_positive_one_is_stored_exactly() {
        for (weights, expected) in [([1.0, -1.0, 0.25], [0x78, 0x0E]), ([-1.0, 1.0, 0.25], [0x87, 0x0E])] {
            let [integers, scales] = pair(&stored(&[3, 1], weights.to_vec()).0, IntegerType::Int4);
            assert_eq!(integers.to_bytes().unwrap(), expected);
            assert_eq!(scales.to_bytes().unwrap(), scale_bytes(&[-0.125], IntegerType::Int4));
        }
    }

    #[test]
    fn data_tells_shapes_and_types() {
        for (type_of, kinds, shape, sizes) in [
            (IntegerType::Int8, [DType::Int8, DType::Float32], vec![2, 37], [370, 296]),
            (IntegerType::Int4, [DType::Int4, DType::Bfloat16], vec![2, 1, 37], [185, 148]),
        ] {
            let [integers, scales] = pair(&scattered(&[2, 37, 5]).transposed(&[0, 2, 1]), type_of);
            assert_eq!((integers.shape(), scales.shape()), (vec![2, 5, 37], shape));
            assert_eq!([integers.dtype(), scales.dtype()], kinds);
            assert_eq!([integers, scales].map(|data| data.to_bytes().unwrap().len()), sizes);
        }
        let [empty, zeros] = pair(&scattered(&[2, 0, 3]), IntegerType::Int8);
        assert_eq!((empty.to_bytes().unwrap(), zeros.to_bytes().unwrap()), (vec![], vec![0; 24]));
        for data in pair(&scattered(&[2, 0, 3]), IntegerType::Int4) {
            assert!(data.to_bytes().unwrap().is_empty());
        }
    }

    #[test]
    fn a_weight_is_read_once_for_scales_and_once_for_integers() {
        let (expr, read) = stored(&[2, 3], vec![1.0, 0.0, -4.0, -2.0, 0.0, 1.0]);
        let [integers, scales] = pair(&expr, IntegerType::Int8);
        let expected = [2.0 / 127.0, 0.0, 4.0 / 127.0];
        for reads in [12, 18] {
            assert_eq!(integers.to_bytes().unwrap(), [64, 0, -127i8 as u8, -127i8 as u8, 0, 32]);
            assert_eq!(read.load(Ordering::Relaxed), reads);
        }
        for reads in [18, 24] {
            assert_eq!(floats(&scales.to_bytes().unwrap()), expected);
            assert_eq!(read.load(Ordering::Relaxed), reads);
        }
    }

    #[test]
    fn a_weight_that_is_no_number_is_the_usual_error() {
        let mut values = vec![0.5; 60];
        values[41] = f32::NAN;
        let expr = stored(&[2, 5, 6], values).0.transposed(&[0, 2, 1]);
        for data in IntegerType::ALL.into_iter().flat_map(|integers| pair(&expr, integers)) {
            for limit in [7, 1000] {
                let found = in_blocks(&data, limit);
                assert!(matches!(found, Err(WeightError::NonFinite { first: 41, .. })), "{found:?}");
            }
        }
    }
}
