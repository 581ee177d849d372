//! What a node keeps between calls: packed weights and scratch memory.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use half::bf16;
use moa_schema::AccuracyLevel;

use crate::check;
use crate::geometry::Geometry;
use crate::kernel_scratch::Scratch;
use crate::key_panels::KEYS_PER_TILE;
use crate::narrowed::{Narrowed, needs_four_bytes};
use crate::packed::{PackScratch, Packed, Packing, Panels};
use crate::rows::{FAR, may_meet_tiles};
use crate::simd::{Form, Instructions, Isa, compact, tiles, widened};
use crate::weight_data::WeightData;
use crate::{KernelError, ThreadPool};

/// Names of the weights that can be packed once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// `router_weight [C, E]`, or `[R, E]` where the router has an input of its own.
    Router,
    /// `query_weight [E, C, G * D]`.
    Query,
    /// `kv_weight [C, 2 * G * D]`.
    KeyValue,
    /// `input_weight [E, C, F]`, or `[E, C, 2 * F]` where gated.
    Input,
    /// `output_weight [E, G * D, C]` or `[E, F, C]`, or `[C, V]` of a head.
    Output,
}

/// Number of [`Weight`]s.
const WEIGHTS: usize = 5;

/// Fewest tokens whose products go to AMX tiles where weights need all bits of an f32: with fewer, splitting the
/// weights of an expert costs what tiles gain, and more in noisy minutes of a shared machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FewestOnTiles {
    /// Where each token takes some of the experts.
    some: usize,
    /// Where each takes all.
    all: usize,
}

impl FewestOnTiles {
    pub(crate) const ATTENTION: Self = Self { some: 192, all: 96 };
    pub(crate) const FEED_FORWARD: Self = Self { some: 192, all: 0 };
}

/// Fewest rows of an expert, on average, from which on both factors of products are rounded to bf16 where a node allows
/// it, those of attention at every level: fewer wait for weights.
const FEWEST_ROUNDED: usize = 4;

/// Most scratch memories that are kept for later calls.
const KEPT: usize = 8;

/// Scratch memory of calls, which nodes may share: those of a graph run one after the other.
// In boxes, because a call takes one and gives it back: small steps feel a move of all its fields.
#[allow(clippy::vec_box)]
#[derive(Debug, Default)]
pub struct ScratchPool(Mutex<Vec<Box<Scratch>>>);

impl ScratchPool {
    /// The one of this process; it lasts as long as somebody holds it.
    pub fn of_process() -> Arc<Self> {
        static SHARED: Mutex<Weak<ScratchPool>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let made = Arc::default();
            *shared = Arc::downgrade(&made);
            made
        })
    }

    /// Bytes that are kept for later calls.
    fn bytes(&self) -> usize {
        self.kept().iter().map(|scratch| scratch.bytes()).sum()
    }

    /// Runs `body` with scratch memory that no other call uses.
    fn with<T>(&self, body: impl FnOnce(&mut Scratch) -> T) -> T {
        let taken = self.kept().pop();
        let mut scratch = taken.unwrap_or_default();
        let result = body(&mut scratch);
        let mut kept = self.kept();
        if kept.len() < KEPT {
            kept.push(scratch);
        }
        result
    }

    #[allow(clippy::vec_box)]
    fn kept(&self) -> MutexGuard<'_, Vec<Box<Scratch>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Packed weights and scratch memory of one node, for any number of calls at the same time.
///
/// Without a prepared weight a call packs the weight that it is given.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) isa: Isa,
    packing: Packing,
    weights: [Option<Arc<Packed>>; WEIGHTS],
    /// Whether the values of a packed weight need four bytes.
    wide: [bool; WEIGHTS],
    scratch: Arc<ScratchPool>,
    /// The most threads that a call had.
    pub(crate) threads: AtomicUsize,
}

impl Default for Prepared {
    fn default() -> Self {
        Self::new(Instructions::default())
    }
}

