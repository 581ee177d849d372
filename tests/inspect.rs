//! Accounts of models: the paper's tables, and the same numbers from checkpoint, configuration and graph.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/data.rs"]
mod data;
mod support_onnx;

use std::path::Path;

use data::data;

use moa_export::{
    checkpoint::{Checkpoint, read_config},
    export::{ExportOptions, ExternalData, export, export_model},
    inspect::{
        GraphInspection, Inspection, Lengths, inspect, inspect_graphs, model_files,
        paper::{Figure, compare},
        preset::{PRESETS, Preset},
    },
    onnx::{
        proto::{GraphProto, TensorProto, tensor_proto::DataType},
        read::{Dim, OnnxFile},
        read_model,
    },
    source::import,
};
use moa_graphs::{
    Form, Options, Precision, SyntheticTensors,
    families::{self, Config, ImportOptions},
    model::Model,
};
use serde_json::json;

const LENGTHS: Lengths = Lengths { source: 12, target: 7 };

fn model(config: &Config, tensors: &SyntheticTensors) -> Model {
    families::import(config, tensors, ImportOptions::default()).unwrap()
}

fn without_weights(config: &Config, lengths: Lengths) -> Inspection {
    inspect(config.model_type(), &model(config, &SyntheticTensors::shapes("shapes")), lengths)
}

/// `(table, preset, figure, printed, ours)` of everything that is not reproduced; everything else is.
#[test]
fn the_tables_of_the_paper_come_out_but_for_what_is_known() {
    use Figure::{Macs, Parameters, ParametersFrench};
    let rows = compare(None).unwrap();
    assert_eq!(rows.len(), 40);
    let different: Vec<_> = rows.iter().filter(|row| !row.reproduced).collect();
    let known = [
        (1, "transformer-base", Parameters, 65.0, 63_082_496),
        (1, "transformer-base", ParametersFrench, 62.0, 66_928_640),
        (2, "mlm-8k8e128d", Parameters, 52.45, 52_444_249),
        (2, "mlm-8k8e128d", Macs, 7.27, 7_224_301_145),
        (2, "mlm-8k64e256d", Macs, 8.98, 8_998_491_737),
        (3, "moa-d", Parameters, 123.0, 122_322_944),
        (3, "moa-e", Macs, 841.0, 842_946_560),
    ];
    let found: Vec<_> =
        different.iter().map(|row| (row.table, row.preset, row.figure, row.printed, row.exact)).collect();
    assert_eq!(found, known);
    assert!(different.iter().all(|row| row.note.is_some()), "every difference is explained");
}

/// Counted by an independent program from the formulas of the paper.
#[test]
fn exact_counts_are_those_of_the_formulas() {
    for (preset, vocabulary, parameters, paper_macs) in [
        ("transformer-base", 31_960, 60_502_016, 604_104_704),
        ("transformer-big", 31_960, 209_084_416, 2_089_013_248),
        ("admin-18l-18l", 31_960, 148_779_008, 1_485_043_712),
        ("admin-60l-12l", 31_960, 255_954_944, 2_554_744_832),
        ("moa-base", 37_000, 65_478_656, 654_202_880),
        ("moa-a", 31_960, 84_131_840, 840_734_720),
        ("moa-b", 31_960, 121_954_304, 841_472_000),
        ("moa-c", 31_960, 80_814_080, 524_441_600),
        ("moa-d", 31_960, 119_742_464, 630_609_920),
        ("moa-e", 31_960, 197_599_232, 842_946_560),
        ("moa-f", 31_960, 197_599_232, 654_202_880),
        ("moa-big", 44_512, 204_025_856, 1_284_700_160),
    ] {
        let config = Preset::find(preset).unwrap().config().with("vocab_size", json!(vocabulary));
        let total = without_weights(&config, Lengths { source: 10, target: 10 }).total;
        assert_eq!((total.parameters, total.paper_macs), (parameters, paper_macs), "{preset}");
    }
    let masked: Vec<_> = compare(Some(2)).unwrap().into_iter().map(|row| row.exact).collect();
    let transformer = [51_336_281, 6_549_034_585];
    let base = [52_444_249, 7_224_301_145];
    let wide = [61_891_673, 8_969_131_609, 78_750_809, 8_973_325_913, 112_469_081, 8_981_714_521];
    let widest = [179_905_625, 8_998_491_737];
    assert_eq!(masked, [&transformer[..], &base, &wide, &widest].concat());
}

