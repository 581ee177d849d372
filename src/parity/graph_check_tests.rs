use moa_graphs::{
    SyntheticTensors,
    families::{self, Config, ImportOptions},
};
use moa_schema::interface::{ATTENTION_MASK, INPUT_IDS};
use serde_json::json;

use super::*;
use crate::parity::compare::{Tolerance, effect_of_rounding, largest};

struct Idle;

impl Watch for Idle {}

/// Gives the same outputs whatever it is given.
struct Fixed(NamedTensors);

impl Runner for Fixed {
    fn run(&mut self, _: &NamedTensors) -> Result<NamedTensors, BackendError> {
        Ok(self.0.clone())
    }
}

/// A model whose activations are bf16, so that rounding explains more than the least that is granted.
fn model() -> Reference {
    let config = json!({
        "model_type": "moa_roberta", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_layers": 2,
        "encoder_attention_heads": 2, "num_expert": 5, "head_dim": 8, "encoder_normalize_before": false,
        "encoder_learned_pos": true, "activation_fn": "gelu", "no_scale_embedding": true,
        "layernorm_embedding": true, "max_source_positions": 8, "vocab_size": 20,
    });
    let config = Config::new("config.json", config.as_object().unwrap().clone());
    let model = families::import(&config, &SyntheticTensors::random("memory", 3), ImportOptions::default());
    Reference::new(&model.unwrap()).unwrap().rounding_to(FloatType::Bf16)
}

/// Of a file that has the weights of `modules` as outputs, on a backend that gives `outputs`.
fn check<'a>(
    reference: &'a Reference,
    atol: Option<f64>,
    modules: &[String],
    outputs: &NamedTensors,
) -> GraphCheck<'a> {
    let tolerance = ToleranceOptions { atol, rtol: None };
    GraphCheck {
        part: Part::Model,
        last_logits: false,
        truth: Truth { reference, trained: None, tolerance, watch: &Idle },
        plain: Box::new(Fixed(outputs.clone())),
        routed: Box::new(Fixed(outputs.clone())),
        modules: modules.to_vec(),
        weighted: modules.to_vec(),
        half: BTreeSet::new(),
        judge: Judge::new(tolerance),
        report: GraphReport::of(String::new()),
    }
}

/// Three tokens, which `seed` decides.
fn tokens(seed: usize) -> NamedTensors {
    let ids = [seed, seed / 16, seed / 256].map(|digits| 4 + i64::try_from(digits % 16).unwrap());
    let of = |values: [i64; 3]| Tensor::new([1, 3], TensorData::I64(values.to_vec())).unwrap();
    [(INPUT_IDS.to_owned(), of(ids)), (ATTENTION_MASK.to_owned(), of([1; 3]))].into()
}

/// All that a graph gives whose routing is an output.
fn with_routing(Evaluation { outputs, routing }: &Evaluation) -> NamedTensors {
    let mut all = outputs.clone();
    for (module, ModuleRouting { choices, .. }) in routing {
        let [indices, weights] = [TensorData::I64(choices.indices.clone()), TensorData::F64(choices.weights.clone())];
        for (part, data) in [(RoutingPart::Indices, indices), (RoutingPart::Weights, weights)] {
            let tensor = Tensor::new([choices.batch, choices.tokens, choices.top_k], data);
            all.insert(part.name(module), tensor.unwrap());
        }
    }
    all
}

fn assert_explained_by_other_roundings(reference: &Reference, name: &str, modules: &[String]) {
    let evaluated = |seed: usize| {
        let inputs = tokens(seed);
        let expected = reference.run(Part::Model, &inputs, None).unwrap();
        let choices = expected.choices();
        let effects = [0, 1, 2].map(|draw| {
            let rounded = reference.run_rounded_again(Part::Model, &inputs, Some(&choices), draw).unwrap();
            effect_of_rounding(&with_routing(&rounded)[name], &with_routing(&expected)[name]).unwrap()
        });
        (inputs, with_routing(&expected), effects)
    };
    let cases = (0..1000).map(evaluated);
    let case = cases.into_iter().find(|(.., effects)| effects[1].max(effects[2]) > 1.5 * effects[0]);
    let (inputs, expected, [effect, ..]) = case.unwrap();
    let passes = |share: f64, is_kept: bool, atol: Option<f64>| {
        let mut outputs = expected.clone();
        let mut values = expected[name].to_f64();
        values[1] += share * Tolerance::derive(ToleranceOptions::default(), largest(&expected[name]), effect).atol;
        outputs.insert(name.to_owned(), Tensor::new(expected[name].shape(), TensorData::F64(values)).unwrap());
        let mut check = check(reference, atol, modules, &outputs);
        check.check("a case", &inputs).unwrap();
        if !is_kept {
            check.judge.forget_cases();
        }
        check.finish().outputs.passed()
    };
    assert!(passes(0.9, false, None) && passes(1.4, true, None), "{name}");
    assert!(!passes(1.4, false, None), "{name}: one evaluation does not explain it");
    assert!(!passes(4.5, true, None), "{name}: too far for any");
    assert!(!passes(1.4, true, Some(8.0 * effect)), "{name}: what the user said stands");
}

#[test]
fn rounding_that_one_evaluation_does_not_show_is_looked_for_again() {
    let reference = model();
    let routing = reference.run(Part::Model, &tokens(0), None).unwrap().routing;
    let modules: Vec<_> = routing.into_keys().collect();
    assert_explained_by_other_roundings(&reference, LOGITS, &modules);
    assert_explained_by_other_roundings(&reference, &RoutingPart::Weights.name(&modules[1]), &modules);
}

#[test]
fn only_what_is_filled_of_a_cache_is_compared() {
    let values = (0..12).map(|value| value as f32).collect();
    let cache = Tensor::new([1, 2, 3, 2], TensorData::F32(values)).unwrap();
    let kept = first_rows(cache.clone(), 2);
    assert_eq!((kept.shape(), kept.to_f64()), (&[1, 2, 2, 2][..], vec![0.0, 1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0]));
    assert_eq!(first_rows(cache.clone(), 3), cache);
}
