//! Running a model and watching its routers.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use moa_schema::interface::{
    ATTENTION_MASK, DECODER_ATTENTION_MASK, DECODER_INPUT_IDS, ENCODER_ATTENTION_MASK, INPUT_IDS, QUERY_ATTENTION_MASK,
    past_of,
};

use super::{
    PmiOptions, Profile, ProfileError,
    instrument::{Router, instrument},
    statistics::{Seen, Tally},
};
use crate::{
    backend::{Backend, Runner, add_implied},
    file_names::{Part, graph_file, graphs_in},
    onnx::{OnnxFile, read::ValueInfo, read_model},
    tensor::{NamedTensors, Tensor},
};

/// Names of the decoder's inputs in what [`Profiler::add`] takes for an encoder and decoder.
const DECODER_INPUTS: [[&str; 2]; 2] = [[DECODER_INPUT_IDS, INPUT_IDS], [DECODER_ATTENTION_MASK, ATTENTION_MASK]];

/// A loaded model and what its routers did so far.
pub struct Profiler {
    graphs: Vec<Graph>,
}

/// A graph with its routing as outputs.
struct Graph {
    name: String,
    part: Part,
    /// The file and those of its weights.
    files: Vec<PathBuf>,
    inputs: Vec<ValueInfo>,
    /// Rows of the table that `input_ids` look up.
    symbols: Option<usize>,
    /// Most tokens of a row.
    positions: Option<usize>,
    runner: Box<dyn Runner>,
    routers: Vec<(Router, Tally)>,
}

impl Profiler {
    /// Loads a model file, a folder with `model.onnx`, or one with `encoder_model.onnx` and `decoder_model.onnx`.
    ///
    /// # Errors
    ///
    /// Where a file is missing or broken, shows no routing, or is not taken by `backend`.
    pub fn open(path: &Path, backend: &dyn Backend) -> Result<Self, ProfileError> {
        let paths = if path.is_dir() {
            let is_pair = graphs_in(path)?.iter().any(|(part, _)| *part != Part::Model);
            let parts = if is_pair { &[Part::Encoder, Part::Decoder][..] } else { &[Part::Model] };
            parts.iter().map(|part| path.join(graph_file(*part))).collect()
        } else {
            vec![path.to_path_buf()]
        };
        if let Some(path) = paths.iter().find(|path| matches!(path.try_exists(), Ok(false))) {
            return Err(ProfileError::Missing { path: path.clone() });
        }
        let graphs: Result<Vec<_>, _> = paths.iter().map(|path| Graph::load(&read_model(path)?, backend)).collect();
        let graphs = graphs?;
        if graphs.iter().all(|graph| graph.routers.is_empty()) {
            return Err(ProfileError::NoRouting { path: path.into() });
        }
        Ok(Self { graphs })
    }

    /// Files of the graphs, those of their weights included.
    pub fn files(&self) -> BTreeSet<&Path> {
        self.graphs.iter().flat_map(|graph| &graph.files).map(PathBuf::as_path).collect()
    }

    /// Whether an encoder and its decoder are loaded.
    pub fn is_encoder_decoder(&self) -> bool {
        self.graphs.len() == 2
    }

    /// File and part of each graph that has token ids, and the number of the symbols that it knows.
    pub fn symbols(&self) -> impl Iterator<Item = (&str, Part, usize)> {
        self.graphs.iter().filter_map(|graph| Some((graph.name.as_str(), graph.part, graph.symbols?)))
    }

    /// Of each graph the symbols that it knows and most tokens of a row, where it has tables of them.
    pub fn limits(&self) -> impl Iterator<Item = (Option<usize>, Option<usize>)> {
        self.graphs.iter().map(|graph| (graph.symbols, graph.positions))
    }

    /// Inputs that the only graph, or the encoder, declares.
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.graphs[0].inputs
    }

    /// Runs the model once.
    ///
    /// One graph takes its own inputs; `position_ids` and the caches of earlier tokens may be left out. An encoder
    /// with its decoder takes `input_ids` and `attention_mask` `[B, S]`, `decoder_input_ids` and
    /// `decoder_attention_mask` `[B, T]`, int64, 1 at real tokens: the decoder reads its inputs in one pass.
    ///
    /// # Errors
    ///
    /// Where inputs do not fit the graphs, or the runtime fails.
    pub fn add(&mut self, inputs: &NamedTensors) -> Result<(), ProfileError> {
        match self.graphs.as_mut_slice() {
            [encoder, decoder] => {
                let decoder_name = |name: &str| DECODER_INPUTS.iter().any(|[ours, _]| *ours == name);
                let of_encoder = inputs.iter().filter(|(name, _)| !decoder_name(name));
                let outputs = encoder.add(of_encoder.map(|(name, tensor)| (name.clone(), tensor.clone())).collect())?;
                let mut of_decoder = NamedTensors::new();
                for [ours, theirs] in DECODER_INPUTS {
                    of_decoder.insert(theirs.into(), required(inputs, ours)?.clone());
                }
                of_decoder.insert(ENCODER_ATTENTION_MASK.into(), required(inputs, ATTENTION_MASK)?.clone());
                of_decoder.extend(outputs.into_iter().filter_map(|(name, cache)| Some((past_of(&name)?, cache))));
                decoder.add(of_decoder).map(drop)
            }
            graphs => graphs.iter_mut().try_for_each(|graph| graph.add(inputs.clone()).map(drop)),
        }
    }

    /// Sums up.
    pub fn finish(self, options: PmiOptions) -> Profile {
        let modules = self.graphs.into_iter().flat_map(|graph| {
            let place = (graph.name, graph.part);
            let finish = move |(router, tally): (Router, Tally)| {
                tally.finish((&place.0, place.1), &router.module, router.score, options)
            };
            graph.routers.into_iter().map(finish)
        });
        Profile { modules: modules.collect() }
    }
}

