//! Configurations that are known by name: the rows of the paper's tables, JetMoE-8B and the released MoLMs.
//!
//! Source of the sizes: Zhang et al., "Mixture of Attention Heads: Selecting Attention Heads Per Token", EMNLP 2022,
//! Tables 1 to 3; for the Transformers Vaswani et al. 2017, for the deep ones Liu et al. 2020 ("Admin"); for JetMoE-8B
//! and MoLM their published configurations.

use moa_graphs::families::{Config, model_types};
use serde_json::{Map, Value, json};

/// Vocabulary of the English–German rows: see [`super::paper`].
pub const ENGLISH_GERMAN: u64 = 37_000;

/// A model without weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// Name on the command line.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    kind: Kind,
    attention: Attention,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// fairseq encoder–decoder, one vocabulary for both sides.
    Translation {
        layers: [u64; 2],
        width: u64,
        hidden: u64,
    },
    /// fairseq RoBERTa of 8 layers with 128 learned positions.
    MaskedLm,
    JetMoe,
    /// Of width 1024, with 32 experts of width 2048 in the feed-forward blocks.
    Molm {
        layers: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attention {
    Heads(u64),
    /// Experts per token, experts in all, width of a head.
    Experts(u64, u64, u64),
}

use Attention::{Experts, Heads};

const BASE: Kind = Kind::Translation { layers: [6, 6], width: 512, hidden: 2048 };
const BIG: Kind = Kind::Translation { layers: [6, 6], width: 1024, hidden: 4096 };

const fn preset(name: &'static str, title: &'static str, kind: Kind, attention: Attention) -> Preset {
    Preset { name, title, kind, attention }
}

const fn deep(name: &'static str, title: &'static str, layers: [u64; 2]) -> Preset {
    preset(name, title, Kind::Translation { layers, width: 512, hidden: 2048 }, Heads(8))
}

/// Every preset.
pub const PRESETS: [Preset; 22] = [
    preset("transformer-base", "Transformer base", BASE, Heads(8)),
    preset("transformer-big", "Transformer big", BIG, Heads(16)),
    deep("admin-18l-18l", "Admin 18L-18L", [18, 18]),
    deep("admin-60l-12l", "Admin 60L-12L", [60, 12]),
    preset("moa-base", "MoA Base 8K8E128D", BASE, Experts(8, 8, 128)),
    preset("moa-a", "(A) 8K8E256D", BASE, Experts(8, 8, 256)),
    preset("moa-b", "(B) 8K16E256D", BASE, Experts(8, 16, 256)),
    preset("moa-c", "(C) 8K32E64D", BASE, Experts(8, 32, 64)),
    preset("moa-d", "(D) 8K32E128D", BASE, Experts(8, 32, 128)),
    preset("moa-e", "(E) 8K32E256D", BASE, Experts(8, 32, 256)),
    preset("moa-f", "(F) 4K32E256D", BASE, Experts(4, 32, 256)),
    preset("moa-big", "MoA Big 16K32E256D", BASE, Experts(16, 32, 256)),
    preset("mlm-transformer", "MLM Transformer", Kind::MaskedLm, Heads(8)),
    preset("mlm-8k8e128d", "MLM 8K8E128D", Kind::MaskedLm, Experts(8, 8, 128)),
    preset("mlm-8k8e256d", "MLM 8K8E256D", Kind::MaskedLm, Experts(8, 8, 256)),
    preset("mlm-8k16e256d", "MLM 8K16E256D", Kind::MaskedLm, Experts(8, 16, 256)),
    preset("mlm-8k32e256d", "MLM 8K32E256D", Kind::MaskedLm, Experts(8, 32, 256)),
    preset("mlm-8k64e256d", "MLM 8K64E256D", Kind::MaskedLm, Experts(8, 64, 256)),
    preset("jetmoe-8b", "JetMoE-8B", Kind::JetMoe, Experts(2, 8, 128)),
    preset("molm-350m-4b", "MoLM-350M-4B", Kind::Molm { layers: 24 }, Experts(2, 16, 1024)),
    preset("molm-700m-4b", "MoLM-700M-4B", Kind::Molm { layers: 24 }, Experts(4, 16, 1024)),
    preset("molm-700m-8b", "MoLM-700M-8B", Kind::Molm { layers: 48 }, Experts(2, 16, 1024)),
];

impl Preset {
    /// The preset of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        PRESETS.iter().find(|preset| preset.name == name)
    }

    /// Whether it is a standard Transformer.
    pub const fn is_transformer(&self) -> bool {
        matches!(self.attention, Heads(_))
    }

    /// Its configuration.
    pub fn config(&self) -> Config {
        let mut keys = match self.kind {
            Kind::Translation { layers: [encoder, decoder], width, hidden } => json!({
                "encoder_layers": encoder, "decoder_layers": decoder,
                "encoder_embed_dim": width, "encoder_ffn_embed_dim": hidden,
                "share_all_embeddings": true, "vocab_size": ENGLISH_GERMAN,
            }),
            // Biases of experts and positions are those with which the printed parameters agree.
            Kind::MaskedLm => json!({
                "encoder_layers": 8, "encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048,
                "activation_fn": "gelu", "encoder_learned_pos": true, "max_source_positions": 128,
                "layernorm_embedding": true, "no_scale_embedding": true, "vocab_size": 50_265,
                "expert_bias": !self.is_transformer(),
            }),
            Kind::JetMoe => json!({
                "model_type": model_types::JETMOE, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5632,
                "kv_channels": 128, "num_key_value_heads": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
                "vocab_size": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            }),
            Kind::Molm { layers } => json!({
                "n_layer": layers, "n_embd": 1024, "n_head": 1, "ffd_hidden": 2048, "n_mlp_experts": 32,
                "gate_type": "mlp", "gating_size": 256, "vocab_size": 50_295,
            }),
        };
        if let Some(keys) = keys.as_object_mut() {
            keys.extend(self.attention_keys());
        }
        let keys = if let Value::Object(keys) = keys { keys } else { Map::new() };
        Config::new(format!("preset {}", self.name), keys)
    }

    fn attention_keys(&self) -> Map<String, Value> {
        let dense = self.is_transformer();
        let family = match self.kind {
            Kind::Translation { .. } if dense => model_types::TRANSFORMER,
            Kind::Translation { .. } => model_types::MOA_TRANSFORMER,
            Kind::MaskedLm if dense => model_types::ROBERTA,
            Kind::MaskedLm => model_types::MOA_ROBERTA,
            Kind::JetMoe => return Map::new(),
            Kind::Molm { .. } => model_types::MOLM,
        };
        let mut keys = vec![("model_type", json!(family))];
        if let (Kind::Molm { .. }, Experts(top_k, experts, head)) = (self.kind, self.attention) {
            keys.extend([("att_hidden", head), ("n_att_experts", experts)].map(|(key, size)| (key, json!(size))));
            keys.extend(["k_att", "k_mlp"].map(|key| (key, json!(top_k))));
            return keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        }
        let per_token = match self.attention {
            Heads(heads) => heads,
            Experts(top_k, experts, head) => {
                keys.extend([("num_expert", json!(experts)), ("head_dim", json!(head))]);
                top_k
            }
        };
        keys.extend([("encoder_attention_heads", json!(per_token)), ("decoder_attention_heads", json!(per_token))]);
        keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}
