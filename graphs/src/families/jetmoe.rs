//! `jetmoe`: JetMoE as Hugging Face stores it, in both dialects of its configuration.

use moa_schema::{Activation, AttentionMode, GateMode};

use super::{
    Config, ImportOptions, activation,
    importer::Importer,
    model_types,
    renamed::{Naming, Renamed},
    rotary::{self, rotary},
};
use crate::{
    ImportError, TensorDirectory,
    model::{
        Attention, CausalLayer, CausalLm, Dialect, ExpertFeedForward, ExpertLayout, KeyValueWeights, Model, Norm,
        RmsNorm, Rotary, Router,
    },
};

const TOKENS: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";
/// Before every name but that of the output, unless the model was saved without its head.
const PREFIX: &str = "model.";

/// `vocab_size` of the configuration class.
const DEFAULT_VOCABULARY: usize = 32_000;

/// `num_local_experts` of the configuration class.
const DEFAULT_EXPERTS: usize = 8;

/// The norms inside a layer are built without the configuration's epsilon; only the final one reads it.
const LAYER_NORM_EPSILON: f32 = 1e-6;

/// From the names of a model without its head to those of a model with it.
const BARE: Naming = Naming {
    rename: |bare| if bare == OUTPUT { bare.into() } else { format!("{PREFIX}{bare}") },
    restore: |full| full.strip_prefix(PREFIX).unwrap_or(full).into(),
};

