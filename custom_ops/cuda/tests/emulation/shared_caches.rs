//! Caches that are updated in the memory of the past.

use moa_cuda::Element;
use moa_schema::SelfAttentionDims;

use crate::attention::{Case, random_dims};
use crate::support::{Random, more};

impl Case {
    /// Asks for caches of `rows` rows that are updated in place.
    pub(crate) fn update_in_place(&mut self, rows: usize) {
        (self.all_outputs, self.capacity) = (true, Some(rows));
    }

    /// `[B, G, rows, D]` with the rows of `values` in front; what stands behind them is never read.
    pub(crate) fn with_room(&self, values: &[f32], rows: usize) -> Vec<f32> {
        let SelfAttentionDims { batch, past, kv_heads, head, .. } = self.dims;
        let pair = |pair: usize| {
            let own = values[pair * past * head..][..past * head].iter().copied();
            own.chain(std::iter::repeat_n(f32::NAN, (rows - past) * head))
        };
        (0..batch * kv_heads).flat_map(pair).collect()
    }

    /// The rows of a cache that a call leaves; what is behind them must be as it was.
    pub(crate) fn rows_of_cache(&self, found: &[f32]) -> Vec<f32> {
        let SelfAttentionDims { tokens, past, head, .. } = self.dims;
        let rows = self.capacity.unwrap_or(past + tokens);
        let pairs = found.chunks_exact(rows * head).map(|pair| pair.split_at((past + tokens) * head));
        let own = pairs.map(|(own, behind)| {
            assert!(behind.iter().all(|value| value.is_nan()), "something stands behind the new rows: {behind:?}");
            own
        });
        own.flatten().copied().collect()
    }
}

/// Caches with room are updated in place, as full as can be and with rows to spare.
#[test]
fn caches_with_room() {
    for seed in more(0..24) {
        let mut random = Random(seed);
        let odd = random_dims(&mut random);
        let large = SelfAttentionDims {
            tokens: random.pick(&[1, 7, 65, 150]),
            past: random.pick(&[0, 1, 63, 64, 200]),
            width: 64,
            head: random.pick(&[32, 64, 128]),
            ..odd
        };
        let dims = random.pick(&[odd, large]);
        let mut case = Case::random(&mut random, dims, Element::ALL[seed as usize % 3], false);
        case.device.multiprocessors = random.pick(&[1, 16, 132]);
        case.update_in_place(dims.past + dims.tokens + random.pick(&[0, 1, 40]));
        println!("seed {seed}: {dims:?} {:?} {:?}", case.capacity, case.device);
        case.check();
        assert!(case.plan().launches.iter().all(|launch| launch.parameters.copy_blocks == 0), "nothing is copied");
    }
}
