//! What ONNX files say: inputs and outputs, operators, weights; and, where the graph tells, the accounts of
//! [`super::cost`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use moa_graphs::Part;
use moa_schema::interface::{LOGITS, is_own_past};

use super::{
    cost::{Cost, Lengths},
    graph_cost::{self, Told},
    sizes::{ModelSizes, symbols},
};
use crate::{
    file_names::MODEL_ENDINGS,
    files::has_ending,
    metadata,
    onnx::{
        OnnxFile,
        proto::{TensorProto, tensor_proto::DataType},
        read::{Dim, ValueInfo, for_each_node},
    },
};

/// Weights of one element type in ONNX files.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GraphWeights {
    /// Element type.
    pub dtype: &'static str,
    /// Tensors.
    pub tensors: u64,
    /// Values.
    pub values: u64,
    /// Bytes of the values.
    pub bytes: u64,
    /// Those of them that lie in a data file beside the model.
    pub external_bytes: u64,
}

/// How often an operator is used.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct OperatorCount {
    /// Domain; `ai.onnx` for the standard operators.
    pub domain: String,
    /// Operator type.
    pub operator: String,
    /// Nodes.
    pub nodes: u64,
}

/// A function of the file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct FunctionBody {
    /// Domain.
    pub domain: String,
    /// Operator that it defines.
    pub operator: String,
    /// Nodes of its body.
    pub nodes: u64,
}

/// One input or output.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Signature {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: &'static str,
    /// Dimensions; `None` where not even the rank is known.
    pub shape: Option<Vec<Dim>>,
}

/// One model file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct File {
    /// Name of the file.
    pub name: String,
    /// Program that wrote it, with its version.
    pub producer: String,
    /// IR version.
    pub ir_version: i64,
    /// Version of each operator set.
    pub opsets: BTreeMap<String, i64>,
    /// Inputs that a run must be given.
    pub inputs: Vec<Signature>,
    /// Outputs.
    pub outputs: Vec<Signature>,
    /// Operators of the graph and its subgraphs.
    pub operators: Vec<OperatorCount>,
    /// Functions.
    pub functions: Vec<FunctionBody>,
    /// Weights by element type.
    pub weights: Vec<GraphWeights>,
    /// `metadata_props`.
    pub metadata: BTreeMap<String, String>,
}

/// One part of a model, as far as its graphs tell.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GraphPart {
    /// What it is.
    pub name: &'static str,
    /// Distinct trained values.
    pub parameters: u64,
    /// Those that one token uses.
    pub active_parameters: Option<u64>,
    /// Multiply-accumulates by the paper's convention.
    pub paper_macs: Option<u64>,
    /// Multiply-accumulates with both attention products.
    pub full_macs: Option<u64>,
}

impl GraphPart {
    fn new(name: &'static str, cost: Cost, told: Told) -> Self {
        Self {
            name,
            parameters: cost.parameters,
            active_parameters: told.linear.then_some(cost.active_parameters),
            paper_macs: told.linear.then_some(cost.paper_macs),
            full_macs: told.attention.then_some(cost.full_macs),
        }
    }
}

/// ONNX files in numbers.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GraphInspection {
    /// `model_type`, where this program wrote the files.
    pub family: Option<String>,
    /// How the operators of this project are written, where this program wrote the files.
    pub form: Option<String>,
    /// Sizes that the graphs tell.
    pub sizes: ModelSizes,
    /// Parts, in the order of the journey of a token; none for a foreign file.
    pub parts: Vec<GraphPart>,
    /// All of them.
    pub total: GraphPart,
    /// Lengths for which multiply-accumulates were counted.
    pub lengths: Lengths,
    /// Bytes of keys and values that one more token of a row needs; `None` where no input is called a past and another
    /// program wrote a graph.
    pub cache_bytes_per_token: Option<u64>,
    /// What cannot be told, and why.
    pub not_told: Vec<String>,
    /// The files.
    pub files: Vec<File>,
}

/// The `.onnx` files of a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// Those of one model, an encoder before its decoder.
    pub model: Vec<PathBuf>,
    /// Those beside it, such as one that was prepared for TensorRT.
    pub others: Vec<PathBuf>,
}

/// The model files of `path`: itself, or those of a folder. Where some have the names that exports have, the model is
/// these; else it is all of them.
///
/// # Errors
///
/// Where the folder cannot be read.
pub fn model_files(path: &Path) -> io::Result<ModelFiles> {
    if !path.is_dir() {
        return Ok(ModelFiles { model: vec![path.into()], others: Vec::new() });
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        if has_ending(&file, MODEL_ENDINGS) && file.is_file() {
            files.push(file);
        }
    }
    let part = |file: &Path| Part::parse(file.file_stem()?.to_str()?);
    files.sort_by_key(|file| (part(file) != Some(Part::Encoder), file.clone()));
    let is = |file: &Path, parts: &[Part]| part(file).is_some_and(|part| parts.contains(&part));
    let models = [&[Part::Encoder, Part::Decoder][..], &[Part::Model]];
    let known = models.into_iter().find(|parts| files.iter().any(|file| is(file, parts)));
    let (model, others) = files.into_iter().partition(|file| known.is_none_or(|parts| is(file, parts)));
    Ok(ModelFiles { model, others })
}

