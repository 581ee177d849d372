//! Products on AMX tiles beside those on vectors and beside f64.

use half::{bf16, f16};
use moa_schema::BLOCK;

use super::*;
use crate::geometry::Geometry;
use crate::simd::Instructions;
use crate::simd::tiles::INNER_LIMIT;
use crate::skip::skip;
use crate::weight_data::{Int4, WeightData};

/// Vectors and tiles; nothing, and a word about it, where the processor has no tiles.
fn levels() -> Option<[Isa; 2]> {
    let levels = [Instructions::Avx512, Instructions::Amx].map(Isa::at_most);
    if !levels[1].has_tiles() {
        skip("no AMX tiles");
    }
    levels[1].has_tiles().then_some(levels)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `-1 .. 1`, with 24 bits.
    fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    /// 2^n for `n` in `low .. low + 64`.
    fn scale(&mut self, low: i32) -> f32 {
        2f32.powi(low + (self.next() % 64) as i32)
    }
}

struct Case {
    rows: usize,
    inner: usize,
    columns: usize,
    /// `[rows, inner]`.
    left: Vec<f32>,
    /// `[inner, columns]`.
    right: Vec<f32>,
}

/// Sizes at which something ends: rows of a tile, strips, inner steps, inner limits, panels, column limits.
const SIZES: [[usize; 3]; 13] = [
    [16, 96, 520],
    [17, 64, 256],
    [24, 2112, 192],
    [32, 96, 192],
    [33, 65, 520],
    [48, 64, 128],
    [49, 65, 140],
    [64, 96, 102],
    [80, 512, 256],
    [81, 545, 300],
    [97, 1100, 65],
    [112, 160, 96],
    [128, 128, 64],
];

impl Case {
    fn random(random: &mut Random, [rows, inner, columns]: [usize; 3]) -> Self {
        Self { rows, inner, columns, left: random.values(rows * inner), right: random.values(inner * columns) }
    }

    fn geometry(&self) -> Geometry {
        Geometry { matrices: 1, blocks: 1, inner: self.inner, columns: self.columns }
    }

    fn compute(&self, isa: Isa) -> Vec<f32> {
        self.compute_rows(isa, 0..self.rows, (&self.right).into(), None)
    }

    /// Some rows, added with factors to 1 where there are factors.
    fn compute_rows(&self, isa: Isa, rows: Range<usize>, right: WeightData<'_>, factors: Option<&[f32]>) -> Vec<f32> {
        self.compute_within(isa, rows, right, factors, None)
    }

    /// As [`Case::compute_rows`], within an epoch.
    fn compute_within(
        &self,
        isa: Isa,
        rows: Range<usize>,
        right: WeightData<'_>,
        factors: Option<&[f32]>,
        epoch: Option<Epoch>,
    ) -> Vec<f32> {
        let starts: Vec<usize> = rows.clone().map(|row| row * self.inner).collect();
        let places: Vec<usize> = (0..rows.len()).collect();
        let mut out = vec![1.0; rows.len() * self.columns];
        RowProduct {
            factors,
            epoch,
            ..RowProduct::new(
                Left::new(&self.left, &starts, self.inner),
                &Packed::new(self.geometry(), right).unwrap(),
                &places,
                self.columns,
            )
        }
        .compute(isa, &mut Tile::dense(&mut out, self.columns));
        out
    }

    /// The product in f64, and the sum of the magnitudes of its terms.
    fn exact(&self, row: usize, column: usize) -> (f64, f64) {
        let terms = (0..self.inner).map(|inner| {
            f64::from(self.left[row * self.inner + inner]) * f64::from(self.right[inner * self.columns + column])
        });
        terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
    }

