//! `moa-export inspect`.

use std::process::ExitCode;

use super::{Failure, args::InspectArguments, print_result, table::table};
use crate::{
    checkpoint::Checkpoint,
    export::import,
    inspect::{Inspection, Lengths, inspect},
};

pub(super) fn run(arguments: &InspectArguments) -> Result<ExitCode, Failure> {
    if arguments.seq == 0 || arguments.target_seq == Some(0) {
        return Err(Failure::usage("a length must be at least 1", None));
    }
    let checkpoint = Checkpoint::open(&arguments.checkpoint, arguments.config.as_deref())?;
    let model = import(&checkpoint, None)?;
    let lengths = Lengths { source: arguments.seq, target: arguments.target_seq.unwrap_or(arguments.seq) };
    let inspection = inspect(checkpoint.config().model_type(), &model, lengths);
    let json = || format!("{:#}\n", serde_json::to_value(&inspection).unwrap_or_default());
    print_result(&if arguments.json { json() } else { text(&inspection) })?;
    Ok(ExitCode::SUCCESS)
}

fn text(inspection: &Inspection) -> String {
    let mut text = format!("{:18} {}\n", "family", inspection.family);
    for (name, value) in &inspection.sizes {
        text.push_str(&format!("{name:18} {value}\n"));
    }
    for weights in &inspection.weights {
        let value = format!("{} values in {} tensors of {}", grouped(weights.values), weights.tensors, weights.dtype);
        text.push_str(&format!("{:18} {value}\n", "stored"));
    }
    if inspection.cache_bytes_per_token > 0 {
        let bytes = grouped(inspection.cache_bytes_per_token);
        text.push_str(&format!("{:18} {bytes} bytes per token (fp32)\n", "cache"));
    }
    let row = |name: &str, cost: &crate::inspect::Cost| {
        let numbers = [cost.parameters, cost.active_parameters, cost.paper_macs, cost.full_macs];
        std::iter::once(name.to_owned()).chain(numbers.map(|number| format!("{:>14}", grouped(number)))).collect()
    };
    let mut rows: Vec<Vec<String>> = inspection.parts.iter().map(|part| row(part.name, &part.cost)).collect();
    rows.push(row("total", &inspection.total));
    let header = ["part", "    parameters", "active a token", "   MACs, paper", "    MACs, full"];
    let lengths = inspection.lengths;
    let sides = if lengths.source == lengths.target {
        format!("{} tokens", lengths.source)
    } else {
        format!("{} source and {} target tokens", lengths.source, lengths.target)
    };
    text.push_str(&format!("\n{}", table(&header, &rows)));
    text.push_str(&format!(
        "\nmultiply-accumulates for {sides}; paper: products with weights, biases once; full: attention products too, no biases\n"
    ));
    text
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
