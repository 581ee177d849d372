//! Expert use beside what upstream's routers did, on every backend and form.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::{Path, PathBuf};

use common::{attention_mask, data, floats, golden::layer_cases, integers, json, read_tensors, token_inputs};
use moa_export::{
    backend::{self, Backend, OrtOptions},
    checkpoint::Checkpoint,
    export::DEFAULT_OPSET,
    export::{ExportOptions, export, export_model},
    onnx::encode,
    profile::{PmiOptions, Profile, Profiler, Score},
    tensor::{NamedTensors, Tensor},
};
use moa_graphs::{
    Form, Options, SyntheticTensors,
    families::{Config, ImportOptions},
    lower,
};

const PAD: i64 = 1;

fn ort() -> Box<dyn Backend> {
    backend::ort(OrtOptions::default()).unwrap()
}

fn bodies() -> Box<dyn Backend> {
    backend::ort_function(OrtOptions::default()).unwrap()
}

fn settings() -> [(Box<dyn Backend>, Form); 6] {
    [
        (ort(), Form::Function),
        (ort(), Form::Fused),
        (bodies(), Form::Function),
        (bodies(), Form::Standard),
        (backend::tract().unwrap(), Form::Function),
        (backend::tract().unwrap(), Form::Standard),
    ]
}

/// The fixture `name`, exported below `folder`.
fn exported(name: &str, form: Form, folder: &Path) -> PathBuf {
    let checkpoint = Checkpoint::open(&data(name), None).unwrap();
    let out = folder.join(form.as_str());
    let options = ExportOptions { graph: Options { form, ..Options::default() }, ..ExportOptions::default() };
    export(&checkpoint, &out, &options).unwrap();
    out
}

fn profile(path: &Path, backend: &dyn Backend, batches: &[NamedTensors]) -> Profile {
    let mut profiler = Profiler::open(path, backend).unwrap_or_else(|error| panic!("{error}"));
    for batch in batches {
        profiler.add(batch).unwrap_or_else(|error| panic!("{}: {error}", backend.name()));
    }
    profiler.finish(PmiOptions::default())
}

/// Counts of every module are upstream's, to the last token.
fn assert_counts(profile: &Profile, manifest: &str, label: &str) {
    let counts = json(manifest)["router_use_counts"].as_object().unwrap().clone();
    assert_eq!(profile.modules.len(), counts.len(), "{label}");
    for module in &profile.modules {
        let golden: Vec<u64> = serde_json::from_value(counts[&module.module].clone()).unwrap();
        assert_eq!(module.counts, golden, "{label}: {}", module.module);
        assert_eq!(module.tokens * module.top_k as u64, golden.iter().sum::<u64>(), "{label}");
        assert!((module.load_percent.iter().sum::<f64>() - 100.0).abs() < 1e-9);
        assert_eq!(module.tokens_apart_from_scores, 0, "{label}: {}", module.module);
    }
}

/// Smallest difference of the k-th and the next of upstream's probabilities, over real tokens.
fn golden_margin(goldens: &NamedTensors, module: &str, batches: &[(&str, &Tensor)], top_k: usize) -> f64 {
    let mut least = f64::INFINITY;
    for (prefix, ids) in batches {
        let scores = &goldens[&format!("{prefix}router.{module}.probs")];
        let rows = scores.to_f64();
        for (scores, id) in rows.chunks(*scores.shape().last().unwrap()).zip(ids.as_i64().unwrap()) {
            let mut ranked = scores.to_vec();
            ranked.sort_by(|a, b| b.total_cmp(a));
            if *id != PAD {
                least = least.min(ranked[top_k - 1] - ranked[top_k]);
            }
        }
    }
    least
}