/// Weights that were packed for one call, in memory that is kept.
#[derive(Debug, Default)]
pub(crate) struct OwnWeights {
    packed: [Packed; WEIGHTS],
    scratch: PackScratch,
}

/// The weights of one call.
pub(crate) struct CallWeights<'a> {
    prepared: &'a [Option<Arc<Packed>>; WEIGHTS],
    own: &'a OwnWeights,
    geometries: [Option<Geometry>; WEIGHTS],
}

impl Prepared {
    /// Nothing packed; instructions up to `limit` are used where the processor has them.
    pub fn new(limit: Instructions) -> Self {
        Self {
            isa: Isa::at_most(limit),
            packing: Packing::default(),
            weights: Default::default(),
            wide: [false; WEIGHTS],
            scratch: Arc::default(),
            threads: AtomicUsize::new(0),
        }
    }

    /// The same with scratch memory that other nodes may use too.
    #[must_use]
    pub fn with_pool(self, scratch: Arc<ScratchPool>) -> Self {
        Self { scratch, ..self }
    }

    /// The same that packs weights of more than 4 MiB of bf16 as `packing` says, with the same results. AMX tiles take
    /// them plain, and so do vectors of 8 lanes and fewer.
    #[must_use]
    pub fn with_packing(self, packing: Packing) -> Self {
        let serves = compact::serves(self.isa) && !self.isa.has_tiles();
        Self { packing: if serves { packing } else { Packing::Plain }, ..self }
    }

    /// The same for a node that may round factors of products: where weights are bf16 and the processor multiplies
    /// pairs of bf16 faster, calls of many tokens do; where weights are integers and it multiplies integers, all do,
    /// and attention of many tokens has factors of bf16 where these are faster. On AMX tiles rows are bf16 beside
    /// integers too.
    #[must_use]
    pub fn with_accuracy(self, level: AccuracyLevel) -> Self {
        match level {
            AccuracyLevel::Activations => self,
            AccuracyLevel::Bf16 => Self { isa: self.isa.rounding(), ..self },
            AccuracyLevel::Int8 => Self { isa: self.isa.quantizing(), ..self },
        }
    }

    /// Whether calls round what they multiply with such weights: of many tokens where these are bf16, or all where they
    /// are integers.
    pub fn rounds_rows(&self, weights: WeightData<'_>) -> bool {
        match weights.form() {
            Form::Values => false,
            Form::Pairs => self.isa.rounds(),
            form => self.isa.quantizes_to(form),
        }
    }

