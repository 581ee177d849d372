//! Sizes of a model, as people ask for them.

use serde::Serialize;

use super::cost::RoutedAttention;

/// Sizes of a model, as far as they are told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ModelSizes {
    /// Layers of each stack, an encoder's before a decoder's; none of a single layer.
    pub layers: Vec<u64>,
    /// Attention of each stack, that of its first layer; cross-attention aside.
    pub attention: Vec<AttentionSizes>,
    /// Symbols of the output, behind those of a source where that has others.
    pub vocabulary: Vec<u64>,
}

/// Sizes of the attention of one stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttentionSizes {
    /// `attention`, or `encoder attention` and `decoder attention` where there are both.
    pub name: &'static str,
    /// Width of what it reads and gives.
    pub width: u64,
    /// Heads of keys and values; all that a token has, or all of one expert.
    pub heads: u64,
    /// Width of a head.
    pub head_size: u64,
    /// Experts that a token takes, where tokens are routed.
    pub top_k: Option<u64>,
    /// Experts that there are, where tokens are routed.
    pub num_experts: Option<u64>,
}

impl AttentionSizes {
    pub(super) fn routed(name: &'static str, sizes: &RoutedAttention) -> Self {
        let RoutedAttention { width, top_k, experts, kv_heads, head, .. } = *sizes;
        let (top_k, num_experts) = (Some(top_k), Some(experts));
        Self { name, width, heads: kv_heads, head_size: head, top_k, num_experts }
    }

    /// `heads` heads of `head_size`, as wide as what they read.
    pub(super) fn dense(name: &'static str, heads: u64, head_size: u64) -> Self {
        Self { name, width: heads * head_size, heads, head_size, top_k: None, num_experts: None }
    }

    fn text(&self) -> String {
        let Self { width, heads, head_size, .. } = self;
        match (self.top_k, self.num_experts) {
            (Some(top_k), Some(experts)) => {
                let heads = if *heads == 1 { String::new() } else { format!("{heads} x ") };
                format!("{top_k} of {experts} experts, heads of {heads}{head_size}, width {width}")
            }
            _ => format!("{heads} heads of {head_size}, width {width}"),
        }
    }
}

impl ModelSizes {
    /// Each with its name.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let joined = |sizes: &[u64], between: &str| {
            Some(sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(between))
                .filter(|text| !text.is_empty())
        };
        let layers = joined(&self.layers, " + ").map(|text| ("layers", text));
        let attention = self.attention.iter().map(|attention| (attention.name, attention.text()));
        let vocabulary = joined(&self.vocabulary, " to ").map(|text| ("vocabulary", text));
        layers.into_iter().chain(attention).chain(vocabulary).collect()
    }
}

/// Symbols of a source and of the output, once where they are as many.
pub(super) fn symbols(source: u64, target: u64) -> Vec<u64> {
    if source == target { vec![target] } else { vec![source, target] }
}
