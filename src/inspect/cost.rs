//! Counting rules.
//!
//! Two conventions for multiply-accumulates:
//!
//! * `paper`: products with weights, router and output layer included, experts that are not chosen left out, no
//!   product of queries with keys or of probabilities with values; a bias counts its length once per call. This is
//!   the convention behind the numbers printed in "Mixture of Attention Heads" (EMNLP 2022).
//! * `full`: products with weights and both attention products over all keys; no biases.

use std::{collections::BTreeSet, ops::Add};

use moa_graphs::{
    Weight,
    model::{
        Attention, DenseFeedForward, Embedding, EncoderDecoder, ExpertFeedForward, FeedForward, KeyValueWeights,
        LayerNorm, Linear, MaskedLm, Model, Positions,
    },
};

/// Tokens for which multiply-accumulates are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Lengths {
    /// Tokens of the source, or of the only side.
    pub source: u64,
    /// Tokens of the target.
    pub target: u64,
}

/// What a part holds and costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Cost {
    /// Distinct trained values.
    pub parameters: u64,
    /// Those that one token uses.
    pub active_parameters: u64,
    /// Multiply-accumulates by the paper's convention.
    pub paper_macs: u64,
    /// Multiply-accumulates with both attention products.
    pub full_macs: u64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            parameters: self.parameters + other.parameters,
            active_parameters: self.active_parameters + other.active_parameters,
            paper_macs: self.paper_macs + other.paper_macs,
            full_macs: self.full_macs + other.full_macs,
        }
    }
}

/// Values of one tensor.
pub(super) fn elements(weight: &Weight) -> u64 {
    weight.shape().iter().map(|dim| *dim as u64).product()
}

/// Counts every stored tensor once.
#[derive(Default)]
struct Counter<'a> {
    seen: BTreeSet<&'a str>,
}

impl<'a> Counter<'a> {
    fn new_values(&mut self, weight: &'a Weight) -> u64 {
        if self.seen.insert(weight.name()) { elements(weight) } else { 0 }
    }

