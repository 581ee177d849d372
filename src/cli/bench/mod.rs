//! `moa-export bench`.

mod args;
mod changes;
mod csv;
mod html;
mod short;
mod text;
mod words;

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

pub(super) use args::BenchArguments;
use args::RoutingArgument;
use serde::Serialize;

use super::{
    Failure,
    apart::keep_apart,
    backends::{BackendOptions, backends, check_ort_options},
    document::{self, Kind, document},
    failure::COMPARABLE,
    interrupt::Ending,
    must_be_open, note, open_checkpoint,
    output_file::{CSV, JSON, OutputFile, PAGE, commit_all, is_stdout, own_ending},
    print_aside, print_result,
    progress::{BenchProgress, VerifyProgress},
    receipt::{instructions, libraries, packing},
};
use crate::{
    backend::{self, Backend, BackendKind, OrtOptions, Ranges},
    engine::DimRange,
    files::{LONGEST_JSON, read_at_most},
    latency::{
        BenchResult, Budget, Choice, End, Grid, Incomparable, LatencyError, Model, Options, Receipt, Regression, Setup,
        Threads, Verdict, bench, compare, left_out, own_inputs,
    },
    parity::{Finding, VerifyError, VerifyOptions, verify_watched},
    provenance::{Machine, Moment, hash_file, now},
    tensor::NamedTensors,
    tensor_file,
};

/// Each once, in the order in which they come.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.fold(Vec::new(), |mut known, one| {
        if !known.contains(&one) {
            known.push(one);
        }
        known
    })
}

const DEFAULT_BACKENDS: [BackendKind; 2] = [BackendKind::Ort, BackendKind::OrtFunction];

/// What ends a point where the user does not say.
const DEFAULT_SAMPLES: usize = 1000;
const DEFAULT_TIME: Duration = Duration::from_secs(10);

