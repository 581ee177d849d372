//! Values of initializers in blocks of bounded size, whatever the size of the tensor.

use std::ops::Range;

use super::{
    Data, Quantization, RotaryTable, Sinusoids, WeightExpr,
    turn::{TILE, transpose},
    view::{Axis, View},
};
use crate::{FloatType, Rounding, Runs, Weight, WeightError};

/// Bytes of a block, where the order of the values allows it.
const BLOCK: usize = 24 << 20;

/// Fewest neighbouring elements that are read at once of a matrix that is too large for a block.
const SHORTEST_RUN: usize = 1 << 9;

/// The values of an initializer, little-endian, row-major, from first to last.
#[derive(Debug)]
pub struct Blocks<'a> {
    source: Source<'a>,
    elements: usize,
    /// First element of the next block.
    next: usize,
    /// Elements of a block, where the order of the values allows it.
    pub(super) limit: usize,
    buffers: &'a mut Buffers,
}

/// Memory that the blocks of one tensor after another are made in.
#[derive(Debug, Default)]
pub struct Buffers {
    block: Vec<u8>,
    scratch: Vec<u8>,
}

#[derive(Debug)]
enum Source<'a> {
    Literal(Vec<u8>),
    Weight(Plan<'a>, FloatType),
    /// With an integer that waits for the one that it shares a byte with.
    Integers(Plan<'a>, &'a Quantization, Option<u8>),
    Scales(&'a Quantization),
}

impl<'a> Blocks<'a> {
    pub(super) fn new(data: &'a Data, buffers: &'a mut Buffers) -> Self {
        let f32_limit = BLOCK / FloatType::F32.bytes();
        let (source, limit) = match data {
            Data::Literal(constant) => (Source::Literal(constant.to_bytes()), usize::MAX),
            Data::Weight(expr, to) => (Source::Weight(Plan::of(expr), *to), BLOCK / to.bytes()),
            Data::Integers(matrices) => (Source::Integers(Plan::of(matrices.expr()), matrices, None), f32_limit),
            Data::Scales(matrices) => (Source::Scales(matrices), f32_limit),
        };
        let elements = data.shape().iter().product();
        Self { source, elements, next: 0, limit, buffers }
    }

    /// The values of `expr` as f32.
    pub(super) fn of_f32(expr: &'a WeightExpr, limit: usize, buffers: &'a mut Buffers) -> Self {
        let source = Source::Weight(Plan::of(expr), FloatType::F32);
        Self { source, elements: size(expr), next: 0, limit, buffers }
    }

    /// The next bytes, at least one; `None` after the last.
    ///
    /// # Errors
    ///
    /// Where a trained weight cannot be read, or does not fit the type that it is written in.
    pub fn next_block(&mut self) -> Result<Option<&[u8]>, WeightError> {
        if self.next == self.elements {
            return Ok(None);
        }
        let start = self.next;
        match &mut self.source {
            Source::Literal(bytes) => {
                self.next = self.elements;
                Ok(Some(bytes))
            }
            Source::Weight(plan, to) => {
                self.next = plan.end_of_block(start, self.elements, self.limit);
                let Buffers { block, scratch } = &mut *self.buffers;
                block.clear();
                plan.read(start..self.next, *to, scratch, block)?;
                Ok(Some(block))
            }
            Source::Integers(plan, matrices, waiting) => {
                let scales = matrices.scales(self.limit, self.buffers)?;
                let Buffers { block, scratch } = &mut *self.buffers;
                scratch.clear();
                while scratch.is_empty() {
                    let start = self.next;
                    self.next = plan.end_of_block(start, self.elements, self.limit);
                    block.clear();
                    plan.read(start..self.next, FloatType::F32, scratch, block)?;
                    scratch.clear();
                    scratch.extend(waiting.take());
                    matrices.append(block, start, &scales, scratch);
                    *waiting = matrices.pack(scratch, self.next == self.elements);
                }
                Ok(Some(scratch))
            }
            Source::Scales(matrices) => {
                let scales = matrices.last_scales(self.limit, self.buffers)?;
                self.next = self.elements;
                let block = &mut self.buffers.block;
                block.clear();
                let _always_in_range = matrices.integers().scales().append(&scales, block);
                Ok(Some(block))
            }
        }
    }
}

fn size(expr: &WeightExpr) -> usize {
    expr.shape().iter().product()
}

/// A way to any part of the values of an expression.
#[derive(Debug)]
enum Plan<'a> {
    /// The stored order.
    Stored(&'a Weight),
    /// Runs of `run` neighbouring elements; `outer` leads from one to the next.
    Rows { weight: &'a Weight, outer: Vec<Axis>, run: usize },
    /// Transposed matrices; `outer` leads from one to the next.
    Turned { weight: &'a Weight, outer: Vec<Axis>, matrix: Matrix },
    /// Matrices side by side, with their widths.
    Columns { parts: Vec<(Plan<'a>, usize)>, rows: usize, width: usize },
    /// Rows of a table.
    Sinusoids(Sinusoids),
    /// Rows of a table.
    Rotary(RotaryTable),
    /// Another order, for which all `size` values are read at once.
    Scattered { base: Box<Plan<'a>>, axes: Vec<Axis>, size: usize },
}

/// A stored matrix that is read column by column.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    rows: usize,
    columns: usize,
    /// Elements from one row to the next.
    stride: usize,
}

impl<'a> Plan<'a> {
    fn of(expr: &'a WeightExpr) -> Self {
        if size(expr) == 0 {
            return Self::Columns { parts: Vec::new(), rows: 0, width: 0 };
        }
        let view = View::of(expr);
        let axes = view.axes();
        match (view.root, axes.as_slice()) {
            (WeightExpr::Stored(weight), [] | [Axis { stride: 1, .. }]) => Self::Stored(weight),
            (WeightExpr::Stored(weight), [outer @ .., Axis { size, stride: 1 }]) => {
                Self::Rows { weight, outer: outer.to_vec(), run: *size }
            }
            (
                WeightExpr::Stored(weight),
                [outer @ .., Axis { size: columns, stride: 1 }, Axis { size: rows, stride }],
            ) if stride >= columns => {
                let matrix = Matrix { rows: *rows, columns: *columns, stride: *stride };
                Self::Turned { weight, outer: outer.to_vec(), matrix }
            }
            (root, [] | [Axis { stride: 1, .. }]) => Self::of_root(root),
            (root, _) => Self::Scattered { base: Box::new(Self::of_root(root)), axes, size: size(root) },
        }
    }

    /// `root` in its own order.
    fn of_root(root: &'a WeightExpr) -> Self {
        match root {
            WeightExpr::Stored(weight) => Self::Stored(weight),
            WeightExpr::Transposed { input, .. } | WeightExpr::Reshaped { input, .. } => Self::of(input),
            WeightExpr::Columns(parts) => {
                let parts: Vec<_> = parts.iter().map(|part| (Self::of(part), part.shape()[1])).collect();
                let width = parts.iter().map(|(_, width)| width).sum();
                Self::Columns { parts, rows: root.shape()[0], width }
            }
            WeightExpr::Sinusoids(table) => Self::Sinusoids(*table),
            WeightExpr::Rotary(table) => Self::Rotary(*table),
        }
    }

    /// Where the values may be cut: at multiples of so many elements; `None` where nowhere.
    fn grain(&self) -> Option<usize> {
        match self {
            Self::Stored(_) => Some(1),
            Self::Rows { run, .. } => Some(*run),
            Self::Turned { matrix, .. } => Some(matrix.rows),
            Self::Columns { parts, width, .. } => {
                let fits =
                    |(part, width): &(Self, usize)| part.grain().is_some_and(|grain| width.is_multiple_of(grain));
                parts.iter().all(fits).then_some(*width)
            }
            Self::Sinusoids(table) => Some(table.width),
            Self::Rotary(table) => Some(table.head / 2),
            Self::Scattered { .. } => None,
        }
    }

    /// The end of the block that begins at `start`, in elements.
    fn end_of_block(&self, start: usize, elements: usize, limit: usize) -> usize {
        let length = match self {
            Self::Turned { matrix, .. } => matrix.length_of_block(start, limit),
            _ => self.grain().map_or(elements, |grain| (limit / grain).max(1) * grain),
        };
        elements.min(start + length)
    }

    /// Appends the values `range` to `out`; both ends are where the values may be cut.
    fn read(
        &self,
        range: Range<usize>,
        to: FloatType,
        scratch: &mut Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), WeightError> {
        match self {
            Self::Stored(weight) => weight.read_runs(Runs::one(range.start, range.len()), to, out),
            Self::Rows { weight, outer, run } => read_rows(weight, outer, *run, range, to, out),
            Self::Turned { weight, outer, matrix } => matrix.read(weight, outer, range, to, scratch, out),
            Self::Columns { parts, rows, width } => {
                let rows = if range.len() == rows * width { 0..*rows } else { range.start / width..range.end / width };
                side_by_side(parts, rows, to, scratch, out)
            }
            Self::Sinusoids(table) => {
                append_table(&table.rows(range.start / table.width..range.end / table.width), to, out);
                Ok(())
            }
            Self::Rotary(table) => {
                let width = table.head / 2;
                append_table(&table.rows(range.start / width..range.end / width), to, out);
                Ok(())
            }
            Self::Scattered { base, axes, size } => {
                let mut whole = Vec::with_capacity(size * to.bytes());
                base.read(0..*size, to, scratch, &mut whole)?;
                gather(&whole, axes, to.bytes(), out);
                Ok(())
            }
        }
    }
}

/// Values of a table of positions lie between -1 and 1, so every type holds them.
fn append_table(values: &[f32], to: FloatType, out: &mut Vec<u8>) {
    let _always_in_range = to.append(values, out);
}

/// Offset of the `index`-th combination of indices along `axes`.
fn offset(axes: &[Axis], mut index: usize) -> usize {
    let mut offset = 0;
    for axis in axes.iter().rev() {
        offset += index % axis.size * axis.stride;
        index /= axis.size;
    }
    offset
}

fn read_rows(
    weight: &Weight,
    outer: &[Axis],
    run: usize,
    range: Range<usize>,
    to: FloatType,
    out: &mut Vec<u8>,
) -> Result<(), WeightError> {
    let Some(axis) = outer.last() else {
        return weight.read_runs(Runs::one(range.start, range.len()), to, out);
    };
    let (mut row, end) = (range.start / run, range.end / run);
    while row < end {
        let count = (axis.size - row % axis.size).min(end - row);
        let start = offset(outer, row);
        if axis.stride >= run {
            weight.read_runs(Runs { start, length: run, count, stride: axis.stride }.joined(), to, out)?;
        } else {
            for row in row..row + count {
                weight.read_runs(Runs::one(offset(outer, row), run), to, out)?;
            }
        }
        row += count;
    }
    Ok(())
}

impl Matrix {
    /// Whole matrices, or strips of columns of nearly equal width.
    fn length_of_block(self, start: usize, limit: usize) -> usize {
        let whole = self.rows * self.columns;
        if whole <= limit {
            return limit / whole * whole;
        }
        let most = (limit / self.rows).max(SHORTEST_RUN.min(limit)).min(self.columns);
        let strip = self.columns.div_ceil(self.columns.div_ceil(most)).next_multiple_of(TILE);
        let column = start / self.rows % self.columns;
        strip.min(self.columns - column) * self.rows
    }

    fn read(
        self,
        weight: &Weight,
        outer: &[Axis],
        range: Range<usize>,
        to: FloatType,
        scratch: &mut Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), WeightError> {
        let (mut at, end) = (range.start / self.rows, range.end / self.rows);
        while at < end {
            let column = at % self.columns;
            let columns = (self.columns - column).min(end - at);
            let start = offset(outer, at / self.columns) + column;
            scratch.clear();
            let runs = Runs { start, length: columns, count: self.rows, stride: self.stride };
            weight.read_runs(runs.joined(), to, scratch)?;
            transpose(scratch, columns, to, out);
            at += columns;
        }
        Ok(())
    }
}

fn side_by_side(
    parts: &[(Plan<'_>, usize)],
    rows: Range<usize>,
    to: FloatType,
    scratch: &mut Vec<u8>,
    out: &mut Vec<u8>,
) -> Result<(), WeightError> {
    let mut read = Vec::new();
    for (part, width) in parts {
        let mut bytes = Vec::with_capacity(rows.len() * width * to.bytes());
        part.read(rows.start * width..rows.end * width, to, scratch, &mut bytes)?;
        read.push((bytes, width * to.bytes()));
    }
    for row in 0..rows.len() {
        for (bytes, width) in &read {
            out.extend_from_slice(&bytes[row * width..(row + 1) * width]);
        }
    }
    Ok(())
}

/// Appends the elements of `whole`, `width` bytes each, in the order of `axes`.
fn gather(whole: &[u8], axes: &[Axis], width: usize, out: &mut Vec<u8>) {
    let elements: usize = axes.iter().map(|axis| axis.size).product();
    let inner = axes.last().map_or(1, |axis| axis.size);
    let stride = axes.last().map_or(1, |axis| axis.stride);
    for row in 0..elements / inner {
        let start = offset(axes, row * inner);
        for index in 0..inner {
            let at = (start + index * stride) * width;
            out.extend_from_slice(&whole[at..at + width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::TensorSource;
    use crate::graph::AngleFunction;

    /// The values 0, 1, 2 and so on.
    struct Counting(usize);

    impl TensorSource for Counting {
        fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
            Ok((0..self.0).map(|value| value as f32).collect())
        }

        fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
            Ok((0..self.0).map(|value| value as f64).collect())
        }

        fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
            assert!(runs.count == 1 || runs.stride >= runs.length, "{runs:?}");
            for run in 0..runs.count {
                let start = runs.start + run * runs.stride;
                assert!(start + runs.length <= self.0, "{runs:?}");
                let values: Vec<_> = (start..start + runs.length).map(|value| value as f32).collect();
                to.append(&values, out).unwrap();
            }
            Ok(())
        }

        fn stored_type(&self) -> &'static str {
            "F32"
        }

        fn stored_bytes(&self) -> u64 {
            self.0 as u64 * 4
        }

        fn read_bytes(&self, _: &mut dyn FnMut(&[u8]) -> std::ops::ControlFlow<()>) -> Result<(), WeightError> {
            panic!("values are read by runs")
        }
    }

    fn stored(shape: &[usize]) -> WeightExpr {
        let source = Arc::new(Counting(shape.iter().product()));
        WeightExpr::Stored(Weight::new("w", shape.to_vec(), "memory", source))
    }

    /// The same values, one by one.
    fn naive(expr: &WeightExpr) -> Vec<f32> {
        match expr {
            WeightExpr::Stored(weight) => weight.to_f32().unwrap(),
            WeightExpr::Transposed { input, permutation } => {
                let (values, shape, sizes) = (naive(input), input.shape(), expr.shape());
                let at = |mut index: usize| {
                    let mut indices = vec![0; sizes.len()];
                    for axis in (0..sizes.len()).rev() {
                        indices[permutation[axis]] = index % sizes[axis];
                        index /= sizes[axis];
                    }
                    indices.iter().zip(&shape).fold(0, |at, (index, size)| at * size + index)
                };
                (0..values.len()).map(|index| values[at(index)]).collect()
            }
            WeightExpr::Reshaped { input, .. } => naive(input),
            WeightExpr::Columns(parts) => {
                let rows = expr.shape()[0];
                let parts: Vec<_> = parts.iter().map(|part| (naive(part), part.shape()[1])).collect();
                let row =
                    |row: usize| parts.iter().flat_map(move |(part, width)| &part[row * width..(row + 1) * width]);
                (0..rows).flat_map(row).copied().collect()
            }
            WeightExpr::Sinusoids(table) => table.rows(0..table.rows),
            WeightExpr::Rotary(table) => table.rows(0..table.rows),
        }
    }

    fn expressions() -> Vec<WeightExpr> {
        let columns =
            || WeightExpr::Columns(vec![stored(&[5, 7]).transposed(&[1, 0]), stored(&[7, 3]), stored(&[7, 0])]);
        let rotary = RotaryTable { rows: 11, head: 6, base: 10_000.0, function: AngleFunction::Cosine };
        vec![
            stored(&[]),
            stored(&[3, 0, 2]),
            stored(&[4, 9]),
            stored(&[35, 70]).transposed(&[1, 0]),
            stored(&[3, 35, 40]).transposed(&[0, 2, 1]),
            stored(&[3, 35, 40]).transposed(&[0, 2, 1]).transposed(&[1, 0, 2]).reshaped(&[40, 105]),
            stored(&[3, 35, 40]).transposed(&[1, 0, 2]).reshaped(&[35, 120]),
            stored(&[2, 3, 4, 5]).transposed(&[1, 0, 2, 3]),
            stored(&[2, 3, 4, 5]).transposed(&[2, 1, 0, 3]),
            stored(&[2, 3, 4, 5]).transposed(&[3, 2, 1, 0]),
            stored(&[2, 3, 4, 5]).transposed(&[1, 0, 3, 2]).reshaped(&[24, 5]),
            stored(&[6, 5]).transposed(&[1, 0]).reshaped(&[3, 10]).transposed(&[1, 0]),
            columns(),
            columns().transposed(&[1, 0]),
            columns().reshaped(&[8, 7]).transposed(&[1, 0]).reshaped(&[56]),
            WeightExpr::Columns(vec![stored(&[6, 5]).transposed(&[1, 0]).reshaped(&[3, 10]), stored(&[3, 1])]),
            WeightExpr::Sinusoids(Sinusoids { rows: 9, width: 5, padding: 1 }),
            WeightExpr::Rotary(rotary).transposed(&[1, 0]),
            WeightExpr::Rotary(rotary),
        ]
    }

    #[test]
    fn blocks_of_every_size_hold_the_values_in_order() {
        for expr in expressions() {
            for to in [FloatType::F32, FloatType::Bf16] {
                let mut expected = Vec::new();
                to.append(&naive(&expr), &mut expected).unwrap();
                let data = Data::Weight(expr.clone(), to);
                assert_eq!(data.to_bytes().unwrap(), expected, "{expr:?}");
                for limit in [1, 2, 7, 64, 700, 1500, 4000] {
                    let mut buffers = Buffers::default();
                    let (mut blocks, mut bytes) = (data.blocks(&mut buffers), Vec::new());
                    blocks.limit = limit;
                    while let Some(block) = blocks.next_block().unwrap() {
                        assert!(!block.is_empty());
                        bytes.extend_from_slice(block);
                    }
                    assert!(bytes == expected, "{expr:?} in blocks of {limit}");
                }
            }
        }
    }

    #[test]
    fn blocks_of_large_matrices_are_small() {
        let data = Data::Weight(stored(&[3, 64, 2048]).transposed(&[0, 2, 1]), FloatType::F32);
        let mut buffers = Buffers::default();
        let mut blocks = data.blocks(&mut buffers);
        blocks.limit = 64 * 900;
        let mut lengths = Vec::new();
        while let Some(block) = blocks.next_block().unwrap() {
            lengths.push(block.len() / 4 / 64);
        }
        assert_eq!(lengths, [688, 688, 672].repeat(3));
    }
}
