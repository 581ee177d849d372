//! Shapes of outputs, from the sizes of a node.

use std::ops::Deref;

use crate::{CrossAttentionDims, FeedForwardDims, LmHeadDims, SelfAttentionDims};

/// Most dimensions of an output.
const MAX_RANK: usize = 4;

/// The dimensions of one output, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputShape {
    dims: [usize; MAX_RANK],
    rank: usize,
}

impl Deref for OutputShape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

impl OutputShape {
    const fn three([first, second, third]: [usize; 3]) -> Self {
        Self { dims: [first, second, third, 0], rank: 3 }
    }
}

/// What an operator returns whose tokens are routed: its output, and the routing.
const fn routed([batch, tokens, width]: [usize; 3], top_k: usize) -> [OutputShape; 3] {
    let chosen = OutputShape::three([batch, tokens, top_k]);
    [OutputShape::three([batch, tokens, width]), chosen, chosen]
}

impl SelfAttentionDims {
    /// Shapes of all outputs, in the order of the schema; `capacity` is that of shared caches, as
    /// [`SelfAttentionDims::with_capacity`] gives it.
    pub fn output_shapes(&self, capacity: Option<usize>) -> [OutputShape; 5] {
        let rows = capacity.unwrap_or(self.past + self.tokens);
        let cache = OutputShape { dims: [self.batch, self.kv_heads, rows, self.head], rank: 4 };
        let [output, indices, weights] = routed([self.batch, self.tokens, self.width], self.top_k);
        [output, cache, cache, indices, weights]
    }
}

impl CrossAttentionDims {
    /// Shapes of all outputs, in the order of the schema.
    pub fn output_shapes(&self) -> [OutputShape; 3] {
        routed([self.batch, self.tokens, self.width], self.top_k)
    }
}

impl FeedForwardDims {
    /// Shapes of all outputs, in the order of the schema.
    pub fn output_shapes(&self) -> [OutputShape; 3] {
        routed([self.batch, self.tokens, self.width], self.top_k)
    }
}

impl LmHeadDims {
    /// Shapes of all outputs, in the order of the schema.
    pub fn output_shapes(&self) -> [OutputShape; 1] {
        [OutputShape::three([self.batch, self.tokens, self.vocabulary])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CROSS_ATTENTION, FEED_FORWARD, LM_HEAD, Operator, SELF_ATTENTION};

    const SIZES: [(&str, usize); 9] =
        [("B", 2), ("T", 3), ("C", 5), ("G", 7), ("P", 11), ("P + T", 14), ("D", 13), ("k", 17), ("V", 19)];

    /// The shapes that the contract of an operator names.
    fn of_contract(operator: &Operator) -> Vec<Vec<usize>> {
        let size = |symbol: &&str| SIZES.iter().find(|(name, _)| name == symbol).unwrap().1;
        operator.outputs.iter().map(|output| output.dims.iter().map(size).collect()).collect()
    }

    fn vectors<const N: usize>(shapes: [OutputShape; N]) -> Vec<Vec<usize>> {
        shapes.iter().map(|shape| shape.to_vec()).collect()
    }

    #[test]
    fn shapes_are_those_of_the_contract() {
        let (batch, tokens, width, experts, top_k) = (2, 3, 5, 23, 17);
        let (kv_heads, head, past, keys) = (7, 13, 11, 29);
        let own = SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head };
        assert_eq!(vectors(own.output_shapes(None)), of_contract(&SELF_ATTENTION));
        let cross = CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head };
        assert_eq!(vectors(cross.output_shapes()), of_contract(&CROSS_ATTENTION));
        let layer = FeedForwardDims { batch, tokens, width, experts, top_k, hidden: 31 };
        assert_eq!(vectors(layer.output_shapes()), of_contract(&FEED_FORWARD));
        let head = LmHeadDims { batch, tokens, width, vocabulary: 19 };
        assert_eq!(vectors(head.output_shapes()), of_contract(&LM_HEAD));
    }

    #[test]
    fn shared_caches_keep_their_rows() {
        let dims =
            SelfAttentionDims { batch: 2, tokens: 3, past: 4, width: 8, experts: 2, top_k: 1, kv_heads: 1, head: 8 };
        let [_, key, value, ..] = dims.output_shapes(Some(16));
        assert_eq!((&*key, &*value), (&[2, 1, 16, 8][..], &[2, 1, 16, 8][..]));
    }
}