pub(super) fn run(arguments: &BenchArguments) -> Result<ExitCode, Failure> {
    check_outputs(arguments)?;
    let grid = arguments.grid()?;
    arguments.models.iter().try_for_each(|model| must_be_open(model))?;
    let outputs = [&arguments.json, &arguments.csv, &arguments.report].into_iter().flatten();
    let ending = Ending::at_once(arguments.models.iter().chain(outputs).map(PathBuf::as_path))?;
    let old = arguments.compare.as_deref().map(read_result).transpose()?;
    let outputs = Outputs::begin(arguments)?;
    let models = Model::open_all(&arguments.models)?;
    let threads = arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let named = !arguments.backends.is_empty();
    let chosen = if named { arguments.backends.as_slice() } else { &DEFAULT_BACKENDS };
    arguments.tensorrt.check(chosen)?;
    check_ort_options(chosen, arguments.library.as_deref(), arguments.threads)?;
    check_seed(arguments)?;
    let inputs = arguments.inputs.as_deref().map(|path| given_inputs(path, &models)).transpose()?;
    let backend_options = BackendOptions {
        threads: Some(threads),
        library: arguments.library.clone(),
        tensorrt: arguments.tensorrt.options(timed_ranges(&grid, &models, inputs.as_ref())),
    };
    let backends = backends(chosen, &backend_options)?;
    let ort = OrtOptions::new(Some(threads), arguments.library.as_deref());
    let bodies = backend::ort_function(ort.clone());
    let progress = BenchProgress::new();
    let setup = Setup {
        models: &models,
        backends: &backends,
        backends_are_named: named,
        bodies: bodies.as_deref(),
        ort,
        grid,
        older: old.as_ref(),
        inputs,
        choice: choice(&arguments.routing)?,
        seed: arguments.seed(),
        budget: budget(arguments),
        verified: verified(arguments, &models, &backends)?,
        allow_failed_parity: arguments.allow_failed_parity,
        in_place: arguments.in_place,
        record_operators: !arguments.no_operators,
        watch: &progress,
    };
    let result = bench(&setup, receipt(arguments, &setup, threads)?);
    drop(progress);
    let result = result.map_err(|error| failure(error, arguments))?;
    let changes = old.as_ref().map(|old| compared(arguments, &result, old)).transpose();
    outputs.write(arguments, &result, changes.as_ref().map(Option::as_ref), &ending)?;
    Ok(if changes?.is_some_and(|changes| changes.is_slower()) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Refuses a seed where nothing is random.
fn check_seed(arguments: &BenchArguments) -> Result<(), Failure> {
    if arguments.seed.is_none() || arguments.inputs.is_none() || arguments.checkpoint.is_some() {
        return Ok(());
    }
    let message = "--seed is for random inputs, and --inputs gives them";
    Err(Failure::usage(message, "leave one of them out, or add --checkpoint to verify with random inputs too"))
}

/// The result beside the older one of `--compare`.
fn compared(arguments: &BenchArguments, result: &BenchResult, old: &BenchResult) -> Result<Regression, Failure> {
    compare(result, old, arguments.threshold / 100.0).map_err(|difference| incomparable(&difference, arguments))
}

fn incomparable(difference: &Incomparable, arguments: &BenchArguments) -> Failure {
    let path = arguments.compare.as_deref().unwrap_or(Path::new("")).display();
    Failure::usage(format!("{path} measured something else: {difference}"), COMPARABLE)
}

/// Reads inputs, and says which graphs they leave out.
fn given_inputs(path: &Path, models: &[Model]) -> Result<NamedTensors, Failure> {
    let inputs = tensor_file::read(path)?;
    for left in left_out(models, &inputs).map_err(|error| of_inputs(error, path))? {
        note(&format!("{} is not timed: {} has no {left}", left.part.as_str(), path.display()));
    }
    Ok(inputs)
}

fn failure(error: LatencyError, arguments: &BenchArguments) -> Failure {
    match (error, &arguments.inputs) {
        (LatencyError::Incomparable(difference), _) => incomparable(&difference, arguments),
        (error @ LatencyError::Trace { .. }, _) => match &arguments.routing {
            RoutingArgument::Trace(file) => Failure::from(error).of_file(file),
            _ => error.into(),
        },
        (error, Some(path)) => of_inputs(error, path),
        (error, None) => error.into(),
    }
}

/// What is wrong with inputs names their file.
fn of_inputs(error: LatencyError, path: &Path) -> Failure {
    match error {
        LatencyError::Backend(error) => Failure::of_inputs(error, path),
        error @ LatencyError::MissingInput { .. } => Failure::from(error).of_file(path),
        error => error.into(),
    }
}

/// Sizes that hold every point, tuned for the largest.
fn timed_ranges(grid: &Grid, models: &[Model], inputs: Option<&NamedTensors>) -> Ranges {
    if let Some(inputs) = inputs {
        let parts = models.iter().flat_map(|model| &model.parts);
        return parts.fold(Ranges::default(), |ranges, (_, file)| match own_inputs(file, inputs) {
            Ok(own) => ranges.holding(file, &own),
            Err(_) => ranges,
        });
    }
    let range = |sizes: &[usize]| {
        let (least, most) = (sizes.iter().min().copied().unwrap_or(1), sizes.iter().max().copied().unwrap_or(1));
        [least, most, most].map(|size| size as u64)
    };
    let most = |sizes: &[usize]| sizes.iter().max().copied().unwrap_or(1);
    let sources = match grid.source.as_slice() {
        [] => &[most(grid.sequences()) + most(grid.pasts())],
        given => given,
    };
    let named = grid.others.iter().map(|(name, size)| DimRange { name: name.clone(), sizes: [*size as u64; 3] });
    Ranges {
        batch: range(grid.batches()),
        past: range(grid.pasts()),
        tokens: range(&[grid.sequences(), sources].concat()),
        named: named.collect(),
    }
}

/// What is wrong with the names of outputs, before anything is timed.
fn check_outputs(arguments: &BenchArguments) -> Result<(), Failure> {
    if [&arguments.json, &arguments.csv].iter().all(|path| path.as_deref().is_some_and(is_stdout)) {
        return Err(Failure::usage("--json and --csv cannot both go to stdout", "give one of them a file"));
    }
    keep_apart(&files(arguments), arguments.inputs())?;
    files(arguments).into_iter().zip([JSON, CSV, PAGE]).try_for_each(|(path, endings)| own_ending(path, endings))
}

/// Files to write; `-` is none.
fn files(arguments: &BenchArguments) -> [Option<&Path>; 3] {
    [&arguments.json, &arguments.csv, &arguments.report].map(|path| path.as_deref())
}

fn budget(arguments: &BenchArguments) -> Budget {
    let end = match (arguments.samples, arguments.seconds.map(Duration::from_secs_f64)) {
        (None, None) => End::Either(DEFAULT_SAMPLES, DEFAULT_TIME),
        (Some(samples), None) => End::Samples(samples),
        (None, Some(time)) => End::Time(time),
        (Some(samples), Some(time)) => End::Either(samples, time),
    };
    Budget { end, warm_up: Duration::from_secs_f64(arguments.warm_up) }
}

fn choice(routing: &RoutingArgument) -> Result<Choice, Failure> {
    Ok(match routing {
        RoutingArgument::Data => Choice::Data,
        RoutingArgument::Uniform => Choice::Uniform,
        RoutingArgument::Zipf(exponent) => Choice::Zipf(*exponent),
        RoutingArgument::Single => Choice::Single,
        RoutingArgument::Trace(file) => {
            Choice::trace(&tensor_file::read(file)?).map_err(|error| Failure::from(error).of_file(file))?
        }
    })
}

/// What `verify` says, by model and backend, where there is a checkpoint.
fn verified(
    arguments: &BenchArguments,
    models: &[Model],
    backends: &[Box<dyn Backend>],
) -> Result<Option<Vec<Vec<Verdict>>>, Failure> {
    let Some(path) = &arguments.checkpoint else { return Ok(None) };
    let checkpoint = open_checkpoint(path, arguments.config.as_deref())?;
    let named = if arguments.backends.is_empty() { &[] } else { backends };
    let required = named.iter().map(|backend| backend.kind()).collect();
    let options =
        VerifyOptions { seed: arguments.seed(), required, skip_same: named.is_empty(), ..VerifyOptions::default() };
    let (mut all, progress) = (Vec::new(), VerifyProgress::new());
    for model in models {
        let result = match verify_watched(&model.path, &checkpoint, backends, &options, &progress) {
            Err(error @ VerifyError::RoutingUnseen { .. }) if arguments.allow_failed_parity => {
                all.push(vec![Verdict::NotChecked { why: error.to_string() }; backends.len()]);
                continue;
            }
            result => result?,
        };
        let verdict = |report| match result.finding(report) {
            Finding::Verified => Verdict::Verified,
            Finding::NotCompared(why) => Verdict::NotChecked { why },
            Finding::Differs(fault) => Verdict::Failed { fault: format!("{fault}; `moa-export verify` says more") },
        };
        all.push(result.backends.iter().map(verdict).collect());
    }
    Ok(Some(all))
}

fn receipt(arguments: &BenchArguments, setup: &Setup<'_>, threads: usize) -> Result<Receipt, Failure> {
    let is_kept =
        [&arguments.json, &arguments.csv, &arguments.report, &arguments.compare].iter().any(|path| path.is_some());
    let mut files = Vec::new();
    for model in setup.models.iter().filter(|_| is_kept) {
        files.extend(model.files()?);
    }
    let inputs = arguments.inputs.as_deref().map(hash_file).transpose()?;
    Ok(Receipt {
        program: env!("CARGO_PKG_VERSION").into(),
        unix_time: now(),
        machine: Machine::read(),
        before: Moment::read(),
        after: Moment::default(),
        throttled: None,
        threads: Threads { asked: arguments.threads, onnx_runtime: threads, tract: 1 },
        runtimes: libraries(setup.backends, setup.ort.operator_library.as_deref()),
        files,
        options: Options {
            routing: setup.choice.name(),
            inputs: inputs.map(|(sha256, _)| sha256),
            seed: setup.seed,
            samples: setup.budget.samples(),
            seconds: setup.budget.time().map(|time| time.as_secs_f64()),
            warm_up: arguments.warm_up,
            allow_failed_parity: arguments.allow_failed_parity,
            in_place: setup.in_place,
            instructions: instructions(setup.backends),
            packing: packing(setup.backends),
        },
        warnings: Vec::new(),
    })
}

fn read_result(path: &Path) -> Result<BenchResult, Failure> {
    let place = path.display().to_string();
    let malformed = |why: String| {
        let help = "give a file that `moa-export bench --json FILE` wrote";
        Failure::malformed(format!("{place} {why}"), help)
    };
    let text = read_at_most(path, LONGEST_JSON).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => malformed(format!("is no result of `bench`: {error}")),
        _ => Failure::io(&error, &place),
    })?;
    document::read(Kind::Bench, &text).map_err(malformed)
}

