//! Goldens of the upstream code: cases, tolerances, comparisons.

use moa_export::{
    reference::{ModuleRouting, Routing},
    tensor::{NamedTensors, Tensor},
};
use moa_graphs::model::Model;
use serde_json::{Map, Value, json as object};

use super::{Weights, floats, generated, import, import_folder, integers, json, read_tensors};

/// Smallest gap between the `k`-th and the next score at which the chosen set must be upstream's.
pub(crate) const DECIDED: f64 = 1e-5;

/// The eight variants of the encoder–decoder.
pub(crate) const VARIANTS: [&str; 8] = [
    "variants/v_ffd_moe",
    "variants/v_learned_pos_lnemb",
    "variants/v_noisy_gating_k_enc3_dec1",
    "variants/v_nopos_kE",
    "variants/v_postnorm",
    "variants/v_prenorm",
    "variants/v_shared_dec_only",
    "variants/v_untied",
];

/// One `MultiheadAttention` of upstream.
#[derive(Debug)]
pub(crate) struct LayerCase {
    /// Name in the manifest.
    pub(crate) name: String,
    /// Keys of a `moa_layer` configuration.
    pub(crate) config: Map<String, Value>,
    /// Weights made by the recipe, under upstream's names.
    pub(crate) weights: Weights,
    /// Inputs of the exported layer.
    pub(crate) inputs: NamedTensors,
    /// Everything that is stored: `output`, `router.*`, masks, in some cases `weight.*` and `input.*`.
    pub(crate) golden: NamedTensors,
    /// Largest difference between upstream in f32 and upstream in f64.
    pub(crate) f64_maxdiff: f64,
}

impl LayerCase {
    /// The typed model.
    pub(crate) fn model(&self) -> Model {
        import(self.config.clone(), &self.weights)
    }
}

/// All cases of `layers.json`.
pub(crate) fn layer_cases() -> Vec<LayerCase> {
    json("layers/layers.json")["cases"].as_array().unwrap().iter().map(layer_case).collect()
}

fn layer_case(case: &Value) -> LayerCase {
    let text = |key: &str| case[key].as_str().unwrap();
    let cross = text("kind") == "cross";
    let golden = read_tensors(format!("layers/{}", text("file")));
    let seed: u64 = text("seed").parse().unwrap();
    let mut weights = Weights::new(text("name"));
    let mut inputs = NamedTensors::new();
    for (name, entry) in case["tensors"].as_object().unwrap() {
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        let values = generated(seed, name, shape.iter().product(), entry["amplitude"].as_f64().unwrap());
        match name.strip_prefix("input.") {
            Some(input) => drop(inputs.insert(input.into(), floats(&shape, values))),
            None => weights.insert(name, &shape, values),
        }
    }
    let mask = |name: &str, tokens: &str| {
        let shape = ["batch", tokens].map(|key| usize::try_from(case[key].as_u64().unwrap()).unwrap());
        match golden.get(name) {
            Some(pads) => integers(&shape, pads.as_i64().unwrap().iter().map(|pad| 1 - pad).collect()),
            None => integers(&shape, vec![1; shape.iter().product()]),
        }
    };
    inputs.insert("attention_mask".into(), mask("key_padding_mask", "src_len"));
    if cross {
        inputs.insert("query_attention_mask".into(), mask("query_padding_mask", "tgt_len"));
    }
    let Value::Object(config) = object!({
        "model_type": "moa_layer", "embed_dim": case["embed_dim"], "kdim": case["kdim"], "top_k": case["k"],
        "num_expert": case["num_expert"], "head_dim": case["head_dim"], "causal": case["causal"],
        "cross_attention": cross,
    }) else {
        panic!("an object")
    };
    LayerCase {
        name: text("name").into(),
        config,
        weights,
        inputs,
        golden,
        f64_maxdiff: case["f64_maxdiff"].as_f64().unwrap(),
    }
}