#[test]
fn translation_counts_and_margins_are_those_of_upstream() {
    let goldens = read_tensors("nmt/goldens.safetensors");
    let folder = tempfile::tempdir().unwrap();
    let prefixes = ["b0.", "b1.", "b2.", "s0.", "s1.", "s2."];
    let ids = |name: &str| prefixes.map(|prefix| (prefix, &goldens[&format!("{prefix}{name}")]));
    let (sources, targets) = (ids("src_tokens"), ids("prev_output_tokens"));
    let batches: Vec<NamedTensors> = sources
        .iter()
        .zip(&targets)
        .map(|((_, source), (_, target))| {
            let inputs = [
                ("input_ids", (*source).clone()),
                ("attention_mask", attention_mask(source)),
                ("decoder_input_ids", (*target).clone()),
                ("decoder_attention_mask", attention_mask(target)),
            ];
            inputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
        })
        .collect();
    for form in [Form::Function, Form::Fused, Form::Standard] {
        let out = exported("nmt", form, folder.path());
        for (backend, _) in settings().iter().filter(|(_, taken)| *taken == form) {
            let label = format!("{} on {}", form.as_str(), backend.name());
            let profile = profile(&out, backend.as_ref(), &batches);
            assert_counts(&profile, "nmt/nmt.json", &label);
            for module in &profile.modules {
                let inputs = if module.graph.starts_with("encoder") { &sources } else { &targets };
                let golden = golden_margin(&goldens, &module.module, inputs, module.top_k);
                assert_eq!(module.margin.score, Score::Probability);
                assert!((module.margin.min.unwrap() - golden).abs() < 2e-6, "{label}: {} {golden}", module.module);
                assert_eq!(module.pmi.as_ref().unwrap().len(), 8);
            }
        }
    }
}

#[test]
fn masked_language_model_counts_are_those_of_upstream() {
    let goldens = read_tensors("mlm/goldens.safetensors");
    let folder = tempfile::tempdir().unwrap();
    let batches: Vec<NamedTensors> = ["pad.", "padleft.", "single.", "long."]
        .iter()
        .map(|prefix| token_inputs(&goldens[&format!("{prefix}tokens")]))
        .collect();
    let out = exported("mlm", Form::Function, folder.path());
    assert_counts(&profile(&out, ort().as_ref(), &batches), "mlm/mlm.json", "mlm");
}

#[test]
fn jetmoe_is_ranked_by_logits_and_its_padding_left_out() {
    let goldens = read_tensors("jetmoe/bf16/goldens.safetensors");
    let folder = tempfile::tempdir().unwrap();
    for prefix in ["left.", "right."] {
        let input = |name: &str| (name.to_owned(), goldens[&format!("{prefix}{name}")].clone());
        let batch = NamedTensors::from(["input_ids", "attention_mask"].map(input));
        let real: i64 = batch["attention_mask"].as_i64().unwrap().iter().sum();
        let mut profiles = Vec::new();
        for (backend, form) in settings() {
            let out = folder.path().join(form.as_str());
            let out = if out.exists() { out } else { exported("jetmoe/bf16", form, folder.path()) };
            let profile = profile(&out, backend.as_ref(), std::slice::from_ref(&batch));
            for module in &profile.modules {
                assert_eq!((module.tokens, module.margin.score), (real as u64, Score::Logit), "{}", module.module);
            }
            profiles.push(profile.modules.into_iter().map(|module| (module.module, module.counts)).collect::<Vec<_>>());
        }
        assert!(profiles[0].iter().any(|(module, _)| module.ends_with("mlp")), "feed-forward layers are routed too");
        assert!(profiles.iter().all(|other| *other == profiles[0]), "{prefix}: {profiles:#?}");
    }
}

