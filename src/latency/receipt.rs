//! What a result must carry so that somebody else can believe it.

use serde::{Deserialize, Serialize};

use crate::provenance::{Library, Machine, ModelFile, Moment};

/// Where, with what and under which circumstances times were taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// Version of this program.
    pub program: String,
    /// Seconds since 1970, UTC.
    pub unix_time: u64,
    /// The machine.
    pub machine: Machine,
    /// Before the first timed call.
    pub before: Moment,
    /// After the last one.
    pub after: Moment,
    /// Times that the processor was throttled in between, where it counts them.
    #[serde(rename = "throttle_events")]
    pub throttled: Option<u64>,
    /// Threads that each backend was given.
    pub threads: Threads,
    /// Runtimes and libraries.
    pub runtimes: Vec<Library>,
    /// Files that were timed.
    pub files: Vec<ModelFile>,
    /// Options, as they were meant.
    pub options: Options,
    /// What weakens the result.
    pub warnings: Vec<String>,
}

/// Threads of the timed backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Threads {
    /// What the user asked for.
    pub asked: Option<usize>,
    /// What ONNX Runtime uses.
    pub onnx_runtime: usize,
    /// What tract uses.
    pub tract: usize,
}

/// What decides what was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// Who decides about the experts.
    pub routing: String,
    /// SHA-256 of the file of inputs, where they came from one.
    #[serde(rename = "inputs_sha256")]
    pub inputs: Option<String>,
    /// Seed of random inputs.
    pub seed: u64,
    /// Samples that end a point.
    pub samples: Option<usize>,
    /// Seconds that end a point.
    pub seconds: Option<f64>,
    /// Most seconds of a warm-up.
    #[serde(rename = "warm_up_seconds")]
    pub warm_up: f64,
    /// Whether a backend that computes something else is timed.
    pub allow_failed_parity: bool,
    /// Whether caches are updated in place where graph and backend can.
    #[serde(default)]
    pub in_place: bool,
    /// The widest instructions that the environment lets the operator library use.
    #[serde(default)]
    pub instructions: Option<String>,
    /// How the environment lets the operator library pack large matrices of bf16.
    #[serde(default)]
    pub packing: Option<String>,
}

/// Processors' worth of time of other programs, beyond processors that the timed threads leave free, that is no
/// weakness of a result.
const MOST_OF_OTHERS: f64 = 0.1;

/// The same of other machines, which do not keep to processors that are free.
const MOST_STOLEN: f64 = 0.02;

impl Receipt {
    /// Notes what is known after the last call, and what weakens the result.
    pub fn finish(&mut self) {
        self.after = Moment::read();
        self.throttled =
            Machine::read().throttled.zip(self.machine.throttled).map(|(after, before)| after - before.min(after));
        self.warnings = self.weaknesses();
    }

    fn weaknesses(&self) -> Vec<String> {
        let Self { machine, before, after, threads, .. } = self;
        let mut warnings = Vec::new();
        let ticks = after.ticks.zip(before.ticks);
        let others = ticks.and_then(|(after, before)| Some((after.cpus, after.of_others_since(&before)?)));
        #[allow(clippy::cast_precision_loss)]
        let is_felt =
            |(cpus, took): &(usize, f64)| *took > cpus.saturating_sub(threads.onnx_runtime) as f64 + MOST_OF_OTHERS;
        if let Some((cpus, took)) = others.filter(is_felt) {
            warnings.push(format!("other programs took {took:.2} of {cpus} processors while this ran"));
        }
        if threads.onnx_runtime > machine.usable_cpus {
            let processors = if machine.usable_cpus == 1 { "processor" } else { "processors" };
            warnings.push(format!("{} threads share {} {processors}", threads.onnx_runtime, machine.usable_cpus));
        }
        if machine.governors.is_empty() {
            warnings.push("the frequency governor is unknown: clocks may have changed".to_owned());
        }
        for governor in machine.governors.iter().filter(|governor| *governor != "performance") {
            warnings.push(format!("the frequency governor is {governor}, not performance"));
        }
        if machine.virtual_machine == Some(true) {
            warnings.push("this is a virtual machine: other machines may share the processor".to_owned());
        }
        if let Some(quota) =
            machine.quota.filter(|quota| *quota < f64::from(u32::try_from(threads.onnx_runtime).unwrap_or(u32::MAX)))
        {
            warnings.push(format!("a control group grants {quota:.2} processors only"));
        }
        let stolen = ticks.and_then(|(after, before)| Some((after.cpus, after.stolen_since(&before)?)));
        if let Some((cpus, took)) = stolen.filter(|(_, took)| *took > MOST_STOLEN) {
            warnings.push(format!("other machines took {took:.2} of {cpus} processors while this ran"));
        }
        if let Some(count) = self.throttled.filter(|count| *count > 0) {
            let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
            warnings.push(format!("the processor was throttled {times} while this ran"));
        }
        warnings
    }
}

