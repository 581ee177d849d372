//! Weights in the order in which the microkernels read them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use half::{bf16, f16};

use crate::buffer::{Buffer, emptied};
use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, cut};
use crate::pool::{self, Sequential, Stage, ThreadPool};
use crate::simd::compact::Compact;
use crate::simd::magnitudes::Magnitudes;
use crate::simd::{Element, Form, Nibbles, PANEL, Packable};
use crate::weight_data::WeightData;

/// Elements that one task packs at least.
const ELEMENTS_PER_TASK: usize = 16384;

/// How large weights of bf16 are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// In 16 bits each.
    #[default]
    Plain,
    /// In 12 bits each, without loss, where panels have few exponents: few rows then wait less for memory, and many are
    /// multiplied after their weights were unpacked.
    Compact,
}

impl Packing {
    /// Every way, in the order of [`moa_schema::PACKINGS`].
    const ALL: [Self; moa_schema::PACKINGS.len()] = [Self::Plain, Self::Compact];

    /// The way of this name.
    pub fn named(name: &str) -> Option<Self> {
        let index = moa_schema::PACKINGS.iter().position(|packing| *packing == name)?;
        Some(Self::ALL[index])
    }
}

/// Panels of each type of element.
#[derive(Debug)]
pub(crate) enum Panels {
    F32(Buffer<f32>),
    Bf16(Buffer<[bf16; 2]>),
    F16(Buffer<f16>),
    /// bf16 in 12 bits.
    Compact(Compact),
    I8(Buffer<i8>),
    I4(Buffer<Nibbles>),
}

impl Panels {
    /// The form that rows have which are multiplied with such elements, where nodes allow more than their values.
    pub(crate) fn form(&self) -> Form {
        match self {
            Self::F32(_) | Self::F16(_) => Form::Values,
            Self::Bf16(_) | Self::Compact(_) => Form::Pairs,
            Self::I8(_) => Form::OF_INT8,
            Self::I4(_) => Form::OF_INT4,
        }
    }
}

/// Weights in panels `[matrices, blocks, ceil(columns / PANEL), inner, PANEL]`, the last panel of a block padded with
/// zeros, in the type in which they are given; two inner steps of bf16 stand side by side, and 64 of int4 stand in nine
/// rows ([`Nibbles`]).
#[derive(Debug)]
pub(crate) struct Packed {
    geometry: Geometry,
    /// As it was asked for, of bf16, whether the weights allow it or not.
    packing: Packing,
    panels: Panels,
    /// `[matrices, blocks, ceil(columns / PANEL) * PANEL]`, where the panels hold int8.
    scales: Buffer,
    /// Magnitudes of each panel once they are known, 0 before.
    magnitudes: Vec<AtomicU64>,
}

/// Packed weights that are in use somewhere in the process.
static SHARED: Mutex<Vec<Weak<Packed>>> = Mutex::new(Vec::new());

