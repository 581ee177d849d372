//! Models whose matrices are integers, and heads in bf16.

use std::collections::BTreeMap;

use moa_schema::{IntegerType, LM_HEAD, OPERATORS, RoutingPart};
use serde_json::{Value as Json, json};

use super::{
    test_models::{jetmoe, translator},
    *,
};
use crate::graph::{Attribute, Initializer, Node};

fn graphs(config: &Json, form: Form, precision: Precision) -> Vec<Graph> {
    graphs_with(config, Options { form, precision, ..Options::default() })
}

fn graphs_with(config: &Json, options: Options) -> Vec<Graph> {
    test_models::graphs(config, options).unwrap()
}

/// The one that `all` holds.
fn only<T>(all: Vec<T>) -> T {
    let [one] = <[T; 1]>::try_from(all).unwrap_or_else(|all| panic!("{} instead of one", all.len()));
    one
}

/// With hidden states as keys and values, and a head that has a matrix of its own, where it is not `tied`.
fn molm(tied: bool) -> Json {
    json!({
        "model_type": "moduleformer", "n_embd": 16, "n_head": 1, "att_hidden": 16, "vocab_size": 30, "k_att": 3,
        "k_mlp": 2, "n_layer": 1, "n_att_experts": 4, "n_mlp_experts": 4, "ffd_hidden": 20,
        "tie_word_embeddings": tied,
    })
}

/// With a bias behind its head.
fn masked() -> Json {
    json!({
        "model_type": "moa_roberta", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "num_expert": 6,
        "encoder_attention_heads": 2, "head_dim": 8, "vocab_size": 30, "encoder_layers": 1, "max_positions": 16,
    })
}

/// Every model in every type of integers.
fn in_integers(form: Form) -> impl Iterator<Item = (IntegerType, Graph)> {
    [(Precision::Int8, IntegerType::Int8), (Precision::Int4, IntegerType::Int4)].into_iter().flat_map(
        move |(precision, integers)| {
            let all = [jetmoe(), translator()].map(|config| graphs(&config, form, precision));
            all.into_iter().flatten().map(move |graph| (integers, graph))
        },
    )
}

/// The integers of the matrices of an operator: heads have 8 bits beside experts of 4.
fn integers_of(operator: &str, integers: IntegerType) -> IntegerType {
    if operator == LM_HEAD.name { IntegerType::Int8 } else { integers }
}

fn type_of(weight: &Initializer) -> Option<IntegerType> {
    IntegerType::ALL.into_iter().find(|integers| weight.dtype() == (*integers).into())
}

fn weights(graph: &Graph) -> BTreeMap<&str, &Initializer> {
    graph.initializers.iter().map(|initializer| (initializer.name.as_str(), initializer)).collect()
}

fn ours(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.nodes.iter().filter(|node| node.op.domain == moa_schema::DOMAIN)
}

#[test]
fn nodes_read_integers_and_their_scales() {
    let mut seen = BTreeMap::new();
    for (integers, graph) in in_integers(Form::Fused) {
        let weights = weights(&graph);
        for node in ours(&graph) {
            *seen.entry(node.op.op_type.clone()).or_insert(0) += 1;
            let operator = OPERATORS.iter().find(|operator| operator.name == node.op.op_type).unwrap();
            let integers = integers_of(operator.name, integers);
            for [matrix, scale] in operator.matrices() {
                let rank = operator.inputs[matrix].dims.len();
                let [matrix, scale] = [matrix, scale].map(|place| weights[node.inputs[place].as_str()]);
                assert_eq!([matrix.dtype(), scale.dtype()], [integers.into(), integers.scales().into()]);
                let name = matrix.name.strip_suffix(&format!("/{integers}")).unwrap();
                assert_eq!((format!("{name}/scale"), rank), (scale.name.clone(), matrix.shape().len()));
                assert_eq!(scale.shape(), integers.scale_shape(&matrix.shape()));
                for weight in [matrix, scale] {
                    assert_eq!(weight.data.to_bytes().unwrap().len() as u64, weight.bytes());
                }
            }
            let router = operator.inputs.iter().position(|input| input.name == "router_weight");
            assert_eq!(router.is_some(), operator.is_routed());
            assert!(router.is_none_or(|router| weights[node.inputs[router].as_str()].dtype() == DType::Float32));
        }
        let matrices = weights.values().filter(|weight| type_of(weight).is_some());
        let readers = |weight: &Initializer| ours(&graph).filter(|node| node.inputs.contains(&weight.name)).count();
        assert!(matrices.into_iter().all(|weight| readers(weight) == 1));
    }
    let expected = [("LMHead", 4), ("MoACrossAttention", 2), ("MoASelfAttention", 8), ("MoEFeedForward", 4)];
    assert_eq!(seen, expected.map(|(name, count)| (name.to_owned(), count)).into());
}