    /// Packs a weight `[matrices, inner, blocks * columns]` that never changes; equal weights of other nodes and
    /// sessions that are packed alike and still in use are shared.
    ///
    /// `blocks` is `G` for [`Weight::Query`], `2 * G` for [`Weight::KeyValue`], 2 for a gated [`Weight::Input`] and 1
    /// for the others; `matrices` is `E`, and 1 for [`Weight::Router`], [`Weight::KeyValue`] and the output of a
    /// head.
    ///
    /// f32 whose every value is a bf16 is packed as such, with the same results from half of the memory; so is f32
    /// whose every value is an f16, except where products may go to AMX tiles, since small ones have other bits there.
    /// While it is packed there is one more copy in two bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Length`] where `data` does not have that shape, or its scales do not fit it.
    ///
    /// # Panics
    ///
    /// With [`OutOfMemory`](crate::OutOfMemory).
    pub fn pack<'a>(
        &mut self,
        weight: Weight,
        shape: [usize; 3],
        blocks: usize,
        data: impl Into<WeightData<'a>>,
    ) -> Result<(), KernelError> {
        let data = data.into();
        let [matrices, inner, row] = shape;
        check::weight(weight.names(), data, shape)?;
        let columns = row.checked_div(blocks).unwrap_or(0);
        let geometry = Geometry { matrices, blocks, inner, columns };
        check::length(weight.names()[0], geometry.len(), &shape)?;
        let narrowed = Narrowed::exact(data, !self.isa.has_tiles());
        let packing = if geometry.len() > FAR / size_of::<bf16>() { self.packing } else { Packing::Plain };
        let source = narrowed.as_ref().map_or(data, Narrowed::data);
        self.weights[weight as usize] = Packed::shared(geometry, source, packing);
        self.wide[weight as usize] = narrowed.is_none() && needs_four_bytes(data);
        Ok(())
    }

    /// The instructions for `tokens` tokens, each of which takes `top_k` of `experts` experts with these weights. Where
    /// no rows are rounded, what a weight is stored in, and whether it is packed already, makes no difference.
    pub(crate) fn isa_of<const N: usize>(
        &self,
        fewest: FewestOnTiles,
        tokens: usize,
        [top_k, experts]: [usize; 2],
        given: [(Weight, WeightData<'_>); N],
    ) -> Isa {
        let is_wide = |(weight, data)| match &self.weights[weight as usize] {
            Some(_) => self.wide[weight as usize],
            None => needs_four_bytes(data),
        };
        let few = self.isa.has_tiles() && tokens < if top_k < experts { fewest.some } else { fewest.all };
        let leaves_tiles = few && given.into_iter().any(is_wide)
            || self.isa.form().is_quantized() && !may_meet_tiles(self.isa, tokens);
        let isa = if leaves_tiles { self.isa.without_tiles() } else { self.isa };
        let few = tokens.saturating_mul(top_k) < FEWEST_ROUNDED.saturating_mul(experts);
        let forms = given.map(|(weight, data)| match &self.weights[weight as usize] {
            Some(packed) => packed.panels().form(),
            None => data.form(),
        });
        let quantized = forms.into_iter().find(|form| isa.quantizes_to(*form));
        match (isa.form(), quantized) {
            (Form::Pairs, _) if !few && forms.contains(&Form::Pairs) => isa,
            (Form::Quantized(_), Some(form)) if few => isa.quantizing_to(form).keeping_attention(),
            (Form::Quantized(_), Some(form)) => isa.quantizing_to(form),
            _ => isa.keeping_rows(),
        }
    }

    /// Bytes of the packed weights; those shared with others count too.
    pub fn weight_bytes(&self) -> usize {
        self.weights.iter().flatten().map(|packed| packed.bytes()).sum()
    }

    /// Bytes that each thread keeps besides, for all nodes together, once it has multiplied on AMX tiles, or many rows
    /// by weights that are packed in int4, in 12 bits or, with vectors of 8 lanes or 4, in f16; or has rounded rows.
    pub fn thread_bytes(&self) -> usize {
        let tiles = if self.isa.has_tiles() { tiles::THREAD_BYTES } else { 0 };
        let int4 = || self.weights.iter().flatten().any(|packed| matches!(packed.panels(), Panels::I4(_)));
        let widens = self.isa.has_narrow_vectors() || self.isa.has_wide_vectors() && int4();
        let vectors = self.isa.without_tiles();
        let rounded = self.weights.iter().flatten().map(|packed| match packed.panels().form() {
            Form::Pairs if vectors.rounds() => Form::Pairs.thread_bytes(packed.geometry().inner),
            form if vectors.quantizes_to(form) => form.thread_bytes(packed.geometry().inner),
            _ => 0,
        });
        let attention = match &self.weights[Weight::Query as usize] {
            Some(query) if self.isa.rounds_attention() => {
                Form::Pairs.thread_bytes(query.geometry().columns.max(KEYS_PER_TILE))
            }
            _ => 0,
        };
        let rounded = rounded.max().filter(|bytes| *bytes > 0).map_or(0, |bytes| bytes.max(attention));
        let unpacked = self.weights.iter().flatten().filter(|packed| matches!(packed.panels(), Panels::Compact(_)));
        let unpacked = unpacked.map(|packed| compact::thread_bytes(packed.geometry().inner)).max().unwrap_or(0);
        tiles + rounded + unpacked + if widens { widened::THREAD_BYTES } else { 0 }
    }

    /// Bytes of scratch memory that is kept for later calls, those of nodes that share it included.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// Runs `body` with scratch memory that no other call uses.
    pub(crate) fn with_scratch<T>(&self, body: impl FnOnce(&mut Scratch) -> T) -> T {
        self.scratch.with(body)
    }

    /// The weights of one call: what is prepared, and the others packed now, on the threads of the call.
    pub(crate) fn weights<'a, 'b>(
        &'a self,
        own: &'a mut OwnWeights,
        given: impl IntoIterator<Item = (Weight, Geometry, WeightData<'b>)>,
        pool: &dyn ThreadPool,
    ) -> CallWeights<'a> {
        let mut geometries = [None; WEIGHTS];
        for (weight, geometry, data) in given {
            let index = weight as usize;
            geometries[index] = Some(geometry);
            if self.weights[index].as_ref().is_none_or(|packed| packed.geometry() != geometry) {
                own.packed[index].refill(geometry, data, &mut own.scratch, pool);
            }
        }
        CallWeights { prepared: &self.weights, own, geometries }
    }
}

impl CallWeights<'_> {
    /// The panels of a weight.
    pub(crate) fn get(&self, weight: Weight) -> &Packed {
        let index = weight as usize;
        let prepared = self.prepared[index].as_deref();
        prepared.filter(|packed| Some(packed.geometry()) == self.geometries[index]).unwrap_or(&self.own.packed[index])
    }
}