    /// The errors squared of both levels, relative to the magnitude of the terms and in units of 2^-24, after a check
    /// that none is larger than a chain of fused multiply-adds may have.
    fn errors(&self, levels: [Isa; 2], what: &str) -> [f64; 2] {
        let unit = 2f64.powi(-24);
        levels.map(|isa| {
            let found = self.compute(isa);
            let mut total = 0.0;
            for (index, found) in found.iter().enumerate() {
                let (sum, magnitude) = self.exact(index / self.columns, index % self.columns);
                let error = (f64::from(*found) - sum).abs();
                let bound = self.inner as f64 * (unit * magnitude + 2f64.powi(-150));
                assert!(error <= bound, "{what}, {isa:?}: {found}, not {sum}: off by {error:e}, at most {bound:e}");
                total += (error / (unit * magnitude).max(2f64.powi(-149))).powi(2);
            }
            total
        })
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn tiles_are_as_accurate_as_vectors() {
    let Some(levels) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut random = Random(seed as u64);
        let plain = Case::random(&mut random, sizes);
        assert_ne!(bits(&plain.compute(levels[0])), bits(&plain.compute(levels[1])), "tiles were not used");
        let [vectors, tiles] = plain.errors(levels, "uniform");
        assert!(tiles <= vectors, "{sizes:?}: {tiles} beside {vectors}");

        let mut scaled = Case::random(&mut random, sizes);
        scaled.left.iter_mut().for_each(|value| *value *= random.scale(-24));
        scaled.right.iter_mut().for_each(|value| *value *= random.scale(-24));
        scaled.errors(levels, "badly scaled");

        let mut cancelling = Case::random(&mut random, sizes);
        for inner in 1..sizes[1] / 2 * 2 {
            let earlier = inner - inner % 2;
            for row in 0..sizes[0] {
                cancelling.left[row * sizes[1] + inner] = cancelling.left[row * sizes[1] + earlier];
            }
            for column in (0..sizes[2]).filter(|_| inner != earlier) {
                let before = cancelling.right[earlier * sizes[2] + column];
                cancelling.right[inner * sizes[2] + column] = -before * (1.0 + 1e-6 * random.value());
            }
        }
        let [vectors, tiles] = cancelling.errors(levels, "cancelling");
        assert!(tiles <= 1.25 * vectors, "{sizes:?}: {tiles} beside {vectors}");
    }
}

/// Values that tiles would flush or overflow, in some rows or some panels.
#[test]
fn extreme_values_are_as_accurate_as_on_vectors() {
    let Some(levels) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut random = Random(100 + seed as u64);
        for (extreme, others) in
            [(1e-40, 1.0), (1e-38, 1e-5), (1e-30, 1e-9), (3.4e38, 1e-3), (1e30, 1e6), (2e-25, 2e-20)]
        {
            let mut case = Case::random(&mut random, sizes);
            case.left.iter_mut().chain(&mut case.right).for_each(|value| *value *= others);
            for (values, row) in [(&mut case.left, sizes[1]), (&mut case.right, sizes[2])] {
                for values in values.chunks_mut(row).step_by(7) {
                    values[3] = extreme * random.value();
                }
                if seed % 2 == 0 {
                    values.iter_mut().take(2 * row).for_each(|value| *value = 0.0);
                }
            }
            let finite = case.compute(levels[0]).iter().all(|value| value.is_finite());
            if finite {
                case.errors(levels, &format!("{extreme:e} among {others:e}"));
            }
        }
        // Where one factor is 0 but for the other's subnormal number, nothing else hides what is lost.
        let mut case = Case::random(&mut random, sizes);
        for (index, value) in case.left.iter_mut().enumerate() {
            *value *= if index % 2 == 0 { 1.0 } else { 1e-38 };
        }
        case.right
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| index / sizes[2] % 2 == 0)
            .for_each(|(_, value)| *value = 0.0);
        if sizes[1] % 2 == 0 {
            case.errors(levels, "subnormal against zero");
        }
    }
}

#[test]
fn values_that_are_not_finite_give_what_vectors_give() {
    let Some([vectors, tiles]) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut random = Random(200 + seed as u64);
        for extreme in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut case = Case::random(&mut random, sizes);
            case.left[5 * sizes[1] + 7] = extreme;
            case.right[9 * sizes[2] + sizes[2] - 1] = extreme;
            let (found, expected) = (case.compute(tiles), case.compute(vectors));
            for (found, expected) in found.iter().zip(&expected).filter(|(_, expected)| !expected.is_finite()) {
                assert!(found == expected || found.is_nan() && expected.is_nan());
            }
            let finite = |values: &[f32]| values.iter().filter(|value| value.is_finite()).count();
            assert_eq!(finite(&found), finite(&expected));
            assert_eq!(bits(&found[5 * sizes[2]..6 * sizes[2]]), bits(&expected[5 * sizes[2]..6 * sizes[2]]));
        }
    }
}

#[test]
fn vectors_serve_a_thread_whose_tiles_are_taken() {
    let Some([vectors, tiles]) = levels() else { return };
    let case = Case::random(&mut Random(250), SIZES[4]);
    let taken = Unit::new(tiles);
    assert_eq!(bits(&case.compute(tiles)), bits(&case.compute(vectors)));
    drop(taken);
    assert_ne!(bits(&case.compute(tiles)), bits(&case.compute(vectors)));
}

