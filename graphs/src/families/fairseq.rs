//! What the fairseq families share: tensor names of layers, and the configuration keys behind them.

use moa_schema::{Activation, AttentionMode, GateMode};

use super::{Config, ImportOptions, activation, importer::Importer};
use crate::{
    ImportError, Weight,
    model::{
        Attention, DenseAttention, DenseFeedForward, Embedding, Encoder, EncoderLayer, ExpertBiases, ExpertFeedForward,
        ExpertLayout, FeedForward, KeyValueWeights, LayerNorm, Linear, Positions, Router,
    },
};

/// Padding in fairseq's dictionaries.
const PADDING: usize = 1;

/// Longest sequence of a side, where a configuration says nothing.
pub const DEFAULT_POSITIONS: usize = 1024;

/// Experts per token in `ffd_type = moe`; fixed in the released code.
const FEED_FORWARD_TOP_K: usize = 4;

/// Narrower sinusoids divide by zero, upstream too.
const SMALLEST_SINUSOID_WIDTH: usize = 4;

/// Names of stored buffers that are no weights.
pub(super) fn is_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "version" | "_float_tensor" | "w_noise" | "_extra_state")
}

/// Which half of an encoder–decoder a key belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Encoder,
    Decoder,
}

impl Side {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Encoder => "encoder",
            Self::Decoder => "decoder",
        }
    }

    /// Where `nn.Sequential` keeps the second matrix of the feed-forward block.
    const fn second_matrix(self) -> &'static str {
        match self {
            Self::Encoder => "ffd.3",
            Self::Decoder => "ffd.2",
        }
    }
}

/// What the layers of a stack attend with, as fairseq configures and stores it.
pub(super) trait StackAttention: Sized {
    /// What the configuration says about it.
    type Sizes: Copy;

    /// Reads the keys of one side.
    fn sizes(config: &Config, side: Side, width: usize, options: ImportOptions) -> Result<Self::Sizes, ImportError>;

    /// The layer whose tensors start with `prefix`.
    fn import(
        importer: &mut Importer<'_>,
        prefix: &str,
        sizes: Self::Sizes,
        widths: Widths,
        causal: bool,
    ) -> Result<Self, ImportError>;
}

/// Widths of the queries of an attention layer, and of its keys and values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    pub(super) width: usize,
    pub(super) source: usize,
}

/// Where a side's positions come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PositionKind {
    None,
    Learned,
    Sinusoidal,
}

/// The keys of one side.
#[derive(Debug, Clone)]
pub(super) struct Stack<A: StackAttention> {
    pub(super) side: Side,
    /// Prefix of the side's tensors.
    pub(super) prefix: String,
    pub(super) width: usize,
    /// Width of the encoder's output.
    pub(super) source_width: usize,
    pub(super) layers: usize,
    hidden: usize,
    attention: A::Sizes,
    /// Experts of a routed feed-forward block.
    num_experts: usize,
    normalize_before: bool,
    positions: PositionKind,
    max_positions: usize,
    norm_embedding: bool,
    final_norm: bool,
    scale: f32,
    routed_feed_forward: bool,
    activation: Activation,
    gate_mode: GateMode,
    epsilon: f32,
    pub(super) pad_token_id: usize,
}