/// `total_size` of the published index of JetMoE-8B is 17,044,475,904 bytes of bf16.
#[test]
fn jetmoe_has_as_many_parameters_as_its_published_files() {
    let total = without_weights(&Preset::find("jetmoe-8b").unwrap().config(), LENGTHS).total;
    assert_eq!(total.parameters * 2, 17_044_475_904);
}

/// The published files have 8.36 and 16.51 GB of bf16, buffers of 75 and 151 MB included, and their names say how many
/// values a token takes.
#[test]
fn molms_have_as_many_parameters_as_their_published_files() {
    for (name, parameters, active) in [
        ("molm-350m-4b", 4_142_526_464, 417_984_512),
        ("molm-700m-4b", 4_142_526_464, 719_974_400),
        ("molm-700m-8b", 8_182_046_720, 732_962_816),
    ] {
        let total = without_weights(&Preset::find(name).unwrap().config(), LENGTHS).total;
        assert_eq!((total.parameters, total.active_parameters), (parameters, active), "{name}");
    }
}

#[test]
fn a_configuration_counts_as_its_checkpoint() {
    let mut names = vec!["nmt".to_owned(), "mlm".into(), "jetmoe/sharded".into(), "jetmoe/bf16".into()];
    names.extend(["molm/mlp".to_owned(), "molm/linear".into()]);
    names.extend(
        std::fs::read_dir(data("variants"))
            .unwrap()
            .map(|entry| format!("variants/{}", entry.unwrap().file_name().into_string().unwrap())),
    );
    assert!(names.len() > 8);
    for name in names {
        let folder = data(&name);
        let checkpoint = Checkpoint::open(&folder, None).unwrap();
        let stored = inspect(checkpoint.config().model_type(), &import(&checkpoint, None).unwrap(), LENGTHS);
        let counted = without_weights(&read_config(&folder.join("config.json")).unwrap(), LENGTHS);
        let weights = Vec::new();
        assert_eq!(Inspection { weights: weights.clone(), ..counted }, Inspection { weights, ..stored }, "{name}");
    }
}

fn options(form: Form) -> ExportOptions {
    let graph = Options { form, precision: Precision::Fp32, router_outputs: form == Form::Fused, last_logits: false };
    let external_data = if form == Form::Fused { ExternalData::Always } else { ExternalData::Auto };
    ExportOptions { graph, external_data, ..ExportOptions::default() }
}

fn of_graphs(folder: &Path) -> GraphInspection {
    let files: Vec<_> = model_files(folder).unwrap().model.iter().map(|path| read_model(path).unwrap()).collect();
    inspect_graphs(&files, LENGTHS)
}

#[track_caller]
fn assert_equal_accounts(graph: &GraphInspection, model: &Inspection, what: &str) {
    assert_eq!(graph.not_told, [""; 0], "{what}");
    assert_eq!(graph.family.as_deref(), Some(model.family.as_str()), "{what}");
    let ours: Vec<_> = model.parts.iter().map(|part| (part.name, part.cost)).collect();
    for part in &graph.parts {
        let same_name = ours.iter().filter(|(name, _)| *name == part.name).map(|(_, cost)| *cost);
        let cost: moa_export::inspect::Cost = same_name.sum();
        let found = [Some(part.parameters), part.active_parameters, part.paper_macs, part.full_macs];
        let expected = [cost.parameters, cost.active_parameters, cost.paper_macs, cost.full_macs].map(Some);
        assert_eq!(found, expected, "{what}: {}", part.name);
    }
    let total =
        [Some(graph.total.parameters), graph.total.active_parameters, graph.total.paper_macs, graph.total.full_macs];
    let expected = model.total;
    let expected = [expected.parameters, expected.active_parameters, expected.paper_macs, expected.full_macs];
    assert_eq!(total, expected.map(Some), "{what}");
    assert_eq!(graph.cache_bytes_per_token, Some(model.cache_bytes_per_token), "{what}");
    assert_eq!(graph.sizes, model.sizes, "{what}");
}