/// A model with its goldens.
#[derive(Debug)]
pub(crate) struct ModelCase {
    /// Folder in the fixtures.
    pub(crate) folder: &'static str,
    /// The typed model.
    pub(crate) model: Model,
    /// All golden tensors.
    pub(crate) golden: NamedTensors,
    /// The batches of a full pass.
    pub(crate) batches: Vec<Batch>,
}

/// One batch of a full pass.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    /// Start of its golden names, such as `left.`.
    pub(crate) prefix: String,
    /// Largest difference of the logits between upstream in f32 and upstream in f64.
    pub(crate) logits_maxdiff: f64,
    /// The same of the encoder's output.
    pub(crate) encoder_out_maxdiff: f64,
}

impl ModelCase {
    /// Reads a folder whose manifest is `manifest`.
    pub(crate) fn read(folder: &'static str, manifest: &str) -> Self {
        let manifest = json(format!("{folder}/{manifest}"));
        let batch = |entry: &Value| Batch {
            prefix: entry["prefix"].as_str().unwrap().into(),
            logits_maxdiff: entry["f64_maxdiff_logits"].as_f64().unwrap(),
            encoder_out_maxdiff: entry["f64_maxdiff_encoder_out"].as_f64().unwrap(),
        };
        Self {
            folder,
            model: import_folder(folder),
            golden: read_tensors(format!("{folder}/goldens.safetensors")),
            batches: manifest["batches"].as_array().unwrap().iter().map(batch).collect(),
        }
    }

    /// The batch with this prefix.
    pub(crate) fn batch(&self, prefix: &str) -> &Batch {
        self.batches.iter().find(|batch| batch.prefix == prefix).unwrap()
    }

    /// The golden `name` of the batch `prefix`.
    pub(crate) fn golden(&self, prefix: &str, name: &str) -> &Tensor {
        let name = format!("{prefix}{name}");
        self.golden.get(&name).unwrap_or_else(|| panic!("{}: no golden {name}", self.folder))
    }
}

/// One of [`VARIANTS`].
pub(crate) fn variant(folder: &'static str) -> ModelCase {
    ModelCase::read(folder, "variant.json")
}

/// The trained translation model.
pub(crate) fn translation() -> ModelCase {
    ModelCase::read("nmt", "nmt.json")
}

/// The trained masked language model.
pub(crate) fn masked_lm() -> ModelCase {
    ModelCase::read("mlm", "mlm.json")
}

/// How far values may be from a golden: ten times upstream's own rounding, and one millionth of its largest value.
pub(crate) fn tolerance(f64_maxdiff: f64, golden: &Tensor) -> f64 {
    10.0 * f64_maxdiff + 1e-6 * golden.to_f64().iter().fold(0.0, |largest: f64, value| largest.max(value.abs()))
}

/// The difference that came closest to its bound.
#[derive(Debug, Clone, Default)]
pub(crate) struct Worst {
    /// What was compared.
    pub(crate) what: String,
    /// Largest difference.
    pub(crate) difference: f64,
    /// What it must not exceed.
    pub(crate) bound: f64,
}

impl Worst {
    /// Keeps the worse of the two.
    pub(crate) fn add(&mut self, other: Self) {
        if self.bound == 0.0 || other.difference * self.bound > self.difference * other.bound {
            *self = other;
        }
    }
}

impl std::fmt::Display for Worst {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2e} (bound {:.2e}) at {}", self.difference, self.bound, self.what)
    }
}

/// Fails where a value is further than `bound` from the golden one, or is NaN.
pub(crate) fn assert_close(what: &str, found: &[f64], golden: &[f64], bound: f64) -> Worst {
    assert_eq!(found.len(), golden.len(), "{what}: number of values");
    let mut largest = 0.0;
    for (index, (found, golden)) in found.iter().zip(golden).enumerate() {
        let difference = (found - golden).abs();
        let is_close = difference <= bound;
        assert!(is_close, "{what}: {found} instead of {golden} at index {index}, further than {bound:e}");
        largest = difference.max(largest);
    }
    Worst { what: what.into(), difference: largest, bound }
}

