//! The f64 reference against goldens of the upstream code.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{
    decoder_inputs, floats, fnv_1a, generated,
    golden::{
        Batch, ModelCase, RoutingReport, VARIANTS, Worst, assert_close, assert_output, assert_routing, layer_cases,
        masked_lm, translation, variant,
    },
    integers, token_inputs, weight,
};
use moa_export::{
    reference::{Choices, Evaluation, Factors, Reference, ReferenceError},
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::{
    Part, Precision,
    model::{Attention, ExpertLayout, KeyValueWeights, MoaLayer, Model, Router},
};
use moa_schema::{AttentionMode, FloatType, GateMode};

/// Largest difference of a routing probability or gate from upstream's in f32.
const LAYER_ROUTING_BOUND: f64 = 2e-6;
const MODEL_ROUTING_BOUND: f64 = 1e-5;

fn run(reference: &Reference, part: Part, inputs: &NamedTensors) -> Evaluation {
    reference.run(part, inputs, None).unwrap_or_else(|error| panic!("{error}"))
}

/// Encoder and decoder over all tokens at once.
fn translate(reference: &Reference, source: &Tensor, target: &Tensor) -> (Evaluation, Evaluation) {
    let encoded = run(reference, Part::Encoder, &token_inputs(source));
    let inputs = decoder_inputs(source, target, (0, target.shape()[1]), &encoded.outputs, None);
    let decoded = run(reference, Part::Decoder, &inputs);
    (encoded, decoded)
}

/// Encoder once, decoder `stride` tokens at a time: logits `[B, T, V]`, the encoder's outputs, those of the last step.
fn translate_by_step(
    reference: &Reference,
    source: &Tensor,
    target: &Tensor,
    stride: usize,
) -> (Tensor, NamedTensors, NamedTensors) {
    let encoded = run(reference, Part::Encoder, &token_inputs(source)).outputs;
    let (batch, tokens) = (target.shape()[0], target.shape()[1]);
    let mut steps: Vec<NamedTensors> = Vec::new();
    for from in (0..tokens).step_by(stride) {
        let to = tokens.min(from + stride);
        let inputs = decoder_inputs(source, target, (from, to), &encoded, steps.last());
        steps.push(run(reference, Part::Decoder, &inputs).outputs);
    }
    let vocabulary = steps[0]["logits"].shape()[2];
    let mut logits = Vec::new();
    for b in 0..batch {
        for step in steps.iter().map(|step| &step["logits"]) {
            let size = step.shape()[1] * vocabulary;
            logits.extend_from_slice(&step.as_f64().unwrap()[b * size..(b + 1) * size]);
        }
    }
    let logits = Tensor::new([batch, tokens, vocabulary], TensorData::F64(logits)).unwrap();
    (logits, encoded, steps.pop().unwrap())
}

#[test]
fn the_generator_follows_the_recipe() {
    assert_eq!(fnv_1a("input.query"), 0x42d0_464e_1bb7_5c95);
    let expected =
        [-0.161_542_892_456_054_7, 0.720_264_077_186_584_5, -0.195_311_784_744_262_7, 0.356_700_658_798_217_8];
    let found: Vec<f64> = generated(1_234_567, "input.query", 4, 1.0).into_iter().map(f64::from).collect();
    assert_eq!(found, expected);
    let mut stored = 0;
    for case in layer_cases() {
        for (name, golden) in &case.golden {
            let found = if let Some(name) = name.strip_prefix("weight.") {
                moa_graphs::TensorDirectory::tensor(&case.weights, name).unwrap().to_f32().unwrap()
            } else if let Some(name) = name.strip_prefix("input.") {
                case.inputs[name].as_f32().unwrap().to_vec()
            } else {
                continue;
            };
            assert_eq!(golden.as_f32().unwrap(), found, "{} {name}", case.name);
            stored += 1;
        }
    }
    assert_eq!(stored, 17, "tensors stored in five cases");
}

#[test]
fn layers_agree_with_upstream() {
    let (mut outputs, mut routing) = (Worst::default(), RoutingReport::default());
    let cases = layer_cases();
    assert_eq!(cases.len(), 23);
    for case in cases {
        let reference = Reference::new(&case.model()).unwrap();
        let found = run(&reference, Part::Model, &case.inputs);
        outputs.add(assert_output(&case.name, &found.outputs["output"], &case.golden["output"], case.f64_maxdiff));
        routing.add(assert_routing(&case.golden, "", &found.routing, LAYER_ROUTING_BOUND));
    }
    println!("output {outputs}; routing {}, {} of {} sets", routing.worst, routing.decided, routing.routed);
    assert!(routing.decided * 10 > routing.routed * 9);
}

#[test]
fn padded_queries_of_layers_are_exactly_zero() {
    let mut padded = 0;
    for case in layer_cases() {
        let reference = Reference::new(&case.model()).unwrap();
        let output = run(&reference, Part::Model, &case.inputs).outputs["output"].to_f64();
        assert!(output.iter().all(|value| value.is_finite()), "{}", case.name);
        let mask = case.inputs.get("query_attention_mask").unwrap_or(&case.inputs["attention_mask"]);
        let width = output.len() / mask.data().len();
        for (token, _) in mask.as_i64().unwrap().iter().enumerate().filter(|(_, real)| **real == 0) {
            let row = &output[token * width..(token + 1) * width];
            assert!(row.iter().all(|value| value.to_bits() == 0), "{} token {token}", case.name);
            padded += usize::from(matches!(case.name.as_str(), "self_allpad_row" | "self_causal_pad_left_nanrows"));
        }
    }
    assert_eq!(padded, 6 + 12, "padded queries that see no key upstream");
}

/// Compares a full pass with the goldens of `batch`, pads included.
fn check_translation(case: &ModelCase, reference: &Reference, batch: &Batch) -> (Worst, RoutingReport) {
    let prefix = &batch.prefix;
    let name = |golden: &str| format!("{} {prefix}{golden}", case.folder);
    let source = case.golden(prefix, "src_tokens");
    let (encoded, decoded) = translate(reference, source, case.golden(prefix, "prev_output_tokens"));
    let golden = case.golden(prefix, "encoder_out");
    let state = &encoded.outputs["last_hidden_state"];
    let mut worst = assert_output(&name("encoder_out"), state, golden, batch.encoder_out_maxdiff);
    let golden = case.golden(prefix, "logits");
    worst.add(assert_output(&name("logits"), &decoded.outputs["logits"], golden, batch.logits_maxdiff));
    let mut routing = encoded.routing;
    routing.extend(decoded.routing);
    (worst, assert_routing(&case.golden, prefix, &routing, MODEL_ROUTING_BOUND))
}

#[test]
fn variants_agree_with_upstream() {
    let (mut outputs, mut routing) = (Worst::default(), RoutingReport::default());
    for folder in VARIANTS {
        let case = variant(folder);
        let reference = Reference::new(&case.model).unwrap();
        assert_eq!(case.batches.len(), 3);
        for batch in &case.batches {
            let (worst, report) = check_translation(&case, &reference, batch);
            outputs.add(worst);
            routing.add(report);
        }
    }
    println!("outputs {outputs}; routing {}, {} of {} sets", routing.worst, routing.decided, routing.routed);
    assert!(routing.decided * 10 > routing.routed * 9);
}

#[test]
fn variants_agree_with_upstream_step_by_step() {
    let mut worst = Worst::default();
    for folder in VARIANTS {
        let case = variant(folder);
        let reference = Reference::new(&case.model).unwrap();
        let [source, target] = ["src_tokens", "prev_output_tokens"].map(|name| case.golden("single.", name));
        let (logits, ..) = translate_by_step(&reference, source, target, 1);
        let golden = case.golden("single.", "incremental_logits");
        worst.add(assert_output(folder, &logits, golden, case.batch("single.").logits_maxdiff));
    }
    println!("logits {worst}");
}

#[test]
fn translation_agrees_with_upstream() {
    let case = translation();
    let reference = Reference::new(&case.model).unwrap();
    let (mut outputs, mut routing) = (Worst::default(), RoutingReport::default());
    assert_eq!(case.batches.len(), 6);
    for batch in &case.batches {
        let (worst, report) = check_translation(&case, &reference, batch);
        outputs.add(worst);
        routing.add(report);
    }
    println!("outputs {outputs}; routing {}, {} of {} sets", routing.worst, routing.decided, routing.routed);
    assert!(routing.decided * 10 > routing.routed * 9);
}

#[test]
fn translation_agrees_with_upstream_step_by_step() {
    let case = translation();
    let reference = Reference::new(&case.model).unwrap();
    let [source, target] = ["src_tokens", "prev_output_tokens"].map(|name| case.golden("inc.", name));
    let (logits, encoded, last) = translate_by_step(&reference, source, target, 1);
    let batch = case.batch("b2.");
    let mut worst = assert_output("inc.logits", &logits, case.golden("inc.", "logits"), batch.logits_maxdiff);
    for layer in 0..3 {
        for part in ["key", "value"] {
            for (side, found) in [
                ("self", &last[&format!("present.{layer}.decoder.{part}")]),
                ("cross", &encoded[&format!("present.{layer}.encoder.{part}")]),
            ] {
                let name = format!("inc.cache.{layer}.{side}_{part}");
                let golden = case.golden("", &name);
                let [batch_size, heads, tokens, width] = found.shape() else { panic!("{name}: {:?}", found.shape()) };
                assert_eq!((*heads, golden.shape()), (1, &[*batch_size, *tokens, *width][..]), "{name}");
                let bound = common::golden::tolerance(batch.logits_maxdiff, golden);
                worst.add(assert_close(&name, &found.to_f64(), &golden.to_f64(), bound));
            }
        }
    }
    println!("logits and caches {worst}");
}

#[test]
fn cached_steps_equal_one_full_pass() {
    let case = translation();
    let reference = Reference::new(&case.model).unwrap();
    for (prefix, stride) in [("b0.", 1), ("b0.", 4), ("b2.", 1), ("b2.", 5)] {
        let [source, target] = ["src_tokens", "prev_output_tokens"].map(|name| case.golden(prefix, name));
        let (by_step, _, last) = translate_by_step(&reference, source, target, stride);
        let (_, whole) = translate(&reference, source, target);
        assert_close(prefix, &by_step.to_f64(), &whole.outputs["logits"].to_f64(), 1e-12);
        for (name, cache) in whole.outputs.iter().filter(|(name, _)| name.starts_with("present.")) {
            assert_close(name, &last[name].to_f64(), &cache.to_f64(), 1e-12);
        }
    }
}

#[test]
fn masked_lm_agrees_with_upstream() {
    let case = masked_lm();
    let reference = Reference::new(&case.model).unwrap();
    let (mut outputs, mut routing) = (Worst::default(), RoutingReport::default());
    assert_eq!(case.batches.len(), 4);
    for batch in &case.batches {
        let found = run(&reference, Part::Model, &token_inputs(case.golden(&batch.prefix, "tokens")));
        let golden = case.golden(&batch.prefix, "logits");
        outputs.add(assert_output(&batch.prefix, &found.outputs["logits"], golden, batch.logits_maxdiff));
        routing.add(assert_routing(&case.golden, &batch.prefix, &found.routing, MODEL_ROUTING_BOUND));
    }
    println!("logits {outputs}; routing {}, {} of {} sets", routing.worst, routing.decided, routing.routed);
    assert!(routing.decided * 10 > routing.routed * 9);
}

#[test]
fn replaying_its_own_routing_changes_nothing() {
    let case = variant("variants/v_ffd_moe");
    let reference = Reference::new(&case.model).unwrap();
    let [source, target] = ["src_tokens", "prev_output_tokens"].map(|name| case.golden("left.", name));
    let (encoded, decoded) = translate(&reference, source, target);
    let mut choices = encoded.choices();
    choices.extend(decoded.choices());
    let replayed = reference.run(Part::Encoder, &token_inputs(source), Some(&choices)).unwrap();
    assert_eq!(replayed, encoded);
    let inputs = decoder_inputs(source, target, (0, target.shape()[1]), &encoded.outputs, None);
    assert_eq!(reference.run(Part::Decoder, &inputs, Some(&choices)).unwrap(), decoded);
}

#[test]
fn a_replayed_expert_gets_its_own_weight() {
    let case = layer_cases().into_iter().find(|case| case.name == "self_k1").unwrap();
    let reference = Reference::new(&case.model()).unwrap();
    let own = run(&reference, Part::Model, &case.inputs);
    let mut replay = own.choices();
    let module = replay.get_mut("").unwrap();
    module.indices.iter_mut().for_each(|index| *index = (*index + 1) % 6);
    let changed = reference.run(Part::Model, &case.inputs, Some(&replay)).unwrap();
    assert_ne!(changed.outputs, own.outputs);
    assert_eq!(changed.routing[""].scores, own.routing[""].scores);
    for (token, index) in replay[""].indices.iter().enumerate() {
        let expert = usize::try_from(*index).unwrap();
        assert_eq!(changed.routing[""].choices.weights[token], own.routing[""].scores[token * 6 + expert]);
    }
    assert_eq!(changed.routing[""].choices.indices, replay[""].indices);
    let error = reference.run(Part::Model, &case.inputs, Some(&Choices::new())).unwrap_err();
    assert!(matches!(error, ReferenceError::Replay { .. }));
}

/// A self-attention layer over `C` = 3 with 4 experts, top-2, two key/value heads of width 2, or one of them.
fn grouped_layer(head: Option<usize>) -> Model {
    let (experts, width, size) = (4, 3, 2);
    let groups = if head.is_some() { 1 } else { 2 };
    let all = |name: &str, count: usize| generated(99, name, count, 1.0);
    // Columns or rows of both heads are `[head 0, head 1]`; `runs` is their number times the width of a run.
    let kept = |values: Vec<f32>, run: usize| -> Vec<f32> {
        let keep = |at: &usize| head.is_none_or(|head| (at / run) % 2 == head);
        (0..values.len()).filter(keep).map(|at| values[at]).collect()
    };
    let columns = groups * size;
    Model::Layer(MoaLayer {
        attention: Attention {
            module: "q".into(),
            prefix: String::new(),
            layout: ExpertLayout::InOut,
            router: Router::of_tokens(
                weight("router", &[width, experts], all("router", width * experts)),
                ExpertLayout::InOut,
            ),
            query: weight("query", &[experts, width, columns], kept(all("query", experts * width * 4), size)),
            keys_values: KeyValueWeights::Separate {
                key: weight("key", &[columns, width], kept(all("key", 4 * width), size * width)),
                value: weight("value", &[columns, width], kept(all("value", 4 * width), size * width)),
            },
            output: weight(
                "output",
                &[experts, columns, width],
                kept(all("output", experts * 4 * width), size * width),
            ),
            output_bias: None,
            expert_biases: None,
            rotary: None,
            width,
            source_width: width,
            top_k: 2,
            num_experts: experts,
            kv_num_heads: groups,
            head_size: size,
            gate_mode: GateMode::SoftmaxTopkRenorm,
            attention_mode: AttentionMode::Softmax,
            causal: true,
            skip_padded_queries: false,
        },
        cross_attention: false,
    })
}

fn grouped_inputs() -> NamedTensors {
    NamedTensors::from([
        ("query".into(), floats(&[2, 5, 3], generated(7, "query", 30, 2.0))),
        ("attention_mask".into(), integers(&[2, 5], vec![1, 1, 1, 1, 1, 0, 0, 1, 1, 0])),
    ])
}

#[test]
fn key_value_heads_add_up() {
    let output = |head| {
        let reference = Reference::new(&grouped_layer(head)).unwrap();
        run(&reference, Part::Model, &grouped_inputs()).outputs["output"].to_f64()
    };
    let sum: Vec<f64> = output(Some(0)).iter().zip(output(Some(1))).map(|(a, b)| a + b).collect();
    assert_close("two heads", &output(None), &sum, 1e-14);
}

/// The weights are those of the export that they are stored as; what they are multiplied with is rounded where a
/// runtime's roundings are.
#[test]
fn products_are_rounded_where_roundings_are_asked_for() {
    let model = grouped_layer(None);
    for (stored, precision, factors, shown) in [
        (Precision::Bf16, Precision::Bf16Products, Factors::Bf16, "bfloat16"),
        (Precision::Int8, Precision::Int8Products, Factors::Int8, "int8"),
        (Precision::Int4, Precision::Int4Products, Factors::Int8, "int8"),
    ] {
        let [stored, products] = [stored, precision].map(|precision| Reference::stored_as(&model, precision).unwrap());
        let exact = |reference: &Reference| run(reference, Part::Model, &grouped_inputs());
        let rounded = |reference: &Reference| reference.run_rounded(Part::Model, &grouped_inputs(), None).unwrap();
        assert_eq!(exact(&products), exact(&stored));
        let [found, expected] = [&products, &stored].map(rounded);
        assert_eq!(found.routing, expected.routing);
        assert_ne!(found.outputs, expected.outputs);
        assert_eq!((products.activations(), products.products()), (FloatType::F32, Some(factors)));
        assert_eq!(factors.to_string(), shown);
        assert_eq!((products.with_exact_products().products(), stored.products()), (None, None));
        assert_eq!(rounded(&products.with_exact_products()), expected);
        for activations in [FloatType::F16, FloatType::Bf16] {
            let [products, stored] = [&products, &stored].map(|reference| reference.rounding_to(activations));
            assert_eq!((products.products(), rounded(&products)), (None, rounded(&stored)));
        }
    }
}

#[test]
fn routed_padding_that_sees_no_key_is_zero() {
    let reference = Reference::new(&grouped_layer(None)).unwrap();
    let found = run(&reference, Part::Model, &grouped_inputs());
    let output = found.outputs["output"].to_f64();
    assert!(found.routing["q"].routed.iter().all(|routed| *routed));
    assert!(output[15..21].iter().all(|value| *value == 0.0), "left padding under the causal mask");
    assert!(output[27..30].iter().all(|value| *value != 0.0 && value.is_finite()), "padding that sees real tokens");
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let case = translation();
    let reference = Reference::new(&case.model).unwrap();
    let ids = integers(&[1, 3], vec![5, 6, 2]);
    let message = |part, inputs: &NamedTensors| reference.run(part, inputs, None).unwrap_err().to_string();
    let with = |name: &str, tensor: Tensor| {
        let mut inputs = token_inputs(&ids);
        inputs.insert(name.into(), tensor);
        message(Part::Encoder, &inputs)
    };
    assert_eq!(message(Part::Encoder, &NamedTensors::new()), "input \"input_ids\" is missing");
    assert_eq!(message(Part::Model, &token_inputs(&ids)), "the encoder-decoder has no part \"model\"");
    assert_eq!(
        with("attention_mask", integers(&[1, 2], vec![1, 1])),
        "input \"attention_mask\" must be int64 [1, 3], found int64 [1, 2]"
    );
    assert_eq!(
        with("input_ids", floats(&[3], vec![5.0, 6.0, 2.0])),
        "input \"input_ids\" must be int64 [batch, sequence], found float32 [3]"
    );
    assert_eq!(
        with("attention_mask", integers(&[1, 3], vec![1, 2, 1])),
        "input \"attention_mask\" holds 2 at index 1; a mask is 1 at real tokens and 0 at padding"
    );
    for id in [120, -1] {
        assert_eq!(
            with("input_ids", integers(&[1, 3], vec![5, id, 2])),
            format!("input \"input_ids\" holds token id {id} at index 1; the vocabulary has 120 ids from 0")
        );
    }
    let encoded = run(&reference, Part::Encoder, &token_inputs(&ids)).outputs;
    let mut inputs = decoder_inputs(&ids, &ids, (0, 3), &encoded, None);
    inputs.insert("past_key_values.1.decoder.key".into(), floats(&[1, 1, 1, 32], vec![0.0; 32]));
    assert_eq!(
        message(Part::Decoder, &inputs),
        "input \"past_key_values.1.decoder.key\" must be float16, float32 or float64 [1, 1, 0, 32], found float32 [1, 1, 1, 32]"
    );
}

#[test]
fn more_real_tokens_than_positions_are_refused() {
    let reference = Reference::new(&masked_lm().model).unwrap();
    let fits = integers(&[1, 257], [vec![1], vec![5; 256]].concat());
    run(&reference, Part::Model, &token_inputs(&fits));
    let error = reference.run(Part::Model, &token_inputs(&integers(&[1, 257], vec![5; 257])), None).unwrap_err();
    assert_eq!(error, ReferenceError::Position { row: 0, position: 258, rows: 258 });
}

#[test]
fn padding_does_not_change_real_tokens() {
    let case = masked_lm();
    let reference = Reference::new(&case.model).unwrap();
    let ids = case.golden("single.", "tokens");
    let alone = run(&reference, Part::Model, &token_inputs(ids)).outputs["logits"].to_f64();
    let ids = ids.as_i64().unwrap();
    let padded = integers(&[2, ids.len() + 3], [&[1; 3], ids, ids, &[1; 3]].concat());
    let padded = run(&reference, Part::Model, &token_inputs(&padded)).outputs["logits"].to_f64();
    let pads = 3 * alone.len() / ids.len();
    assert_close("left padding", &padded[pads..pads + alone.len()], &alone, 1e-11);
    assert_close("right padding", &padded[pads + alone.len()..][..alone.len()], &alone, 1e-11);
}
