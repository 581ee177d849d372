//! Weights that never change, packed when the kernel of a node is created.

use std::env;
use std::ffi::OsStr;

use moa_kernels::{Instructions, Packing, Prepared, ScratchPool, Weight};
use moa_schema::{
    Attributes, INSTRUCTIONS_VARIABLE, PACKING_VARIABLE, cross_attention as cross, feed_forward as ffn, instructions,
    lm_head as head, packing, self_attention as own,
};

use crate::failure::Failure;
use crate::ffi::{Elements, Shape};

/// A constant input.
pub(crate) struct Constant<'a> {
    pub(crate) shape: Shape,
    pub(crate) elements: Elements<'a>,
}

/// What kernels do as the environment says.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choices {
    /// The widest instructions.
    limit: Instructions,
    packing: Packing,
}

impl Choices {
    /// # Errors
    ///
    /// A value of [`INSTRUCTIONS_VARIABLE`] or [`PACKING_VARIABLE`] that names nothing.
    pub(crate) fn of_environment() -> Result<Self, Failure> {
        let [level, way] = [INSTRUCTIONS_VARIABLE, PACKING_VARIABLE].map(env::var_os);
        Self::named(level.as_deref(), way.as_deref())
    }

    fn named(level: Option<&OsStr>, way: Option<&OsStr>) -> Result<Self, Failure> {
        let level = instructions(level).map_err(Failure::argument)?;
        let way = packing(way).map_err(Failure::argument)?;
        Ok(Self {
            limit: level.and_then(Instructions::named).unwrap_or_default(),
            packing: way.and_then(Packing::named).unwrap_or_default(),
        })
    }
}

/// Packs what `constant` knows as `choices` say; an input that is not constant, or does not fit, is left to each call.
pub(crate) fn prepare<'a>(
    Choices { limit, packing }: Choices,
    attributes: &Attributes,
    constant: &dyn Fn(usize) -> Option<Constant<'a>>,
) -> Prepared {
    let mut prepared = Prepared::new(limit).with_packing(packing).with_pool(ScratchPool::of_process());
    let weights: Vec<(Weight, usize, Option<usize>, usize)> = match attributes {
        Attributes::SelfAttention(attributes) => vec![
            (Weight::Router, own::ROUTER_WEIGHT, None, 1),
            (Weight::Query, own::QUERY_WEIGHT, Some(own::QUERY_SCALE), attributes.kv_num_heads),
            (Weight::KeyValue, own::KV_WEIGHT, Some(own::KV_SCALE), 2 * attributes.kv_num_heads),
            (Weight::Output, own::OUTPUT_WEIGHT, Some(own::OUTPUT_SCALE), 1),
        ],
        Attributes::CrossAttention(attributes) => vec![
            (Weight::Router, cross::ROUTER_WEIGHT, None, 1),
            (Weight::Query, cross::QUERY_WEIGHT, Some(cross::QUERY_SCALE), attributes.kv_num_heads),
            (Weight::Output, cross::OUTPUT_WEIGHT, Some(cross::OUTPUT_SCALE), 1),
        ],
        Attributes::FeedForward(attributes) => vec![
            (Weight::Router, ffn::ROUTER_WEIGHT, None, 1),
            (Weight::Input, ffn::INPUT_WEIGHT, Some(ffn::INPUT_SCALE), if attributes.gated { 2 } else { 1 }),
            (Weight::Output, ffn::OUTPUT_WEIGHT, Some(ffn::OUTPUT_SCALE), 1),
        ],
        Attributes::LmHead => vec![(Weight::Output, head::OUTPUT_WEIGHT, Some(head::OUTPUT_SCALE), 1)],
    };
    for (weight, index, scale, blocks) in weights {
        let Some(Constant { shape, elements }) = constant(index) else { continue };
        let scales = scale.and_then(constant).map(|scales| scales.elements);
        let Some(values) = elements.weights(scales) else { continue };
        let shape = match *shape.as_slice() {
            [inner, row] => [1, inner, row],
            [matrices, inner, row] => [matrices, inner, row],
            _ => continue,
        };
        // A refusal leaves the weight unpacked; a call then names what does not fit.
        let _ = prepared.pack(weight, shape, blocks, values);
    }
    prepared
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Bytes that a large head takes in the library, by what the environment names.
    fn packed_bytes(weights: &[bf16], level: &str, way: &str) -> usize {
        let choices = Choices::named(Some(level.as_ref()), Some(way.as_ref())).ok().unwrap();
        let constant = |index| {
            let shape = Shape::of(&[1024, 2176]);
            (index == head::OUTPUT_WEIGHT).then_some(Constant { shape, elements: Elements::Brain(weights) })
        };
        prepare(choices, &Attributes::LmHead, &constant).weight_bytes()
    }

    #[test]
    #[cfg_attr(miri, ignore = "too many weights")]
    fn weights_are_packed_as_the_environment_says() {
        let weights: Vec<bf16> = (0..1024 * 2176).map(|i| bf16::from_f32((i as f32 * 0.37).sin())).collect();
        let plain = packed_bytes(&weights, "avx512", "plain");
        assert_eq!((packed_bytes(&weights, "avx512", ""), packed_bytes(&weights, "avx2", "compact")), (plain, plain));
        let compact = packed_bytes(&weights, "avx512", "compact");
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") {
            assert!(compact * 100 < plain * 77, "{compact} of {plain}");
            return;
        }
        assert_eq!(compact, plain);
    }
}