#[test]
fn bodies_multiply_integers_with_their_scales_first() {
    for (integers, graph) in in_integers(Form::Function) {
        for function in &graph.functions {
            let weights = function.inputs.iter().filter(|name| name.ends_with("_weight") && *name != "router_weight");
            for weight in weights {
                let scale = weight.replace("_weight", "_scale");
                assert!(function.inputs.contains(&scale), "{scale}");
                check_product(&function.nodes, integers_of(&function.op.op_type, integers), weight, &scale);
            }
        }
        assert!(!graph.functions.is_empty());
    }
    for (_, graph) in in_integers(Form::Standard) {
        for (matrix, integers) in graph.initializers.iter().filter_map(|weight| Some((weight, type_of(weight)?))) {
            let scale = matrix.name.replace(&format!("/{integers}"), "/scale");
            check_product(&graph.nodes, integers, &matrix.name, &scale);
        }
    }
}

/// The only reader of `weight` widens it, and nothing else reads its scale.
fn check_product(nodes: &[Node], integers: IntegerType, weight: &str, scale: &str) {
    let reader = |value: &str| {
        let readers: Vec<_> = nodes.iter().filter(|node| node.inputs.iter().any(|input| input == value)).collect();
        let [reader] = readers.as_slice() else { panic!("{value} has {} readers", readers.len()) };
        *reader
    };
    let (widened, row) = (reader(weight), reader(scale));
    match integers {
        IntegerType::Int8 => {
            assert_eq!([widened, row].map(|node| node.op.op_type.as_str()), ["Cast", "Unsqueeze"]);
            let product = reader(&widened.outputs[0]);
            assert_eq!(product.op.op_type, "Mul");
            assert_eq!(product.inputs, [widened.outputs[0].clone(), row.outputs[0].clone()]);
        }
        IntegerType::Int4 => {
            assert_eq!([widened, row].map(|node| node.op.op_type.as_str()), ["DequantizeLinear", "Cast"]);
            assert_eq!(widened.inputs, [weight, row.outputs[0].as_str()]);
            let blocks = [("axis", Attribute::Int(-2)), ("block_size", Attribute::Int(32))];
            assert_eq!(widened.attributes, blocks.map(|(name, value)| (name.to_owned(), value)).into());
        }
    }
}

#[test]
fn floats_have_no_scales() {
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        for form in Form::ALL {
            for graph in [jetmoe(), translator()].iter().flat_map(|config| graphs(config, form, precision)) {
                let weights = graph.initializers.iter().map(|weight| (weight.name.as_str(), weight.dtype()));
                let is_float = |dtype: DType| ![DType::Int8, DType::Int4].contains(&dtype);
                assert!(weights.into_iter().all(|(name, dtype)| !name.ends_with("/scale") && is_float(dtype)));
                let scales = |inputs: &[String]| inputs.iter().any(|input| input.ends_with("_scale"));
                assert!(!graph.functions.iter().any(|function| scales(&function.inputs)));
            }
        }
    }
}