/// The bits of a row depend on that row and the weights alone: not on its place, nor on what stands beside it.
#[test]
fn rows_do_not_change_each_other() {
    let Some([_, tiles]) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut case = Case::random(&mut Random(300 + seed as u64), sizes);
        let (whole, columns) = (case.compute(tiles), sizes[2]);
        let area = AREA_ON_TILES[usize::from(sizes[0] > STRIP)];
        let some = sizes[0] - ON_TILES[0].max(area.div_ceil(columns))..sizes[0];
        let alone = case.compute_rows(tiles, some.clone(), (&case.right).into(), None);
        assert_eq!(bits(&alone), bits(&whole[some.start * columns..]));
        case.left[..sizes[1]].fill(f32::NAN);
        assert_eq!(bits(&case.compute(tiles)[columns..]), bits(&whole[columns..]));
        case.left[..sizes[1]].fill(1e-42);
        assert_eq!(bits(&case.compute(tiles)[columns..]), bits(&whole[columns..]));
    }
}

/// Fewer parts give the bits of all three, and factors scale what is added.
#[test]
fn stored_weights_and_factors_keep_their_meaning() {
    let Some(levels) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut random = Random(400 + seed as u64);
        let mut case = Case::random(&mut random, sizes);
        case.right[..sizes[2]].fill(0.0);
        let all = 0..sizes[0];
        let brain: Vec<bf16> = case.right.iter().copied().map(bf16::from_f32).collect();
        case.right = brain.iter().map(|value| value.to_f32()).collect();
        let found = case.compute_rows(levels[1], all.clone(), WeightData::Bf16(&brain), None);
        assert_eq!(bits(&found), bits(&case.compute(levels[1])));
        case.right = random.values(case.right.len());
        let half: Vec<f16> = case.right.iter().copied().map(f16::from_f32).collect();
        case.right = half.iter().map(|value| value.to_f32()).collect();
        let found = case.compute_rows(levels[1], all.clone(), WeightData::F16(&half), None);
        assert_eq!(bits(&found), bits(&case.compute(levels[usize::from(sizes[0] >= STRIP)])));
        let values: Vec<i8> = case.right.iter().map(|_| random.next() as i8).collect();
        let scales: Vec<f32> = (0..sizes[2]).map(|column| 2f32.powi(column as i32 % 5 - 6)).collect();
        case.right = values.iter().zip(scales.iter().cycle()).map(|(value, scale)| f32::from(*value) * scale).collect();
        let integers = WeightData::I8 { values: &values, scales: &scales };
        assert_eq!(bits(&case.compute_rows(levels[1], all.clone(), integers, None)), bits(&case.compute(levels[1])));

        let values: Vec<u8> = (0..case.right.len().div_ceil(2)).map(|_| random.next() as u8).collect();
        let scales: Vec<bf16> =
            random.values(sizes[1].div_ceil(BLOCK) * sizes[2]).into_iter().map(bf16::from_f32).collect();
        for (index, value) in case.right.iter_mut().enumerate() {
            let integer = (values[index / 2] << (4 - index % 2 * 4)).cast_signed() >> 4;
            let scale = scales[index / sizes[2] / BLOCK * sizes[2] + index % sizes[2]];
            *value = f32::from(integer) * scale.to_f32();
        }
        let int4 = WeightData::I4(Int4 { values: &values, scales: &scales });
        let found = case.compute_rows(levels[1], all.clone(), int4, None);
        assert_eq!(bits(&found), bits(&case.compute(levels[usize::from(sizes[0] >= STRIP)])));

        let factors = random.values(sizes[0]);
        let found = case.compute_rows(levels[1], all, (&case.right).into(), Some(&factors));
        for (index, (found, product)) in found.iter().zip(case.compute(levels[1])).enumerate() {
            assert_eq!(*found, factors[index / sizes[2]].mul_add(product, 1.0));
        }
    }
}

/// Rows are split again as soon as something about them differs, and not before.
#[test]
fn known_rows_are_split_once_an_epoch() {
    let Some([_, tiles]) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut random = Random(500 + seed as u64);
        let mut case = Case::random(&mut random, sizes);
        let others: Vec<f32> = random.values(case.right.len());
        let (all, epoch) = (0..sizes[0], Some(Epoch::new()));
        let compute = |case: &Case, rows: &Range<usize>, right: &[f32], epoch| {
            bits(&case.compute_within(tiles, rows.clone(), right.into(), None, epoch))
        };
        let before = compute(&case, &all, &case.right, None);
        assert_eq!(compute(&case, &all, &case.right, epoch), before);
        assert_eq!(compute(&case, &all, &others, epoch), compute(&case, &all, &others, None), "{sizes:?}: forgotten");
        assert_eq!(compute(&case, &all, &case.right, epoch), before);

        let fewer = 0..sizes[0] - 1;
        let found = compute(&case, &fewer, &case.right, epoch);
        assert_eq!(found, compute(&case, &fewer, &case.right, None), "{sizes:?}: other rows");
        assert_eq!(compute(&case, &all, &case.right, epoch), before);
        let values = random.values(case.left.len());
        case.left.copy_from_slice(&values);
        let strip = sizes[0] <= STRIP && sizes[1].is_multiple_of(32) && sizes[1] <= 4 * INNER_LIMIT;
        let whole = sizes[1] <= INNER_LIMIT || strip;
        assert_eq!(compute(&case, &all, &case.right, epoch) == before, whole, "{sizes:?}: whether rows stay split");
        let after = compute(&case, &all, &case.right, Some(Epoch::new()));
        assert_eq!(after, compute(&case, &all, &case.right, None), "{sizes:?}: another epoch");
    }
}