/// What a router reads may be an input of its operator, of whatever width: a gate of MoLM is 12 wide here, and then as
/// wide as the model.
#[test]
fn routers_with_an_input_are_profiled_alike_in_every_form() {
    let folder = tempfile::tempdir().unwrap();
    let square = folder.path().join("square");
    let config = json("molm/mlp/config.json");
    let keys = config.as_object().unwrap().clone();
    let config = Config::new("config.json", keys).with("gating_size", 16.into());
    let model = moa_graphs::families::import(&config, &SyntheticTensors::random("seed", 1), ImportOptions::default());
    let model = model.unwrap();
    let ids: Vec<i64> = (0..24).map(|index| 1 + index * 7 % 60).collect();
    let inputs = |tokens: usize| {
        let mut inputs: NamedTensors = (0..2)
            .flat_map(|layer| ["key", "value"].map(|part| format!("past_key_values.{layer}.{part}")))
            .map(|name| (name, floats(&[2, 1, 0, 16], Vec::new())))
            .collect();
        inputs.insert("input_ids".into(), integers(&[2, tokens], ids.clone()));
        inputs.insert("attention_mask".into(), integers(&[2, tokens], vec![1; 2 * tokens]));
        inputs
    };
    for is_square in [false, true] {
        let profiles = settings().map(|(backend, form)| {
            let out = match is_square {
                false => exported("molm/mlp", form, &folder.path().join(backend.name())),
                true => {
                    let graph = Options { form, ..Options::default() };
                    let options = ExportOptions { graph, force: true, ..ExportOptions::default() };
                    let out = square.join(form.as_str());
                    export_model("moduleformer", &model, &out, &options, &()).unwrap();
                    out
                }
            };
            profile(&out.join("model.onnx"), backend.as_ref(), &[inputs(12)])
        });
        for other in &profiles {
            assert_eq!(other.modules.len(), 4);
            for (module, expected) in other.modules.iter().zip(&profiles[3].modules) {
                assert_eq!((&module.module, &module.counts), (&expected.module, &expected.counts));
                let [found, expected] = [module, expected].map(|module| module.margin.min.unwrap());
                assert!((found - expected).abs() <= 1e-5, "{}: {found} and {expected}", module.module);
            }
        }
    }
}

#[test]
fn single_layers_have_counts_and_no_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let cases = layer_cases();
    for name in ["self_pad_left_B3", "cross_pad_B3", "self_kE"] {
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let graph = &lower(&case.model(), Options { form: Form::Function, ..Options::default() }).unwrap()[0].graph;
        let path = folder.path().join(format!("{name}.onnx"));
        let mut file = std::fs::File::create(&path).unwrap();
        encode(graph, DEFAULT_OPSET, None).unwrap().write(&[], &mut file).unwrap();
        let profile = profile(&path, ort().as_ref(), std::slice::from_ref(&case.inputs));
        let [module] = profile.modules.as_slice() else { panic!("{name}: {profile:?}") };
        let mask = case.inputs.get("query_attention_mask").unwrap_or(&case.inputs["attention_mask"]);
        assert_eq!(module.tokens, mask.as_i64().unwrap().iter().sum::<i64>() as u64, "{name}");
        let golden = case.golden["router.indices"].as_i64();
        let golden = golden.map(<[i64]>::to_vec).unwrap_or_else(|| {
            case.golden["router.indices"].to_f64().into_iter().map(|expert| expert as i64).collect()
        });
        let mut counts = vec![0; module.counts.len()];
        for (chosen, real) in golden.chunks(module.top_k).zip(mask.as_i64().unwrap()) {
            chosen.iter().filter(|_| *real == 1).for_each(|expert| counts[*expert as usize] += 1);
        }
        assert_eq!(module.counts, counts, "{name}");
        assert!(module.pmi.is_none());
        assert_eq!(module.margin.min.is_none(), name == "self_kE");
    }
}

#[test]
fn a_graph_without_routing_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = exported("mlm", Form::Standard, folder.path());
    let path = if out.is_dir() { out.join("model.onnx") } else { out };
    let file = moa_export::onnx::read_model(&path).unwrap();
    let mut model = file.model().clone();
    for node in &mut model.graph.as_mut().unwrap().node {
        let anonymous = |name: &mut String| *name = name.replace("router.", "chosen.");
        node.output.iter_mut().chain(&mut node.input).for_each(anonymous);
    }
    let stripped = folder.path().join("stripped.onnx");
    std::fs::write(&stripped, prost::Message::encode_to_vec(&model)).unwrap();
    let error = Profiler::open(&stripped, bodies().as_ref()).err().unwrap();
    assert!(error.to_string().contains("no routed module"), "{error}");
}
