//! `moduleformer`: MoLM, ModuleFormer's language models, as Hugging Face stores them.
//!
//! Source of the maths: Shen et al., "ModuleFormer: Modularity Emerges from Mixture-of-Experts", 2023, and its released
//! code.

use moa_schema::{Activation, AttentionMode, GateMode};

use super::{Config, ImportOptions, activation, importer::Importer, model_types};
use crate::{
    ImportError, TensorDirectory,
    model::{
        Attention, CausalLayer, CausalLm, Dialect, ExpertFeedForward, ExpertLayout, KeyValueWeights, LayerNorm, Linear,
        Model, Norm, Router, RouterInput,
    },
};

const TOKENS: &str = "transformer.wte.weight";
const OUTPUT: &str = "lm_head.weight";

/// `vocab_size` of the configuration class.
const DEFAULT_VOCABULARY: usize = 50_295;

/// Every norm is built without the configuration's epsilon.
const NORM_EPSILON: f32 = 1e-5;

/// Ends of the names of tensors that are no weights: a causal mask, and ones below its diagonal.
const BUFFERS: [&str; 2] = [".attn.mask", ".attn.cum_weight"];

pub(super) fn import(
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<Model, ImportError> {
    config.refuse_quantized()?;
    let sizes = Sizes::new(config, options)?;
    let mut importer = Importer::new(config, tensors);
    let width = sizes.width;
    let vocabulary = config.optional_size("vocab_size")?.or(importer.or_stated(Some(DEFAULT_VOCABULARY)));
    let [tokens, output] = importer.take_ends([TOKENS, OUTPUT], sizes.tied, [vocabulary, Some(width)])?;
    let layers = (0..sizes.layers).map(|index| sizes.layer(&mut importer, index)).collect::<Result<_, _>>()?;
    let norm = norm(&mut importer, "transformer.ln_f", width)?;
    importer.check_ids(&tokens)?;
    importer.finish(model_types::MOLM, |name| BUFFERS.iter().any(|buffer| name.ends_with(buffer)))?;
    let pad_token_id = config.optional_id("pad_token_id")?.unwrap_or(0);
    let context = sizes.context;
    let dialect = Dialect::ModuleFormer;
    Ok(Model::CausalLm(CausalLm { dialect, tokens, pad_token_id, layers, norm, output, context }))
}

/// Experts of a layer, and how many of them a token takes.
#[derive(Clone, Copy)]
struct Experts {
    count: usize,
    top_k: usize,
}

impl Experts {
    fn new(config: &Config, [count, top_k]: [&str; 2]) -> Result<Self, ImportError> {
        let experts = config.size_or(count, 32)?;
        let chosen = config.size(top_k, "experts per token; it is never stored in tensors")?;
        if chosen > experts {
            return Err(config.invalid(top_k, format!("at most {experts}, \"{count}\"")));
        }
        Ok(Self { count: experts, top_k: chosen })
    }
}

/// The keys of the configuration.
struct Sizes {
    width: usize,
    layers: usize,
    hidden: usize,
    attention: Experts,
    feed_forward: Experts,
    /// Width between the two matrices of a gate; `None` where it has one.
    gate_width: Option<usize>,
    activation: Activation,
    gate_mode: GateMode,
    tied: bool,
    context: Option<usize>,
}

impl Sizes {
    fn new(config: &Config, options: ImportOptions) -> Result<Self, ImportError> {
        let either = |keys, default| config.agreed_size(keys).map(|size| size.map_or(default, |(size, _)| size));
        let width = either(["n_embd", "hidden_size"], 1024)?;
        check_keys_and_values(config, width)?;
        let gate_width = match config.text_or("gate_type", "mlp")? {
            "mlp" => Some(config.size_or("gating_size", 256)?),
            "linear" => None,
            other => {
                return Err(config.unsupported(format!("\"gate_type\": \"{other}\" (supported: mlp, linear)")));
            }
        };
        Ok(Self {
            width,
            layers: layers(config)?,
            hidden: config.size_or("ffd_hidden", 2048)?,
            attention: Experts::new(config, ["n_att_experts", "k_att"])?,
            feed_forward: Experts::new(config, ["n_mlp_experts", "k_mlp"])?,
            gate_width,
            activation: activation::of_transformers(config, "gelu_new")?,
            gate_mode: options.gate_mode.unwrap_or(GateMode::SoftmaxTopk),
            tied: config.flag_or("tie_word_embeddings", false)?,
            context: context(config)?,
        })
    }

    fn layer(&self, importer: &mut Importer<'_>, index: usize) -> Result<CausalLayer, ImportError> {
        let prefix = format!("transformer.h.{index}");
        Ok(CausalLayer {
            attention_norm: norm(importer, &format!("{prefix}.ln_1"), self.width)?,
            attention: self.attention(importer, &format!("{prefix}.attn"))?,
            feed_forward_norm: norm(importer, &format!("{prefix}.ln_2"), self.width)?,
            feed_forward: self.feed_forward(importer, &format!("{prefix}.mlpf"))?,
            prefix,
        })
    }

    fn attention(&self, importer: &mut Importer<'_>, prefix: &str) -> Result<Attention, ImportError> {
        let (module, width, Experts { count, top_k }) = (format!("{prefix}.q_proj"), self.width, self.attention);
        let router = self.router(importer, &module, count)?;
        let experts = [count, width, width];
        Ok(Attention {
            layout: ExpertLayout::InOut,
            router,
            query: importer.take(&format!("{module}.experts.weight"), &experts)?,
            keys_values: KeyValueWeights::HiddenStates,
            output: importer.take(&format!("{module}.output_experts.weight"), &experts)?,
            output_bias: None,
            expert_biases: None,
            rotary: None,
            width,
            source_width: width,
            top_k,
            num_experts: count,
            kv_num_heads: 1,
            head_size: width,
            gate_mode: self.gate_mode,
            attention_mode: AttentionMode::StickBreaking,
            causal: true,
            skip_padded_queries: false,
            prefix: prefix.into(),
            module,
        })
    }

    fn feed_forward(&self, importer: &mut Importer<'_>, module: &str) -> Result<ExpertFeedForward, ImportError> {
        let (width, hidden, Experts { count, top_k }) = (self.width, self.hidden, self.feed_forward);
        let router = self.router(importer, module, count)?;
        Ok(ExpertFeedForward {
            layout: ExpertLayout::InOut,
            router,
            input: importer.take(&format!("{module}.experts.weight"), &[count, width, hidden])?,
            output: importer.take(&format!("{module}.output_experts.weight"), &[count, hidden, width])?,
            output_bias: None,
            gated: false,
            width,
            hidden,
            top_k,
            num_experts: count,
            gate_mode: self.gate_mode,
            activation: self.activation,
            module: module.into(),
        })
    }

    /// The router of a module, which has a hidden layer but where the gate is linear.
    fn router(&self, importer: &mut Importer<'_>, module: &str, experts: usize) -> Result<Router, ImportError> {
        let name = |part: &str| format!("{module}.gate.w_gate.{part}");
        let Some(read) = self.gate_width else {
            let weight = importer.take(&name("0.weight"), &[experts, self.width])?;
            return Ok(Router::of_tokens(weight, ExpertLayout::OutIn));
        };
        let weight = importer.take(&name("0.weight"), &[read, self.width])?;
        let bias = importer.take(&name("0.bias"), &[read])?;
        Ok(Router {
            input: Some(Box::new(RouterInput(Linear { weight, bias }))),
            weight: importer.take(&name("3.weight"), &[experts, read])?,
            layout: ExpertLayout::OutIn,
        })
    }
}

fn layers(config: &Config) -> Result<usize, ImportError> {
    let keys = ["n_layer", "num_hidden_layers"];
    config.agreed_size(keys)?;
    let [layers, other] = keys.map(|key| config.optional_layers(key));
    Ok(layers?.or(other?).unwrap_or(24))
}

/// Tokens that the model was trained on at a time: those of a block, and of the history before it.
fn context(config: &Config) -> Result<Option<usize>, ImportError> {
    let (history, block) = (config.id_or("history_length", 512)?, config.id_or("block_size", 512)?);
    Ok(Some(history + block).filter(|tokens| *tokens > 0))
}

/// Refuses projections of keys and values, without which the one head is as wide as the model.
fn check_keys_and_values(config: &Config, width: usize) -> Result<(), ImportError> {
    let (heads, head_key) = config.agreed_size(["n_head", "num_attention_heads"])?.unwrap_or((8, "n_head"));
    let attended = config.optional_size("att_hidden")?.unwrap_or(512);
    if heads == 1 && attended == width {
        return Ok(());
    }
    let said = |key: &str, size: usize| {
        let default = if config.has(key) { "" } else { " by default" };
        format!("\"{key}\": {size}{default}")
    };
    Err(config.unsupported(format!(
        "projections of keys and values, that is {} and {} (supported: 1 and the width {width}, where keys and values are \
         the hidden states)",
        said(head_key, heads),
        said("att_hidden", attended)
    )))
}

fn norm(importer: &mut Importer<'_>, name: &str, width: usize) -> Result<Norm, ImportError> {
    let weight = importer.take(&format!("{name}.weight"), &[width])?;
    let bias = importer.take(&format!("{name}.bias"), &[width])?;
    Ok(Norm::Layer(LayerNorm { weight, bias, epsilon: NORM_EPSILON }))
}