/// Weights in each type of two bytes or fewer that rows are rounded for.
struct Stored {
    brain: Vec<bf16>,
    int8: (Vec<i8>, Vec<f32>),
    int4: (Vec<u8>, Vec<bf16>),
}

impl Stored {
    fn random(random: &mut Random, [_, inner, columns]: [usize; 3]) -> Self {
        let len = inner * columns;
        let brains = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect();
        Self {
            brain: brains(random.values(len)),
            int8: ((0..len).map(|_| random.next() as i8).collect(), random.values(columns)),
            int4: (
                (0..len.div_ceil(2)).map(|_| random.next() as u8).collect(),
                brains(random.values(inner.div_ceil(BLOCK) * columns)),
            ),
        }
    }

    /// How rows are rounded for a type, the weights, and the fewest rows of them on tiles.
    fn types(&self, tiles: Isa) -> [(Isa, WeightData<'_>, usize); 3] {
        let Self { brain, int8: (integers, scales), int4: (nibbles, blocks) } = self;
        [
            (tiles.rounding(), WeightData::Bf16(brain), 0),
            (tiles.quantizing(), WeightData::I8 { values: integers, scales }, 0),
            (tiles.quantizing(), WeightData::I4(Int4 { values: nibbles, scales: blocks }), FEWEST_OF_INT4),
        ]
    }
}

/// Rounding rows to bf16 beforehand changes no bit, and as rows that are not rounded then they give the same.
#[test]
fn rows_are_rounded_to_the_nearest_bf16() {
    let Some([_, tiles]) = levels() else { return };
    let long = [[128, 2304, 70], [70, 4000, 128]];
    for (seed, sizes) in SIZES.into_iter().chain(long).enumerate() {
        let mut random = Random(600 + seed as u64);
        let mut case = Case::random(&mut random, sizes);
        let stored = Stored::random(&mut random, sizes);
        let factors = random.values(sizes[0]);
        let rounded: Vec<f32> = case.left.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
        for (isa, right, _) in stored.types(tiles).into_iter().filter(|(_, _, fewest)| sizes[0] >= *fewest) {
            let run = |case: &Case, isa, factors| bits(&case.compute_rows(isa, 0..sizes[0], right, factors));
            let ways = [None, Some(&factors[..])];
            let found = ways.map(|factors| run(&case, isa, factors));
            let values = std::mem::replace(&mut case.left, rounded.clone());
            assert!(found == ways.map(|factors| run(&case, isa, factors)), "{sizes:?} {isa:?}");
            assert!(found == ways.map(|factors| run(&case, tiles, factors)), "{sizes:?} {isa:?}");
            case.left = values;
            assert!(found[0] != run(&case, tiles, None), "{sizes:?} {isa:?}: not rounded");
        }
    }
}

/// A row that is not finite, and one that tiles take as 0, change no other; rows are rounded once an epoch.
#[test]
fn rounded_rows_do_not_change_each_other() {
    let Some([_, tiles]) = levels() else { return };
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let mut random = Random(700 + seed as u64);
        let mut case = Case::random(&mut random, sizes);
        let stored = Stored::random(&mut random, sizes);
        let (first, columns) = (case.left[..sizes[1]].to_vec(), sizes[2]);
        for (isa, right, fewest) in stored.types(tiles) {
            let run = |case: &Case, epoch| bits(&case.compute_within(isa, 0..sizes[0], right, None, epoch));
            let whole = run(&case, None);
            for value in [f32::NAN, f32::INFINITY, 1e-42, 3.4e38] {
                case.left[..sizes[1]].fill(value);
                let found = run(&case, None);
                assert!(found[columns..] == whole[columns..], "{sizes:?} {value}");
                let finite = found[..columns].iter().all(|bits| f32::from_bits(*bits).is_finite());
                assert!(finite == (value == 1e-42) || value == 3.4e38 && sizes[0] < fewest, "{sizes:?} {value}");
            }
            let epoch = Some(Epoch::new());
            case.left[..sizes[1]].copy_from_slice(&first);
            assert!(run(&case, epoch) == whole);
            case.left[..sizes[1]].fill(2.0);
            assert!(run(&case, epoch) == whole, "the caller says that nothing has changed");
            assert!(run(&case, Some(Epoch::new())) != whole);
            case.left[..sizes[1]].copy_from_slice(&first);
        }
    }
}
