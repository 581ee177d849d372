//! Which shapes a graph can be timed at, and the inputs of such a shape.

use std::collections::{BTreeMap, BTreeSet, TryReserveError};

use moa_schema::interface::POSITION_IDS;
pub use moa_schema::interface::axis::{BATCH, PAST, SEQUENCE, SOURCE};

use super::LatencyError;
use crate::{
    onnx::{
        OnnxFile,
        proto::tensor_proto::DataType,
        read::{Dim, ValueInfo, dims_text, sum},
    },
    random::Random,
    tensor::{NamedTensors, Tensor, TensorData},
};

/// Most bytes of all inputs together.
const MOST_BYTES: usize = 1 << 36;

/// What a grid is timed at: sizes by the name of the axis.
pub type Point = BTreeMap<String, usize>;

/// What a grid is made of; every combination is a point.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grid {
    /// Rows; 1 where empty.
    pub batch: Vec<usize>,
    /// New tokens; 32 where empty.
    pub sequence: Vec<usize>,
    /// Cached tokens; none where empty.
    pub past: Vec<usize>,
    /// Source tokens; where absent, as many as past and new tokens together, or new tokens of a graph without those.
    pub source: Vec<usize>,
    /// Sizes of other axes.
    pub others: Point,
}

/// Names of the axes of a graph's inputs that have no fixed size, sums left out.
pub fn axes(file: &OnnxFile) -> BTreeSet<String> {
    let dims = file.inputs().into_iter().filter_map(|input| input.dims).flatten();
    let names = dims.filter_map(|dim| if let Dim::Symbolic(name) = dim { Some(name) } else { None });
    names.filter(|name| !name.contains('+')).collect()
}

impl Grid {
    /// The points of a graph with these axes, in the order of the lists, each once.
    ///
    /// # Errors
    ///
    /// Where the size of an axis is not known.
    pub fn points(&self, axes: &BTreeSet<String>) -> Result<Vec<Point>, LatencyError> {
        let mut points: Vec<Point> = Vec::new();
        let sources: Vec<Option<usize>> = match self.source.as_slice() {
            [] => vec![None],
            several => several.iter().copied().map(Some).collect(),
        };
        for batch in self.batches() {
            for past in self.pasts() {
                for sequence in self.sequences() {
                    for source in &sources {
                        let point = self.point(axes, *batch, *sequence, *past, *source)?;
                        if !points.contains(&point) {
                            points.push(point);
                        }
                    }
                }
            }
        }
        Ok(points)
    }

    /// Rows of the points.
    pub fn batches(&self) -> &[usize] {
        if self.batch.is_empty() { &[1] } else { &self.batch }
    }

    /// New tokens of the points.
    pub fn sequences(&self) -> &[usize] {
        if self.sequence.is_empty() { &[32] } else { &self.sequence }
    }

    /// Cached tokens of the points.
    pub fn pasts(&self) -> &[usize] {
        if self.past.is_empty() { &[0] } else { &self.past }
    }

    /// The most tokens that a point has, those of all rows together: new ones, and cached ones or those of a source.
    pub fn most_tokens(&self) -> usize {
        let most = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(0);
        let length = most(self.sequences()) + most(self.pasts()).max(most(&self.source));
        most(self.batches()).saturating_mul(length)
    }

    /// The first axis that was given a size which no point of graphs with these axes, one set for each graph, has.
    pub(super) fn unused_axis(&self, graphs: &[BTreeSet<String>]) -> Option<&str> {
        let is_known = |axis: &str| graphs.iter().any(|axes| axes.contains(axis));
        // Graphs without new tokens have as many tokens of a source, unless these have a size of their own.
        let sequence_is_read = is_known(SEQUENCE) || (self.source.is_empty() && is_known(SOURCE));
        let given = [
            (BATCH, self.batch.iter().any(|rows| *rows != 1) && !is_known(BATCH)),
            (SEQUENCE, !self.sequence.is_empty() && !sequence_is_read),
            (PAST, self.past.iter().any(|past| *past > 0) && !is_known(PAST)),
            (SOURCE, !self.source.is_empty() && !is_known(SOURCE)),
        ];
        let unused = given.into_iter().find_map(|(axis, is_unused)| is_unused.then_some(axis));
        unused.or_else(|| self.others.keys().map(String::as_str).find(|axis| !is_known(axis)))
    }