/// [`assert_close`] for a whole output, with the tolerance of its `f64_maxdiff`.
pub(crate) fn assert_output(what: &str, found: &Tensor, golden: &Tensor, f64_maxdiff: f64) -> Worst {
    assert_eq!(found.shape(), golden.shape(), "{what}: shape");
    assert_close(what, &found.to_f64(), &golden.to_f64(), tolerance(f64_maxdiff, golden))
}

/// What a comparison of routing saw.
#[derive(Debug, Default)]
pub(crate) struct RoutingReport {
    /// Probabilities and gates.
    pub(crate) worst: Worst,
    /// Tokens whose chosen set had to be upstream's.
    pub(crate) decided: usize,
    /// Routed tokens in all.
    pub(crate) routed: usize,
}

impl RoutingReport {
    /// Adds another comparison.
    pub(crate) fn add(&mut self, other: Self) {
        self.worst.add(other.worst);
        self.decided += other.decided;
        self.routed += other.routed;
    }
}

/// Compares every module of `routing` with the golden tensors `{prefix}router.{module}.*`, and fails where
/// upstream has a module that is missing.
pub(crate) fn assert_routing(golden: &NamedTensors, prefix: &str, routing: &Routing, bound: f64) -> RoutingReport {
    let start = format!("{prefix}router.");
    let modules = golden.keys().filter_map(|name| name.strip_prefix(&start)?.strip_suffix("probs"));
    let mut report = RoutingReport::default();
    let mut count = 0;
    for module in modules {
        let name = module.strip_suffix('.').unwrap_or(module);
        let found = routing.get(name).unwrap_or_else(|| panic!("{start}{name} is missing"));
        report.add(assert_module(golden, &format!("{start}{module}"), found, bound));
        count += 1;
    }
    assert_eq!(count, routing.len(), "{start}: number of modules");
    report
}

/// Compares one module with the golden tensors `{prefix}probs`, `{prefix}indices` and `{prefix}gates`.
fn assert_module(golden: &NamedTensors, prefix: &str, found: &ModuleRouting, bound: f64) -> RoutingReport {
    let (experts, chosen) = (found.num_experts, &found.choices);
    let k = chosen.top_k;
    let part = |part: &str| golden[&format!("{prefix}{part}")].clone();
    let (probs, indices, gates) = (part("probs"), part("indices"), part("gates"));
    assert_eq!(probs.shape(), [chosen.batch, chosen.tokens, experts], "{prefix}probs");
    assert_eq!(indices.shape(), [chosen.batch, chosen.tokens, k], "{prefix}indices");
    let (probs, indices, gates) = (probs.to_f64(), indices.to_f64(), gates.to_f64());
    let mut report = RoutingReport::default();
    for token in 0..chosen.batch * chosen.tokens {
        let (all, slots) = (token * experts..(token + 1) * experts, token * k..(token + 1) * k);
        let is_routed = probs[all.clone()].iter().any(|p| *p != 0.0);
        assert_eq!(found.routed[token], is_routed, "{prefix}: whether token {token} is routed");
        let what = format!("{prefix} token {token}");
        report.worst.add(assert_close(&what, &chosen.weights[slots.clone()], &gates[slots.clone()], bound));
        if !is_routed {
            continue;
        }
        report.worst.add(assert_close(&what, &found.scores[all.clone()], &probs[all.clone()], bound));
        let mut falling = found.scores[all].to_vec();
        falling.sort_by(|a, b| b.total_cmp(a));
        let next = falling.get(k).copied().unwrap_or(f64::NEG_INFINITY);
        for slot in slots.clone().filter(|slot| gates[*slot] - next > DECIDED) {
            let expert = indices[slot] as i64;
            assert!(chosen.indices[slots.clone()].contains(&expert), "{what}: upstream chose expert {expert}");
        }
        report.routed += 1;
        report.decided += usize::from(falling[k - 1] - next > DECIDED);
    }
    report
}