pub(super) fn import(
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<Model, ImportError> {
    config.refuse_quantized()?;
    let has_prefix = tensors.names().iter().any(|name| name.starts_with(PREFIX));
    let is_bare = !has_prefix && tensors.tensor(&(BARE.restore)(TOKENS)).is_some();
    let bare = is_bare.then(|| Renamed::new(tensors, BARE));
    let tensors = bare.as_ref().map_or(tensors, |bare| bare);
    let sizes = Sizes::new(config, tensors, options)?;
    let mut importer = Importer::new(config, tensors);
    let tied = !config.is_null("tie_word_embeddings") && config.flag_or("tie_word_embeddings", true)?;
    let (vocabulary, width) = (config.optional_size("vocab_size")?, sizes.width);
    let vocabulary = vocabulary.or(importer.or_stated(Some(DEFAULT_VOCABULARY)));
    let [tokens, output] = importer.take_ends([TOKENS, OUTPUT], tied, [vocabulary, Some(width)])?;
    let layers = (0..sizes.layers).map(|index| sizes.layer(config, &mut importer, index)).collect::<Result<_, _>>()?;
    let norm = Norm::Rms(RmsNorm {
        weight: importer.take("model.norm.weight", &[width])?,
        epsilon: config.single_or("rms_norm_eps", LAYER_NORM_EPSILON)?,
    });
    let names = tensors.names().into_iter().chain(tensors.aliases());
    for name in names.filter(|name| name.ends_with(rotary::BUFFER)) {
        let weight = importer.take(name, &[sizes.head_size / 2])?;
        rotary::check_buffer(config, &importer.stored_name(name), &weight, sizes.rotary, sizes.head_size)?;
    }
    importer.check_ids(&tokens)?;
    importer.finish(model_types::JETMOE, |_| false)?;
    let pad_token_id = config.optional_id("pad_token_id")?.unwrap_or(0);
    let context = Some(sizes.rotary.positions);
    let dialect = Dialect::JetMoe;
    Ok(Model::CausalLm(CausalLm { dialect, tokens, pad_token_id, layers, norm, output, context }))
}

/// Refuses what makes transformers let a token see other tokens than all before it: keys that JetMoE's own
/// configuration does not have, and that the library heeds in any.
fn check_visible(config: &Config, positions: usize) -> Result<(), ImportError> {
    if !config.flag_or("is_causal", true)? {
        return Err(config.unsupported("\"is_causal\": false (supported: true)".into()));
    }
    for key in ["sliding_window", "attention_chunk_size"] {
        if let Some(tokens) = config.optional_size(key)?.filter(|tokens| *tokens < positions) {
            let all = format!("supported: null, or all {positions} positions");
            return Err(config.unsupported(format!("\"{key}\": {tokens} ({all})")));
        }
    }
    Ok(())
}

/// The keys of the configuration.
struct Sizes {
    width: usize,
    layers: usize,
    hidden: usize,
    top_k: usize,
    /// Experts, and the key of the configuration that says it; tensors say it too.
    num_experts: Option<(usize, &'static str)>,
    /// Key of the configuration that gives `top_k`.
    top_k_key: &'static str,
    kv_num_heads: usize,
    head_size: usize,
    rotary: Rotary,
    activation: Activation,
    gated: bool,
    /// Whether each feed-forward block must have a bias.
    bias: bool,
    gate_mode: GateMode,
}

impl Sizes {
    /// Reads each key under the name that transformers reads, then under that of the code it came from, then takes the
    /// class default; what no shape can check must agree.
    fn new(config: &Config, tensors: &dyn TensorDirectory, options: ImportOptions) -> Result<Self, ImportError> {
        let hidden = hidden(config, tensors)?;
        let layers = config.optional_layers("num_hidden_layers")?.or(config.optional_layers("num_layers")?);
        let top_k = config.agreed_size(["moe_top_k", "num_experts_per_tok"])?;
        let missing = || config.size("num_experts_per_tok", "experts per token; it is never stored in tensors");
        let (top_k, top_k_key) = top_k.map_or_else(|| missing().map(|top_k| (top_k, "num_experts_per_tok")), Ok)?;
        let num_experts = config.agreed_size(["moe_num_experts", "num_local_experts"])?;
        let head = config.agreed_size(["kv_channels", "head_dim"])?;
        let (head_size, head_key) = head.unwrap_or_else(|| (config.assume("kv_channels", 128), "kv_channels"));
        if !head_size.is_multiple_of(2) {
            return Err(config.invalid(head_key, "an even number, as rotary embedding needs it"));
        }
        let kv_num_heads = config.size_or("num_key_value_heads", 16)?;
        if config.optional_size("num_attention_heads")?.is_some_and(|heads| heads != kv_num_heads * top_k) {
            if let Some((experts, key)) = num_experts.filter(|(experts, _)| top_k > *experts) {
                return Err(config.invalid(top_k_key, format!("at most {experts}, \"{key}\"")));
            }
            let expected = format!(
                "{}, \"num_key_value_heads\" ({kv_num_heads}) times \"{top_k_key}\" ({top_k})",
                kv_num_heads * top_k
            );
            return Err(config.invalid("num_attention_heads", expected));
        }
        let positions = config.optional_size("max_position_embeddings")?.or(config.optional_size("n_positions")?);
        let rotary = rotary(config, positions.unwrap_or_else(|| config.assume("max_position_embeddings", 4096)))?;
        check_visible(config, rotary.positions)?;
        Ok(Self {
            width: config.size_or("hidden_size", 2048)?,
            layers: layers.unwrap_or(12),
            hidden,
            top_k,
            num_experts,
            top_k_key,
            kv_num_heads,
            head_size,
            rotary,
            activation: activation::of_transformers(config, "silu")?,
            gated: is_gated(config, tensors, hidden)?,
            bias: config.flag_or("bias", true)?,
            gate_mode: options.gate_mode.unwrap_or(GateMode::TopkSoftmax),
        })
    }

    fn layer(&self, config: &Config, importer: &mut Importer<'_>, index: usize) -> Result<CausalLayer, ImportError> {
        let prefix = format!("model.layers.{index}");
        Ok(CausalLayer {
            attention_norm: self.norm(importer, &format!("{prefix}.input_layernorm"))?,
            attention: self.attention(config, importer, &format!("{prefix}.self_attention"))?,
            feed_forward_norm: self.norm(importer, &format!("{prefix}.post_attention_layernorm"))?,
            feed_forward: self.feed_forward(config, importer, &format!("{prefix}.mlp"))?,
            prefix,
        })
    }

    fn norm(&self, importer: &mut Importer<'_>, name: &str) -> Result<Norm, ImportError> {
        let weight = importer.take(&format!("{name}.weight"), &[self.width])?;
        Ok(Norm::Rms(RmsNorm { weight, epsilon: LAYER_NORM_EPSILON }))
    }

    /// A router and the number of its experts, which may differ between attention and feed-forward.
    fn router(
        &self,
        config: &Config,
        importer: &mut Importer<'_>,
        module: &str,
    ) -> Result<(Router, usize), ImportError> {
        let experts = importer.or_stated(Some(self.num_experts.map_or(DEFAULT_EXPERTS, |(experts, _)| experts)));
        let router = importer.take_any(&format!("{module}.router.layer.weight"), &[experts, Some(self.width)])?;
        let experts = router.shape()[0];
        if let Some((_, key)) = self.num_experts.filter(|(stated, _)| *stated != experts) {
            return Err(config.invalid(key, format!("{experts}, the experts of \"{module}\"")));
        }
        if self.top_k > experts {
            return Err(config.invalid(self.top_k_key, format!("at most {experts}, the experts of \"{module}\"")));
        }
        Ok((Router::of_tokens(router, ExpertLayout::OutIn), experts))
    }

    fn attention(&self, config: &Config, importer: &mut Importer<'_>, prefix: &str) -> Result<Attention, ImportError> {
        let module = format!("{prefix}.experts");
        let (router, num_experts) = self.router(config, importer, &module)?;
        let (width, columns) = (self.width, self.kv_num_heads * self.head_size);
        let both = importer.take(&format!("{prefix}.kv_proj.weight"), &[2 * columns, width])?;
        Ok(Attention {
            layout: ExpertLayout::OutIn,
            router,
            query: importer.take(&format!("{module}.input_linear.weight"), &[num_experts, columns, width])?,
            keys_values: KeyValueWeights::Joint(both),
            output: importer.take(&format!("{module}.output_linear.weight"), &[num_experts, width, columns])?,
            output_bias: Some(importer.take(&format!("{module}.bias"), &[width])?),
            expert_biases: None,
            rotary: Some(self.rotary),
            width,
            source_width: width,
            top_k: self.top_k,
            num_experts,
            kv_num_heads: self.kv_num_heads,
            head_size: self.head_size,
            gate_mode: self.gate_mode,
            attention_mode: AttentionMode::Softmax,
            causal: true,
            skip_padded_queries: false,
            prefix: prefix.into(),
            module,
        })
    }

    fn feed_forward(
        &self,
        config: &Config,
        importer: &mut Importer<'_>,
        module: &str,
    ) -> Result<ExpertFeedForward, ImportError> {
        let (router, num_experts) = self.router(config, importer, module)?;
        let (width, hidden) = (self.width, self.hidden);
        let rows = if self.gated { 2 * hidden } else { hidden };
        let bias = format!("{module}.bias");
        // Without the key's consent, transformers has one all the same.
        let has_bias = self.bias || importer.has(&bias);
        Ok(ExpertFeedForward {
            layout: ExpertLayout::OutIn,
            router,
            input: importer.take(&format!("{module}.input_linear.weight"), &[num_experts, rows, width])?,
            output: importer.take(&format!("{module}.output_linear.weight"), &[num_experts, width, hidden])?,
            output_bias: if has_bias { Some(importer.take(&bias, &[width])?) } else { None },
            gated: self.gated,
            width,
            hidden,
            top_k: self.top_k,
            num_experts,
            gate_mode: self.gate_mode,
            activation: self.activation,
            module: module.into(),
        })
    }
}

/// Size `axis` of a matrix of the first feed-forward block.
fn stored_size(tensors: &dyn TensorDirectory, matrix: &str, axis: usize) -> Option<usize> {
    tensors.tensor(&format!("model.layers.0.mlp.{matrix}.weight"))?.shape().get(axis).copied()
}

/// Width between the matrices of a feed-forward block. Transformers reads one key and the code it came from another,
/// and keeps what it does not read: where they differ, the checkpoint tells which one it follows.
fn hidden(config: &Config, tensors: &dyn TensorDirectory) -> Result<usize, ImportError> {
    let both = (config.optional_size("intermediate_size")?, config.optional_size("ffn_hidden_size")?);
    Ok(match both {
        (Some(_), Some(old)) if stored_size(tensors, "output_linear", 2) == Some(old) => old,
        (Some(hidden), _) | (None, Some(hidden)) => hidden,
        (None, None) => config.assume("intermediate_size", 5632),
    })
}

/// Whether the first matrix makes gates too. Transformers makes them whatever `glu` says.
fn is_gated(config: &Config, tensors: &dyn TensorDirectory, hidden: usize) -> Result<bool, ImportError> {
    Ok(config.flag_or("glu", true)? || stored_size(tensors, "input_linear", 1) == Some(2 * hidden))
}