impl<A: StackAttention> Stack<A> {
    /// Reads the keys of one side; defaults are those of `base_ende_architecture`.
    pub(super) fn new(
        config: &Config,
        side: Side,
        prefix: &str,
        max_positions_key: &str,
        options: ImportOptions,
    ) -> Result<Self, ImportError> {
        let key = |name: &str| format!("{}_{name}", side.name());
        let source_width = config.size_or("encoder_embed_dim", 512)?;
        let encoder_hidden = config.size_or("encoder_ffn_embed_dim", 2048)?;
        let (width, hidden) = match side {
            Side::Encoder => (source_width, encoder_hidden),
            Side::Decoder => (
                config.optional_size("decoder_embed_dim")?.unwrap_or(source_width),
                config.optional_size("decoder_ffn_embed_dim")?.unwrap_or(encoder_hidden),
            ),
        };
        let attention = A::sizes(config, side, width, options)?;
        let normalize_before = config.flag_or(&key("normalize_before"), false)?;
        let learned = config.flag_or(&key("learned_pos"), false)?;
        let positions = match config.flag_or("no_token_positional_embeddings", false)? {
            true => PositionKind::None,
            false if learned => PositionKind::Learned,
            false => PositionKind::Sinusoidal,
        };
        if width < SMALLEST_SINUSOID_WIDTH && positions == PositionKind::Sinusoidal {
            return Err(config.unsupported(format!("sinusoidal positions of width {width}")));
        }
        let no_final_norm = config.flag_or(&format!("no_{}_final_norm", side.name()), false)?;
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
        let sqrt_width = (width as f64).sqrt() as f32;
        Ok(Self {
            side,
            prefix: prefix.into(),
            width,
            source_width,
            layers: config.optional_layers(&key("layers"))?.unwrap_or(6),
            hidden,
            attention,
            num_experts: num_experts(config)?,
            normalize_before,
            positions,
            max_positions: config.size_or(max_positions_key, DEFAULT_POSITIONS)?,
            norm_embedding: config.flag_or("layernorm_embedding", false)?,
            final_norm: normalize_before && !no_final_norm,
            scale: if config.flag_or("no_scale_embedding", false)? { 1.0 } else { sqrt_width },
            routed_feed_forward: routed_feed_forward(config)?,
            activation: activation::of_fairseq(config)?,
            gate_mode: options.gate_mode.unwrap_or(GateMode::SoftmaxTopk),
            epsilon: config.epsilon_or("layer_norm_eps", 1e-5)?,
            pad_token_id: config.id_or("pad_token_id", PADDING)?,
        })
    }

    /// Token embedding stored under at least one of `names`, positions and their normalisation.
    ///
    /// The first of `vocabulary` that the configuration has says how many rows a synthetic one has.
    pub(super) fn embedding(
        &self,
        config: &Config,
        importer: &mut Importer<'_>,
        names: &[&str],
        vocabulary: &[&str],
    ) -> Result<Embedding, ImportError> {
        let prefix = &self.prefix;
        let rows = match importer.is_synthetic() {
            true => Some(stated_vocabulary(config, vocabulary)?),
            false => None,
        };
        let tokens = importer.take_shared(names, &[rows, Some(self.width)])?;
        let rows = self.max_positions + self.pad_token_id + 1;
        let positions = match self.positions {
            PositionKind::None => Positions::None,
            PositionKind::Learned => {
                Positions::Learned(importer.take(&format!("{prefix}.embed_positions.weight"), &[rows, self.width])?)
            }
            PositionKind::Sinusoidal => Positions::Sinusoidal { rows },
        };
        let norm = match self.norm_embedding {
            true => Some(self.norm(importer, &format!("{prefix}.layernorm_embedding"))?),
            false => None,
        };
        Ok(Embedding {
            prefix: prefix.clone(),
            tokens,
            scale: self.scale,
            positions,
            norm,
            pad_token_id: self.pad_token_id,
            zero_at_padding: self.side == Side::Encoder,
        })
    }

    /// The whole encoder.
    pub(super) fn encoder(&self, importer: &mut Importer<'_>, embedding: Embedding) -> Result<Encoder<A>, ImportError> {
        let layers = (0..self.layers).map(|index| self.encoder_layer(importer, index)).collect::<Result<_, _>>()?;
        Ok(Encoder { embedding, layers, norm: self.stack_norm(importer)? })
    }

    fn encoder_layer(&self, importer: &mut Importer<'_>, index: usize) -> Result<EncoderLayer<A>, ImportError> {
        let prefix = format!("{}.layers.{index}", self.prefix);
        Ok(EncoderLayer {
            self_attention: self.attention(importer, &format!("{prefix}.self_attn"), self.width, false)?,
            self_attention_norm: self.norm(importer, &format!("{prefix}.self_attn_layer_norm"))?,
            feed_forward: self.feed_forward(importer, &prefix)?,
            final_norm: self.norm(importer, &format!("{prefix}.final_layer_norm"))?,
            normalize_before: self.normalize_before,
            prefix,
        })
    }

    /// Normalisation after the stack, where the model has one.
    pub(super) fn stack_norm(&self, importer: &mut Importer<'_>) -> Result<Option<LayerNorm>, ImportError> {
        match self.final_norm {
            true => self.norm(importer, &format!("{}.layer_norm", self.prefix)).map(Some),
            false => Ok(None),
        }
    }

    /// Attention layer whose tensors start with `prefix`.
    pub(super) fn attention(
        &self,
        importer: &mut Importer<'_>,
        prefix: &str,
        source_width: usize,
        causal: bool,
    ) -> Result<A, ImportError> {
        let widths = Widths { width: self.width, source: source_width };
        A::import(importer, prefix, self.attention, widths, causal)
    }