impl OwnWeights {
    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.packed.iter().map(Packed::bytes).sum::<usize>() + self.scratch.bytes()
    }
}

impl Weight {
    /// Of the weight, and of its scales.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Router => ["router_weight", "router_scale"],
            Self::Query => ["query_weight", "query_scale"],
            Self::KeyValue => ["kv_weight", "kv_scale"],
            Self::Input => ["input_weight", "input_scale"],
            Self::Output => ["output_weight", "output_scale"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(values: &[f32]) -> Prepared {
        let mut prepared = Prepared::default();
        prepared.pack(Weight::Router, [1, 3, 4], 1, values).unwrap();
        prepared.pack(Weight::Query, [2, 3, 2], 2, values).unwrap();
        prepared
    }

    #[test]
    fn nodes_of_a_process_share_their_scratch_memory() {
        let pool = ScratchPool::of_process();
        assert!(Arc::ptr_eq(&pool, &ScratchPool::of_process()));
        let [first, second] = [(); 2].map(|()| Prepared::default().with_pool(Arc::clone(&pool)));
        let taken = |prepared: &Prepared| prepared.with_scratch(|scratch| scratch.border.output.take(1000).as_ptr());
        let place = taken(&first);
        let held = first.scratch_bytes();
        assert!(held >= 4000);
        assert_eq!((taken(&second), second.scratch_bytes()), (place, held));
        assert_eq!(Prepared::default().scratch_bytes(), 0);
    }

    /// Rows of queries are rounded in the memory of a thread, as wide as a head.
    #[test]
    fn threads_keep_rows_of_wide_heads() {
        let (values, scales) = ([1i8; 8 * 600], [1.0f32; 600]);
        for (level, data) in [
            (AccuracyLevel::Bf16, WeightData::Bf16(&[half::bf16::ONE; 8 * 600])),
            (AccuracyLevel::Int8, WeightData::I8 { values: &values, scales: &scales }),
        ] {
            let mut prepared = Prepared::new(Instructions::Avx512).with_accuracy(level);
            if !prepared.isa.rounds_attention() {
                return crate::skip::skip("no AVX512_BF16, or none that is faster than AVX-512");
            }
            prepared.pack(Weight::Query, [1, 8, 600], 1, data).unwrap();
            assert_eq!(prepared.thread_bytes(), Form::Pairs.thread_bytes(600), "{level:?}");
        }
    }

    /// What is asked for is kept to where the processor serves it and caches may not hold the weights.
    #[test]
    #[cfg_attr(miri, ignore = "too many weights")]
    fn large_weights_are_packed_as_asked() {
        let with = |packing, level, weights: &[bf16]| {
            let mut prepared = Prepared::new(level).with_packing(packing);
            prepared.pack(Weight::Output, [1, 512, weights.len() / 512], 1, WeightData::Bf16(weights)).unwrap();
            prepared
        };
        let weights: Vec<bf16> = (0..FAR / 2 + 512).map(|i| bf16::from_f32((i as f32 * 0.37).sin())).collect();
        let widest = Isa::at_most(Instructions::Avx512);
        let plain = with(Packing::Plain, Instructions::Avx512, &weights);
        let compact = with(Packing::Compact, Instructions::Avx512, &weights);
        if compact::serves(widest) {
            assert!(compact.weight_bytes() * 100 < plain.weight_bytes() * 77, "{}", compact.weight_bytes());
            assert_eq!(compact.thread_bytes() - plain.thread_bytes(), compact::thread_bytes(512));
            let other = with(Packing::Compact, Instructions::Avx512, &weights);
            assert!(Arc::ptr_eq(compact.weights[4].as_ref().unwrap(), other.weights[4].as_ref().unwrap()));
        } else {
            crate::skip::leave_out("no AVX-512 F and BW");
            assert_eq!(compact.weight_bytes(), plain.weight_bytes());
        }
        let narrow = with(Packing::Compact, Instructions::Avx2, &weights);
        assert_eq!(narrow.weight_bytes(), plain.weight_bytes(), "vectors of 8 lanes");
        let tiles = with(Packing::Compact, Instructions::Amx, &weights);
        let expected = if tiles.isa.has_tiles() { &plain } else { &compact };
        assert_eq!(tiles.weight_bytes(), expected.weight_bytes(), "tiles take weights plain");
        let near =
            [Packing::Plain, Packing::Compact].map(|packing| with(packing, Instructions::Avx512, &weights[512..]));
        assert_eq!(near[0].weight_bytes(), near[1].weight_bytes(), "weights that caches may hold");
        let unlike: Vec<bf16> = (0..FAR / 2 + 512).map(|i| bf16::from_bits((i * 40503) as u16)).collect();
        let unlike = [Packing::Plain, Packing::Compact].map(|packing| with(packing, Instructions::Avx512, &unlike));
        assert_eq!(unlike[0].weight_bytes(), unlike[1].weight_bytes(), "weights of too many exponents");
        let wide: Vec<f32> = (0..FAR / 2 + 512).map(|i| i as f32 + 0.1).collect();
        let [plain, compact] = [Packing::Plain, Packing::Compact].map(|packing| {
            let mut prepared = Prepared::new(Instructions::Avx512).with_packing(packing);
            prepared.pack(Weight::Output, [1, 512, wide.len() / 512], 1, &wide).unwrap();
            prepared
        });
        let shared = compact.weights[4].as_ref().zip(plain.weights[4].as_ref());
        assert!(shared.is_some_and(|(first, second)| Arc::ptr_eq(first, second)), "f32 is packed in one way");
    }

    #[test]
    fn nodes_with_equal_weights_share_them() {
        let values: Vec<f32> = (0u8..12).map(f32::from).collect();
        let (first, second) = (packed(&values), packed(&values));
        let both = first.weights.iter().flatten().zip(second.weights.iter().flatten());
        assert_eq!(both.filter(|(first, second)| Arc::ptr_eq(first, second)).count(), 2);
        assert!(first.weight_bytes() > 0 && first.weight_bytes() == second.weight_bytes());
    }
}