#[test]
fn graphs_with_operators_count_as_their_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "nmt",
        "mlm",
        "jetmoe/sharded",
        "molm/mlp",
        "molm/linear",
        "variants/v_ffd_moe",
        "variants/v_prenorm",
        "variants/v_untied",
        "variants/v_learned_pos_lnemb",
        "variants/v_shared_dec_only",
    ] {
        let checkpoint = Checkpoint::open(&data(name), None).unwrap();
        let model = inspect(checkpoint.config().model_type(), &import(&checkpoint, None).unwrap(), LENGTHS);
        for form in [Form::Function, Form::Fused] {
            let out = folder.path().join(format!("{}-{}", name.replace('/', "-"), form.as_str()));
            export(&checkpoint, &out, &options(form)).unwrap();
            assert_equal_accounts(&of_graphs(&out), &model, &format!("{name}, {}", form.as_str()));
        }
    }
}

/// Small enough to be written, and of everything that the graphs' names are read for.
fn small(preset: &Preset) -> Config {
    let sizes =
        [("encoder_embed_dim", 32), ("encoder_ffn_embed_dim", 48), ("encoder_layers", 2), ("decoder_layers", 3)];
    let config = sizes.into_iter().fold(preset.config(), |config, (key, size)| config.with(key, json!(size)));
    config.with("vocab_size", json!(50)).with("head_dim", json!(16)).with("expert_bias", json!(false))
}

#[test]
fn baselines_count_as_their_configuration() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["transformer-base", "mlm-transformer", "moa-f", "mlm-8k8e128d"] {
        let config = small(Preset::find(name).unwrap());
        let model = model(&config, &SyntheticTensors::random("seed", 1));
        let forms: &[Form] = match model {
            Model::Transformer(_) | Model::TransformerMaskedLm(_) => &[Form::Standard, Form::Fused],
            _ => &[Form::Function, Form::Fused],
        };
        let counted = inspect(config.model_type(), &model, LENGTHS);
        for form in forms {
            let out = folder.path().join(format!("{name}-{}", form.as_str()));
            export_model(config.model_type(), &model, &out, &options(*form), &()).unwrap();
            assert_equal_accounts(&of_graphs(&out), &counted, &format!("{name}, {}", form.as_str()));
        }
    }
}

#[test]
fn the_standard_form_tells_parameters_and_says_what_it_does_not_tell() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("nmt"), None).unwrap();
    export(&checkpoint, &folder.path().join("out"), &options(Form::Standard)).unwrap();
    let graph = of_graphs(&folder.path().join("out"));
    let total = inspect("", &import(&checkpoint, None).unwrap(), LENGTHS).total;
    assert_eq!(graph.total.parameters, total.parameters);
    assert_eq!((graph.total.active_parameters, graph.total.paper_macs, graph.total.full_macs), (None, None, None));
    assert!(graph.not_told[0].contains("top-k"), "{:?}", graph.not_told);
}

/// Scales are no parameters, and a weight is one whatever it is stored in.
#[test]
fn exports_in_integers_count_as_their_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["nmt", "mlm", "jetmoe/sharded", "molm/mlp", "variants/v_ffd_moe"] {
        let checkpoint = Checkpoint::open(&data(name), None).unwrap();
        let model = inspect(checkpoint.config().model_type(), &import(&checkpoint, None).unwrap(), LENGTHS);
        let precisions = [Precision::Int8, Precision::Int4];
        for (form, precision) in Form::ALL.into_iter().flat_map(|form| precisions.map(|precision| (form, precision))) {
            let what = format!("{}-{}-{}", name.replace('/', "-"), form.as_str(), precision.as_str());
            let out = folder.path().join(&what);
            let mut options = options(form);
            options.graph.precision = precision;
            export(&checkpoint, &out, &options).unwrap();
            let graph = of_graphs(&out);
            match form {
                Form::Standard => assert_eq!(graph.total.parameters, model.total.parameters, "{what}"),
                _ => assert_equal_accounts(&graph, &model, &what),
            }
            for file in &graph.files {
                let weights = |dtype: &str| file.weights.iter().find(|weights| weights.dtype == dtype).unwrap();
                let (integers, floats) = (weights(precision.as_str()), weights("float32"));
                assert_eq!(floats.bytes, 4 * floats.values, "{what}");
                if precision == Precision::Int4 {
                    let scales = weights("bfloat16");
                    assert_eq!((2 * integers.bytes, scales.bytes), (integers.values, 2 * scales.values), "{what}");
                    assert_eq!(scales.tensors, integers.tensors, "{what}: {file:?}");
                } else {
                    assert_eq!(integers.bytes, integers.values, "{what}");
                }
                assert!(integers.values > 0 && floats.tensors > integers.tensors, "{what}: {file:?}");
            }
        }
    }
}

