//! Reading an `.onnx` file that anybody may have written.
//!
//! [`read_model`] proves a file against the ONNX specification before a runtime sees it. It accepts no more than
//! the strictest reader does: nodes are sorted, every value has one definition, every tensor has one data field of
//! the right size, and external data is one regular file beside the model.

mod contract;
mod counts;
mod dims;
mod error;
mod external;
mod limits;
mod lookups;
mod names;
mod normal;
mod operator_node;
mod positions;
mod structure;
mod tensor;
mod types;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use moa_graphs::Part;
use prost::Message;
use prost::bytes::Bytes;

pub use crate::files::ErrorKind;
use crate::files::name_of;
pub(crate) use contract::accuracy_of;
pub use dims::{Dim, dims_text};
pub(crate) use dims::{sum, terms};
use error::Fault;
pub use error::ReadError;
use external::{Absent, DataFiles};
pub(super) use limits::MAX_DECODED;
pub use lookups::PositionTable;
pub(crate) use operator_node::{module_of, operator_input, operator_of};
pub(super) use structure::canonical_domain;
pub use structure::for_each_node;

use crate::{
    file_kind::{self, FileKind},
    metadata,
};

use super::proto::tensor_proto::DataType;
use super::proto::tensor_shape_proto::dimension;
use super::proto::type_proto;
use super::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};

/// The bytes of a tensor that stands in a node; `None` where they are elsewhere or have no fixed size.
pub(crate) fn inline_bytes(tensor: &TensorProto) -> Option<Bytes> {
    tensor::inline_values(tensor).ok()
}

/// Newest IR version that is read.
pub const MAX_IR_VERSION: i64 = 14;

/// Newest version of the standard operators that is read.
pub const MAX_OPSET_VERSION: i64 = 28;

/// Most nodes through which a value is followed to what it was before: exports have four at most, and without an end
/// the work for a file of many such nodes would be their square.
pub(crate) const LONGEST_CHAIN: usize = 16;

/// A model file that passed every check.
#[derive(Debug, Clone)]
pub struct OnnxFile {
    path: PathBuf,
    model: ModelProto,
    modified: bool,
    /// Whether absent inputs at the end of nodes were cut, which says the same.
    cut: bool,
    data: Arc<DataFiles>,
    index: OnceLock<Index>,
}

/// Input or output of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Dimensions, outermost first; `None` where not even the rank is known.
    pub dims: Option<Vec<Dim>>,
}

/// Places of the values of a graph by name.
#[derive(Debug, Clone, Default)]
struct Index {
    /// Of the node that computes a value.
    producers: HashMap<String, usize>,
    /// Of a weight.
    initializers: HashMap<String, usize>,
}

impl Index {
    fn of(graph: &GraphProto) -> Self {
        let outputs = |(place, node): (usize, &NodeProto)| -> Vec<(String, usize)> {
            node.output.iter().filter(|output| !output.is_empty()).map(|output| (output.clone(), place)).collect()
        };
        let weights = graph.initializer.iter().enumerate();
        Self {
            producers: graph.node.iter().enumerate().flat_map(outputs).collect(),
            initializers: weights.map(|(place, tensor)| (tensor.name.clone(), place)).collect(),
        }
    }
}

/// Reads and checks a model file.
///
/// # Errors
///
/// Where the file cannot be read, contradicts the ONNX specification, is newer than this program, or exceeds a
/// limit.
pub fn read_model(path: &Path) -> Result<OnnxFile, ReadError> {
    OnnxFile::check(path.to_owned(), decoded(path)?, false, Absent::Refused)
}

/// As [`read_model`], for those who need no values of weights: [`OnnxFile::absent_data_files`] may be missing.
///
/// # Errors
///
/// As of [`read_model`].
pub(crate) fn read_model_without_data(path: &Path) -> Result<OnnxFile, ReadError> {
    OnnxFile::check(path.to_owned(), decoded(path)?, false, Absent::LeftOut)
}

fn decoded(path: &Path) -> Result<ModelProto, ReadError> {
    let bytes = read_file(path)?;
    limits::check(&bytes).map_err(|fault| other_format(&bytes).unwrap_or(fault).at(path))?;
    ModelProto::decode(bytes).map_err(|error| Fault::malformed(format!("not an ONNX model: {error}")).at(path))
}

