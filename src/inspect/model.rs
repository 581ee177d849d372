//! Accounts of a typed model.

use std::collections::BTreeSet;

use moa_graphs::{
    Weight,
    model::{
        Attention, AttentionLayer, DenseAttention, DenseFeedForward, Embedding, EncoderDecoder, ExpertFeedForward,
        FeedForward, KeyValueWeights, LayerNorm, Linear, MaskedLm, Model, Norm, Positions, Router, RouterInput,
    },
};

use super::{
    component::Component,
    cost::{Cost, Lengths, RoutedAttention, RoutedFeedForward},
    sizes::{AttentionSizes, ModelSizes, symbols},
};

/// Values of one tensor.
pub(super) fn elements(weight: &Weight) -> u64 {
    weight.shape().iter().fold(1, |values, dim| values.saturating_mul(*dim as u64))
}

/// Counts every stored tensor once.
#[derive(Default)]
struct Counter<'a> {
    seen: BTreeSet<&'a str>,
}

/// Attention of one kind.
trait Counted: AttentionLayer {
    fn cost<'a>(&'a self, counter: &mut Counter<'a>, queries: u64, keys: u64) -> Cost;

    fn sizes(&self, component: Component) -> AttentionSizes;
}

impl Counted for Attention {
    fn cost<'a>(&'a self, c: &mut Counter<'a>, queries: u64, keys: u64) -> Cost {
        let mut shared = vec![&self.router.weight];
        match &self.keys_values {
            KeyValueWeights::Separate { key, value } => shared.extend([key, value]),
            KeyValueWeights::Joint(both) => shared.push(both),
            KeyValueWeights::HiddenStates => {}
        }
        shared.extend(&self.output_bias);
        let mut routed = vec![&self.query, &self.output];
        if let Some(biases) = &self.expert_biases {
            shared.extend([&biases.key, &biases.value]);
            routed.extend([&biases.query, &biases.output]);
        }
        let sizes = routed_attention(self);
        let keys_and_values = match self.keys_values {
            KeyValueWeights::HiddenStates => Cost::default(),
            _ => Cost::product(2 * sizes.columns() * self.source_width as u64, keys),
        };
        let router_input = c.router_input(&self.router, queries);
        router_input
            + c.dense(&shared)
            + c.routed(&routed, self.top_k, self.num_experts)
            + keys_and_values
            + sizes.macs(queries, keys)
    }

    fn sizes(&self, component: Component) -> AttentionSizes {
        AttentionSizes::routed(component.of_sizes(), &routed_attention(self))
    }
}

fn routed_attention(attention: &Attention) -> RoutedAttention {
    RoutedAttention {
        width: attention.width as u64,
        read: router_width(&attention.router, attention.num_experts),
        top_k: attention.top_k as u64,
        experts: attention.num_experts as u64,
        kv_heads: attention.kv_num_heads as u64,
        head: attention.head_size as u64,
    }
}

/// `R` of a router.
fn router_width(router: &Router, experts: usize) -> u64 {
    elements(&router.weight) / (experts as u64).max(1)
}

impl Counted for DenseAttention {
    fn cost<'a>(&'a self, c: &mut Counter<'a>, queries: u64, keys: u64) -> Cost {
        c.linear(&self.query, queries)
            + c.linear(&self.key, keys)
            + c.linear(&self.value, keys)
            + c.linear(&self.output, queries)
            + Cost::attention(queries, keys, (self.heads * self.head_size) as u64)
    }

    fn sizes(&self, component: Component) -> AttentionSizes {
        AttentionSizes::dense(component.of_sizes(), self.heads as u64, self.head_size as u64)
    }
}