impl Packed {
    /// Packs `source`; `None` where its length does not fit.
    pub(crate) fn new<'a>(geometry: Geometry, source: impl Into<WeightData<'a>>) -> Option<Self> {
        let mut packed = Self::default();
        packed.refill(geometry, source.into(), &mut PackScratch::default(), &Sequential).then_some(packed)
    }

    /// Packs `source` in 12 bits each; `None` where its length does not fit, or its weights have too many exponents.
    pub(crate) fn compact(geometry: Geometry, source: &[bf16]) -> Option<Self> {
        if source.is_empty() || !geometry.fits(WeightData::Bf16(source)) {
            return None;
        }
        let panels = geometry.matrices * geometry.blocks * geometry.panels();
        let place = |panel| geometry.place(panel, 0, geometry.inner);
        let panels = Panels::Compact(Compact::new(panels, geometry.inner, place, source)?);
        Some(Self { geometry, packing: Packing::Compact, panels, ..Self::default() })
    }

    /// Packs `source` as `packing` asks where its weights allow it; equal weights that are in use somewhere in the
    /// process are shared.
    pub(crate) fn shared<'a>(
        geometry: Geometry,
        source: impl Into<WeightData<'a>>,
        packing: Packing,
    ) -> Option<Arc<Self>> {
        let source = source.into();
        let packing = if let WeightData::Bf16(_) = source { packing } else { Packing::Plain };
        let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|weak| weak.strong_count() > 0);
        if let Some(found) = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|packed| packed.packing == packing && packed.holds(geometry, source))
        {
            return Some(found);
        }
        let compact = match source {
            WeightData::Bf16(values) if packing == Packing::Compact => Self::compact(geometry, values),
            _ => None,
        };
        let packed = match compact {
            Some(packed) => packed,
            None => Self { packing, ..Self::new(geometry, source)? },
        };
        let packed = Arc::new(packed);
        all.push(Arc::downgrade(&packed));
        Some(packed)
    }

    /// Weights that are there for one call only, in memory that is kept while their type stays; `false` where the
    /// length does not fit.
    pub(crate) fn refill(
        &mut self,
        geometry: Geometry,
        source: WeightData<'_>,
        scratch: &mut PackScratch,
        pool: &dyn ThreadPool,
    ) -> bool {
        self.geometry = geometry;
        if !geometry.fits(source) || source.is_empty() {
            return false;
        }
        self.fill_scales(source);
        let panels = geometry.matrices * geometry.blocks * geometry.panels();
        emptied(&mut self.magnitudes, panels).resize_with(panels, AtomicU64::default);
        match (&mut self.panels, source) {
            (Panels::F32(panels), WeightData::F32(source)) => geometry.fill(panels, source, scratch, pool),
            (Panels::Bf16(panels), WeightData::Bf16(source)) => geometry.fill(panels, source, scratch, pool),
            (Panels::F16(panels), WeightData::F16(source)) => geometry.fill(panels, source, scratch, pool),
            (Panels::I8(panels), WeightData::I8 { values, .. }) => geometry.fill(panels, values, scratch, pool),
            (Panels::I4(panels), WeightData::I4(source)) => geometry.fill(panels, source, scratch, pool),
            (_, source) => {
                self.panels = match source {
                    WeightData::F32(_) => Panels::F32(Buffer::default()),
                    WeightData::Bf16(_) => Panels::Bf16(Buffer::default()),
                    WeightData::F16(_) => Panels::F16(Buffer::default()),
                    WeightData::I8 { .. } => Panels::I8(Buffer::default()),
                    WeightData::I4(_) => Panels::I4(Buffer::default()),
                };
                return self.refill(geometry, source, scratch, pool);
            }
        }
        true
    }

    /// Takes over the scales of the columns of `source`, where these have any.
    fn fill_scales(&mut self, source: WeightData<'_>) {
        let Geometry { matrices, blocks, columns, .. } = self.geometry;
        let Some(scales) = source.column_scales() else { return };
        let whole = self.geometry.panels() * PANEL;
        let kept = self.scales.take(matrices * blocks * whole);
        for (scales, kept) in scales.chunks_exact(columns).zip(kept.chunks_exact_mut(whole)) {
            let (known, rest) = kept.split_at_mut(columns);
            known.copy_from_slice(scales);
            rest.fill(0.0);
        }
    }

    /// The scales of a matrix from column `column` of a block on, with those of the blocks behind it, each as wide as
    /// its panels; `None` where columns have none.
    pub(crate) fn scales(&self, matrix: usize, block: usize, column: usize) -> Option<&[f32]> {
        let Panels::I8(_) = self.panels else { return None };
        let (blocks, whole) = (self.geometry.blocks, self.geometry.panels() * PANEL);
        Some(&self.scales.filled()[matrix * blocks * whole..][block * whole + column..blocks * whole])
    }

    /// Whether these are the scales `source`, bit by bit.
    fn holds_scales(&self, source: &[f32]) -> bool {
        let whole = self.geometry.panels() * PANEL;
        let mut rows = self.scales.filled().chunks_exact(whole).zip(source.chunks_exact(self.geometry.columns));
        let same = |(kept, given): (&f32, &f32)| kept.to_bits() == given.to_bits();
        rows.all(|(kept, given)| kept.iter().zip(given).all(same))
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes that so many of the weights take.
    pub(crate) fn bytes_of(&self, weights: usize) -> usize {
        let bytes_of = |steps: usize, bytes: usize| weights.saturating_mul(bytes) / steps;
        match self.panels {
            Panels::F32(_) => bytes_of(1, size_of::<f32>()),
            Panels::Bf16(_) | Panels::F16(_) => bytes_of(1, size_of::<f16>()),
            Panels::Compact(_) => Compact::bytes_of(weights),
            Panels::I8(_) => bytes_of(1, size_of::<i8>()),
            Panels::I4(_) => bytes_of(Nibbles::STEPS, Nibbles::ROWS * size_of::<Nibbles>()),
        }
    }

    /// The panels, to be read with [`Geometry::right`].
    pub(crate) fn panels(&self) -> &Panels {
        &self.panels
    }

    /// Magnitudes of a panel, `compute`d the first time that somebody asks.
    pub(crate) fn magnitudes(
        &self,
        matrix: usize,
        block: usize,
        panel: usize,
        compute: impl FnOnce() -> Magnitudes,
    ) -> Magnitudes {
        let known = &self.magnitudes[(matrix * self.geometry.blocks + block) * self.geometry.panels() + panel];
        Magnitudes::from_bits(known.load(Ordering::Relaxed)).unwrap_or_else(|| {
            let found = compute();
            known.store(found.to_bits(), Ordering::Relaxed);
            found
        })
    }

    /// Bytes of the panels, their scales and what is known of them.
    pub(crate) fn bytes(&self) -> usize {
        let known = self.magnitudes.capacity() * size_of::<AtomicU64>();
        known
            + self.scales.bytes()
            + match &self.panels {
                Panels::F32(panels) => panels.bytes(),
                Panels::Bf16(panels) => panels.bytes(),
                Panels::F16(panels) => panels.bytes(),
                Panels::Compact(panels) => panels.bytes(),
                Panels::I8(panels) => panels.bytes(),
                Panels::I4(panels) => panels.bytes(),
            }
    }

    /// Whether these are the weights `source`, bit by bit.
    fn holds(&self, geometry: Geometry, source: WeightData<'_>) -> bool {
        if geometry != self.geometry || !geometry.fits(source) {
            return false;
        }
        match (&self.panels, source) {
            (Panels::F32(panels), WeightData::F32(source)) => geometry.holds(panels.filled(), source),
            (Panels::Bf16(panels), WeightData::Bf16(source)) => geometry.holds(panels.filled(), source),
            (Panels::F16(panels), WeightData::F16(source)) => geometry.holds(panels.filled(), source),
            (Panels::Compact(panels), WeightData::Bf16(source)) => {
                panels.holds(|panel| geometry.place(panel, 0, geometry.inner), source)
            }
            (Panels::I8(panels), WeightData::I8 { values, scales }) => {
                self.holds_scales(scales) && geometry.holds(panels.filled(), values)
            }
            (Panels::I4(panels), WeightData::I4(source)) => geometry.holds(panels.filled(), source),
            _ => false,
        }
    }
}