    fn point(
        &self,
        axes: &BTreeSet<String>,
        batch: usize,
        sequence: usize,
        past: usize,
        source: Option<usize>,
    ) -> Result<Point, LatencyError> {
        let both_sides = axes.contains(SEQUENCE);
        let size = |axis: &String| match axis.as_str() {
            BATCH => Ok(batch),
            SEQUENCE => Ok(sequence),
            PAST => Ok(past),
            SOURCE if both_sides => Ok(source.unwrap_or(past + sequence)),
            SOURCE => Ok(source.unwrap_or(sequence)),
            other => self.others.get(other).copied().ok_or_else(|| LatencyError::UnknownAxis { axis: axis.clone() }),
        };
        axes.iter().map(|axis| Ok((axis.clone(), size(axis)?))).collect()
    }
}

/// New tokens of one call at `point`.
pub fn tokens(point: &Point) -> usize {
    let rows = point.get(BATCH).copied().unwrap_or(1);
    rows * point.get(SEQUENCE).or_else(|| point.get(SOURCE)).copied().unwrap_or(1)
}

/// Fails where a row is longer than a table of positions of the graph.
///
/// # Errors
///
/// [`LatencyError::TooLong`].
pub(super) fn check_length(file: &OnnxFile, point: &Point) -> Result<(), LatencyError> {
    let new = point.get(SEQUENCE).or_else(|| point.get(SOURCE)).copied().unwrap_or(0);
    let length = new + point.get(PAST).copied().unwrap_or(0);
    match file.position_tables().into_iter().find(|table| length > table.positions) {
        Some(table) => Err(LatencyError::TooLong {
            model: file.path().to_path_buf(),
            length,
            table: table.name,
            positions: table.positions,
        }),
        None => Ok(()),
    }
}

/// Where an input that holds a cache says how many tokens that is of.
const PAST_AXIS: usize = 2;

/// Fails where a graph fixes a size of 0, but for that of a past.
///
/// # Errors
///
/// [`LatencyError::FixedSize`].
pub(super) fn check_fixed(file: &OnnxFile) -> Result<(), LatencyError> {
    for input in file.inputs() {
        let Some(dims) = &input.dims else { continue };
        let may_be_empty = |axis| axis == PAST_AXIS && input.name.starts_with("past");
        if dims.iter().enumerate().any(|(axis, dim)| *dim == Dim::Fixed(0) && !may_be_empty(axis)) {
            let (model, dims) = (file.path().to_path_buf(), dims_text(dims));
            return Err(LatencyError::FixedSize { model, input: input.name, dims });
        }
    }
    Ok(())
}

/// Random inputs of `file` at the first point of `grid`, as a benchmark makes them: ids over the whole of the table
/// that they look up, masks of ones, positions that follow the past, floats uniform as after a normalisation.
///
/// # Errors
///
/// Where a size is missing, unused or 0, a row is too long for the graph, where nothing is known of an input, and where
/// the inputs take more than 64 GiB or than memory has.
pub fn inputs_at(file: &OnnxFile, grid: &Grid, seed: u64) -> Result<NamedTensors, LatencyError> {
    check_fixed(file)?;
    let axes = axes(file);
    let point = grid.points(&axes)?.into_iter().next().unwrap_or_default();
    if let Some(axis) = grid.unused_axis(&[axes]) {
        return Err(LatencyError::UnusedAxis { axis: axis.to_owned() });
    }
    check_length(file, &point)?;
    random_inputs(file, &point, &mut Random::new(seed))
}

/// Random inputs of `file` at `point`: ids over the whole of the table that they look up, masks of ones, positions
/// that follow the past, floats uniform as after a normalisation.
///
/// # Errors
///
/// Where nothing is known of an input, and where the inputs take more than [`MOST_BYTES`] or than memory has.
pub(super) fn random_inputs(file: &OnnxFile, point: &Point, random: &mut Random) -> Result<NamedTensors, LatencyError> {
    let rows = file.looked_up_rows();
    let mut inputs = NamedTensors::new();
    let mut free = MOST_BYTES;
    for input in file.inputs() {
        let shape = shape(&input, point)?;
        let width = input.data_type.bits().unwrap_or(8).div_ceil(8);
        let bytes = shape.iter().try_fold(width, |bytes, size| bytes.checked_mul(*size));
        let rest = bytes.and_then(|bytes| free.checked_sub(bytes));
        free =
            rest.ok_or_else(|| too_large(&input, &shape, format!("the inputs take more than {MOST_BYTES} bytes")))?;
        let data = values(&input, &shape, point, rows.get(&input.name).copied(), random)?;
        inputs.insert(input.name, Tensor::new(shape, data)?);
    }
    Ok(inputs)
}

fn too_large(input: &ValueInfo, shape: &[usize], what: String) -> LatencyError {
    LatencyError::TooLarge { input: input.name.clone(), shape: shape.to_vec(), what }
}

/// As many values, where memory has room for them.
fn filled<T>(count: usize, value: impl FnMut(usize) -> T) -> Result<Vec<T>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(count)?;
    values.extend((0..count).map(value));
    Ok(values)
}