/// A product of the last token alone counts once, whatever its matrix is stored in.
#[test]
fn a_head_of_integers_counts_as_one_of_floats() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("jetmoe/sharded"), None).unwrap();
    let [floats, int8, int4] = [Precision::Fp32, Precision::Int8, Precision::Int4].map(|precision| {
        let out = folder.path().join(precision.as_str());
        let mut options = options(Form::Fused);
        (options.graph.precision, options.graph.last_logits) = (precision, true);
        export(&checkpoint, &out, &options).unwrap();
        let GraphInspection { not_told, parts, total, .. } = of_graphs(&out);
        assert!(not_told.is_empty(), "{not_told:?}");
        (parts, total)
    });
    assert_eq!([int8, int4], [floats.clone(), floats]);
}

/// Nodes that say more of their products store the same.
#[test]
fn exports_whose_products_may_be_rounded_count_as_those_that_store_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("jetmoe/sharded"), None).unwrap();
    let products = || Precision::ALL.into_iter().filter(|precision| *precision != precision.without_products());
    assert_eq!(products().count(), 3);
    for (form, precision) in
        [Form::Function, Form::Fused].into_iter().flat_map(|form| products().map(move |of| (form, of)))
    {
        let [stored, mut products] = [precision.without_products(), precision].map(|precision| {
            let out = folder.path().join(format!("{}-{}", form.as_str(), precision.as_str()));
            let mut options = options(form);
            options.graph.precision = precision;
            export(&checkpoint, &out, &options).unwrap();
            of_graphs(&out)
        });
        let dtype = precision.without_products().as_str();
        let stated = products.files[0].metadata.insert("moa.dtype".into(), dtype.into());
        assert_eq!(stated.as_deref(), Some(precision.as_str()));
        assert_eq!(serde_json::to_value(products).unwrap(), serde_json::to_value(stored).unwrap());
    }
}

#[test]
fn weights_are_counted_by_type_and_place() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("mlm"), None).unwrap();
    export(&checkpoint, folder.path(), &options(Form::Fused)).unwrap();
    let graph = of_graphs(folder.path());
    let floats = graph.files[0].weights.iter().find(|weights| weights.dtype == "float32").unwrap();
    assert_eq!(floats.bytes, 4 * floats.values);
    let beside = std::fs::metadata(folder.path().join("model.onnx.data")).unwrap().len();
    assert!(floats.external_bytes <= beside && floats.external_bytes > floats.bytes / 2, "{floats:?}, {beside}");
    let operators: Vec<_> =
        graph.files[0].operators.iter().map(|count| (count.operator.as_str(), count.nodes)).collect();
    assert_eq!(operators[0], ("MoASelfAttention", 4));
}

#[test]
fn every_preset_has_a_model() {
    for preset in &PRESETS {
        assert!(without_weights(&preset.config(), LENGTHS).total.parameters > 1_000_000, "{}", preset.name);
        assert_eq!(Preset::find(preset.name), Some(preset));
    }
}

/// Files of other programs: what can be said is said.
#[test]
fn foreign_files_are_described() {
    use support_onnx::{file, graph, import, model, node, node_of, value, weight};

    let nodes = vec![node("MatMul", &["x", "w"], &["h"]), node_of("com.other", "Twist", &["h"], &["y"])];
    let inputs = vec![value("x", DataType::Float, &["batch", "3"])];
    let outputs = vec![value("y", DataType::Float, &["batch", "2"])];
    let graph = graph(nodes, inputs, outputs, vec![weight("w", &[3, 2], &[1.0; 6])]);
    let mut proto = model(graph);
    proto.opset_import = vec![import("", 18), import("com.other", 4)];
    let (_folder, foreign) = file(&proto);
    let found = inspect_graphs(&[foreign], LENGTHS);
    assert_eq!((found.family, found.form, found.parts.len(), found.total.parameters), (None, None, 0, 6));
    assert_eq!((found.total.paper_macs, found.cache_bytes_per_token), (None, None));
    assert!(found.not_told[0].contains("the file does not say"), "{:?}", found.not_told);
    let described = &found.files[0];
    assert_eq!(described.opsets, [("ai.onnx".to_owned(), 18), ("com.other".to_owned(), 4)].into());
    let operators: Vec<_> = described.operators.iter().map(|count| count.operator.as_str()).collect();
    assert_eq!(operators, ["MatMul", "Twist"]);
    assert_eq!(described.inputs[0].shape.as_deref(), Some(&[Dim::Symbolic("batch".into()), Dim::Fixed(3)][..]));
}

