//! Trained matrices in 8-bit integers: their scales, and the integers block by block.

use std::{iter, ops::Range, sync::OnceLock};

use super::{Blocks, Buffers, WeightExpr};
use crate::{
    WeightError,
    quantization::{quantized, scale},
};

/// Matrices `[.., inner, columns]` that are stored in 8-bit integers, with scales `[.., columns]`; see
/// [`crate::quantization`].
///
/// The scales are found once, in a pass over all weights, when scales or integers are first read.
#[derive(Debug)]
pub struct Quantization {
    expr: WeightExpr,
    inner: usize,
    columns: usize,
    scales: OnceLock<Vec<f32>>,
}

impl Quantization {
    /// Of `expr`, whose last two axes are those of the matrices; a tensor with one axis is one row.
    pub fn new(expr: WeightExpr) -> Self {
        let shape = expr.shape();
        let (inner, columns) = match shape.as_slice() {
            [] => (1, 1),
            [columns] => (1, *columns),
            [.., inner, columns] => (*inner, *columns),
        };
        Self { expr, inner, columns, scales: OnceLock::new() }
    }

    /// The weights.
    pub const fn expr(&self) -> &WeightExpr {
        &self.expr
    }

    /// Dimensions of the scales: those of the weights without the last but one.
    pub fn scale_shape(&self) -> Vec<usize> {
        let mut shape = self.expr.shape();
        if let Some(inner) = shape.len().checked_sub(2) {
            shape.remove(inner);
        }
        shape
    }

    /// The scales, row-major, for which the weights are read in blocks of `limit` elements where they are not known.
    pub(super) fn scales(&self, limit: usize, buffers: &mut Buffers) -> Result<&[f32], WeightError> {
        if let Some(scales) = self.scales.get() {
            return Ok(scales);
        }
        let mut largest = vec![0f32; self.scale_shape().iter().product()];
        let (mut blocks, mut start) = (Blocks::of_f32(&self.expr, limit, buffers), 0);
        while let Some(block) = blocks.next_block()? {
            let values = block.as_chunks::<4>().0;
            for (piece, columns) in self.pieces(start..start + values.len()) {
                let values = &values[piece.start - start..piece.end - start];
                for (largest, value) in largest[columns].iter_mut().zip(values) {
                    *largest = largest.max(f32::from_le_bytes(*value).abs());
                }
            }
            start += values.len();
        }
        Ok(self.scales.get_or_init(|| largest.into_iter().map(scale).collect()))
    }

    /// Appends the integers for the weights `block`, f32, of which the first has the index `start`.
    #[allow(clippy::cast_sign_loss)]
    pub(super) fn append(&self, block: &[u8], start: usize, scales: &[f32], out: &mut Vec<u8>) {
        let values = block.as_chunks::<4>().0;
        for (piece, columns) in self.pieces(start..start + values.len()) {
            let values = &values[piece.start - start..piece.end - start];
            let pairs = values.iter().zip(&scales[columns]);
            out.extend(pairs.map(|(value, scale)| quantized(f32::from_le_bytes(*value), *scale) as u8));
        }
    }

    /// The elements `range` cut where rows end, each piece with the places of its scales.
    fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (inner, columns) = (self.inner, self.columns);
        let mut at = range.start;
        iter::from_fn(move || {
            if at == range.end {
                return None;
            }
            let (row, column) = (at / columns, at % columns);
            let piece = at..range.end.min(at - column + columns);
            let scale = row / inner * columns + column;
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

    use super::*;
    use crate::{FloatType, Rounding, Runs, TensorSource, Weight, graph::Data};

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

    /// Integers and scales of matrices `[.., inner, columns]`, one by one.
    fn naive(expr: &WeightExpr) -> (Vec<i8>, Vec<f32>) {
        let shape = expr.shape();
        let (inner, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let values = floats(&Data::Weight(expr.clone(), FloatType::F32).to_bytes().unwrap());
        let (mut integers, mut scales) = (vec![0; values.len()], Vec::new());
        for start in (0..values.len()).step_by(inner * columns) {
            for column in 0..columns {
                let places = (0..inner).map(|row| start + row * columns + column);
                let largest = places.clone().map(|place| values[place].abs()).fold(0.0, f32::max);
                scales.push(largest / 127.0);
                for place in places.filter(|_| largest > 0.0) {
                    integers[place] = (values[place] / (largest / 127.0)).round_ties_even() as i8;
                }
            }
        }
        (integers, scales)
    }

    /// Both initializers of one weight.
    fn pair(expr: &WeightExpr) -> [Data; 2] {
        let matrices = Arc::new(Quantization::new(expr.clone()));
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
        ]
    }

    #[test]
    fn integers_and_scales_do_not_depend_on_blocks() {
        for expr in expressions() {
            let (integers, scales) = naive(&expr);
            for limit in [1, 2, 7, 64, 100, 1500, 1 << 20] {
                for reverse in [false, true] {
                    let [first, second] = pair(&expr);
                    let order = if reverse { [&second, &first] } else { [&first, &second] };
                    let mut found = order.map(|data| in_blocks(data, limit).unwrap());
                    if reverse {
                        found.reverse();
                    }
                    let as_integers: Vec<_> = found[0].iter().map(|byte| *byte as i8).collect();
                    assert!(as_integers == integers, "{expr:?} in blocks of {limit}");
                    assert!(floats(&found[1]) == scales, "{expr:?} in blocks of {limit}");
                }
            }
        }
    }

    #[test]
    fn data_tells_shapes_and_types() {
        let [integers, scales] = pair(&scattered(&[2, 37, 5]).transposed(&[0, 2, 1]));
        assert_eq!((integers.shape(), integers.dtype().bytes()), (vec![2, 5, 37], 1));
        assert_eq!((scales.shape(), scales.dtype().bytes()), (vec![2, 37], 4));
        assert_eq!((integers.to_bytes().unwrap().len(), scales.to_bytes().unwrap().len()), (370, 296));
        let [empty, zeros] = pair(&scattered(&[2, 0, 3]));
        assert_eq!((empty.to_bytes().unwrap(), zeros.to_bytes().unwrap()), (vec![], vec![0; 24]));
    }

    #[test]
    fn a_weight_is_read_once_for_scales_and_once_for_integers() {
        let (expr, read) = stored(&[2, 3], vec![1.0, 0.0, -4.0, -2.0, 0.0, 1.0]);
        let [integers, scales] = pair(&expr);
        let expected = [2.0 / 127.0, 0.0, 4.0 / 127.0];
        for reads in [6, 6, 12, 18] {
            if reads > 6 {
                assert_eq!(integers.to_bytes().unwrap(), [64, 0, -127i8 as u8, -127i8 as u8, 0, 32]);
            } else {
                assert_eq!(floats(&scales.to_bytes().unwrap()), expected);
            }
            assert_eq!(read.load(Ordering::Relaxed), reads);
        }
    }

    #[test]
    fn a_weight_that_is_no_number_is_the_usual_error() {
        let mut values = vec![0.5; 60];
        values[41] = f32::NAN;
        for data in pair(&stored(&[2, 5, 6], values).0.transposed(&[0, 2, 1])) {
            for limit in [7, 1000] {
                let found = in_blocks(&data, limit);
                assert!(matches!(found, Err(WeightError::NonFinite { first: 41, .. })), "{found:?}");
            }
        }
    }
}