/// Counts what the files of one model hold and cost.
pub fn inspect_graphs(files: &[OnnxFile], lengths: Lengths) -> GraphInspection {
    let said = |key| files.iter().find_map(|file| file.metadata(key)).map(ToOwned::to_owned);
    let family = said(metadata::FAMILY);
    let accounts = graph_cost::accounts(files, family.as_deref(), lengths);
    let part = |(name, cost): &(&'static str, Cost)| GraphPart::new(name, *cost, accounts.told);
    let total = accounts.parts.iter().map(|(_, cost)| *cost).sum();
    GraphInspection {
        form: said(metadata::FORM),
        sizes: ModelSizes { vocabulary: vocabulary(files), ..accounts.sizes },
        parts: if family.is_some() { accounts.parts.iter().map(part).collect() } else { Vec::new() },
        total: GraphPart::new("total", total, accounts.told),
        lengths,
        cache_bytes_per_token: cache_bytes_per_token(files),
        not_told: accounts.not_told,
        files: files.iter().map(describe).collect(),
        family,
    }
}

/// Symbols that the output called `logits` has scores for, after those of an encoder that has others.
fn vocabulary(files: &[OnnxFile]) -> Vec<u64> {
    let mut outputs = files.iter().flat_map(OnnxFile::outputs);
    let logits = outputs.find(|output| output.name == LOGITS).and_then(|logits| logits.dims?.pop());
    let Some(Dim::Fixed(target)) = logits else { return Vec::new() };
    let target = target as u64;
    let encoder = files.iter().find(|file| file.part() == Part::Encoder);
    let tables = encoder.and_then(OnnxFile::graph).into_iter().flat_map(|graph| &graph.initializer);
    let rows =
        tables.filter(|tensor| tensor.name.ends_with("embed_tokens.weight")).find_map(|table| table.dims.first());
    symbols(rows.and_then(|rows| u64::try_from(*rows).ok()).unwrap_or(target), target)
}

/// Fixed dimensions of every past of self-attention, of which one token of a row adds one line.
fn cache_bytes_per_token(files: &[OnnxFile]) -> Option<u64> {
    let inputs = files.iter().flat_map(OnnxFile::inputs);
    let pasts = inputs.filter(|input| is_own_past(&input.name));
    let bytes = pasts.map(|past| {
        let fixed = past.dims.iter().flatten().filter_map(|dim| match dim {
            Dim::Fixed(size) => Some(*size as u64),
            _ => None,
        });
        Some(fixed.fold(past.data_type.bits()? as u64, u64::saturating_mul) / 8)
    });
    let bytes: Vec<u64> = bytes.collect::<Option<_>>()?;
    let is_known = !bytes.is_empty() || files.iter().all(OnnxFile::is_export);
    is_known.then(|| bytes.into_iter().fold(0, u64::saturating_add))
}

fn describe(file: &OnnxFile) -> File {
    let model = file.model();
    let nodes = file.graph().map_or(&[][..], |graph| graph.node.as_slice());
    let mut operators: BTreeMap<(String, String), u64> = BTreeMap::new();
    for_each_node(nodes, &mut |node| {
        *operators.entry((domain_name(&node.domain), node.op_type.clone())).or_default() += 1;
    });
    let count = |((domain, operator), nodes)| OperatorCount { domain, operator, nodes };
    File {
        name: file.name(),
        producer: format!("{} {}", model.producer_name, model.producer_version).trim().to_owned(),
        ir_version: model.ir_version,
        opsets: model.opset_import.iter().map(|import| (domain_name(&import.domain), import.version)).collect(),
        inputs: file.inputs().iter().map(signature).collect(),
        outputs: file.outputs().iter().map(signature).collect(),
        operators: operators.into_iter().map(count).collect(),
        functions: file
            .functions()
            .iter()
            .map(|function| FunctionBody {
                domain: domain_name(&function.domain),
                operator: function.name.clone(),
                nodes: function.node.len() as u64,
            })
            .collect(),
        weights: weights(file),
        metadata: model.metadata_props.iter().map(|entry| (entry.key.clone(), entry.value.clone())).collect(),
    }
}

fn domain_name(domain: &str) -> String {
    if domain.is_empty() { "ai.onnx".into() } else { domain.into() }
}

fn signature(value: &ValueInfo) -> Signature {
    Signature { name: value.name.clone(), dtype: value.data_type.type_name(), shape: value.dims.clone() }
}

/// Number of values.
pub(super) fn values(tensor: &TensorProto) -> u64 {
    tensor.dims.iter().fold(1, |values, dim| values.saturating_mul(u64::try_from(*dim).unwrap_or(0)))
}

fn weights(file: &OnnxFile) -> Vec<GraphWeights> {
    let mut by_type: BTreeMap<&'static str, GraphWeights> = BTreeMap::new();
    for tensor in file.graph().iter().flat_map(|graph| &graph.initializer) {
        let Ok(data_type) = DataType::try_from(tensor.data_type) else { continue };
        let dtype = data_type.type_name();
        let entry =
            by_type.entry(dtype).or_insert(GraphWeights { dtype, tensors: 0, values: 0, bytes: 0, external_bytes: 0 });
        let text_bytes: usize = tensor.string_data.iter().map(Vec::len).sum();
        let bytes =
            data_type.bits().map_or(text_bytes as u64, |bits| values(tensor).saturating_mul(bits as u64).div_ceil(8));
        entry.tensors += 1;
        entry.values += values(tensor);
        entry.bytes += bytes;
        entry.external_bytes += if tensor.external_data.is_empty() { 0 } else { bytes };
    }
    by_type.into_values().collect()
}

/// Domain and type of every operator of the graphs; subgraphs are left out.
pub(super) fn operators_of(files: &[OnnxFile]) -> BTreeSet<(&str, &str)> {
    let nodes = files.iter().filter_map(OnnxFile::graph).flat_map(|graph| &graph.node);
    nodes.map(|node| (node.domain.as_str(), node.op_type.as_str())).collect()
}