/// What the bytes are of, where they are no ONNX model and that is known.
fn other_format(bytes: &[u8]) -> Option<Fault> {
    let prefix = &bytes[..bytes.len().min(file_kind::PREFIX)];
    let is_torch = file_kind::is_zip(prefix) && file_kind::names_pickle(prefix);
    let known = is_torch.then_some(FileKind::Torch).or_else(|| file_kind::recognise(prefix));
    let known = known.or_else(|| file_kind::is_safetensors(prefix).then_some(FileKind::Safetensors));
    let kind = known.or_else(|| file_kind::is_text(prefix).then_some(FileKind::Text))?;
    let fault = Fault::malformed(format!("{kind}, expected an ONNX model (.onnx)"));
    match kind {
        FileKind::Onnx => None,
        FileKind::Ort => Some(fault.help("give the .onnx file that it was made of; ONNX Runtime alone reads .ort")),
        _ => Some(fault),
    }
}

/// Whether a file begins as an ONNX model does, or one of ONNX Runtime's own format.
pub(crate) fn begins_as_model(path: &Path) -> bool {
    let mut prefix = Vec::new();
    let is_read = path.is_file()
        && File::open(path).and_then(|file| file.take(file_kind::PREFIX as u64).read_to_end(&mut prefix)).is_ok();
    let is_model = matches!(file_kind::recognise(&prefix), Some(FileKind::Onnx | FileKind::Ort));
    is_read && is_model && !file_kind::is_safetensors(&prefix)
}

fn read_file(path: &Path) -> Result<Bytes, ReadError> {
    let io = |error| ReadError::io(path, error);
    let metadata = fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        let fault = Fault::malformed("not a regular file".into());
        let which = if metadata.is_dir() { "give one .onnx file of that folder" } else { "give an .onnx file" };
        return Err(fault.help(which).at(path));
    }
    let mut bytes = Vec::new();
    if metadata.len() <= limits::MAX_FILE_BYTES {
        let file = File::open(path).map_err(io)?;
        bytes.reserve_exact(usize::try_from(metadata.len()).unwrap_or(0));
        file.take(limits::MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    }
    if metadata.len().max(bytes.len() as u64) > limits::MAX_FILE_BYTES {
        let fault = Fault::limit("larger than 2 GiB, the most that a protobuf message may hold".into());
        return Err(fault.help("keep the weights in an external data file").at(path));
    }
    if bytes.is_empty() {
        return Err(Fault::malformed("the file is empty".into()).at(path));
    }
    Ok(bytes.into())
}

impl OnnxFile {
    fn check(path: PathBuf, mut model: ModelProto, modified: bool, absent: Absent) -> Result<Self, ReadError> {
        structure::check(&model).and_then(|()| names::check(&model)).map_err(|fault| fault.at(&path))?;
        let cut = normal::normalise(&mut model);
        let tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
        let data = Arc::new(DataFiles::open(&path, tensors, absent)?);
        Ok(Self { path, model, modified, cut, data, index: OnceLock::new() })
    }

    /// Its name in its folder.
    pub(crate) fn name(&self) -> String {
        name_of(&self.path)
    }

    /// Another model in the place of this file: external data is read from the same folder, the file itself stays
    /// as it is.
    ///
    /// # Errors
    ///
    /// Where `model` does not pass the checks of [`read_model`].
    pub fn with_model(&self, model: ModelProto) -> Result<Self, ReadError> {
        Self::check(self.path.clone(), model, true, Absent::Refused)
    }

    /// Where the model was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model; the standard domain is `""` in it, however the file spells it, and no node's inputs end with one that
    /// is absent.
    pub const fn model(&self) -> &ModelProto {
        &self.model
    }

    /// The graph of the model.
    pub fn graph(&self) -> Option<&GraphProto> {
        self.model.graph.as_ref()
    }

    /// Whether the model differs from the file at [`Self::path`].
    pub const fn is_modified(&self) -> bool {
        self.modified
    }

    /// Whether a runtime may be given the file at [`Self::path`] in place of [`Self::model`].
    pub const fn is_as_stored(&self) -> bool {
        !self.modified && !self.cut
    }

    /// Whether weights lie in a file of their own.
    pub fn has_external_data(&self) -> bool {
        !self.data.is_empty()
    }

    /// Files of weights beside the model, by name.
    pub fn data_files(&self) -> Vec<PathBuf> {
        self.data.names().map(|name| self.path.with_file_name(name)).collect()
    }