/// A receipt of a machine that is known in full, for tests.
#[cfg(test)]
pub(crate) fn sample() -> Receipt {
    let moment = |load: f64| Moment { load: Some([load, load + 0.125, load + 0.25]), ..Moment::default() };
    let file = |file: &str, sha256: &str| ModelFile {
        model: "m.onnx".into(),
        file: file.into(),
        bytes: 9,
        sha256: sha256.into(),
    };
    Receipt {
        program: "0".into(),
        unix_time: 1,
        machine: Machine { cpu: Some("a processor".into()), cpus: Some(8), usable_cpus: 6, ..Machine::default() },
        before: moment(0.5),
        after: moment(1.5),
        throttled: None,
        threads: Threads { asked: None, onnx_runtime: 4, tract: 1 },
        runtimes: Vec::new(),
        files: vec![
            file("encoder_model.onnx", "e"),
            file("decoder_model.onnx", "d"),
            file("decoder_model.onnx.data", "x"),
        ],
        options: Options {
            routing: "data".into(),
            inputs: None,
            seed: 0,
            samples: None,
            seconds: None,
            warm_up: 5.0,
            allow_failed_parity: false,
            in_place: false,
            instructions: None,
            packing: None,
        },
        warnings: Vec::new(),
    }
}

#[cfg(test)]
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
mod tests {
    use super::*;
    use crate::provenance::Ticks;

    /// Of a run in which other programs took the time of `others` processors.
    fn receipt(machine: Machine, others: f64, threads: usize) -> Receipt {
        let cpus = machine.usable_cpus;
        let busy = (others / cpus as f64 * 1000.0).round() as u64;
        let before = Moment { ticks: Some(Ticks::default()), ..Moment::default() };
        let after = Moment { ticks: Some(Ticks { cpus, all: 1000, busy, ..Ticks::default() }), ..Moment::default() };
        let threads = Threads { asked: Some(threads), onnx_runtime: threads, tract: 1 };
        Receipt { machine, before, after, threads, ..sample() }
    }

    #[test]
    fn a_quiet_machine_has_no_warnings_and_a_busy_one_several() {
        let quiet = Machine { usable_cpus: 8, governors: vec!["performance".into()], ..Machine::default() };
        for (others, threads) in [(4.0, 4), (0.0, 8), (0.08, 8)] {
            assert_eq!(receipt(quiet.clone(), others, threads).weaknesses(), [""; 0]);
        }
        assert_eq!(
            receipt(quiet.clone(), 0.2, 8).weaknesses(),
            ["other programs took 0.20 of 8 processors while this ran"]
        );
        let busy = Machine {
            usable_cpus: 2,
            governors: vec!["powersave".into()],
            virtual_machine: Some(true),
            quota: Some(1.5),
            ..quiet.clone()
        };
        let warnings = receipt(busy, 1.8, 4).weaknesses().join("\n");
        let during = |stolen: u64, throttled: u64| {
            let mut receipt = receipt(quiet.clone(), 0.4, 4);
            receipt.after.ticks.as_mut().unwrap().stolen = stolen;
            Receipt { throttled: Some(throttled), ..receipt }.weaknesses()
        };
        assert_eq!(during(2, 0), [""; 0]);
        assert_eq!(during(3, 0), ["other machines took 0.02 of 8 processors while this ran"]);
        assert_eq!(during(0, 3), ["the processor was throttled 3 times while this ran"]);
        assert_eq!(during(0, 1), ["the processor was throttled once while this ran"]);
        let one = Machine { usable_cpus: 1, ..quiet.clone() };
        assert_eq!(receipt(one, 0.0, 2).weaknesses(), ["2 threads share 1 processor"]);
        for part in
            ["took 1.80 of 2 processors", "4 threads share 2", "powersave", "virtual machine", "1.50 processors"]
        {
            assert!(warnings.contains(part), "{part} is not in\n{warnings}");
        }
    }
}
