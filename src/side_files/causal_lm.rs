//! The files beside the graph of a causal language model: its configuration and tokenizer as Hugging Face's tools read
//! them, and `genai_config.json` for onnxruntime-genai.

use std::{fs, path::Path};

use moa_graphs::{
    Form, Precision,
    families::Config,
    model::{Attention, CausalLm, Dialect},
};
use moa_schema::{
    ORT_LIBRARY,
    interface::{ANY_LAYER, ATTENTION_MASK, Cache, INPUT_IDS, LOGITS, POSITION_IDS},
    library_file,
};
use serde_json::{Map, Value, json};

use super::{LARGEST, SideFile, SideFileOptions, file_in};
use crate::{
    file_names::{CONFIG, GENAI_CONFIG, GENERATION_CONFIG, REPLACED_SIZES},
    text::{Keys, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TextError, read_bytes},
};

/// Written for every model.
pub(super) const NAMES: [&str; 2] = [CONFIG, GENAI_CONFIG];

/// Copied as they are, where they lie beside the checkpoint.
pub(super) const COPIED: [&str; 9] = [
    GENERATION_CONFIG,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// What begins and what ends a text by a configuration that names neither.
const fn default_ids(dialect: Dialect) -> [i64; 2] {
    match dialect {
        Dialect::JetMoe => [1, 2],
        Dialect::ModuleFormer => [50_256, 50_256],
    }
}

/// A graph with what its folder must say about it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CausalLmFiles<'a> {
    pub(crate) model: &'a CausalLm,
    pub(crate) config: &'a Config,
    pub(crate) form: Form,
    pub(crate) precision: Precision,
    /// Name of the graph's file.
    pub(crate) graph: &'a str,
}

/// Whether `folder` is the one that the checkpoint lies in, whose files must stay as they are.
pub(crate) fn is_own_folder(folder: &Path, options: &SideFileOptions) -> bool {
    let real = |path: &Path| fs::canonicalize(path).ok();
    options.checkpoint_folder().and_then(real).is_some_and(|checkpoint| real(folder) == Some(checkpoint))
}

