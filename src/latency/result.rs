//! What a benchmark found.

use serde::{Deserialize, Serialize};

use super::{
    experts::ExpertLoad,
    receipt::Receipt,
    shapes::Point,
    statistics::{Estimate, Summary},
};
use crate::parity::Agreement;

/// Everything that a benchmark found. Times are nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchResult {
    /// Where, with what and how.
    pub receipt: Receipt,
    /// Whether the backends compute the same.
    pub parity: Vec<ParityRow>,
    /// What it takes before the first call.
    pub sessions: Vec<SessionRow>,
    /// Backends that do not take a model and were not named.
    pub skipped: Vec<Skipped>,
    /// Times, point by point; contestants of a point stand together, the first of them first.
    pub rows: Vec<Row>,
    /// Tokens by expert.
    pub experts: Vec<ExpertLoad>,
    /// Where the time goes.
    pub operators: Vec<OperatorTimes>,
}

/// What is timed beside others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// Model.
    pub model: String,
    /// Backend.
    pub backend: String,
    /// Part of the model: `model`, `encoder_model` or `decoder_model`.
    pub part: String,
    /// The layer, where its operator is timed by itself.
    pub module: Option<String>,
}

/// Times of one contestant at one point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Who.
    pub subject: Subject,
    /// At which shape.
    pub point: Point,
    /// First call at this shape.
    #[serde(rename = "first_call_ns")]
    pub first_call: u64,
    /// Calls of the warm-up.
    pub warm_up_calls: usize,
    /// Whether the warm-up ended in a steady state.
    pub steady: bool,
    /// Whether past and present of its caches were one buffer.
    #[serde(default)]
    pub in_place: bool,
    /// All timed calls.
    #[serde(rename = "times_ns")]
    pub times: Summary,
    /// Turns.
    pub turns: usize,
    /// Median of the turns' medians.
    #[serde(rename = "turn_median_ns")]
    pub turn_median: Estimate,
    /// The median of each turn, in the order in which they were timed: turn `i` of the contestants of a point followed
    /// each other.
    #[serde(rename = "turn_medians_ns")]
    pub turn_medians: Vec<u64>,
    /// New tokens a second at the median.
    pub tokens_per_second: f64,
    /// Time beside that of the point's first contestant; none for that one.
    pub ratio: Option<Estimate>,
    /// The same calls between events on the device, where the backend has them. All other times are by the host's
    /// clock, from the call to its return.
    pub device: Option<DeviceTimes>,
}

/// Times of calls between two events on the device: for TensorRT CUDA events before and behind a run, which `trtexec`
/// calls GPU compute time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceTimes {
    /// All timed calls.
    #[serde(rename = "times_ns")]
    pub times: Summary,
    /// Time beside that of the point's first contestant, where that has such times too.
    pub ratio: Option<Estimate>,
    /// As [`Row::turn_medians`].
    #[serde(rename = "turn_medians_ns")]
    pub turn_medians: Vec<u64>,
}

/// Whose time a row tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// The host's, from a call to its return.
    Host,
    /// The device's, as [`DeviceTimes`].
    Device,
}

impl Row {
    /// The row, and behind it that of the device's own times, as tables show them.
    pub fn by_clock(&self) -> impl Iterator<Item = (Clock, Self)> {
        let of_device = self.on_device().map(|row| (Clock::Device, row));
        [(Clock::Host, self.clone())].into_iter().chain(of_device)
    }

    #[allow(clippy::cast_precision_loss)]
    fn on_device(&self) -> Option<Self> {
        let DeviceTimes { times, ratio, turn_medians } = self.device.clone()?;
        let faster = self.times.p50 as f64 / times.p50.max(1) as f64;
        let tokens_per_second = self.tokens_per_second * faster;
        Some(Self { times, ratio, turn_medians, tokens_per_second, device: None, ..self.clone() })
    }
}