    /// Parameters that every token uses.
    fn dense(&mut self, weights: &[&'a Weight]) -> Cost {
        let parameters = weights.iter().map(|weight| self.new_values(weight)).sum();
        Cost { parameters, active_parameters: parameters, ..Cost::default() }
    }

    /// Parameters of which a token uses `top_k` of `experts` shares.
    fn routed(&mut self, weights: &[&'a Weight], top_k: usize, experts: usize) -> Cost {
        let parameters: u64 = weights.iter().map(|weight| self.new_values(weight)).sum();
        let active_parameters = parameters / experts as u64 * top_k as u64;
        Cost { parameters, active_parameters, ..Cost::default() }
    }

    fn attention(&mut self, a: &'a Attention, queries: u64, keys: u64) -> Cost {
        let mut shared = vec![&a.router];
        match &a.keys_values {
            KeyValueWeights::Separate { key, value } => shared.extend([key, value]),
            KeyValueWeights::Joint(both) => shared.push(both),
        }
        shared.extend(&a.output_bias);
        let cost = self.dense(&shared) + self.routed(&[&a.query, &a.output], a.top_k, a.num_experts);
        let columns = (a.kv_num_heads * a.head_size) as u64;
        let (width, source, k) = (a.width as u64, a.source_width as u64, a.top_k as u64);
        let linear =
            2 * keys * source * columns + 2 * queries * k * width * columns + queries * width * a.num_experts as u64;
        let products = 2 * queries * keys * k * columns;
        cost + Cost { paper_macs: linear, full_macs: linear + products, ..Cost::default() }
    }

    fn linear(&mut self, linear: &'a Linear, tokens: u64) -> Cost {
        let macs = tokens * elements(&linear.weight);
        let cost = self.dense(&[&linear.weight, &linear.bias]);
        cost + Cost { paper_macs: macs + elements(&linear.bias), full_macs: macs, ..Cost::default() }
    }

    fn feed_forward(&mut self, block: &'a FeedForward, tokens: u64) -> Cost {
        match block {
            FeedForward::Dense(DenseFeedForward { input, output, .. }) => {
                self.linear(input, tokens) + self.linear(output, tokens)
            }
            FeedForward::Experts(block) => self.expert_feed_forward(block, tokens),
        }
    }

    fn expert_feed_forward(&mut self, block: &'a ExpertFeedForward, tokens: u64) -> Cost {
        let mut shared = vec![&block.router];
        shared.extend(&block.output_bias);
        let cost = self.dense(&shared) + self.routed(&[&block.input, &block.output], block.top_k, block.num_experts);
        let experts = block.num_experts as u64;
        let per_expert = (elements(&block.input) + elements(&block.output)) / experts;
        let macs = tokens * (block.width as u64 * experts + block.top_k as u64 * per_expert);
        cost + Cost { paper_macs: macs, full_macs: macs, ..Cost::default() }
    }

    fn norms(&mut self, norms: &[&'a LayerNorm]) -> Cost {
        norms.iter().fold(Cost::default(), |cost, norm| cost + self.dense(&[&norm.weight, &norm.bias]))
    }

    /// Looking up costs no multiply-accumulate.
    fn embedding(&mut self, embedding: &'a Embedding) -> Cost {
        let mut weights = vec![&embedding.tokens];
        if let Positions::Learned(table) = &embedding.positions {
            weights.push(table);
        }
        self.dense(&weights) + self.norms(&embedding.norm.iter().collect::<Vec<_>>())
    }

    /// `x · weightᵀ` for every token.
    fn output(&mut self, weight: &'a Weight, tokens: u64) -> Cost {
        let macs = tokens * elements(weight);
        self.dense(&[weight]) + Cost { paper_macs: macs, full_macs: macs, ..Cost::default() }
    }
}

fn sum(costs: impl Iterator<Item = Cost>) -> Cost {
    costs.fold(Cost::default(), Add::add)
}

/// Parts of `model` in the order of the journey of a token.
pub(super) fn parts(model: &Model, lengths: Lengths) -> Vec<(&'static str, Cost)> {
    let mut c = Counter::default();
    match model {
        Model::EncoderDecoder(model) => encoder_decoder(&mut c, model, lengths),
        Model::MaskedLm(model) => masked_lm(&mut c, model, lengths.source),
        Model::CausalLm(model) => {
            let t = lengths.source;
            let layers = || model.layers.iter();
            let embedding = c.dense(&[&model.tokens]);
            let attention = sum(layers().map(|layer| c.attention(&layer.attention, t, t)));
            let feed_forward = sum(layers().map(|layer| c.expert_feed_forward(&layer.feed_forward, t)));
            let norms = layers().flat_map(|layer| [&layer.attention_norm.weight, &layer.feed_forward_norm.weight]);
            let norms: Vec<_> = norms.chain([&model.norm.weight]).collect();
            let norms = c.dense(&norms);
            let output = c.output(&model.output, t);
            vec![
                ("embedding", embedding),
                ("attention", attention),
                ("feed-forward", feed_forward),
                ("norms", norms),
                ("output", output),
            ]
        }
        Model::Layer(layer) => vec![("attention", c.attention(&layer.attention, lengths.target, lengths.source))],
    }
}

fn encoder_decoder<'a>(c: &mut Counter<'a>, model: &'a EncoderDecoder, lengths: Lengths) -> Vec<(&'static str, Cost)> {
    let Lengths { source, target } = lengths;
    let (encoder, decoder) = (&model.encoder, &model.decoder);
    let embeddings = c.embedding(&encoder.embedding) + c.embedding(&decoder.embedding);
    let own = sum(encoder.layers.iter().map(|layer| c.attention(&layer.self_attention, source, source)));
    let encoder_ffn = sum(encoder.layers.iter().map(|layer| c.feed_forward(&layer.feed_forward, source)));
    let decoder_own = sum(decoder.layers.iter().map(|layer| c.attention(&layer.self_attention, target, target)));
    let cross = sum(decoder.layers.iter().map(|layer| c.attention(&layer.cross_attention, target, source)));
    let decoder_ffn = sum(decoder.layers.iter().map(|layer| c.feed_forward(&layer.feed_forward, target)));
    let encoder_norms = encoder.layers.iter().flat_map(|layer| [&layer.self_attention_norm, &layer.final_norm]);
    let decoder_norms = decoder
        .layers
        .iter()
        .flat_map(|layer| [&layer.self_attention_norm, &layer.cross_attention_norm, &layer.final_norm]);
    let norms: Vec<_> = encoder_norms.chain(&encoder.norm).chain(decoder_norms).chain(&decoder.norm).collect();
    vec![
        ("embeddings", embeddings),
        ("encoder self-attention", own),
        ("encoder feed-forward", encoder_ffn),
        ("decoder self-attention", decoder_own),
        ("cross-attention", cross),
        ("decoder feed-forward", decoder_ffn),
        ("norms", c.norms(&norms)),
        ("output", c.output(&decoder.output, target)),
    ]
}

fn masked_lm<'a>(c: &mut Counter<'a>, model: &'a MaskedLm, tokens: u64) -> Vec<(&'static str, Cost)> {
    let (encoder, head) = (&model.encoder, &model.head);
    let embedding = c.embedding(&encoder.embedding);
    let attention = sum(encoder.layers.iter().map(|layer| c.attention(&layer.self_attention, tokens, tokens)));
    let feed_forward = sum(encoder.layers.iter().map(|layer| c.feed_forward(&layer.feed_forward, tokens)));
    let norms = encoder.layers.iter().flat_map(|layer| [&layer.self_attention_norm, &layer.final_norm]);
    let norms: Vec<_> = norms.chain(&encoder.norm).chain([&head.norm]).collect();
    let norms = c.norms(&norms);
    let output = c.linear(&head.dense, tokens) + c.output(&head.weight, tokens) + c.dense(&[&head.bias]);
    vec![
        ("embedding", embedding),
        ("attention", attention),
        ("feed-forward", feed_forward),
        ("norms", norms),
        ("output", output),
    ]
}

/// Values that self-attention keeps for one token of a row.
pub(super) fn cache_values_per_token(model: &Model) -> u64 {
    let values = |a: &Attention| 2 * (a.kv_num_heads * a.head_size) as u64;
    match model {
        Model::EncoderDecoder(model) => model.decoder.layers.iter().map(|layer| values(&layer.self_attention)).sum(),
        Model::CausalLm(model) => model.layers.iter().map(|layer| values(&layer.attention)).sum(),
        Model::MaskedLm(_) | Model::Layer(_) => 0,
    }
}

/// Sizes of a model, as people ask for them.
pub(super) fn sizes(model: &Model) -> Vec<(&'static str, String)> {
    let first = |attention: Option<&Attention>, label: &'static str| -> Vec<(&'static str, String)> {
        let routing = |a: &Attention| {
            let heads = if a.kv_num_heads == 1 { String::new() } else { format!("{} x ", a.kv_num_heads) };
            format!("{} of {} experts, heads of {heads}{}, width {}", a.top_k, a.num_experts, a.head_size, a.width)
        };
        attention.map(|a| (label, routing(a))).into_iter().collect()
    };
    match model {
        Model::EncoderDecoder(model) => {
            let (encoder, decoder) = (&model.encoder, &model.decoder);
            let mut sizes = vec![("layers", format!("{} + {}", encoder.layers.len(), decoder.layers.len()))];
            sizes.extend(first(encoder.layers.first().map(|layer| &layer.self_attention), "encoder attention"));
            sizes.extend(first(decoder.layers.first().map(|layer| &layer.self_attention), "decoder attention"));
            let (source, target) = (encoder.embedding.tokens.shape()[0], decoder.output.shape()[0]);
            sizes.push((
                "vocabulary",
                if source == target { source.to_string() } else { format!("{source} to {target}") },
            ));
            sizes
        }
        Model::MaskedLm(model) => {
            let mut sizes = vec![("layers", model.encoder.layers.len().to_string())];
            sizes.extend(first(model.encoder.layers.first().map(|layer| &layer.self_attention), "attention"));
            sizes.push(("vocabulary", model.head.weight.shape()[0].to_string()));
            sizes
        }
        Model::CausalLm(model) => {
            let mut sizes = vec![("layers", model.layers.len().to_string())];
            sizes.extend(first(model.layers.first().map(|layer| &layer.attention), "attention"));
            sizes.push(("vocabulary", model.output.shape()[0].to_string()));
            sizes
        }
        Model::Layer(layer) => first(Some(&layer.attention), "attention"),
    }
}