/// A result, and what became of the older one of `--compare`.
#[derive(Serialize)]
struct Compared<'a> {
    #[serde(flatten)]
    result: &'a BenchResult,
    comparison: Option<&'a Comparison>,
}

/// What became of an older result, or why that is not known.
#[derive(Serialize)]
struct Comparison {
    why_not: Option<String>,
    #[serde(flatten)]
    regression: Regression,
}

/// Files to write, known to be free before anything is timed.
struct Outputs {
    json: Option<OutputFile>,
    csv: Option<OutputFile>,
    report: Option<OutputFile>,
}

impl Outputs {
    fn begin(arguments: &BenchArguments) -> Result<Self, Failure> {
        let [json, csv, report] = files(arguments).map(|path| OutputFile::of_option(path, arguments.force));
        Ok(Self { json: json?, csv: csv?, report: report? })
    }

    /// Prints the result and writes the files; what was measured is not lost where one of them fails.
    fn write(
        self,
        arguments: &BenchArguments,
        result: &BenchResult,
        changes: Result<Option<&Regression>, &Failure>,
        ending: &Ending,
    ) -> Result<(), Failure> {
        let comparison = match changes {
            Ok(regression) => regression.map(|regression| Comparison { why_not: None, regression: regression.clone() }),
            Err(failure) => Some(Comparison {
                why_not: Some(failure.message.clone()),
                regression: Regression { threshold: arguments.threshold / 100.0, ..Regression::default() },
            }),
        };
        let on_page = changes.map_err(|failure| failure.message.as_str());
        let changes = changes.unwrap_or_default();
        let json = || document(Kind::Bench, Compared { result, comparison: comparison.as_ref() });
        let printed = Self::print(arguments, result, changes, &json);
        let json = self.json.map(|file| file.fill(json()));
        let csv = self.csv.map(|file| file.fill(csv::csv(result)));
        let report = self.report.map(|file| file.fill(html::html(result, on_page)));
        let written = commit_all([json, csv, report], ending);
        printed.and(written)
    }

