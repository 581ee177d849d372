//! From the numbers of the C ABI to the types of the crates below.

use moa_cuda::ACTIVATIONS;
use moa_cuda::Element;
use moa_cuda::plan::Regime;
use moa_cuda_driver::{Caches, Node};
use moa_schema::{AttentionMode, CrossAttentionAttributes, FeedForwardAttributes, GateMode, SelfAttentionAttributes};

use crate::failure::Failure;
use crate::types::{MAX_RANK, RawNode, RawShape};

/// `MOA_CUDA_TF32`.
const TF32: u32 = 1;

/// `MOA_CUDA_SHARED_CACHES`.
const SHARED_CACHES: u32 = 2;

/// The member of `all` that `number` numbers.
fn member<T: Copy>(what: &str, number: u32, all: &[T]) -> Result<T, Failure> {
    let unknown = || Failure::argument(format!("`{what}` must be below {}, found {number}", all.len()));
    all.get(number as usize).copied().ok_or_else(unknown)
}

fn flag(what: &str, number: u32) -> Result<bool, Failure> {
    member(what, number, &[false, true])
}

/// The element type behind a number of the header.
pub(crate) fn element(number: u32) -> Result<Element, Failure> {
    member("element", number, &Element::ALL)
}

impl RawNode {
    /// The operator with its attributes.
    pub(crate) fn node(&self) -> Result<Node, Failure> {
        if self.flags & !(TF32 | SHARED_CACHES) != 0 {
            return Err(Failure::argument(format!("`flags` has unknown bits: {:#x}", self.flags)));
        }
        let (top_k, kv_num_heads) = (self.top_k as usize, self.kv_num_heads as usize);
        let gate_mode = member("gate_mode", self.gate_mode, &GateMode::ALL)?;
        if self.operator_id < 2 {
            if kv_num_heads == 0 {
                return Err(Failure::argument("`kv_num_heads` must be at least 1, found 0"));
            }
            if !self.scale.is_finite() {
                return Err(Failure::argument(format!("`scale` must be finite, found {}", self.scale)));
            }
        }
        let skip_padded_queries = flag("skip_padded_queries", self.skip_padded_queries)?;
        let caches = if self.flags & SHARED_CACHES == 0 { Caches::Separate } else { Caches::Shared };
        match self.operator_id {
            0 => {
                let attention_mode = member("attention_mode", self.attention_mode, &AttentionMode::ALL)?;
                if attention_mode == AttentionMode::StickBreaking && self.causal == 0 {
                    return Err(Failure::argument("`attention_mode` breaks sticks, which needs `causal`"));
                }
                let attributes = SelfAttentionAttributes {
                    top_k,
                    kv_num_heads,
                    causal: flag("causal", self.causal)?,
                    scale: self.scale,
                    gate_mode,
                    skip_padded_queries,
                    attention_mode,
                };
                Ok(Node::SelfAttention(attributes, caches))
            }
            1 => Ok(Node::CrossAttention(CrossAttentionAttributes {
                top_k,
                kv_num_heads,
                scale: self.scale,
                gate_mode,
                skip_padded_queries,
            })),
            2 => Ok(Node::FeedForward(FeedForwardAttributes {
                top_k,
                gate_mode,
                activation: member("activation", self.activation, &ACTIVATIONS)?,
                gated: flag("gated", self.gated)?,
            })),
            number => Err(Failure::argument(format!("`operator_id` must be below 3, found {number}"))),
        }
    }

    /// The element type of the node.
    pub(crate) fn element(&self) -> Result<Element, Failure> {
        element(self.element)
    }

    /// Choices that change rounding.
    pub(crate) const fn options(&self) -> moa_cuda::Options {
        moa_cuda::Options { tf32: self.flags & TF32 != 0, wgmma: false }
    }
}

impl RawShape {
    /// The dimensions; `None` for an absent tensor.
    pub(crate) fn dims(&self) -> Result<Option<Vec<usize>>, Failure> {
        if self.rank == -1 {
            return Ok(None);
        }
        let rank = usize::try_from(self.rank).ok().filter(|rank| *rank <= MAX_RANK);
        let rank = rank.ok_or_else(|| Failure::argument(format!("a shape has the rank {}", self.rank)))?;
        let dims: Result<Vec<_>, _> = self.dims[..rank].iter().map(|&dim| usize::try_from(dim)).collect();
        let dims = dims.map_err(|_| Failure::argument(format!("a shape is {:?}", &self.dims[..rank])))?;
        let elements = dims.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim));
        // Half of what an address can count leaves room for the bytes of each element.
        if elements.is_none_or(|count| count > usize::MAX / 16) {
            return Err(Failure::argument(format!("a shape has too many elements: {dims:?}")));
        }
        Ok(Some(dims))
    }

    /// The structure for dimensions of at most [`MAX_RANK`].
    pub(crate) fn of(dims: &[usize]) -> Self {
        let mut shape = Self { rank: dims.len().min(MAX_RANK) as i32, reserved: 0, dims: [0; MAX_RANK] };
        for (place, dim) in shape.dims.iter_mut().zip(dims) {
            *place = i64::try_from(*dim).unwrap_or(i64::MAX);
        }
        shape
    }
}

/// The number of a regime in the header.
pub(crate) const fn regime(regime: Regime) -> u32 {
    match regime {
        Regime::Dense => 0,
        Regime::Sparse => 1,
        Regime::Grouped => 2,
        Regime::GroupedReduce => 3,
    }
}
