//! `moa-export build`.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, builder::PossibleValuesParser};
use indicatif::{ProgressBar, ProgressStyle};

use super::{
    Failure,
    apart::keep_apart,
    args::{PlanDtype, within, written},
    document::{Kind, document},
    interrupt::Ending,
    must_be_open, note,
    output_file::{OutputFile, output_place},
    print_result,
    shape_args::ShapeArguments,
    table::size,
    tensorrt_args::CacheArguments,
};
use crate::{
    backend::{EngineError, Installation, Plan, PlanRequest},
    engine::{
        BuildOptions, Dtype, GPUS, Gpu, PlanLock, ShapeProfile, dtype_of, must_be, must_fit, must_have_positions,
    },
    file_names::{MODEL_ENDINGS, PLAN_ENDINGS, graphs_in},
    files::{has_ending, in_folder, name_of, read_whole},
    onnx::{OnnxFile, Staging, read_model},
};

const DETAILS: &str = "\
An engine is built on the GPU that will run it, by the TensorRT and the plugin that are here (`moa-export ops` shows \
them). Every form is taken: bodies of our operators are stripped as `moa-export prepare` does. Types are those of the \
model; export with --dtype fp16 for an engine in fp16. Sizes between MIN and MAX are served, and OPT is what the engine \
is tuned for. --min, --opt and --max list the shapes of all inputs instead, as trtexec's --minShapes, --optShapes and \
--maxShapes do. An engine with several profiles is tuned for each of them, and a run takes the first that holds its shapes.

Beside PLAN, PLAN.lock.json says what the plan was built from and what it needs: hashes of model, plugin, kernels and \
plan, versions, GPU, sizes, options, layers with their tactics. `run`, `verify` and `bench` load a plan only where the \
lock matches, or with --trust-plan: a plan is executable code, so load your own. Engines are kept in a cache, which may \
be deleted at any time; a build that was done before ends at once.

Examples:
  moa-export build model.onnx -o model.plan --dim batch=1:1:8 --dim sequence=1:128:512
  moa-export build OUT -o PLANS --gpu h200 --dim batch=1:1:8 --dim source=1:64:256 \\
      --dim sequence=1:1:64 --dim past_sequence=0:64:256
  moa-export build model.onnx -o model.plan --min input_ids:1x1,attention_mask:1x1 \\
      --opt input_ids:1x128,attention_mask:1x128 --max input_ids:8x512,attention_mask:8x512
  moa-export build model.onnx -o model.plan --dim batch=1:1:8 \\
      --profile=0 --dim sequence=1 --profile=1 --dim sequence=2:128:512
  moa-export run model.plan --inputs in.safetensors --outputs out.safetensors
  moa-export verify model.onnx --checkpoint CHECKPOINT --backends tensorrt --plan model.plan";

const AUTO: &str = "auto";

#[derive(Debug, Args)]
#[command(after_help = DETAILS)]
pub(super) struct BuildArguments {
    /// Model file, or the folder of an export
    model: PathBuf,
    /// Plan to write; for a folder, the folder of the plans
    #[arg(short, long, value_name = "PLAN", value_parser = written())]
    output: PathBuf,
    /// GPU that must be here; `auto` takes any
    #[arg(long, value_name = "GPU", default_value = AUTO, ignore_case = true)]
    #[arg(value_parser = PossibleValuesParser::new(gpu_names()))]
    gpu: String,
    #[command(flatten)]
    shapes: ShapeArguments,
    /// Type that the model must have [default: any]
    #[arg(long, value_enum)]
    dtype: Option<PlanDtype>,
    /// Let products of fp32 round their factors to TF32, which `verify` rejects
    #[arg(long)]
    tf32: bool,
    /// Memory limit of TensorRT's own layers, such as 512M or 4G [default: TensorRT's choice]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    workspace: Option<u64>,
    /// Effort of the search for fast kernels, 1 to 5 [default: TensorRT's choice]
    #[arg(long, value_name = "N", value_parser = within::<u32>(1..=5))]
    optimization_level: Option<u32>,
    /// Timings of earlier builds: read where it is there, and written with those of this build
    #[arg(long, value_name = "FILE")]
    timing_cache: Option<PathBuf>,
    #[command(flatten)]
    cache: CacheArguments,
    /// Replace existing files
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

fn gpu_names() -> Vec<&'static str> {
    GPUS.iter().map(|gpu| gpu.name).chain([AUTO]).collect()
}