/// A file that claims to be ours and is not what it claims to be has no counts.
#[test]
fn operators_with_impossible_attributes_are_refused() {
    use moa_export::onnx::proto::attribute_proto::AttributeType;

    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("mlm"), None).unwrap();
    export(&checkpoint, &folder.path().join("out"), &options(Form::Function)).unwrap();
    let original = read_model(&folder.path().join("out/model.onnx")).unwrap();
    for value in [17, i64::MAX] {
        let mut proto = original.model().clone();
        let nodes = &mut proto.graph.as_mut().unwrap().node;
        let node = nodes.iter_mut().find(|node| node.op_type == "MoASelfAttention").unwrap();
        let top_k = node.attribute.iter_mut().find(|attribute| attribute.name == "top_k").unwrap();
        assert_eq!(top_k.r#type, AttributeType::Int as i32);
        top_k.i = Some(value);
        let refusal = original.with_model(proto).unwrap_err().to_string();
        let expected = format!("(`MoASelfAttention`): top_k is {value}, but the router has 16 experts");
        assert!(refusal.ends_with(&expected), "{refusal}");
    }
}

#[test]
fn what_no_number_holds_stays_at_the_largest() {
    let largest = [("hidden_size", 1 << 20), ("num_key_value_heads", 1 << 10), ("kv_channels", 1 << 16)];
    let config = largest.into_iter().fold(Preset::find("jetmoe-8b").unwrap().config(), |config, (key, size)| {
        config.with(key, json!(size)).with("num_local_experts", json!(1 << 18))
    });
    let total = without_weights(&config, LENGTHS).total;
    assert_eq!((total.parameters, total.active_parameters > 1 << 50), (u64::MAX, true), "{total:?}");
}

/// The masked language model in the form of functions.
fn masked_lm() -> (tempfile::TempDir, OnnxFile) {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("mlm"), None).unwrap();
    export(&checkpoint, folder.path(), &options(Form::Function)).unwrap();
    let file = read_model(&folder.path().join("model.onnx")).unwrap();
    (folder, file)
}

/// A weight of 8 bits beside its scales, under the names that ONNX Runtime's tools give them.
fn quantise(graph: &mut GraphProto, name: &str) {
    let weight = graph.initializer.iter().find(|tensor| tensor.name == name).unwrap();
    let (dims, columns) = (weight.dims.clone(), *weight.dims.last().unwrap());
    let bytes = |kind: DataType, ending: &str, dims: Vec<i64>, width: usize| TensorProto {
        name: format!("{name}{ending}"),
        data_type: kind as i32,
        raw_data: Some(vec![0; width * dims.iter().product::<i64>() as usize].into()),
        dims,
        ..TensorProto::default()
    };
    graph.initializer.extend([
        bytes(DataType::Int8, "_quantized", dims, 1),
        bytes(DataType::Float, "_scale", vec![columns], 4),
        bytes(DataType::Int8, "_zero_point", vec![columns], 1),
    ]);
}