    fn print(
        arguments: &BenchArguments,
        result: &BenchResult,
        changes: Option<&Regression>,
        json: &dyn Fn() -> String,
    ) -> Result<(), Failure> {
        let to_stdout = |path: &Option<PathBuf>| path.as_deref().is_some_and(is_stdout);
        let changes = changes.map(|changes| changes::text(result, changes)).unwrap_or_default();
        if to_stdout(&arguments.json) {
            print_result(&json())?;
        } else if to_stdout(&arguments.csv) {
            print_result(&csv::csv(result))?;
        } else {
            return print_result(&(text::text(result) + &changes));
        }
        print_aside(&changes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::latency::{Estimate, Outcome, sample};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArguments,
    }

    fn arguments(line: &str) -> BenchArguments {
        Line::try_parse_from(format!("bench m.onnx {line}").split_whitespace()).unwrap().bench
    }

    #[test]
    fn an_engine_is_built_for_every_point_and_tuned_for_the_largest() {
        let ranges = |line: &str| {
            let Ranges { batch, past, tokens, named } = timed_ranges(&arguments(line).grid().unwrap(), &[], None);
            let named: Vec<_> = named.into_iter().map(|DimRange { name, sizes }| (name, sizes)).collect();
            (batch, past, tokens, named)
        };
        assert_eq!(ranges(""), ([1; 3], [0; 3], [32; 3], vec![]));
        let heads = vec![("heads".to_owned(), [6; 3])];
        let line = "--batch 4,1,2 --seq 8,3 --past 5,0 --dim heads=6";
        assert_eq!(ranges(line), ([1, 4, 4], [0, 5, 5], [3, 13, 13], heads));
        assert_eq!(ranges("--seq 8,3 --past 5,0 --source 20,2"), ([1; 3], [0, 5, 5], [2, 20, 20], vec![]));
    }

    #[test]
    fn a_threshold_is_in_per_cent() {
        let old = sample();
        let mut new = old.clone();
        new.rows[0].turn_median = Estimate { value: 1_500.0, interval: Some([1_450.0, 1_550.0]) };
        let outcomes = |line: &str| {
            let changes = compared(&arguments(&format!("--compare old.json {line}")), &new, &old).ok().unwrap();
            changes.rows.iter().map(|change| change.outcome).collect::<Vec<_>>()
        };
        assert_eq!(outcomes("--threshold 40"), [Outcome::Slower, Outcome::Same]);
        assert_eq!(outcomes("--threshold 50"), [Outcome::Same; 2]);
        assert_eq!(outcomes(""), [Outcome::Slower, Outcome::Same]);
        new.receipt.options.seed = 1;
        let failure = compared(&arguments("--compare old.json"), &new, &old).err().unwrap();
        assert_eq!(failure.message, "old.json measured something else: seed: 0 then, 1 now");
    }

    #[test]
    fn sizes_and_limits_are_those_that_were_typed() {
        let line = "--batch 4,1 --seq 8 --past 5 --source 20 --dim heads=6 --warm-up 2.5";
        let grid = arguments(line).grid().unwrap();
        assert_eq!((grid.batch, grid.sequence, grid.past, grid.source), (vec![4, 1], vec![8], vec![5], vec![20]));
        let half = Duration::from_millis(500);
        for (line, end) in [
            ("", End::Either(DEFAULT_SAMPLES, DEFAULT_TIME)),
            ("--samples 7", End::Samples(7)),
            ("--seconds 0.5", End::Time(half)),
            ("--samples 7 --seconds 0.5", End::Either(7, half)),
        ] {
            assert_eq!(budget(&arguments(line)).end, end, "{line}");
        }
        assert_eq!(budget(&arguments(line)).warm_up, Duration::from_millis(2_500));
    }
}