#[test]
fn other_matrices_stay_floats() {
    let mut counts = Vec::new();
    for (_, graph) in in_integers(Form::Fused) {
        for node in graph.nodes.iter().filter(|node| node.op.op_type == "MatMul") {
            if let Some(matrix) = weights(&graph).get(node.inputs[1].as_str()) {
                assert_eq!(matrix.dtype(), DType::Float32, "{}", matrix.name);
            }
        }
        counts.push(graph.initializers.iter().filter(|weight| type_of(weight).is_some()).count());
    }
    assert_eq!(counts, [11, 3, 6].repeat(2));
}

#[test]
fn what_has_no_operators_of_ours_has_no_integers() {
    let baseline = json!({
        "model_type": "transformer", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "vocab_size": 30,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1,
        "max_positions": 16,
    });
    for precision in [Precision::Int8, Precision::Int4] {
        for graph in [Form::Fused, Form::Standard].iter().flat_map(|form| graphs(&baseline, *form, precision)) {
            assert!(ours(&graph).next().is_none() && graph.initializers.iter().all(|weight| type_of(weight).is_none()));
        }
    }
}

fn is_head(node: &Node) -> bool {
    node.op.op_type == LM_HEAD.name
}

/// Forms with nodes of ours, in every precision in which heads are such nodes.
fn with_nodes() -> impl Iterator<Item = (Form, Precision)> {
    let forms = [Form::Function, Form::Fused].into_iter();
    forms.flat_map(|form| Precision::ALL.map(|precision| (form, precision))).filter(|(_, kind)| kind.has_lm_head())
}

#[test]
fn a_head_returns_logits_alone_where_routers_return_their_choices() {
    for (form, precision) in with_nodes() {
        let options = Options { form, precision, router_outputs: true, last_logits: true };
        let graph = only(graphs_with(&jetmoe(), options));
        let (heads, routed): (Vec<_>, Vec<_>) = ours(&graph).partition(|node| is_head(node));
        let head = only(heads);
        assert_eq!((head.outputs.as_slice(), routed.len()), (&["logits".to_owned()][..], 4), "{form:?} {precision:?}");
        let declared: Vec<_> = graph.outputs.iter().map(|output| output.name.as_str()).collect();
        let choices: Vec<_> =
            routed.iter().flat_map(|node| RoutingPart::ALL.map(|part| part.name(&node.name))).collect();
        assert!(routed.iter().zip(choices.chunks(2)).all(|(node, names)| node.outputs.ends_with(names)));
        assert_eq!(declared[declared.len() - choices.len()..], choices);
        assert_eq!((declared[0], &graph.outputs[0].shape[1]), ("logits", &Dim::from(1)));
        let bodies: BTreeMap<_, _> =
            graph.functions.iter().map(|function| (function.op.op_type.as_str(), &function.outputs)).collect();
        assert_eq!(bodies.len(), if form == Form::Function { 3 } else { 0 });
        for (operator, outputs) in bodies {
            let routing = RoutingPart::ALL.map(|part| part.output().to_owned());
            assert_eq!(outputs.ends_with(&routing), operator != LM_HEAD.name, "{operator}: {outputs:?}");
            assert!(operator != LM_HEAD.name || *outputs == ["logits"], "{outputs:?}");
        }
    }
}

#[test]
fn a_bias_is_added_to_what_a_head_returns() {
    for (form, precision) in with_nodes() {
        let graph = only(graphs(&masked(), form, precision));
        let head = only(ours(&graph).filter(|node| is_head(node)).collect());
        let readers = graph.nodes.iter().filter(|node| node.inputs.contains(&head.outputs[0])).collect();
        let sum: &Node = only(readers);
        assert_eq!((sum.op.op_type.as_str(), sum.outputs[0].as_str()), ("Add", "logits"));
        assert_eq!(sum.inputs[0], head.outputs[0]);
        let bias = weights(&graph)[sum.inputs[1].as_str()];
        assert_eq!(
            (bias.name.as_str(), bias.dtype(), bias.shape()),
            ("encoder.lm_head.bias", DType::Float32, vec![30])
        );
    }
}