/// What `onnxruntime.quantization.quantize_dynamic` makes of products and tables.
fn quantised(graph: &mut GraphProto) {
    let two_dims = |tensor: &&TensorProto| tensor.dims.len() == 2;
    let matrices: Vec<_> = graph.initializer.iter().filter(two_dims).map(|tensor| tensor.name.clone()).collect();
    let mut replaced = Vec::new();
    for node in std::mem::take(&mut graph.node) {
        let index = if node.op_type == "Gather" { 0 } else { 1 };
        let is_quantised = matches!(node.op_type.as_str(), "Gather" | "MatMul");
        let Some(weight) = node.input.get(index).filter(|name| is_quantised && matrices.contains(name)).cloned() else {
            graph.node.push(node);
            continue;
        };
        if !replaced.contains(&weight) {
            quantise(graph, &weight);
            replaced.push(weight.clone());
        }
        let of_weight = ["_quantized", "_scale", "_zero_point"].map(|ending| format!("{weight}{ending}"));
        let [quantized, scale, zero] = of_weight.each_ref().map(String::as_str);
        let (input, output) = (node.input[0].as_str(), node.output[0].as_str());
        let made = ["q", "s", "z", "sum", "float", "scales"].map(|what| format!("{output}_{what}"));
        let [q, s, z, sum, float, scales] = made.each_ref().map(String::as_str);
        match node.op_type.as_str() {
            "Gather" => graph.node.extend([
                support_onnx::node("Gather", &[quantized, &node.input[1]], &[q]),
                support_onnx::node("DequantizeLinear", &[q, scale, zero], &[output]),
            ]),
            _ => graph.node.extend([
                support_onnx::node("DynamicQuantizeLinear", &[input], &[q, s, z]),
                support_onnx::node("MatMulInteger", &[q, quantized, z, zero], &[sum]),
                support_onnx::node("Cast", &[sum], &[float]),
                support_onnx::node("Mul", &[s, scale], &[scales]),
                support_onnx::node("Mul", &[float, scales], &[output]),
            ]),
        }
    }
    let is_read = |tensor: &TensorProto| graph.node.iter().any(|node| node.input.contains(&tensor.name));
    let read: Vec<_> = graph.initializer.iter().map(is_read).collect();
    let mut read = read.into_iter();
    graph.initializer.retain(|_| read.next().unwrap());
}

#[test]
fn a_quantised_graph_counts_as_what_it_was() {
    let (_folder, original) = masked_lm();
    let expected = inspect_graphs(std::slice::from_ref(&original), LENGTHS);
    let mut proto = original.model().clone();
    quantised(proto.graph.as_mut().unwrap());
    let found = inspect_graphs(&[original.with_model(proto).unwrap()], LENGTHS);
    assert_eq!((found.not_told, found.parts, found.total), (expected.not_told, expected.parts, expected.total));
}

/// The `MatMul` of the first feed-forward block as another operator.
fn renamed(original: &OnnxFile, domain: &str, operator: &str) -> GraphInspection {
    let mut proto = original.model().clone();
    let nodes = &mut proto.graph.as_mut().unwrap().node;
    let node = nodes.iter_mut().find(|node| node.input.get(1).is_some_and(|name| name.contains("fc1"))).unwrap();
    assert_eq!(node.op_type, "MatMul");
    (node.domain, node.op_type) = (domain.into(), operator.into());
    proto.opset_import.extend([support_onnx::import("com.microsoft", 1), support_onnx::import("com.other", 1)]);
    inspect_graphs(&[original.with_model(proto).unwrap()], LENGTHS)
}

#[test]
fn products_under_other_names_are_counted_or_said_not_to_be() {
    let (_folder, original) = masked_lm();
    let expected = inspect_graphs(std::slice::from_ref(&original), LENGTHS).total;
    for (domain, operator) in [("", "Gemm"), ("", "MatMulInteger"), ("com.microsoft", "FusedMatMul")] {
        let found = renamed(&original, domain, operator);
        assert_eq!((found.not_told, found.total.full_macs), (Vec::new(), expected.full_macs), "{operator}");
    }
    for (domain, operator, name) in [
        ("", "Einsum", "1 Einsum"),
        ("", "Conv", "1 Conv"),
        ("", "Attention", "1 Attention"),
        ("com.microsoft", "MatMulNBits", "1 com.microsoft.MatMulNBits"),
        ("com.microsoft", "GroupQueryAttention", "1 com.microsoft.GroupQueryAttention"),
        ("com.other", "Twist", "1 com.other.Twist"),
    ] {
        let found = renamed(&original, domain, operator);
        assert!(found.not_told[0].contains(name), "{:?}", found.not_told);
        let total = (found.total.active_parameters, found.total.paper_macs, found.total.full_macs);
        assert_eq!((found.total.parameters, total), (expected.parameters, (None, None, None)), "{operator}");
        assert_eq!(found.not_told.len(), if operator == "MatMulNBits" { 2 } else { 1 }, "{:?}", found.not_told);
    }
}
