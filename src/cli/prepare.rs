//! `moa-export prepare`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, builder::PossibleValuesParser};
use moa_graphs::Form;
use prost::Message;

use super::{
    Failure, apart,
    args::written,
    document::{Kind, document},
    interrupt::Ending,
    only_graph,
    output_file::OutputFile,
    print_result,
    shape_args::ShapeArguments,
    table::counted,
};
use crate::{
    backend::find_tensorrt_plugin,
    engine::{
        Dtype, GPUS, Gpu, InputShapes, Plugin, Release, ReleaseNumber, dtype_of, known_release_of, must_fit,
        must_have_positions, open_dims, prepare,
    },
    file_names::MODEL_ENDINGS,
    files::{ends_as_folder, folder_of, has_ending},
    metadata,
    onnx::{
        OnnxFile,
        read::{Dim, ValueInfo},
        read_model,
    },
    shell::word,
};

const DETAILS: &str = "\
The file that is written holds the same weights and computes the same values, but that of an export in bf16 rounds what \
our operators read and give to bf16. Bodies of our operators are gone, their \
nodes name the plugin, an attribute lists the inputs that are present where one is absent before them, and outputs that nobody reads are cut. The form \
`standard` is not prepared: TensorRT takes it as it is. The plugin is built by `cargo xtask tensorrt`.

Examples:
  moa-export prepare model.onnx -o model.trt.onnx
  moa-export prepare model.onnx -o model.trt.onnx --gpu v100 --tensorrt 10.4 \\
      --dim batch=1:1:8 --dim sequence=1:128:512
  moa-export prepare OUT/model.onnx -o OUT/model.trt.onnx \\
      --dim batch=1:1:8 --dim sequence=1:1:64 --dim past_sequence=0:64:256
";

