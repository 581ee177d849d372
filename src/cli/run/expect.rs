//! Outputs of `moa-export run` beside those that were expected.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use clap::Args;
use half::f16;
use serde::Serialize;

use crate::{
    cli::{
        Failure,
        tolerance::{check_tolerance, tolerance, worst},
    },
    parity::{Comparison, Difference, Tolerance},
    tensor::{NamedTensors, Tensor, TensorData},
    tensor_file,
};

#[derive(Debug, Args)]
#[command(next_help_heading = "Comparison")]
pub(super) struct ExpectArguments {
    /// Outputs to compare with, a `.safetensors` file by names of outputs, as PyTorch or --outputs writes them; exit
    /// code 1 where one differs
    #[arg(long, value_name = "FILE")]
    pub(super) expect: Option<PathBuf>,
    /// Absolute tolerance: |found - expected| <= atol + rtol * |expected| [default: 32 units in the last place of the
    /// output's type at its largest expected value; 0 for integers]
    #[arg(long, value_name = "X", requires = "expect")]
    atol: Option<f64>,
    /// Relative tolerance, added to the absolute one [default: 0]
    #[arg(long, value_name = "X", requires = "expect")]
    rtol: Option<f64>,
}

/// Units in the last place that are granted at the largest value of an output.
const UNITS: f64 = 32.0;

impl ExpectArguments {
    /// What the outputs are compared with, if anything.
    pub(super) fn read(&self) -> Result<Option<Expected<'_>>, Failure> {
        check_tolerance("--atol", self.atol)?;
        check_tolerance("--rtol", self.rtol)?;
        let Some(path) = self.expect.as_deref() else { return Ok(None) };
        let tensors = tensor_file::read(path)?;
        if tensors.is_empty() {
            let message = format!("{} holds no tensor to compare with", path.display());
            return Err(Failure::malformed(message, "give a file with at least one output by its name"));
        }
        Ok(Some(Expected { path, tensors, arguments: self }))
    }

    /// What a value of an output may differ by.
    fn tolerance(&self, found: &Tensor, expected: &Tensor) -> Tolerance {
        let unit = match found.data() {
            TensorData::F16(_) => f64::from(f16::EPSILON),
            TensorData::F32(_) | TensorData::F64(_) => f64::from(f32::EPSILON),
            TensorData::I32(_) | TensorData::I64(_) => 0.0,
        };
        let finite = expected.to_f64().into_iter().filter(|value| value.is_finite());
        let largest = finite.fold(0.0, |largest: f64, value| largest.max(value.abs()));
        Tolerance { atol: self.atol.unwrap_or(UNITS * unit * largest), rtol: self.rtol.unwrap_or(0.0) }
    }
}

/// Tensors of a file, by names of outputs.
pub(super) struct Expected<'a> {
    path: &'a Path,
    tensors: NamedTensors,
    arguments: &'a ExpectArguments,
}

/// What was found beside each output that was expected.
pub(super) type Compared = BTreeMap<String, Compare>;

/// An output beside what was expected of it.
#[derive(Serialize)]
pub(super) struct Compare {
    passed: bool,
    #[serde(flatten)]
    comparison: Comparison,
}

impl Expected<'_> {
    /// Compares `outputs`; the file may leave some out.
    pub(super) fn compare(&self, outputs: &NamedTensors) -> Result<Compared, Failure> {
        let compare = |(name, expected): (&String, &Tensor)| {
            let found = outputs.get(name).ok_or_else(|| self.unknown(name, outputs))?;
            if found.shape() != expected.shape() {
                return Err(self.misfit(name, found, expected));
            }
            let mut comparison = Comparison::default();
            comparison.add(name, found, expected, self.arguments.tolerance(found, expected));
            Ok((name.clone(), Compare { passed: comparison.passed(), comparison }))
        };
        self.tensors.iter().map(compare).collect()
    }

    fn unknown(&self, name: &str, outputs: &NamedTensors) -> Failure {
        let known: Vec<_> = outputs.keys().map(String::as_str).collect();
        let message = format!("{}: `{name}` is no output; outputs are {}", self.path.display(), known.join(", "));
        Failure::malformed(message, "name each tensor after the output that it is compared with")
    }

    fn misfit(&self, name: &str, found: &Tensor, expected: &Tensor) -> Failure {
        let [found, expected] = [found, expected].map(Tensor::shape);
        let message = format!("{}: `{name}` has shape {expected:?}, and the output {found:?}", self.path.display());
        Failure::malformed(message, "compare outputs of the same inputs, with axes in the same order")
    }
}

/// Columns that [`cells`] fills.
pub(super) const COLUMNS: [&str; 3] = ["worst |diff|", "allowed", "expected"];

/// The last cells of an output's row.
pub(super) fn cells(compared: Option<&Compare>) -> [String; COLUMNS.len()] {
    let Some(Compare { comparison, passed }) = compared else { return ["-", "-", "-"].map(ToOwned::to_owned) };
    let verdict = match passed {
        true => "agrees".to_owned(),
        false => format!("{} of {} differ", comparison.mismatches, comparison.values),
    };
    [worst(comparison), tolerance(comparison), verdict]
}

/// Where outputs differ, a line for each.
pub(super) fn differences(compared: &Compared) -> String {
    let worst = compared.iter().filter_map(|(name, compare)| Some((name, compare.comparison.worst.as_ref()?, compare)));
    let lines = worst.filter(|(_, _, compare)| !compare.passed).map(|(name, worst, _)| {
        let Difference { index, found, expected, .. } = worst;
        format!("{name} differs most at {index:?}: {found} instead of {expected}\n")
    });
    lines.collect()
}

/// Whether every output is as expected.
pub(super) fn passed(compared: &Compared) -> bool {
    compared.values().all(|compare| compare.passed)
}