fn shape(input: &ValueInfo, point: &Point) -> Result<Vec<usize>, LatencyError> {
    let unknown = || LatencyError::UnknownInput { input: input.name.clone(), what: "its shape is not declared" };
    let dims = input.dims.as_ref().ok_or_else(unknown)?;
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbolic(name) => sum(name, |term| point.get(term).copied()),
        Dim::Unknown => None,
    };
    dims.iter().map(|dim| size(dim).ok_or_else(unknown)).collect()
}

#[allow(clippy::cast_possible_wrap, clippy::cast_possible_truncation)]
fn values(
    input: &ValueInfo,
    shape: &[usize],
    point: &Point,
    rows: Option<i64>,
    random: &mut Random,
) -> Result<TensorData, LatencyError> {
    let count = shape.iter().product();
    let unknown = |what| LatencyError::UnknownInput { input: input.name.clone(), what };
    let no_room = |_: TryReserveError| too_large(input, shape, "it takes more than memory has".to_owned());
    let mut float = || random.normalised();
    let integers = match input.data_type {
        DataType::Float => return filled(count, |_| float()).map(TensorData::F32).map_err(no_room),
        DataType::Float16 => {
            return filled(count, |_| half::f16::from_f32(float())).map(TensorData::F16).map_err(no_room);
        }
        DataType::Int64 | DataType::Int32 if input.name.ends_with("mask") => filled(count, |_| 1),
        DataType::Int64 | DataType::Int32 if input.name == POSITION_IDS => {
            let past = point.get(PAST).copied().unwrap_or(0);
            let length = shape.last().copied().unwrap_or(1).max(1);
            filled(count, |index| (past + index % length) as i64)
        }
        DataType::Int64 | DataType::Int32 => {
            let rows = rows.and_then(|rows| usize::try_from(rows).ok()).filter(|rows| *rows > 0);
            let rows = rows.ok_or_else(|| unknown("which integers it takes is not known"))?;
            filled(count, |_| random.below(rows) as i64)
        }
        _ => return Err(unknown("values of its type cannot be made")),
    };
    let typed = integers.and_then(|integers| match input.data_type {
        DataType::Int32 => filled(count, |place| integers[place] as i32).map(TensorData::I32),
        _ => Ok(TensorData::I64(integers)),
    });
    typed.map_err(no_room)
}

/// The point at which `inputs` lie, by the names of the graph's axes.
pub(super) fn point_of(file: &OnnxFile, inputs: &NamedTensors) -> Point {
    let mut point = Point::new();
    for input in file.inputs() {
        let Some(tensor) = inputs.get(&input.name) else { continue };
        for (dim, size) in input.dims.iter().flatten().zip(tensor.shape()) {
            if let Dim::Symbolic(name) = dim
                && !name.contains('+')
            {
                point.insert(name.clone(), *size);
            }
        }
    }
    point
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_size_without_its_axis_is_unused() {
        let (encoder, decoder) = (set(&[BATCH, SOURCE]), set(&[BATCH, SEQUENCE, PAST, SOURCE]));
        let sizes = |sequence: &[usize], source: &[usize]| Grid {
            sequence: sequence.to_vec(),
            source: source.to_vec(),
            ..Grid::default()
        };
        assert_eq!(Grid::default().unused_axis(&[set(&[])]), None);
        assert_eq!(sizes(&[8], &[]).unused_axis(std::slice::from_ref(&encoder)), None);
        assert_eq!(sizes(&[8], &[9]).unused_axis(std::slice::from_ref(&encoder)), Some(SEQUENCE));
        assert_eq!(sizes(&[8], &[9]).unused_axis(&[encoder, decoder]), None);
        assert_eq!(sizes(&[], &[9]).unused_axis(&[set(&[BATCH, SEQUENCE])]), Some(SOURCE));
        assert_eq!(sizes(&[8], &[]).unused_axis(&[set(&[BATCH])]), Some(SEQUENCE));
        let rows = |rows| Grid { batch: vec![rows], ..Grid::default() };
        assert_eq!(rows(1).unused_axis(&[set(&[SEQUENCE])]), None);
        assert_eq!(rows(2).unused_axis(&[set(&[SEQUENCE])]), Some(BATCH));
        let past = |past| Grid { past: vec![past], ..Grid::default() };
        assert_eq!(past(0).unused_axis(&[set(&[SEQUENCE])]), None);
        assert_eq!(past(3).unused_axis(&[set(&[SEQUENCE])]), Some(PAST));
        let others = Grid { others: Point::from([("heads".to_owned(), 2)]), ..Grid::default() };
        assert_eq!(others.unused_axis(&[set(&["heads"])]), None);
        assert_eq!(others.unused_axis(&[set(&[BATCH])]), Some("heads"));
    }
}