impl<'a> Counter<'a> {
    fn new_values(&mut self, weights: &[&'a Weight]) -> u64 {
        let seen = &mut self.seen;
        weights
            .iter()
            .filter(|weight| seen.insert(weight.name()))
            .map(|weight| elements(weight))
            .fold(0, u64::saturating_add)
    }

    /// Parameters that every token uses.
    fn dense(&mut self, weights: &[&'a Weight]) -> Cost {
        Cost::parameters(self.new_values(weights), 1, 1)
    }

    /// Parameters of which a token uses `top_k` of `experts` shares.
    fn routed(&mut self, weights: &[&'a Weight], top_k: usize, experts: usize) -> Cost {
        Cost::parameters(self.new_values(weights), top_k as u64, experts as u64)
    }

    fn linear(&mut self, linear: &'a Linear, tokens: u64) -> Cost {
        let product = Cost::product(elements(&linear.weight), tokens);
        self.dense(&[&linear.weight, &linear.bias]) + product + Cost::bias(elements(&linear.bias))
    }

    /// What a router reads, where that is not the token.
    fn router_input(&mut self, router: &'a Router, tokens: u64) -> Cost {
        router.input.as_deref().map_or_else(Cost::default, |RouterInput(linear)| self.linear(linear, tokens))
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
        let mut shared = vec![&block.router.weight];
        shared.extend(&block.output_bias);
        let sizes = RoutedFeedForward {
            read: router_width(&block.router, block.num_experts),
            top_k: block.top_k as u64,
            experts: block.num_experts as u64,
            matrices: elements(&block.input) + elements(&block.output),
        };
        self.router_input(&block.router, tokens)
            + self.dense(&shared)
            + self.routed(&[&block.input, &block.output], block.top_k, block.num_experts)
            + sizes.macs(tokens)
    }

    fn norm(&mut self, norm: &'a Norm) -> Cost {
        match norm {
            Norm::Layer(norm) => self.norms(&[norm]),
            Norm::Rms(norm) => self.dense(&[&norm.weight]),
        }
    }

    fn norms(&mut self, norms: &[&'a LayerNorm]) -> Cost {
        norms.iter().map(|norm| self.dense(&[&norm.weight, &norm.bias])).sum()
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
        self.dense(&[weight]) + Cost::product(elements(weight), tokens)
    }
}

/// Parts of `model` in the order of the journey of a token.
pub(super) fn parts(model: &Model, lengths: Lengths) -> Vec<(Component, Cost)> {
    let mut c = Counter::default();
    match model {
        Model::EncoderDecoder(model) => encoder_decoder(&mut c, model, lengths),
        Model::Transformer(model) => encoder_decoder(&mut c, model, lengths),
        Model::MaskedLm(model) => masked_lm(&mut c, model, lengths.source),
        Model::TransformerMaskedLm(model) => masked_lm(&mut c, model, lengths.source),
        Model::CausalLm(model) => {
            let t = lengths.source;
            let layers = || model.layers.iter();
            let embedding = c.dense(&[&model.tokens]);
            let attention = layers().map(|layer| layer.attention.cost(&mut c, t, t)).sum();
            let feed_forward = layers().map(|layer| c.expert_feed_forward(&layer.feed_forward, t)).sum();
            let norms = layers().flat_map(|layer| [&layer.attention_norm, &layer.feed_forward_norm]);
            let norms = norms.chain([&model.norm]).map(|norm| c.norm(norm)).sum();
            let output = c.output(&model.output, t);
            vec![
                (Component::Embeddings, embedding),
                (Component::Attention, attention),
                (Component::FeedForward, feed_forward),
                (Component::Norms, norms),
                (Component::Output, output),
            ]
        }
        Model::Layer(layer) => {
            let queries = if layer.cross_attention { lengths.target } else { lengths.source };
            vec![(Component::Attention, layer.attention.cost(&mut c, queries, lengths.source))]
        }
    }
}

fn encoder_decoder<'a, A: Counted>(
    c: &mut Counter<'a>,
    model: &'a EncoderDecoder<A>,
    lengths: Lengths,
) -> Vec<(Component, Cost)> {
    let Lengths { source, target } = lengths;
    let (encoder, decoder) = (&model.encoder, &model.decoder);
    let embeddings = c.embedding(&encoder.embedding) + c.embedding(&decoder.embedding);
    let own = encoder.layers.iter().map(|layer| layer.self_attention.cost(c, source, source)).sum();
    let encoder_ffn = encoder.layers.iter().map(|layer| c.feed_forward(&layer.feed_forward, source)).sum();
    let decoder_own = decoder.layers.iter().map(|layer| layer.self_attention.cost(c, target, target)).sum();
    let cross = decoder.layers.iter().map(|layer| layer.cross_attention.cost(c, target, source)).sum();
    let decoder_ffn = decoder.layers.iter().map(|layer| c.feed_forward(&layer.feed_forward, target)).sum();
    let encoder_norms = encoder.layers.iter().flat_map(|layer| [&layer.self_attention_norm, &layer.final_norm]);
    let decoder_norms = decoder
        .layers
        .iter()
        .flat_map(|layer| [&layer.self_attention_norm, &layer.cross_attention_norm, &layer.final_norm]);
    let norms: Vec<_> = encoder_norms.chain(&encoder.norm).chain(decoder_norms).chain(&decoder.norm).collect();
    vec![
        (Component::Embeddings, embeddings),
        (Component::EncoderAttention, own),
        (Component::EncoderFeedForward, encoder_ffn),
        (Component::DecoderAttention, decoder_own),
        (Component::CrossAttention, cross),
        (Component::DecoderFeedForward, decoder_ffn),
        (Component::Norms, c.norms(&norms)),
        (Component::Output, c.output(&decoder.output, target)),
    ]
}

fn masked_lm<'a, A: Counted>(c: &mut Counter<'a>, model: &'a MaskedLm<A>, tokens: u64) -> Vec<(Component, Cost)> {
    let (encoder, head) = (&model.encoder, &model.head);
    let embedding = c.embedding(&encoder.embedding);
    let attention = encoder.layers.iter().map(|layer| layer.self_attention.cost(c, tokens, tokens)).sum();
    let feed_forward = encoder.layers.iter().map(|layer| c.feed_forward(&layer.feed_forward, tokens)).sum();
    let norms = encoder.layers.iter().flat_map(|layer| [&layer.self_attention_norm, &layer.final_norm]);
    let norms: Vec<_> = norms.chain(&encoder.norm).chain([&head.norm]).collect();
    let norms = c.norms(&norms);
    let bias = c.dense(&[&head.bias]) + Cost::bias(elements(&head.bias));
    let output = c.linear(&head.dense, tokens) + c.output(&head.weight, tokens) + bias;
    vec![
        (Component::Embeddings, embedding),
        (Component::Attention, attention),
        (Component::FeedForward, feed_forward),
        (Component::Norms, norms),
        (Component::Output, output),
    ]
}

/// Values that self-attention keeps for one token of a row.
pub(super) fn cache_values_per_token(model: &Model) -> u64 {
    fn decoder<A: AttentionLayer>(model: &EncoderDecoder<A>) -> u64 {
        model.decoder.layers.iter().map(|layer| values(&layer.self_attention)).sum()
    }
    fn values(attention: &impl AttentionLayer) -> u64 {
        let [heads, size] = attention.cache_heads();
        2 * (heads * size) as u64
    }
    match model {
        Model::EncoderDecoder(model) => decoder(model),
        Model::Transformer(model) => decoder(model),
        Model::CausalLm(model) => model.layers.iter().map(|layer| values(&layer.attention)).sum(),
        Model::MaskedLm(_) | Model::TransformerMaskedLm(_) | Model::Layer(_) => 0,
    }
}

/// Sizes of a model.
pub(super) fn sizes(model: &Model) -> ModelSizes {
    match model {
        Model::EncoderDecoder(model) => encoder_decoder_sizes(model),
        Model::Transformer(model) => encoder_decoder_sizes(model),
        Model::MaskedLm(model) => masked_lm_sizes(model),
        Model::TransformerMaskedLm(model) => masked_lm_sizes(model),
        Model::CausalLm(model) => ModelSizes {
            layers: vec![model.layers.len() as u64],
            attention: model
                .layers
                .first()
                .map(|layer| layer.attention.sizes(Component::Attention))
                .into_iter()
                .collect(),
            vocabulary: vec![model.output.shape()[0] as u64],
        },
        Model::Layer(layer) => {
            ModelSizes { attention: vec![layer.attention.sizes(Component::Attention)], ..ModelSizes::default() }
        }
    }
}

fn encoder_decoder_sizes<A: Counted>(model: &EncoderDecoder<A>) -> ModelSizes {
    let (encoder, decoder) = (&model.encoder, &model.decoder);
    let encoders = encoder.layers.first().map(|layer| layer.self_attention.sizes(Component::EncoderAttention));
    let decoders = decoder.layers.first().map(|layer| layer.self_attention.sizes(Component::DecoderAttention));
    ModelSizes {
        layers: vec![encoder.layers.len() as u64, decoder.layers.len() as u64],
        attention: encoders.into_iter().chain(decoders).collect(),
        vocabulary: symbols(encoder.embedding.tokens.shape()[0] as u64, decoder.output.shape()[0] as u64),
    }
}

fn masked_lm_sizes<A: Counted>(model: &MaskedLm<A>) -> ModelSizes {
    let layers = &model.encoder.layers;
    ModelSizes {
        layers: vec![layers.len() as u64],
        attention: layers.first().map(|layer| layer.self_attention.sizes(Component::Attention)).into_iter().collect(),
        vocabulary: vec![model.head.weight.shape()[0] as u64],
    }
}