    /// Files of weights that the model names and that are not there, where it was read without them.
    pub(crate) fn absent_data_files(&self) -> impl Iterator<Item = PathBuf> {
        self.data.absent().map(|name| self.path.with_file_name(name))
    }

    /// The model file, and those of its weights.
    pub fn files(&self) -> Vec<PathBuf> {
        [vec![self.path.clone()], self.data_files()].concat()
    }

    /// Which graph of a model it is: what the file says, else what it is called, else the whole.
    pub fn part(&self) -> Part {
        let by_name = || Part::parse(self.path.file_stem()?.to_str()?);
        self.metadata(metadata::PART).and_then(Part::parse).or_else(by_name).unwrap_or(Part::Model)
    }

    /// Inputs that a run must be given: those without a default value.
    pub fn inputs(&self) -> Vec<ValueInfo> {
        let Some(graph) = self.graph() else { return Vec::new() };
        let required = |input: &&ValueInfoProto| self.initializer(&input.name).is_none();
        graph.input.iter().filter(required).filter_map(value_info).collect()
    }

    /// Outputs of the graph.
    pub fn outputs(&self) -> Vec<ValueInfo> {
        self.graph().map_or_else(Vec::new, |graph| graph.output.iter().filter_map(value_info).collect())
    }

    fn index(&self) -> &Index {
        self.index.get_or_init(|| self.graph().map(Index::of).unwrap_or_default())
    }

    /// The metadata entry `key`.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.model.metadata_props.iter().find(|entry| entry.key == key).map(|entry| entry.value.as_str())
    }

    /// Functions of the model.
    pub fn functions(&self) -> &[FunctionProto] {
        &self.model.functions
    }

    /// The weight `name` of the graph.
    pub fn initializer(&self, name: &str) -> Option<&TensorProto> {
        self.graph()?.initializer.get(*self.index().initializers.get(name)?)
    }

    /// The values of the weight `name`, little-endian, wherever they are stored.
    ///
    /// # Errors
    ///
    /// Where there is no such weight, the data file cannot be read, or the values have no fixed size.
    pub fn initializer_values(&self, name: &str) -> Result<Bytes, ReadError> {
        let missing = || Fault::malformed(format!("there is no weight {}", error::shown(name))).at(&self.path);
        self.values(self.initializer(name).ok_or_else(missing)?)
    }

    /// The values of a weight of this model.
    pub(crate) fn values(&self, tensor: &TensorProto) -> Result<Bytes, ReadError> {
        if tensor.external_data.is_empty() {
            return tensor::inline_values(tensor).map_err(|fault| fault.at(&self.path));
        }
        self.data.values(&self.path, tensor)
    }

    /// Fills `bytes` with the values of a weight of this model from byte `start` on.
    ///
    /// # Errors
    ///
    /// Where the data file cannot be read, or the values end before.
    pub(crate) fn read_values(&self, tensor: &TensorProto, start: usize, bytes: &mut [u8]) -> Result<(), ReadError> {
        if !tensor.external_data.is_empty() {
            return self.data.read(&self.path, tensor, start, bytes);
        }
        let values = self.values(tensor)?;
        let part = values.get(start..).and_then(|rest| rest.get(..bytes.len()));
        let short = || Fault::malformed(format!("tensor {} is too short", error::shown(&tensor.name))).at(&self.path);
        bytes.copy_from_slice(part.ok_or_else(short)?);
        Ok(())
    }
}

/// Name and type of a value, where it is a tensor.
pub(crate) fn value_info(value: &ValueInfoProto) -> Option<ValueInfo> {
    let type_proto::Value::TensorType(tensor) = value.r#type.as_ref()?.value.as_ref()?;
    let dims = tensor.shape.as_ref().map(|shape| shape.dim.iter().map(|dim| dim_of(dim.value.as_ref())).collect());
    Some(ValueInfo { name: value.name.clone(), data_type: DataType::try_from(tensor.elem_type).ok()?, dims })
}

fn dim_of(value: Option<&dimension::Value>) -> Dim {
    match value {
        Some(dimension::Value::DimValue(size)) => usize::try_from(*size).map_or(Dim::Unknown, Dim::Fixed),
        Some(dimension::Value::DimParam(name)) if !name.is_empty() => Dim::Symbolic(name.clone()),
        _ => Dim::Unknown,
    }
}
