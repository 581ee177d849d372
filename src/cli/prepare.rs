//! `moa-export prepare`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, builder::PossibleValuesParser};
use prost::Message;

use super::{Failure, print_result, run::output_place};
use crate::{
    engine::{Dtype, GPUS, Gpu, Plugin, PrepareError, RELEASES, Release, Version, fit, prepare},
    onnx::{
        OnnxFile, Staging, WriteError,
        proto::tensor_proto::DataType,
        read::{Dim, ValueInfo},
        read_model,
    },
};

const DETAILS: &str = "\
The file that is written holds the same weights and computes the same values. Bodies of our operators are gone, their \
nodes name the plugin, inputs that are absent are told by an attribute, and outputs that nobody reads are cut. The form \
`standard` is not prepared: TensorRT takes it as it is. The plugin is built by `cargo xtask tensorrt`.

Examples:
  moa-export prepare model.onnx -o model.trt.onnx
  moa-export prepare model.onnx -o model.trt.onnx --gpu v100 --tensorrt 10.4 --dim batch=1:1:8 --dim sequence=1:128:512
";

#[derive(Debug, Args)]
#[command(after_help = DETAILS)]
pub(super) struct PrepareArguments {
    /// Model file of an export
    model: PathBuf,
    /// Model file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// GPU that must fit [default: any]
    #[arg(long, value_name = "GPU", value_parser = PossibleValuesParser::new(GPUS.map(|gpu| gpu.name)))]
    gpu: Option<String>,
    /// Release of TensorRT that must fit, such as 10.4 [default: any]
    #[arg(long, value_name = "VERSION", value_parser = version)]
    tensorrt: Option<Version>,
    /// Smallest, most frequent and largest size of a dimension that the model leaves open, for the line that builds
    /// an engine; repeatable
    #[arg(long = "dim", value_name = "NAME=MIN:OPT:MAX", value_parser = sizes)]
    dims: Vec<Sizes>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

fn version(text: &str) -> Result<Version, String> {
    let mut numbers = text.split('.').map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok(Version(major, minor)),
        _ => Err("expected a version such as 10.4".into()),
    }
}

/// Sizes of one open dimension.
#[derive(Debug, Clone)]
struct Sizes {
    name: String,
    /// Smallest, most frequent, largest.
    sizes: [u64; 3],
}

fn sizes(text: &str) -> Result<Sizes, String> {
    let expected = || "expected NAME=MIN:OPT:MAX, such as batch=1:4:8".to_owned();
    let (name, numbers) = text.split_once('=').ok_or_else(expected)?;
    let numbers: Vec<u64> = numbers.split(':').map(str::parse).collect::<Result<_, _>>().map_err(|_| expected())?;
    let sizes: [u64; 3] = numbers.try_into().map_err(|_| expected())?;
    if !sizes.is_sorted() {
        return Err("MIN may not exceed OPT, nor OPT exceed MAX".into());
    }
    Ok(Sizes { name: name.to_owned(), sizes })
}