impl Graph {
    fn load(file: &OnnxFile, backend: &dyn Backend) -> Result<Self, ProfileError> {
        let (file, routers) = match instrument(file) {
            Ok(instrumented) => instrumented,
            // An encoder or its decoder may route nothing.
            Err(ProfileError::NoRouting { .. }) if file.part() != Part::Model => (file.clone(), Vec::new()),
            Err(error) => return Err(error),
        };
        Ok(Self {
            name: file.name(),
            part: file.part(),
            files: file.files(),
            inputs: file.inputs(),
            symbols: file.looked_up_rows().get(INPUT_IDS).and_then(|rows| usize::try_from(*rows).ok()),
            positions: file.most_positions(),
            runner: backend.load(&file)?,
            routers: routers.into_iter().map(|router| (router, Tally::default())).collect(),
        })
    }

    fn add(&mut self, mut inputs: NamedTensors) -> Result<NamedTensors, ProfileError> {
        add_implied(&self.inputs, &mut inputs)?;
        let outputs = self.runner.run(&inputs)?;
        let ids = inputs.get(INPUT_IDS).and_then(Tensor::as_i64);
        for (router, tally) in &mut self.routers {
            let fault = |output: &str, what: String| ProfileError::Output {
                output: output.into(),
                graph: self.name.clone(),
                what,
            };
            let indices = outputs.get(&router.indices).and_then(|tensor| Some((tensor.shape(), tensor.as_i64()?)));
            let scores = outputs.get(&router.scores).and_then(|tensor| Some((tensor.shape(), tensor.as_f32()?)));
            let Some((&[batch, tokens, top_k], indices)) = indices else {
                return Err(fault(&router.indices, "expected int64 [batch, tokens, k]".into()));
            };
            let Some((&[rows, columns, experts], scores)) = scores else {
                return Err(fault(&router.scores, "expected float32 [batch, tokens, experts]".into()));
            };
            if (rows, columns) != (batch, tokens) || !(1..=experts).contains(&top_k) {
                return Err(fault(
                    &router.scores,
                    format!("[{rows}, {columns}, {experts}] beside [{batch}, {tokens}, {top_k}]"),
                ));
            }
            let real = real_tokens(&inputs, batch, tokens)?;
            let ids = ids.filter(|ids| ids.len() == batch * tokens);
            let seen = Seen { indices, scores, top_k, experts, real: &real, ids };
            tally.add(&seen).map_err(|what| fault(&router.indices, what))?;
        }
        Ok(outputs)
    }
}

fn required<'a>(inputs: &'a NamedTensors, name: &str) -> Result<&'a Tensor, ProfileError> {
    inputs.get(name).ok_or_else(|| ProfileError::Input { input: name.into(), what: "expected, and not given".into() })
}

/// Which of the routed tokens are no padding: the last columns of the mask of queries.
fn real_tokens(inputs: &NamedTensors, batch: usize, tokens: usize) -> Result<Vec<bool>, ProfileError> {
    let name = [QUERY_ATTENTION_MASK, ATTENTION_MASK].into_iter().find(|name| inputs.contains_key(*name));
    let name = name.unwrap_or(ATTENTION_MASK);
    let mask = required(inputs, name)?;
    let misfit = || ProfileError::Input {
        input: name.into(),
        what: format!("expected [{batch}, {tokens} or more] for the routed tokens, found {:?}", mask.shape()),
    };
    let &[rows, columns] = mask.shape() else { return Err(misfit()) };
    if rows != batch || columns < tokens {
        return Err(misfit());
    }
    let values = mask.to_f64();
    Ok(values
        .chunks(columns.max(1))
        .flat_map(|row| row[columns - tokens..].iter().map(|value| *value != 0.0))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::TensorData;

    fn integers(shape: [usize; 2], values: &[i64]) -> Tensor {
        Tensor::new(shape, TensorData::I64(values.to_vec())).unwrap()
    }

    #[test]
    fn the_last_columns_of_a_mask_are_those_of_the_routed_tokens() {
        let mut inputs = NamedTensors::from([("attention_mask".to_owned(), integers([2, 3], &[1, 1, 0, 0, 1, 1]))]);
        assert_eq!(real_tokens(&inputs, 2, 2).unwrap(), [true, false, true, true]);
        for (batch, tokens) in [(1, 3), (2, 4)] {
            assert!(real_tokens(&inputs, batch, tokens).is_err(), "{batch}, {tokens}");
        }
        inputs.insert("query_attention_mask".into(), integers([2, 2], &[0, 1, 1, 0]));
        assert_eq!(real_tokens(&inputs, 2, 2).unwrap(), [false, true, true, false]);
    }
}