    /// Feed-forward block of the layer `prefix`.
    pub(super) fn feed_forward(&self, importer: &mut Importer<'_>, prefix: &str) -> Result<FeedForward, ImportError> {
        if self.routed_feed_forward {
            return self.expert_feed_forward(importer, &format!("{prefix}.ffd")).map(FeedForward::Experts);
        }
        let second = self.side.second_matrix();
        let mut linear = |name: &str, alias: &str, input: usize, output: usize| -> Result<Linear, ImportError> {
            let names = |part: &str| [format!("{prefix}.{name}.{part}"), format!("{prefix}.{alias}.{part}")];
            let [weight, weight_alias] = names("weight");
            let [bias, bias_alias] = names("bias");
            Ok(Linear {
                weight: importer.take_shared(&[&weight, &weight_alias], &[Some(output), Some(input)])?,
                bias: importer.take_shared(&[&bias, &bias_alias], &[Some(output)])?,
            })
        };
        Ok(FeedForward::Dense(DenseFeedForward {
            input: linear("fc1", "ffd.0", self.width, self.hidden)?,
            activation: self.activation,
            output: linear("fc2", second, self.hidden, self.width)?,
        }))
    }

    /// The released code gives every expert the hidden width of the model and routes with a fixed top-k.
    fn expert_feed_forward(&self, importer: &mut Importer<'_>, module: &str) -> Result<ExpertFeedForward, ImportError> {
        let (width, experts) = (self.width, self.num_experts);
        Ok(ExpertFeedForward {
            layout: ExpertLayout::InOut,
            router: Router::of_tokens(
                importer.take(&format!("{module}.w_gate"), &[width, experts])?,
                ExpertLayout::InOut,
            ),
            input: importer.take(&format!("{module}.experts.w"), &[experts, width, width])?,
            output: importer.take(&format!("{module}.output_experts.w"), &[experts, width, width])?,
            output_bias: None,
            gated: false,
            width,
            hidden: width,
            top_k: FEED_FORWARD_TOP_K.min(experts),
            num_experts: experts,
            gate_mode: self.gate_mode,
            activation: self.activation,
            module: module.into(),
        })
    }

    /// Layer normalisation `name`.
    pub(super) fn norm(&self, importer: &mut Importer<'_>, name: &str) -> Result<LayerNorm, ImportError> {
        norm(importer, name, self.width, self.epsilon)
    }

    pub(super) fn normalize_before(&self) -> bool {
        self.normalize_before
    }

    pub(super) fn activation(&self) -> Activation {
        self.activation
    }
}

/// Padding must be a token of the vocabulary.
pub(super) fn check_padding(config: &Config, importer: &Importer<'_>, tokens: &Weight) -> Result<(), ImportError> {
    let rows = tokens.shape()[0];
    if config.id_or("pad_token_id", PADDING)? < rows {
        return Ok(());
    }
    let tokens = importer.stored_name(tokens.name());
    let expected = format!("below {rows}, the rows of \"{tokens}\" ({PADDING} where it is absent)");
    Err(config.invalid("pad_token_id", expected))
}

fn stated_vocabulary(config: &Config, keys: &[&str]) -> Result<usize, ImportError> {
    let key = keys.iter().copied().find(|key| config.has(key)).unwrap_or("vocab_size");
    config.size(key, "rows of the token embedding; without tensors nothing else says it")
}

fn num_experts(config: &Config) -> Result<usize, ImportError> {
    config.size_or("num_expert", 12)
}

/// What a configuration says about routed attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoutedSizes {
    pub(super) top_k: usize,
    pub(super) num_experts: usize,
    pub(super) head_size: usize,
    pub(super) gate_mode: GateMode,
    /// Whether every projection has a bias.
    pub(super) biases: bool,
}

impl StackAttention for Attention {
    type Sizes = RoutedSizes;

    fn sizes(config: &Config, side: Side, _width: usize, options: ImportOptions) -> Result<RoutedSizes, ImportError> {
        let top_k_key = format!("{}_attention_heads", side.name());
        let top_k = config.size(&top_k_key, "experts per token, top-k; it is never stored in tensors")?;
        let num_experts = num_experts(config)?;
        if top_k > num_experts {
            return Err(config.invalid(&top_k_key, format!("at most num_expert = {num_experts}")));
        }
        Ok(RoutedSizes {
            top_k,
            num_experts,
            head_size: config.size_or("head_dim", 256)?,
            gate_mode: options.gate_mode.unwrap_or(GateMode::SoftmaxTopk),
            biases: config.flag_or("expert_bias", false)?,
        })
    }

