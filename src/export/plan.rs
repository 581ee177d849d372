//! Where the graphs of an export go.

use std::path::{Path, PathBuf};

use moa_graphs::NamedGraph;

use super::{ExportError, ExternalData};
use crate::{
    file_names::{CHECKPOINT_ENDINGS, DATA, MODEL_ENDINGS, PLAN_ENDINGS, graph_file},
    files::{ends_as_folder, folder_of, has_ending, in_folder},
    onnx::{INLINE_LIMIT, WriteError, weight_bytes},
};

/// Endings of files that are no ONNX, so that a folder of such a name is a slip.
const FOREIGN_ENDINGS: [&[&str]; 3] =
    [PLAN_ENDINGS, CHECKPOINT_ENDINGS, &["gguf", "json", "onx", "ort", "pb", "tflite"]];

/// Where the graphs of one export go.
pub(super) struct Plan {
    pub(super) folder: PathBuf,
    /// Whether the output is a folder, and not one file in it.
    pub(super) whole_folder: bool,
    /// One per graph.
    pub(super) files: Vec<PlannedFile>,
}

pub(super) struct PlannedFile {
    /// Name of the model file.
    pub(super) model: String,
    /// Name of the data file, where there is one.
    pub(super) data: Option<String>,
}

impl Plan {
    /// Place of the file `name`.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        in_folder(&self.folder, name)
    }

    pub(super) fn new(
        out: &Path,
        family: &str,
        graphs: &[NamedGraph],
        external_data: ExternalData,
    ) -> Result<Self, ExportError> {
        let external = |graph: &NamedGraph| match external_data {
            ExternalData::Always => true,
            ExternalData::Never => false,
            ExternalData::Auto => weight_bytes(&graph.graph) > INLINE_LIMIT,
        };
        let file = |model: String, graph: &NamedGraph| PlannedFile {
            data: external(graph).then(|| format!("{model}{DATA}")),
            model,
        };
        // A file is not found under a name with a slash behind it.
        if ends_as_folder(out) && out.components().collect::<PathBuf>().is_file() {
            return Err(WriteError::WrongKind { path: out.into(), expected: "a folder" }.into());
        }
        let is_folder = out.is_dir() || ends_as_folder(out);
        if has_ending(out, MODEL_ENDINGS) && !is_folder {
            let Some(name) = out.file_name().and_then(|name| name.to_str()) else {
                return Err(ExportError::NotText { path: out.into() });
            };
            let [graph] = graphs else {
                let files: Vec<_> = graphs.iter().map(|graph| graph_file(graph.part)).collect();
                let files = files.join(" and ");
                return Err(ExportError::NeedsFolder { path: out.into(), family: family.into(), files });
            };
            let files = vec![file(name.to_owned(), graph)];
            return Ok(Self { folder: folder_of(out).into(), whole_folder: false, files });
        }
        let is_packed = out.file_stem().is_some_and(|stem| has_ending(stem, MODEL_ENDINGS));
        let is_foreign = is_packed || FOREIGN_ENDINGS.iter().any(|endings| has_ending(out, endings));
        if is_foreign && !ends_as_folder(out) {
            return Err(ExportError::WrongEnding { path: out.into() });
        }
        let files = graphs.iter().map(|graph| file(graph_file(graph.part), graph)).collect();
        Ok(Self { folder: out.into(), whole_folder: true, files })
    }
}

#[cfg(test)]
mod tests {
    use moa_graphs::{
        Part,
        graph::{Constant, ConstantValues, Data, Graph, Initializer},
    };

    use super::*;

    /// A graph whose only weight claims to have so many f32 values.
    fn graph(elements: usize) -> NamedGraph {
        let constant = Constant { shape: vec![elements], values: ConstantValues::Float32(Vec::new()) };
        let weight = Initializer { name: "w".into(), data: Data::Literal(constant) };
        let (inputs, outputs, nodes, functions) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let graph = Graph {
            name: "g".into(),
            inputs,
            outputs,
            values: Vec::new(),
            initializers: vec![weight],
            nodes,
            functions,
        };
        NamedGraph { part: Part::Model, graph }
    }

    #[test]
    fn weights_that_protobuf_cannot_hold_go_to_a_file_of_their_own() {
        let data = |elements, external_data| {
            let plan = Plan::new(Path::new("out"), "family", &[graph(elements)], external_data).unwrap();
            plan.files[0].data.clone()
        };
        assert_eq!(data(375_000_000, ExternalData::Auto), None);
        assert_eq!(data(375_000_001, ExternalData::Auto), Some("model.onnx.data".into()));
        assert_eq!(data(375_000_001, ExternalData::Never), None);
        assert_eq!(data(1, ExternalData::Always), Some("model.onnx.data".into()));
    }
}