impl Geometry {
    /// Packs weights whose length fits, and is not 0.
    fn fill<W: Packable>(
        self,
        panels: &mut Buffer<W>,
        source: W::Source<'_>,
        PackScratch { bounds, claims }: &mut PackScratch,
        pool: &dyn ThreadPool,
    ) {
        let (count, len) = (self.matrices * self.blocks * self.panels(), self.panel_len::<W>());
        cut(bounds, count, ELEMENTS_PER_TASK.div_ceil(len));
        let grid = Grid::new(panels.take(count * len), Layout::whole(len), bounds, claims);
        pool::run(pool, &[&Pack { geometry: self, source, grid }]);
    }

    /// Whether `panels` holds `source`.
    fn holds<W: Packable>(self, panels: &[W], source: W::Source<'_>) -> bool {
        panels.chunks(self.panel_len::<W>()).enumerate().all(|(panel, elements)| {
            let mut groups = elements.chunks(W::ROWS * PANEL).enumerate();
            groups.all(|(group, elements)| W::holds(elements, source, &self.place(panel, group * W::STEPS, W::STEPS)))
        })
    }
}

/// Memory that packing keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct PackScratch {
    bounds: Vec<usize>,
    claims: Claims,
}

impl PackScratch {
    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.bounds.capacity() * size_of::<usize>() + Claims::bytes([&self.claims])
    }
}