/// What a contestant takes before its first call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionRow {
    /// Who.
    pub subject: Subject,
    /// Time to load the graph from its file.
    #[serde(rename = "load_ns")]
    pub load: u64,
    /// Resident memory that loading and a first call at every point added to the process at its peak, in bytes.
    #[serde(rename = "added_memory_bytes")]
    pub peak_memory: Option<u64>,
}

/// A backend that was not used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// Who.
    pub subject: Subject,
    /// Why.
    pub why: String,
}

/// Whether a contestant computes what it should.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParityRow {
    /// Who.
    pub subject: Subject,
    /// At which shape; none where a checkpoint was the reference.
    pub point: Option<Point>,
    /// The outcome.
    pub verdict: Verdict,
}

/// Outcome of a parity check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Verdict {
    /// Verified against the checkpoint.
    Verified,
    /// Agrees with another backend on the timed inputs.
    Agrees {
        /// That backend.
        with: String,
        /// How closely.
        agreement: Agreement,
    },
    /// This is what others are compared with.
    Yardstick,
    /// Nothing was compared.
    NotChecked {
        /// Why.
        why: String,
    },
    /// Computes something else, and is timed because the user said so.
    Failed {
        /// What is wrong.
        fault: String,
    },
}

impl Verdict {
    /// How JSON and CSV call the outcome.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::Agrees { .. } => "agrees",
            Self::Yardstick => "yardstick",
            Self::NotChecked { .. } => "not_checked",
            Self::Failed { .. } => "failed",
        }
    }

    /// How little is proved: more where less is.
    const fn doubt(&self) -> u8 {
        match self {
            Self::Verified | Self::Agrees { .. } | Self::Yardstick => 0,
            Self::NotChecked { .. } => 1,
            Self::Failed { .. } => 2,
        }
    }
}

/// Time by node, in a pass of its own in which the runtime recorded every node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorTimes {
    /// Who.
    pub subject: Subject,
    /// At which shape.
    pub point: Point,
    /// Calls that were recorded.
    pub calls: usize,
    /// Time by module and operator, in the order of the graph.
    pub nodes: Vec<NodeTime>,
}

/// Time of the nodes of one operator in one module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeTime {
    /// Layer, such as `encoder.layers.0`; empty for nodes that belong to none.
    pub layer: String,
    /// Module, such as `encoder.layers.0.self_attn`; the layer itself for its other nodes.
    pub module: String,
    /// Operator.
    pub operator: String,
    /// Whether they are a routed operator, or of its body; never in a graph of standard operators alone, whose nodes do
    /// not tell.
    pub routed: bool,
    /// Nodes that ran, in each call.
    #[serde(rename = "nodes_per_call")]
    pub nodes: f64,
    /// Time in each call.
    #[serde(rename = "time_per_call_ns")]
    pub time: f64,
}

/// The layers of `nodes`, each once: those of one kind by their numbers, the kinds in the order of the nodes, and last
/// the empty name of nodes that belong to none.
pub fn layers<'a>(nodes: impl IntoIterator<Item = &'a NodeTime>) -> Vec<&'a str> {
    sorted(nodes.into_iter().map(|node| node.layer.as_str()))
}

fn sorted<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let (mut kinds, mut layers): (Vec<&str>, Vec<(usize, u64, &str)>) = (Vec::new(), Vec::new());
    for name in names {
        let (kind, number) = name.rsplit_once('.').unwrap_or(("", name));
        let (kind, number) = number.parse().map_or((name, 0), |number| (kind, number));
        let place = kinds.iter().position(|known| *known == kind).unwrap_or(kinds.len());
        if place == kinds.len() {
            kinds.push(kind);
        }
        let layer = (if name.is_empty() { usize::MAX } else { place }, number, name);
        if !layers.contains(&layer) {
            layers.push(layer);
        }
    }
    layers.sort_unstable();
    layers.into_iter().map(|(_, _, name)| name).collect()
}

impl BenchResult {
    /// The most doubtful outcome of the parity checks of what was timed in `row`; of several, the last.
    pub fn parity_of(&self, row: &Row) -> Option<&Verdict> {
        let is_of = |parity: &&ParityRow| {
            parity.subject == row.subject && parity.point.as_ref().is_none_or(|point| *point == row.point)
        };
        self.parity.iter().filter(is_of).map(|parity| &parity.verdict).max_by_key(|verdict| verdict.doubt())
    }

