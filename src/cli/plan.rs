//! `moa-export plan`.

use std::process::ExitCode;

use clap::{Args, builder::PossibleValuesParser};

use super::{
    Failure,
    args::PlanDtype,
    document::{Kind, document},
    print_result,
    table::table,
};
use crate::engine::{Dtype, GPUS, Gpu, RELEASES, Release, fit};

const DETAILS: &str = "\
The table says of each TensorRT: the CUDA that it is built for (the plugin's kernels need a driver of CUDA 12, 525 on \
Linux, whichever that is); the types that its engines may have on this GPU; the interface by which it takes our \
operators; and the forms of an export of which its own parser gives them to the plugin. `moa-export build` takes every \
form, `prepare` every one but `standard`.";

#[derive(Debug, Args)]
#[command(after_help = DETAILS)]
pub(super) struct PlanArguments {
    /// GPU to plan for [default: a table of all]
    #[arg(long, value_name = "GPU", ignore_case = true)]
    #[arg(value_parser = PossibleValuesParser::new(GPUS.map(|gpu| gpu.name)))]
    gpu: Option<String>,
    /// Type of weights and activations that must fit [default: any]
    #[arg(long, value_enum)]
    dtype: Option<PlanDtype>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &PlanArguments) -> Result<ExitCode, Failure> {
    let asked = arguments.dtype.map(PlanDtype::dtype);
    let dtypes: Vec<Dtype> = Dtype::ALL.into_iter().filter(|dtype| asked.is_none_or(|asked| asked == *dtype)).collect();
    let gpu = arguments.gpu.as_deref().and_then(Gpu::named);
    if let (Some(gpu), Some(dtype)) = (gpu, asked)
        && newest(&gpu, dtype).is_none()
    {
        let why = RELEASES.iter().find_map(|release| fit(&gpu, release, dtype).err());
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        let message = format!("no TensorRT builds {} engines for {}{why}", dtype.name(), gpu.name);
        return Err(Failure::dtype(message, "choose --dtype fp16".into()));
    }
    let gpus = gpu.map_or_else(|| GPUS.to_vec(), |gpu| vec![gpu]);
    let text = match gpu {
        _ if arguments.json => document(Kind::Plan, json(&gpus, &dtypes)),
        Some(gpu) => of_gpu(&gpu, &dtypes),
        None => overview(&dtypes),
    };
    print_result(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The newest release that serves a GPU with a dtype.
fn newest(gpu: &Gpu, dtype: Dtype) -> Option<&'static Release> {
    RELEASES.iter().rev().find(|release| fit(gpu, release, dtype).is_ok())
}

/// The dtypes that fit, by name.
fn fitting(gpu: &Gpu, release: &Release, dtypes: &[Dtype]) -> String {
    let names: Vec<_> =
        dtypes.iter().filter(|dtype| fit(gpu, release, **dtype).is_ok()).map(|dtype| dtype.name()).collect();
    if names.is_empty() { "–".into() } else { names.join(" ") }
}

fn overview(dtypes: &[Dtype]) -> String {
    let header: Vec<_> = ["GPU", "capability"].into_iter().chain(RELEASES.iter().map(|release| release.name)).collect();
    let row = |gpu: &Gpu| {
        let start = [gpu.name.to_owned(), gpu.capability.to_string()].into_iter();
        start.chain(RELEASES.iter().map(|release| fitting(gpu, release, dtypes))).collect()
    };
    let rows: Vec<_> = GPUS.iter().map(row).collect();
    format!(
        "{}\ncolumns: releases of TensorRT; `moa-export plan --gpu GPU` says why not, and which CUDA\n",
        table(&header, &rows)
    )
}

fn of_gpu(gpu: &Gpu, dtypes: &[Dtype]) -> String {
    let row = |release: &Release| {
        let fits: Vec<_> = dtypes.iter().map(|dtype| fit(gpu, release, *dtype)).collect();
        let cuda = fits.iter().find_map(|fit| fit.ok()).map(|fit| fit.cuda);
        let cuda = cuda.map_or_else(|| "–".to_owned(), |(from, to)| format!("{from} to {to}"));
        let reason = fits.iter().find_map(|fit| fit.err());
        vec![
            release.name.to_owned(),
            cuda,
            fitting(gpu, release, dtypes),
            release.plugin.name().to_owned(),
            if release.body_first { "fused" } else { "fused, function" }.to_owned(),
            reason.map_or_else(String::new, |reason| reason.to_string()),
        ]
    };
    let rows: Vec<_> = RELEASES.iter().map(row).collect();
    let header = ["TensorRT", "CUDA", "dtypes", "plugin", "forms that reach it", "why not more"];
    let mut text =
        format!("{}, compute capability {}\n\n{}\n", gpu.name.to_uppercase(), gpu.capability, table(&header, &rows));
    for dtype in dtypes {
        let found = newest(gpu, *dtype).and_then(|release| Some((release, fit(gpu, release, *dtype).ok()?)));
        let choice = found.map_or_else(
            || "nothing fits".to_owned(),
            |(release, fit)| format!("TensorRT {} with CUDA {} to {}", release.name, fit.cuda.0, fit.cuda.1),
        );
        text.push_str(&format!("{}  {choice}\n", dtype.name()));
    }
    text
}

fn json(gpus: &[Gpu], dtypes: &[Dtype]) -> serde_json::Value {
    let one = |gpu: &Gpu, release: &Release, dtype: Dtype| {
        let found = fit(gpu, release, dtype);
        serde_json::json!({
            "gpu": gpu.name,
            "compute_capability": gpu.capability.to_string(),
            "tensorrt": release.range(),
            "dtype": dtype.name(),
            "fits": found.is_ok(),
            "cuda": found.ok().map(|fit| [fit.cuda.0.to_string(), fit.cuda.1.to_string()]),
            "why_not": found.err().map(|why| why.to_string()),
            "plugin_interface": release.plugin.name(),
            "function_form_reaches_the_plugin": !release.body_first,
            "strongly_typed_only": release.strongly_typed_only,
        })
    };
    let all = gpus.iter().flat_map(|gpu| {
        RELEASES.iter().flat_map(move |release| dtypes.iter().map(move |dtype| one(gpu, release, *dtype)))
    });
    serde_json::json!({ "rows": all.collect::<Vec<_>>() })
}