/// The stage that fills panels, one row of the grid each.
struct Pack<'a, 's, W: Packable> {
    geometry: Geometry,
    source: W::Source<'s>,
    grid: Grid<'a, W>,
}

impl<W: Packable> Stage for Pack<'_, '_, W> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut panels) = self.grid.tile(index) else { return };
        for panel in 0..panels.rows() {
            let number = panels.first_row() + panel;
            for (group, out) in panels.row(panel).chunks_mut(W::ROWS * PANEL).enumerate() {
                let place = self.geometry.place(number, group * W::STEPS, W::STEPS);
                W::pack(self.source, &place, out);
                out.chunks_mut(PANEL).for_each(|row| row[place.columns..].fill(W::default()));
            }
        }
    }
}

impl Default for Packed {
    fn default() -> Self {
        let geometry = Geometry { matrices: 0, blocks: 0, inner: 0, columns: 0 };
        let (packing, panels) = (Packing::Plain, Panels::F32(Buffer::default()));
        Self { geometry, packing, panels, scales: Buffer::default(), magnitudes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight_data::Int4;

    const GEOMETRY: Geometry = Geometry { matrices: 2, blocks: 3, inner: 5, columns: 37 };

    #[test]
    fn panels_hold_the_columns_of_their_block() {
        let source: Vec<f32> = (0..GEOMETRY.len()).map(|i| i as f32).collect();
        let Some(Packed { geometry, panels: Panels::F32(panels), .. }) = Packed::new(GEOMETRY, &source) else {
            panic!("not packed as it is stored");
        };
        for (matrix, block) in [(0, 0), (1, 2)] {
            for inner in 0..5 {
                let row = &source[(matrix * 5 + inner) * 3 * 37 + block * 37..][..37];
                let first = &geometry.right(&panels, matrix, block, 0).data[inner * PANEL..][..PANEL];
                let second = &geometry.right(&panels, matrix, block, 1).data[inner * PANEL..][..PANEL];
                assert_eq!(first, &row[..PANEL]);
                assert_eq!(second[..5], row[PANEL..]);
                assert_eq!(second[5..], [0.0; PANEL - 5]);
            }
        }
        assert!(Packed::new(GEOMETRY, &source[1..]).is_none());
    }

    #[test]
    fn pairs_hold_two_rows_and_zeros_after_the_last() {
        let source: Vec<bf16> = (0..GEOMETRY.len()).map(|i| bf16::from_f32((i % 250) as f32 + 1.0)).collect();
        let Some(Packed { geometry, panels: Panels::Bf16(panels), .. }) =
            Packed::new(GEOMETRY, WeightData::Bf16(&source))
        else {
            panic!("not packed as it is stored");
        };
        let at = |inner: usize, column: usize| match inner < 5 && column < 37 {
            true => source[(5 + inner) * 3 * 37 + 2 * 37 + column],
            false => bf16::ZERO,
        };
        for panel in 0..2 {
            let found = &geometry.right(&panels, 1, 2, panel).data[..3 * PANEL];
            for (place, pair) in found.iter().enumerate() {
                let (row, column) = (place / PANEL, panel * PANEL + place % PANEL);
                assert_eq!(*pair, [at(2 * row, column), at(2 * row + 1, column)], "{row}, {column}");
            }
        }
    }

    #[test]
    fn integers_are_shared_where_their_scales_are_equal() {
        let values: Vec<i8> = (0..GEOMETRY.len()).map(|i| (i % 127) as i8).collect();
        let pack =
            |scales: &[f32]| Packed::shared(GEOMETRY, WeightData::I8 { values: &values, scales }, Packing::Plain);
        let scales: Vec<f32> = (0..2 * 3 * 37).map(|column| 0.125 + column as f32).collect();
        let mut other = scales.clone();
        *other.last_mut().unwrap() = 0.0;
        let first = pack(&scales).unwrap();
        assert!(Arc::ptr_eq(&first, &pack(&scales).unwrap()));
        assert!(!Arc::ptr_eq(&first, &pack(&other).unwrap()));
        assert!(pack(&scales[1..]).is_none());
        let found = first.scales(1, 2, PANEL).unwrap();
        assert_eq!((&found[..5], &found[5..]), (&scales[5 * 37 + PANEL..], &[0.0; PANEL - 5][..]));
    }

    #[test]
    fn int4_is_shared_where_its_scales_are_equal() {
        let values: Vec<u8> = (0..GEOMETRY.len().div_ceil(2)).map(|i| (i * 37 % 256) as u8).collect();
        let scales: Vec<bf16> = (0..2 * 3 * 37).map(|i| bf16::from_f32(0.125 + i as f32)).collect();
        let pack = |values, scales| Packed::shared(GEOMETRY, WeightData::I4(Int4 { values, scales }), Packing::Plain);
        let first = pack(&values, &scales).unwrap();
        assert!(Arc::ptr_eq(&first, &pack(&values, &scales).unwrap()));
        let (mut others, mut steeper) = (values.clone(), scales.clone());
        *others.last_mut().unwrap() ^= 16;
        steeper[100] = bf16::ONE;
        assert!(!Arc::ptr_eq(&first, &pack(&others, &scales).unwrap()));
        assert!(!Arc::ptr_eq(&first, &pack(&values, &steeper).unwrap()));
        assert!(pack(&values[1..], &scales).is_none() && pack(&values, &scales[1..]).is_none());
        assert_eq!(first.bytes_of(64), 36);
    }

    #[test]
    fn equal_weights_are_shared_while_in_use() {
        let source: Vec<f32> = (0..GEOMETRY.len()).map(|i| i as f32 + 0.5).collect();
        let first = Packed::shared(GEOMETRY, &source, Packing::Plain).unwrap();
        assert!(Arc::ptr_eq(&first, &Packed::shared(GEOMETRY, &source, Packing::Plain).unwrap()));
        let mut other = source.clone();
        other[100] = -1.0;
        assert!(!Arc::ptr_eq(&first, &Packed::shared(GEOMETRY, &other, Packing::Plain).unwrap()));
        let stored: Vec<bf16> = source.iter().copied().map(bf16::from_f32).collect();
        let reduced = Packed::shared(GEOMETRY, WeightData::Bf16(&stored), Packing::Plain).unwrap();
        assert!(!Arc::ptr_eq(&first, &reduced));
        assert!(Arc::ptr_eq(&reduced, &Packed::shared(GEOMETRY, WeightData::Bf16(&stored), Packing::Plain).unwrap()));
        assert!(reduced.bytes() * 5 <= first.bytes() * 3 + 512, "three pairs of rows beside five rows");
        let mut last = stored.clone();
        *last.last_mut().unwrap() = bf16::ZERO;
        assert!(!Arc::ptr_eq(&reduced, &Packed::shared(GEOMETRY, WeightData::Bf16(&last), Packing::Plain).unwrap()));
        let flat = Geometry { matrices: 6, blocks: 1, ..GEOMETRY };
        assert!(!Arc::ptr_eq(&first, &Packed::shared(flat, &source, Packing::Plain).unwrap()));
    }

    #[test]
    fn weights_out_of_use_are_forgotten() {
        let [mine, other] = [0.25, 0.75].map(|value| vec![value; GEOMETRY.len()]);
        let known = |weak: &Weak<Packed>| SHARED.lock().unwrap().iter().any(|other| other.ptr_eq(weak));
        let packed = Packed::shared(GEOMETRY, &mine, Packing::Plain).unwrap();
        let weak = Arc::downgrade(&packed);
        assert!(known(&weak));
        drop(packed);
        let _other = Packed::shared(GEOMETRY, &other, Packing::Plain).unwrap();
        assert!(!known(&weak));
    }
}