pub(super) fn run(arguments: &PrepareArguments) -> Result<ExitCode, Failure> {
    let file = read_model(&arguments.model)?;
    let gpu = arguments.gpu.as_deref().and_then(|name| GPUS.into_iter().find(|gpu| gpu.name == name));
    let release = arguments.tensorrt.map(release).transpose()?;
    let dtype = dtype(&file);
    must_fit(gpu.as_ref(), release, dtype)?;
    let open = open_dims(&file.inputs());
    sizes_fit(&arguments.dims, &open)?;
    all_named(&arguments.dims, &file.inputs())?;
    let (folder, name) = output_place(&arguments.output)?;
    data_stays_beside(&file, &folder)?;
    let prepared = prepare(file.model(), release).map_err(refused)?;
    let checked = file.with_model(prepared.model)?;
    let mut staging = Staging::begin(&folder, std::slice::from_ref(&name), arguments.force)?;
    let bytes = checked.model().encode_to_vec();
    staging.file::<WriteError>(&name, |writer| {
        writer.write_all(&bytes).map_err(|source| WriteError::Io { path: arguments.output.clone(), source })
    })?;
    staging.commit()?;
    let mut command = trtexec(&arguments.output, release, dtype);
    if !arguments.dims.is_empty() {
        command.push_str(&profile(&checked.inputs(), &arguments.dims));
    }
    let choose = open.iter().filter(|_| arguments.dims.is_empty()).map(|name| format!(" --dim {name}=MIN:OPT:MAX"));
    let choose: String = choose.collect();
    print_result(&match arguments.json {
        true => {
            let output = arguments.output.display().to_string();
            let value = serde_json::json!({
                "output": output, "plugins": prepared.plugins, "dtype": dtype.name(), "trtexec": command, "open": open,
            });
            format!("{value:#}\n")
        }
        false => {
            let place = arguments.output.display();
            let mut text = format!("wrote {place}: {} nodes for the plugin, {}\n", prepared.plugins, dtype.name());
            text.push_str(&match choose.is_empty() {
                true => format!("next: {command}\n"),
                false => format!("next: {command} --minShapes=… --optShapes=… --maxShapes=…, which{choose} fills in\n"),
            });
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What the table knows of a version; newer ones than it knows are taken for its newest.
fn release(version: Version) -> Result<&'static Release, Failure> {
    RELEASES.iter().rev().find(|release| release.first <= version).ok_or_else(|| {
        let message = format!("TensorRT {version} is too old: {} is the oldest", RELEASES[0].first);
        Failure::unsupported(message, Some("`moa-export plan` shows what fits".into()))
    })
}

/// The type of weights and activations: that of the weights which are not f32 everywhere.
fn dtype(file: &OnnxFile) -> Dtype {
    let weights = file.graph().map_or(&[][..], |graph| &graph.initializer);
    let has = |wanted: DataType| weights.iter().any(|weight| weight.data_type == wanted as i32);
    if has(DataType::Float16) {
        Dtype::Fp16
    } else if has(DataType::Bfloat16) {
        Dtype::Bf16
    } else {
        Dtype::Fp32
    }
}

fn must_fit(gpu: Option<&Gpu>, release: Option<&'static Release>, dtype: Dtype) -> Result<(), Failure> {
    let Some(gpu) = gpu else {
        return match release {
            Some(release) if dtype == Dtype::Bf16 && !release.bf16 => {
                let message = format!("TensorRT {} has no bfloat16, and the model is bf16", release.name);
                Err(Failure::unsupported(message, Some("export with --dtype fp16, or take TensorRT 10.0".into())))
            }
            _ => Ok(()),
        };
    };
    let releases = release.map_or_else(|| RELEASES.iter().collect(), |release| vec![release]);
    let misfits: Vec<_> = releases.iter().map_while(|release| fit(gpu, release, dtype).err()).collect();
    match misfits.last() {
        Some(why) if misfits.len() == releases.len() => {
            let message = format!("the model is {}, and {} does not fit: {why}", dtype.name(), gpu.name);
            let help = format!("`moa-export plan --gpu {}` shows what fits", gpu.name);
            Err(Failure::unsupported(message, Some(help)))
        }
        _ => Ok(()),
    }
}

/// External data is named by its place beside the model.
fn data_stays_beside(file: &OnnxFile, folder: &Path) -> Result<(), Failure> {
    let place = file.path().parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let same = matches!((fs::canonicalize(place), fs::canonicalize(folder)), (Ok(left), Ok(right)) if left == right);
    if same || !file.has_external_data() {
        return Ok(());
    }
    let message = format!("the weights lie beside {}, and -o names another folder", file.path().display());
    Err(Failure::usage(message, Some(&format!("choose a file in {}", place.display()))))
}

fn refused(error: PrepareError) -> Failure {
    let help = match error {
        PrepareError::NothingToDo => "give the file itself to trtexec",
        PrepareError::MixedTypes { .. } => "export with --dtype fp16 or --dtype fp32",
        PrepareError::Routing { .. } => "export without --router-outputs, or take TensorRT 10.0 or newer",
        _ => "give a file that moa-export has written",
    };
    Failure::unsupported(error.to_string(), Some(help.into()))
}

/// Names of the dimensions that the model leaves open, in order.
fn open_dims(inputs: &[ValueInfo]) -> Vec<String> {
    let dims = inputs.iter().flat_map(|input| input.dims.iter().flatten());
    let mut names = Vec::new();
    for dim in dims {
        let Dim::Symbolic(text) = dim else { continue };
        for name in terms(text).filter(|name| name.parse::<u64>().is_err()) {
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
    }
    names
}

/// The summands of a dimension such as `past_sequence + sequence`.
fn terms(dim: &str) -> impl Iterator<Item = &str> {
    dim.split('+').map(str::trim)
}

/// Sizes are given for all open dimensions or for none.
fn sizes_fit(dims: &[Sizes], open: &[String]) -> Result<(), Failure> {
    let help = format!("the model leaves open: {}", open.join(", "));
    if let Some(unknown) = dims.iter().find(|dim| !open.contains(&dim.name)) {
        return Err(Failure::usage(format!("--dim names `{}`, which no input has", unknown.name), Some(&help)));
    }
    let missing: Vec<_> = open.iter().filter(|name| !dims.iter().any(|dim| dim.name == **name)).cloned().collect();
    if !dims.is_empty() && !missing.is_empty() {
        let message = format!("--dim is missing for {}", missing.join(", "));
        return Err(Failure::usage(message, Some("give NAME=MIN:OPT:MAX for each")));
    }
    Ok(())
}

/// Sizes are chosen by name.
fn all_named(dims: &[Sizes], inputs: &[ValueInfo]) -> Result<(), Failure> {
    let is_unknown = |input: &&ValueInfo| input.dims.iter().flatten().any(|dim| *dim == Dim::Unknown);
    match inputs.iter().find(is_unknown) {
        Some(input) if !dims.is_empty() => {
            let message = format!("input `{}` has a dimension without a name, which --dim cannot give", input.name);
            Err(Failure::usage(message, Some("leave out --dim, and write the shapes for trtexec by hand")))
        }
        _ => Ok(()),
    }
}

/// The line that builds an engine, but for its shapes.
fn trtexec(onnx: &Path, release: Option<&Release>, dtype: Dtype) -> String {
    let mut words = vec![
        "trtexec".to_owned(),
        format!("--onnx={}", onnx.display()),
        "--dynamicPlugins=libmoa_tensorrt.so".to_owned(),
        format!("--saveEngine={}", onnx.with_extension("plan").display()),
    ];
    match release {
        Some(release) if release.plugin == Plugin::V2DynamicExt && dtype == Dtype::Fp16 => words.push("--fp16".into()),
        Some(release) if release.plugin == Plugin::V3 && !release.strongly_typed_only => {
            words.push("--stronglyTyped".into());
        }
        _ => {}
    }
    words.join(" ")
}

/// The options for the shapes of every input that has an open dimension.
fn profile(inputs: &[ValueInfo], dims: &[Sizes]) -> String {
    let is_open = |input: &&ValueInfo| input.dims.iter().flatten().any(|dim| !matches!(dim, Dim::Fixed(_)));
    let options = ["min", "opt", "max"].iter().enumerate().map(|(which, name)| {
        let shapes: Vec<_> = inputs.iter().filter(is_open).map(|input| shape(input, dims, which)).collect();
        format!(" --{name}Shapes={}", shapes.join(","))
    });
    options.collect()
}

fn shape(input: &ValueInfo, dims: &[Sizes], which: usize) -> String {
    let size = |name: &str| {
        let given = dims.iter().find(|dim| dim.name == name).map(|dim| dim.sizes[which]);
        given.or_else(|| name.parse().ok()).unwrap_or(0)
    };
    let sizes = input.dims.iter().flatten().map(|dim| match dim {
        Dim::Fixed(size) => size.to_string(),
        Dim::Symbolic(text) => terms(text).map(size).fold(0_u64, u64::saturating_add).to_string(),
        Dim::Unknown => String::new(),
    });
    format!("{}:{}", input.name, sizes.collect::<Vec<_>>().join("x"))
}