    fn import(
        importer: &mut Importer<'_>,
        prefix: &str,
        sizes: RoutedSizes,
        widths: Widths,
        causal: bool,
    ) -> Result<Self, ImportError> {
        attention(importer, prefix, sizes, widths, causal)
    }
}

impl StackAttention for DenseAttention {
    /// Heads.
    type Sizes = usize;

    fn sizes(config: &Config, side: Side, width: usize, _options: ImportOptions) -> Result<usize, ImportError> {
        let key = format!("{}_attention_heads", side.name());
        let heads = config.size(&key, "attention heads")?;
        match width.is_multiple_of(heads) {
            true => Ok(heads),
            false => Err(config.invalid(&key, format!("a divisor of the width {width}"))),
        }
    }

    fn import(
        importer: &mut Importer<'_>,
        prefix: &str,
        heads: usize,
        Widths { width, source }: Widths,
        causal: bool,
    ) -> Result<Self, ImportError> {
        let mut linear = |name: &str, input: usize| -> Result<Linear, ImportError> {
            Ok(Linear {
                weight: importer.take(&format!("{prefix}.{name}.weight"), &[width, input])?,
                bias: importer.take(&format!("{prefix}.{name}.bias"), &[width])?,
            })
        };
        Ok(Self {
            query: linear("q_proj", width)?,
            key: linear("k_proj", source)?,
            value: linear("v_proj", source)?,
            output: linear("out_proj", width)?,
            heads,
            head_size: width / heads,
            causal,
            prefix: prefix.into(),
        })
    }
}

/// Attention layer under upstream's names; `prefix` may be empty.
pub(super) fn attention(
    importer: &mut Importer<'_>,
    prefix: &str,
    sizes: RoutedSizes,
    widths: Widths,
    causal: bool,
) -> Result<Attention, ImportError> {
    let name = |part: &str| if prefix.is_empty() { part.to_owned() } else { format!("{prefix}.{part}") };
    let RoutedSizes { top_k, num_experts, head_size, gate_mode, biases } = sizes;
    let Widths { width, source: source_width } = widths;
    let expert_biases = match biases {
        false => None,
        true => Some(ExpertBiases {
            query: importer.take(&name("q_proj.experts.b"), &[num_experts, head_size])?,
            key: importer.take(&name("k_proj.bias"), &[head_size])?,
            value: importer.take(&name("v_proj.bias"), &[head_size])?,
            output: importer.take(&name("q_proj.output_experts.b"), &[num_experts, width])?,
        }),
    };
    Ok(Attention {
        module: if prefix.is_empty() { String::new() } else { name("q_proj") },
        prefix: prefix.into(),
        layout: ExpertLayout::InOut,
        router: Router::of_tokens(importer.take(&name("q_proj.w_gate"), &[width, num_experts])?, ExpertLayout::InOut),
        query: importer.take(&name("q_proj.experts.w"), &[num_experts, width, head_size])?,
        keys_values: KeyValueWeights::Separate {
            key: importer.take(&name("k_proj.weight"), &[head_size, source_width])?,
            value: importer.take(&name("v_proj.weight"), &[head_size, source_width])?,
        },
        output: importer.take(&name("q_proj.output_experts.w"), &[num_experts, head_size, width])?,
        output_bias: None,
        expert_biases,
        rotary: None,
        width,
        source_width,
        top_k,
        num_experts,
        kv_num_heads: 1,
        head_size,
        gate_mode,
        attention_mode: AttentionMode::Softmax,
        causal,
        skip_padded_queries: true,
    })
}

/// Layer normalisation `name` over `width`.
pub(super) fn norm(
    importer: &mut Importer<'_>,
    name: &str,
    width: usize,
    epsilon: f32,
) -> Result<LayerNorm, ImportError> {
    Ok(LayerNorm {
        weight: importer.take(&format!("{name}.weight"), &[width])?,
        bias: importer.take(&format!("{name}.bias"), &[width])?,
        epsilon,
    })
}

fn routed_feed_forward(config: &Config) -> Result<bool, ImportError> {
    match config.text_or("ffd_type", "normal")? {
        "normal" => Ok(false),
        "moe" => Ok(true),
        _ => Err(config.invalid("ffd_type", "\"normal\" or \"moe\"")),
    }
}