    /// Whether something was timed that computes something else.
    pub fn has_failed_parity(&self) -> bool {
        self.parity.iter().any(|row| matches!(row.verdict, Verdict::Failed { .. }))
    }
}

/// A result of two backends with another number at every place, for tests.
#[cfg(test)]
pub(crate) fn sample() -> BenchResult {
    let subject = |backend: &str, module: Option<&str>| Subject {
        model: "m.onnx".into(),
        backend: backend.into(),
        part: "decoder_model".into(),
        module: module.map(str::to_owned),
    };
    let times = |first: u64| Summary {
        samples: first,
        min: first + 1,
        mean: 0.25 + first as f64,
        p50: first + 2,
        p90: Some(first + 3),
        p99: Some(first + 4),
        p99_9: None,
        max: first + 6,
        histogram: vec![(first + 2, first)],
    };
    let estimate = |value: f64| Estimate { value, interval: Some([value - 0.5, value + 0.5]) };
    let row = |subject: &Subject, first: u64, ratio: Option<f64>| Row {
        subject: subject.clone(),
        point: [("batch", 2), ("sequence", 3), ("past_sequence", 5), ("source", 7)]
            .map(|(axis, size)| (axis.to_owned(), size))
            .into(),
        first_call: first + 7,
        warm_up_calls: 16,
        steady: ratio.is_none(),
        in_place: false,
        times: times(first),
        turns: 20,
        turn_median: estimate(first as f64),
        turn_medians: vec![first; 20],
        tokens_per_second: first as f64 + 0.5,
        ratio: ratio.map(estimate),
        device: None,
    };
    let subjects = [subject("ort", None), subject("tensorrt", Some("layers.0"))];
    let mut rows = vec![row(&subjects[0], 1_000, None), row(&subjects[1], 2_000, Some(2.25))];
    rows[1].device = Some(DeviceTimes { times: times(1_500), ratio: None, turn_medians: vec![1_500; 20] });
    let session = |subject: &Subject, first: u64| SessionRow {
        subject: subject.clone(),
        load: first,
        peak_memory: Some(first + 1),
    };
    BenchResult {
        receipt: super::receipt::sample(),
        parity: Vec::new(),
        sessions: vec![session(&subjects[0], 3_000), session(&subjects[1], 4_000)],
        skipped: Vec::new(),
        rows,
        experts: Vec::new(),
        operators: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{ParityRow, Verdict, sample, sorted};

    #[test]
    fn a_row_has_the_worst_verdict_on_its_own_subject() {
        let mut result = sample();
        let [first, second] = [0, 1].map(|row| result.rows[row].clone());
        let failed = |fault: &str| Verdict::Failed { fault: fault.into() };
        let elsewhere = [("batch".to_owned(), 9)].into();
        result.parity = [
            (&first, None, Verdict::Verified),
            (&second, Some(second.point.clone()), failed("b")),
            (&second, None, Verdict::Yardstick),
            (&first, Some(elsewhere), failed("a")),
        ]
        .map(|(row, point, verdict)| ParityRow { subject: row.subject.clone(), point, verdict })
        .into();
        assert_eq!(result.parity_of(&first), Some(&Verdict::Verified));
        assert_eq!(result.parity_of(&second), Some(&failed("b")));
    }

    #[test]
    fn layers_stand_by_their_numbers_and_those_of_no_layer_last() {
        let ran = ["", "e", "e.layers.0", "e.layers.10", "e.layers.2", "e", "d.layers.1", "d.layers.0", "lm_head", ""];
        let expected = ["e", "e.layers.0", "e.layers.2", "e.layers.10", "d.layers.0", "d.layers.1", "lm_head", ""];
        assert_eq!(sorted(ran.into_iter()), expected);
        assert_eq!(sorted(["1", "0"].into_iter()), ["0", "1"]);
    }
}