#[derive(Debug, Args)]
#[command(after_help = DETAILS)]
pub(super) struct PrepareArguments {
    /// Model file of an export, or a folder with one graph
    model: PathBuf,
    /// Model file to write
    #[arg(short, long, value_name = "FILE", value_parser = written())]
    output: PathBuf,
    /// GPU to check for [default: any]
    #[arg(long, value_name = "GPU", ignore_case = true)]
    #[arg(value_parser = PossibleValuesParser::new(GPUS.map(|gpu| gpu.name)))]
    gpu: Option<String>,
    /// Release of TensorRT to check for, such as 10.4 [default: any]
    #[arg(long, value_name = "VERSION")]
    tensorrt: Option<ReleaseNumber>,
    #[command(flatten, next_help_heading = "For the line that builds an engine")]
    shapes: ShapeArguments,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &PrepareArguments) -> Result<ExitCode, Failure> {
    // A file is not found again under a name with a slash behind it.
    let onnx = &arguments.output.components().collect::<PathBuf>();
    let ending = Ending::at_once([onnx.as_path()])?;
    let file = read_model(&only_graph(&arguments.model)?)?;
    let gpu = arguments.gpu.as_deref().and_then(Gpu::named);
    let release = arguments.tensorrt.map(known_release_of).transpose()?;
    let dtype = dtype_of(&file)?;
    must_fit(gpu.as_ref(), release, dtype)?;
    let inputs = file.inputs();
    let open = open_dims(&inputs);
    let profiles = match arguments.shapes.is_empty() {
        true => Vec::new(),
        false => arguments.shapes.profiles(std::slice::from_ref(&inputs))?.concat(),
    };
    must_have_positions(&file, &profiles)?;
    let folder = folder_of(onnx);
    is_named_like_a_model(onnx)?;
    is_another_file(&file, onnx)?;
    data_stays_beside(&file, folder)?;
    let mut prepared = prepare(file.model())?;
    for entry in prepared.model.metadata_props.iter_mut().filter(|entry| entry.key == metadata::FORM) {
        entry.value = Form::Fused.as_str().into();
    }
    let checked = file.with_model(prepared.model)?;
    let output = OutputFile::begin(onnx, arguments.force)?.fill(checked.model().encode_to_vec())?;
    ending.place(|| output.commit())?;
    let mut command = trtexec(onnx, release, dtype);
    for (index, shapes) in profiles.iter().enumerate() {
        if profiles.len() > 1 {
            command.push_str(&format!(" --profile={index}"));
        }
        command.push_str(&profile(&inputs, shapes));
    }
    let choose = open.iter().filter(|_| profiles.is_empty()).map(|name| format!(" --dim {name}=MIN:OPT:MAX"));
    let choose: String = choose.collect();
    print_result(&match arguments.json {
        true => {
            let value = serde_json::json!({
                "path": onnx.display().to_string(),
                "plugin_nodes": prepared.plugins,
                "dtype": dtype.name(),
                "trtexec": command,
                "open_dimensions": open,
            });
            document(Kind::Prepare, value)
        }
        false => {
            let nodes = counted(prepared.plugins, "node");
            let mut text = format!("wrote {}: {nodes} for the plugin, {}\n", onnx.display(), dtype.name());
            text.push_str(&match choose.is_empty() {
                true => format!("next: {command}\n"),
                false => format!(
                    "next: {command} --minShapes=… --optShapes=… --maxShapes=…\n\
                     to have the shapes filled in: add{choose}\n"
                ),
            });
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Engines lie beside the model under its name and the ending `plan`.
fn is_named_like_a_model(output: &Path) -> Result<(), Failure> {
    if !ends_as_folder(output) && has_ending(output, MODEL_ENDINGS) {
        return Ok(());
    }
    let message = format!("{} does not end in .onnx, as models do", output.display());
    Err(Failure::output_name(message, "give -o NAME.onnx, such as NAME.trt.onnx; `moa-export build` writes NAME.plan"))
}

/// `--force` replaces what was prepared before, and never the export itself, which other runtimes need.
fn is_another_file(file: &OnnxFile, output: &Path) -> Result<(), Failure> {
    if apart::place(file.path()) != apart::place(output) {
        return apart::keep_apart(&[Some(output)], file.data_files().iter().map(PathBuf::as_path));
    }
    let message = format!("{} is the model that is prepared", file.path().display());
    Err(Failure::output_is_input(message, "give -o another name, such as NAME.trt.onnx"))
}

/// External data is named by its place beside the model.
fn data_stays_beside(file: &OnnxFile, folder: &Path) -> Result<(), Failure> {
    let place = folder_of(file.path());
    let same = matches!((fs::canonicalize(place), fs::canonicalize(folder)), (Ok(left), Ok(right)) if left == right);
    if same || !file.has_external_data() {
        return Ok(());
    }
    let message = format!("the weights lie beside {}, and -o names another folder", file.path().display());
    Err(Failure::usage(message, &format!("choose a file in {}", place.display())))
}

/// The line that builds an engine, but for its shapes.
fn trtexec(onnx: &Path, release: Option<&Release>, dtype: Dtype) -> String {
    let plugin = find_tensorrt_plugin().unwrap_or_else(|_| "libmoa_tensorrt.so".into());
    let mut words = vec![
        "trtexec".to_owned(),
        word(format!("--onnx={}", onnx.display())),
        word(format!("--dynamicPlugins={}", plugin.display())),
        word(format!("--saveEngine={}", onnx.with_extension("plan").display())),
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
fn profile(inputs: &[ValueInfo], shapes: &[InputShapes]) -> String {
    let is_open = |name: &str| {
        let input = inputs.iter().find(|input| input.name == name);
        input.is_some_and(|input| input.dims.iter().flatten().any(|dim| !matches!(dim, Dim::Fixed(_))))
    };
    let option = |name: &str, of: fn(&InputShapes) -> &[u64]| {
        let shape = |input: &InputShapes| {
            let sizes: Vec<_> = of(input).iter().map(u64::to_string).collect();
            format!("{}:{}", input.name, sizes.join("x"))
        };
        let shapes: Vec<_> = shapes.iter().filter(|input| is_open(&input.name)).map(shape).collect();
        format!(" --{name}Shapes={}", shapes.join(","))
    };
    [option("min", |input| &input.min), option("opt", |input| &input.opt), option("max", |input| &input.max)].concat()
}