/// A table of tokens is looked up, whether the head has the same matrix or another.
#[test]
fn matrices_of_heads_are_stored_as_integers_alone() {
    let mut untied = jetmoe();
    untied["tie_word_embeddings"] = false.into();
    let mut null = jetmoe();
    null["tie_word_embeddings"] = Json::Null;
    let jetmoe_table = "model.embed_tokens.weight";
    let molm_table = "transformer.wte.weight";
    for (config, table, output) in [
        (jetmoe(), jetmoe_table, jetmoe_table),
        (untied, jetmoe_table, "lm_head.weight"),
        (null, jetmoe_table, "lm_head.weight"),
        (molm(true), molm_table, molm_table),
        (molm(false), molm_table, "lm_head.weight"),
    ] {
        let precisions = [Precision::Int8, Precision::Int4];
        for (form, precision) in Form::ALL.into_iter().flat_map(|form| precisions.map(|precision| (form, precision))) {
            let graph = only(graphs(&config, form, precision));
            let stored: BTreeMap<_, _> = graph
                .initializers
                .iter()
                .filter(|weight| [table, output].iter().any(|name| weight.name.starts_with(name)))
                .map(|weight| (weight.name.as_str(), (weight.dtype(), weight.shape())))
                .collect();
            let [matrix, scale] = ["int8", "scale"].map(|kind| format!("{output}/transposed.10/{kind}"));
            let expected = [
                (table, (DType::Float32, vec![30, 16])),
                (&matrix, (DType::Int8, vec![16, 30])),
                (&scale, (DType::Float32, vec![30])),
            ];
            assert_eq!(stored, expected.into(), "{form:?} {precision:?} {table} {output}");
        }
    }
}

/// In one place, whether the head has the matrix of the table of tokens or another.
#[test]
fn matrices_of_heads_in_bf16_are_stored_once() {
    let (table, separate) = ("transformer.wte.weight", "lm_head.weight/transposed.10");
    let precisions = [Precision::Bf16, Precision::Bf16Products];
    for (form, precision) in [Form::Function, Form::Fused].into_iter().flat_map(|form| precisions.map(|p| (form, p))) {
        for tied in [true, false] {
            let graph = only(graphs(&molm(tied), form, precision));
            let head = only(ours(&graph).filter(|node| is_head(node)).collect());
            let maker = graph.nodes.iter().find(|node| node.outputs.contains(&head.inputs[1]));
            assert_eq!(
                maker.map(|node| (node.op.op_type.as_str(), node.inputs[0].as_str())),
                tied.then_some(("Transpose", table))
            );
            assert!(tied || head.inputs[1] == separate, "{:?}", head.inputs);
            let of_vocabulary = graph.initializers.iter().filter(|weight| weight.shape().contains(&30));
            let stored: Vec<_> = of_vocabulary.map(|weight| (weight.name.as_str(), weight.dtype())).collect();
            let expected = [(table, DType::Bfloat16), (separate, DType::Bfloat16)];
            assert_eq!(stored, expected[..if tied { 1 } else { 2 }], "{form:?} {precision:?}");
        }
    }
}

#[test]
fn heads_that_have_a_matmul_keep_it() {
    for (form, precision) in Form::ALL.into_iter().flat_map(|form| Precision::ALL.map(|precision| (form, precision))) {
        if precision.without_products() != precision {
            continue;
        }
        let graph = only(graphs(&jetmoe(), form, precision));
        let expected = form != Form::Standard && ![Precision::Fp32, Precision::Fp16].contains(&precision);
        assert_eq!(ours(&graph).any(is_head), expected, "{form:?} {precision:?}");
    }
}