impl CausalLmFiles<'_> {
    /// The files, in the order in which they are written; `notes` gets what they leave out.
    pub(crate) fn make(&self, options: &SideFileOptions, notes: &mut Vec<String>) -> Result<Vec<SideFile>, TextError> {
        let mut files = Vec::new();
        if let Some(folder) = options.checkpoint_folder() {
            for name in COPIED {
                files.extend(copied(folder, name)?);
            }
        }
        let ids = self.special_ids(options, notes)?;
        files.push(file(CONFIG, &self.config()));
        files.push(file(GENAI_CONFIG, &self.genai_config(&ids, options)));
        Ok(files)
    }

    fn attention(&self) -> Option<&Attention> {
        self.model.layers.first().map(|layer| &layer.attention)
    }

    /// The checkpoint's configuration in the newer dialect, sizes as the tensors have them.
    ///
    /// Optimum's `ORTModelForCausalLM` does not know `jetmoe` and expects caches of `num_attention_heads` heads, each
    /// `hidden_size / num_attention_heads` wide, and transformers keeps a `num_attention_heads` that is given. So these
    /// two keys describe the caches of the graph; what they replace stays under `moa_export`.
    fn config(&self) -> Value {
        let mut keys = self.config.keys().clone();
        for renamed in OLD_KEYS {
            keys.remove(renamed);
        }
        let (layers, describes_caches) = match self.model.dialect {
            Dialect::JetMoe => ("num_hidden_layers", true),
            Dialect::ModuleFormer => ("n_layer", false),
        };
        let mut set = |key: &str, value: Value| keys.insert(key.into(), value);
        set("model_type", self.config.model_type().into());
        set("vocab_size", self.model.output.shape()[0].into());
        set(layers, self.model.layers.len().into());
        set("use_cache", true.into());
        let activations = if self.precision == Precision::Fp16 { "float16" } else { "float32" };
        set("dtype", activations.into());
        if let Some(layer) = describes_caches.then(|| self.model.layers.first()).flatten() {
            let attention = &layer.attention;
            let cache_width = attention.kv_num_heads * attention.head_size;
            set("num_local_experts", attention.num_experts.into());
            set("num_experts_per_tok", attention.top_k.into());
            set("intermediate_size", layer.feed_forward.hidden.into());
            set("num_key_value_heads", attention.kv_num_heads.into());
            set("kv_channels", attention.head_size.into());
            set("num_attention_heads", attention.kv_num_heads.into());
            set("hidden_size", cache_width.into());
            let replaced = json!({
                "hidden_size": attention.width,
                "num_attention_heads": attention.kv_num_heads * attention.top_k,
            });
            set(REPLACED_SIZES, json!({ "replaced": replaced }));
        }
        if let Some(positions) = self.model.max_positions() {
            set("max_position_embeddings", positions.into());
        }
        Value::Object(keys)
    }

    /// Ids from `generation_config.json` beside the checkpoint, else from the configuration.
    ///
    /// What ends a text is what does so in transformers 4.57: where it goes by `generation_config.json`, that file
    /// alone says it; the configuration's class has an end token where the key is absent, and none where it is `null`.
    /// Tokens that the model does not have are left out: the class writes its own into every configuration.
    fn special_ids(&self, options: &SideFileOptions, notes: &mut Vec<String>) -> Result<SpecialIds, TextError> {
        let vocabulary = self.model.tokens.shape()[0];
        let is_token = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < vocabulary);
        let [default_bos, default_eos] = default_ids(self.model.dialect).map(|id| Some(id).filter(is_token));
        let config = Keys::new(self.config.origin(), self.config.keys().clone());
        let read = |folder: &Path| Keys::read_generation(&folder.join(GENERATION_CONFIG), Some(&config));
        let generation = options.checkpoint_folder().map(read).transpose()?.flatten();
        let sources = [generation.as_ref(), Some(&config)];
        let eos = match &generation {
            None if !config.has("eos_token_id") => default_eos.into_iter().collect(),
            keys => {
                let keys = keys.as_ref().unwrap_or(&config);
                keys.token_ids_below("eos_token_id", vocabulary, notes)?.unwrap_or_default()
            }
        };
        let bos = first_id(sources, |keys| keys.token_ids_below("bos_token_id", vocabulary, notes))?;
        let pad = first_id(sources, |keys| keys.known_token_ids("pad_token_id", vocabulary))?;
        let (bos, pad) = (bos.or(default_bos).unwrap_or(0), pad.or(eos.first().copied()).unwrap_or(0));
        Ok(SpecialIds { bos, eos, pad })
    }

    /// onnxruntime-genai chooses its decoding loop by `type` and knows neither JetMoE nor MoLM; `llama` names its loop
    /// for decoders with one cache per layer. Caches are shared where the library is, which alone writes them in place.
    /// Where no token ends a text, the list is empty; onnxruntime-genai then ends at padding, and knows no other way.
    fn genai_config(&self, ids: &SpecialIds, options: &SideFileOptions) -> Value {
        let context = self.model.context;
        let with_library = options.operator_library.is_some() || self.form == Form::Fused;
        let mut session = Map::new();
        session.insert("log_id".into(), "onnxruntime-genai".into());
        session.insert("provider_options".into(), json!([]));
        if with_library {
            session.insert("custom_ops_library".into(), library_file(ORT_LIBRARY).into());
        }
        let cache = Cache::of_layer(ANY_LAYER);
        let ([past_key, past_value], [present_key, present_value]) = (cache.past(), cache.present());
        let mut decoder = json!({
            "session_options": session,
            "filename": self.graph,
            "num_hidden_layers": self.model.layers.len(),
            "inputs": {
                "input_ids": INPUT_IDS,
                "attention_mask": ATTENTION_MASK,
                "past_key_names": past_key,
                "past_value_names": past_value,
            },
            "outputs": {
                "logits": LOGITS,
                "present_key_names": present_key,
                "present_value_names": present_value,
            },
        });
        if self.model.max_positions().is_some() {
            decoder["inputs"]["position_ids"] = POSITION_IDS.into();
        }
        if let Some(attention) = self.attention() {
            decoder["hidden_size"] = attention.width.into();
            decoder["head_size"] = attention.head_size.into();
            decoder["num_attention_heads"] = (attention.kv_num_heads * attention.top_k).into();
            decoder["num_key_value_heads"] = attention.kv_num_heads.into();
        }
        let eos = if let [one] = ids.eos[..] { one.into() } else { Value::from(ids.eos.clone()) };
        json!({
            "model": {
                "type": "llama",
                "bos_token_id": ids.bos,
                "eos_token_id": eos,
                "pad_token_id": ids.pad,
                "vocab_size": self.model.output.shape()[0],
                "context_length": context,
                "decoder": decoder,
            },
            "search": { "do_sample": false, "max_length": context, "past_present_share_buffer": with_library },
        })
    }
}

/// Names of an older dialect of the configuration, and keys that do not describe the graph: code to be loaded from
/// elsewhere, and the type of the checkpoint's tensors.
const OLD_KEYS: [&str; 7] =
    ["auto_map", "ffn_hidden_size", "moe_num_experts", "moe_top_k", "n_positions", "num_layers", "torch_dtype"];

struct SpecialIds {
    bos: i64,
    /// Empty where no token ends a text.
    eos: Vec<i64>,
    pad: i64,
}

/// The first id that `known` finds in the first of `sources` which says something.
fn first_id(
    sources: [Option<&Keys>; 2],
    mut known: impl FnMut(&Keys) -> Result<Option<Vec<i64>>, TextError>,
) -> Result<Option<i64>, TextError> {
    for keys in sources.into_iter().flatten() {
        if let Some(ids) = known(keys)? {
            return Ok(ids.first().copied());
        }
    }
    Ok(None)
}

fn file(name: &str, value: &Value) -> SideFile {
    SideFile { name: name.into(), bytes: format!("{value:#}\n").into_bytes() }
}

fn copied(folder: &Path, name: &str) -> Result<Option<SideFile>, TextError> {
    let Some(path) = file_in(folder, name) else { return Ok(None) };
    Ok(Some(SideFile { name: name.into(), bytes: read_bytes(&path, LARGEST)? }))
}