/// Reads a number of bytes, with the letter of a power of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let expected = || "expected a number of bytes, such as 512M or 4G".to_owned();
    let upper = text.to_ascii_uppercase();
    let number = upper.trim_end_matches("IB").trim_end_matches('B');
    let (digits, shift) = match number.char_indices().last() {
        Some((at, 'K')) => (&number[..at], 10),
        Some((at, 'M')) => (&number[..at], 20),
        Some((at, 'G')) => (&number[..at], 30),
        _ => (number, 0),
    };
    let count: u64 = digits.parse().map_err(|_| expected())?;
    count.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(expected)
}

/// One graph on its way to a plan.
struct Graph {
    file: OnnxFile,
    /// Name of the plan's file.
    plan: String,
    profiles: Vec<ShapeProfile>,
}

/// What became of a graph.
struct Done {
    plan: Plan,
    path: PathBuf,
    elapsed: Duration,
}

pub(super) fn run(arguments: &BuildArguments) -> Result<ExitCode, Failure> {
    let gpu = Gpu::named(&arguments.gpu);
    let (folder, graphs) = graphs(arguments)?;
    for graph in &graphs {
        dtype_fits(arguments, gpu.as_ref(), &graph.file)?;
        must_have_positions(&graph.file, &graph.profiles)?;
    }
    let lock_of = |plan: &String| PlanLock::path_of(Path::new(plan)).display().to_string();
    let names: Vec<String> = graphs.iter().flat_map(|graph| [graph.plan.clone(), lock_of(&graph.plan)]).collect();
    keep_models(arguments, &folder, &names, &graphs)?;
    let timings = arguments.timing_cache.as_deref().map(TimingCache::open).transpose()?;
    let here = Installation::open()?;
    for graph in &graphs {
        let dtype = dtype_of(&graph.file)?;
        must_be(here.device(), gpu.as_ref(), here.release(), dtype).map_err(EngineError::from)?;
    }
    let ending = Ending::at_once([arguments.output.as_path()])?;
    ending.says("the build was interrupted, and nothing was written");
    let mut staging = Staging::begin(&folder, &names, arguments.force)?;
    let mut done = Vec::new();
    let mut known = timings.as_ref().map(|timings| timings.bytes.clone());
    for graph in &graphs {
        let start = Instant::now();
        let plan = plan(arguments, &here, graph, known.as_deref(), &ending)?;
        known = plan.timing_cache.clone().or(known);
        for (name, bytes) in [(&graph.plan, &plan.bytes), (&lock_of(&graph.plan), &plan.lock.to_json().into_bytes())] {
            staging.write(name, bytes)?;
        }
        done.push(Done { plan, path: in_folder(&folder, &graph.plan), elapsed: start.elapsed() });
    }
    ending.place(|| {
        staging.commit()?;
        timings.as_ref().zip(known).map_or(Ok(()), |(timings, bytes)| timings.write(&bytes))
    })?;
    print_result(&if arguments.json { json(&done) } else { text(&done) })?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses to write over a model, or one result over another, whatever may be replaced.
fn keep_models(arguments: &BuildArguments, folder: &Path, names: &[String], graphs: &[Graph]) -> Result<(), Failure> {
    let written: Vec<_> =
        names.iter().map(|name| in_folder(folder, name)).chain(arguments.timing_cache.clone()).collect();
    let written: Vec<_> = written.iter().map(|path| Some(path.as_path())).collect();
    let read: Vec<_> = graphs.iter().flat_map(|graph| graph.file.files()).collect();
    keep_apart(&written, read.iter().map(PathBuf::as_path))
}

/// The graphs, and the folder of their plans.
fn graphs(arguments: &BuildArguments) -> Result<(PathBuf, Vec<Graph>), Failure> {
    must_be_open(&arguments.model)?;
    let (folder, files) = if arguments.model.is_dir() {
        let files = graphs_in(&arguments.model)?;
        if has_ending(&arguments.output, PLAN_ENDINGS) {
            let message = format!("{} is a folder, and -o names one plan", arguments.model.display());
            return Err(Failure::usage(message, "give a folder for the plans: -o PLANS"));
        }
        let plan = |(_, path): (_, PathBuf)| {
            let name = name_of(&path.with_extension("plan"));
            (path, name)
        };
        (arguments.output.clone(), files.into_iter().map(plan).collect::<Vec<_>>())
    } else {
        let (folder, name) = output_place(&arguments.output)?;
        if has_ending(&name, MODEL_ENDINGS) {
            let message = format!("{name} is the name of a model, and a plan is none");
            return Err(Failure::usage(message, "give -o NAME.plan"));
        }
        (folder, vec![(arguments.model.clone(), name)])
    };
    let files: Vec<_> =
        files.into_iter().map(|(path, plan)| Ok((read_model(&path)?, plan))).collect::<Result<_, Failure>>()?;
    let inputs: Vec<_> = files.iter().map(|(file, _): &(OnnxFile, String)| file.inputs()).collect();
    let profiles = arguments.shapes.profiles(&inputs)?;
    let graph = |((file, plan), profiles)| Graph { file, plan, profiles };
    Ok((folder, files.into_iter().zip(profiles).map(graph).collect()))
}

/// What can be told before TensorRT is looked for.
fn dtype_fits(arguments: &BuildArguments, gpu: Option<&Gpu>, file: &OnnxFile) -> Result<(), Failure> {
    let dtype = dtype_of(file)?;
    if let Some(asked) = arguments.dtype.map(PlanDtype::dtype).filter(|asked| *asked != dtype) {
        let place = file.path().display();
        let message = format!("{place} is {}, and an engine has the types of its model", dtype.name());
        return Err(Failure::dtype(message, format!("export with --dtype {}", asked.name())));
    }
    if arguments.tf32 && dtype != Dtype::Fp32 {
        let message = format!("--tf32 is for models of fp32, and {} is {}", file.path().display(), dtype.name());
        return Err(Failure::usage(message, "leave out --tf32"));
    }
    Ok(must_fit(gpu, None, dtype)?)
}

fn plan(
    arguments: &BuildArguments,
    here: &Installation,
    graph: &Graph,
    timing_cache: Option<&[u8]>,
    ending: &Ending,
) -> Result<Plan, Failure> {
    let cache = arguments.cache.cache();
    let bar = spinner(&graph.file);
    let progress = |phase: &str, step: i32, steps: i32| {
        bar.set_message(if (1..steps).contains(&step) { format!("{phase}, {step} of {steps}") } else { phase.into() });
        ending.is_asked_for()
    };
    let notice = |text: &str| bar.suspend(|| note(text));
    let request = PlanRequest {
        profiles: graph.profiles.clone(),
        options: BuildOptions {
            tf32: arguments.tf32,
            workspace_bytes: arguments.workspace,
            optimization_level: arguments.optimization_level,
        },
        timing_cache,
        cache: cache.as_ref(),
        progress: Some(&progress),
        notice: Some(&notice),
    };
    ending.waits_for_answers(here.tells_progress());
    let plan = here.plan(&graph.file, &request);
    bar.finish_and_clear();
    if ending.is_asked_for() { Err(ending.failure()) } else { Ok(plan?) }
}

/// Elapsed time on stderr, where that is a terminal.
fn spinner(file: &OnnxFile) -> ProgressBar {
    let name = file.name();
    let bar = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{spinner} building {prefix}, {elapsed} {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.set_prefix(name);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// The file of `--timing-cache`.
struct TimingCache {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl TimingCache {
    fn open(path: &Path) -> Result<Self, Failure> {
        let bytes = match read_whole(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Failure::io(&error, &path.display().to_string())),
        };
        Ok(Self { path: path.to_path_buf(), bytes })
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        OutputFile::begin(&self.path, true)?.fill(bytes)?.commit()
    }
}

fn text(done: &[Done]) -> String {
    let line = |Done { plan, path, elapsed }: &Done| {
        let recipe = &plan.lock.recipe;
        let how = match plan.from_cache {
            true => "from the cache".to_owned(),
            false => format!("built in {:.1} s", elapsed.as_secs_f64()),
        };
        format!(
            "wrote {}  {}, {}, TensorRT {} on {}, {how}\n",
            path.display(),
            size(plan.lock.plan_bytes),
            recipe.dtype,
            recipe.machine.tensorrt,
            recipe.machine.device
        )
    };
    done.iter().map(line).collect()
}

fn json(done: &[Done]) -> String {
    let one = |Done { plan, path, elapsed }: &Done| {
        let PlanLock { plan_sha256, plan_bytes, key, recipe, cuda_driver, .. } = &plan.lock;
        serde_json::json!({
            "plan": path.display().to_string(),
            "lock": PlanLock::path_of(path).display().to_string(),
            "sha256": plan_sha256,
            "bytes": plan_bytes,
            "key": key,
            "from_cache": plan.from_cache,
            "seconds": elapsed.as_secs_f64(),
            "dtype": recipe.dtype,
            "tensorrt": recipe.machine.tensorrt,
            "gpu": recipe.machine.device,
            "compute_capability": recipe.machine.compute_capability,
            "cuda_driver": cuda_driver,
            "profiles": recipe.profiles,
        })
    };
    let all: Vec<_> = done.iter().map(one).collect();
    document(Kind::Build, serde_json::json!({ "plans": all }))
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_read() {
        for (text, expected) in
            [("1", 1), ("512M", 512 << 20), ("4g", 4 << 30), ("2GiB", 2 << 30), ("3kb", 3 << 10), ("10B", 10)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for wrong in ["", "0", "M", "-1", "1.5G", "1T", "99999999999G", "x"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
