//! `moa-export CHECKPOINT -o OUT`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use moa_graphs::Options;
use moa_schema::{GateMode, ORT_LIBRARY, library_file};

#[cfg(feature = "tokenizers")]
use super::notes::note_of_contradiction;
use super::{
    Failure,
    args::{ExportArguments, FormArgument},
    document::{Kind, document},
    exported::{report_json, wrote},
    neighbours::Neighbours,
    note,
    notes::note_of_keys,
    open_checkpoint,
    output_file::STDOUT,
    print_result,
    progress::Progress,
    verify::{VerifyArguments, verify},
};
#[cfg(feature = "tokenizers")]
use crate::text::{HubTokenizer, TOKENIZER_FILE};
use crate::{
    backend::operator_library_to_copy,
    export::{ExportOptions, ExportReport, SideFileOptions, export_watched},
    file_names::{GENAI_CONFIG, Part, graph_file},
    files::folder_of,
    shell::path_word,
    side_files,
    text::{Segmentation, TRANSLATION_CONFIG, Tokenizer, TranslationConfig},
};

pub(super) fn run(arguments: &ExportArguments) -> Result<ExitCode, Failure> {
    let mut options = options(arguments);
    let progress = Progress::of_export(&arguments.output)?;
    let checkpoint = open_checkpoint(&arguments.checkpoint, arguments.config.as_deref())?;
    options.side_files = side_file_options(arguments)?;
    let neighbours = Neighbours::before(&arguments.output, arguments.force);
    let exported = export_watched(&checkpoint, &arguments.output, &options, &progress);
    let ending = progress.finish();
    let report = exported?;
    match arguments.verify {
        true => ending.goes_on(format!("interrupted: {} is written, and not verified", arguments.output.display()))?,
        false => ending.done(),
    }
    let as_json = arguments.json.then(|| report_json(&report, &options));
    match &as_json {
        Some(value) if !arguments.verify => print_result(&document(Kind::Export, value))?,
        Some(_) => {}
        None => print_result(&text(&report, arguments))?,
    }
    note_of_keys(checkpoint.config());
    report.notes.iter().for_each(|text| note(text));
    note_of_dictionary(&report);
    note_of_pieces(&report)?;
    #[cfg(feature = "tokenizers")]
    note_of_tokenizer(&report);
    note_of_library(&report, arguments);
    neighbours.note_of(&report, &arguments.output, side_files::is_own_folder(&arguments.output, &options.side_files));
    if !arguments.verify {
        return Ok(ExitCode::SUCCESS);
    }
    let ExportArguments { checkpoint: path, config, output, .. } = arguments;
    let json = arguments.json.then_some(Path::new(STDOUT));
    let verification = VerifyArguments::of_export(output, path, config.as_deref(), json);
    verify(&verification, &checkpoint, as_json, &ending)
}

fn options(arguments: &ExportArguments) -> ExportOptions {
    ExportOptions {
        graph: Options {
            form: arguments.form.into(),
            precision: arguments.dtype.into(),
            router_outputs: arguments.router_outputs,
            last_logits: arguments.last_logits,
        },
        opset: arguments.opset,
        gate_mode: arguments.gate_mode.map(GateMode::from),
        external_data: arguments.external_data.into(),
        force: arguments.force,
        ..ExportOptions::default()
    }
}

fn side_file_options(arguments: &ExportArguments) -> Result<SideFileOptions, Failure> {
    if arguments.with_library && arguments.form == FormArgument::Standard {
        return Err(Failure::usage(
            "--with-library copies the operator library, which computes nothing in --form standard",
            "leave out one of the two",
        ));
    }
    let joined = arguments.dict.as_ref().map(|path| [path.clone(), path.clone()]);
    let separate = arguments.source_dict.clone().zip(arguments.target_dict.clone());
    let operator_library = arguments.with_library.then(operator_library_to_copy).transpose()?;
    Ok(SideFileOptions {
        dictionaries: joined.or(separate.map(|(source, target)| [source, target])),
        bpe_codes: arguments.bpe_codes.clone(),
        beside: Some(arguments.checkpoint.clone()),
        operator_library,
    })
}

/// The file of the export that is called `name`.
fn file_of<'a>(report: &'a ExportReport, name: &str) -> Option<&'a Path> {
    let mut paths = report.files.iter().map(|file| file.path.as_path());
    paths.find(|path| path.file_name() == Some(name.as_ref()))
}

/// Says that a translation model has no dictionary.
fn note_of_dictionary(report: &ExportReport) {
    if file_of(report, &graph_file(Part::Encoder)).is_some() && file_of(report, TRANSLATION_CONFIG).is_none() {
        note(
            "no dictionary was found, and `generate` needs one: export with --dict FILE, or --source-dict and --target-dict",
        );
    }
}

/// Says that text must be split before it is given, where a dictionary holds pieces and `generate` does not split.
fn note_of_pieces(report: &ExportReport) -> Result<(), Failure> {
    let Some(config) = file_of(report, TRANSLATION_CONFIG) else { return Ok(()) };
    let folder = folder_of(config);
    let config = TranslationConfig::read(folder)?;
    if config.segmentation != Segmentation::Words {
        return Ok(());
    }
    let tokenizer = Tokenizer::read(folder, &config)?;
    if tokenizer.source().has_pieces() {
        note(
            "the dictionary has pieces of words (`@@`) and no codes lie beside it: `generate` takes lines that are split \
             already; --bpe-codes FILE lets it split them",
        );
    }
    let split = tokenizer.source().has_sentence_pieces();
    let joined = tokenizer.target().has_sentence_pieces();
    let what = match (split, joined) {
        (true, true) => "takes lines that SentencePiece has split already, and prints pieces that it is to join",
        (true, false) => "takes lines that SentencePiece has split already",
        (false, true) => "prints pieces that SentencePiece is to join",
        (false, false) => return Ok(()),
    };
    note(&format!("the dictionary has pieces of SentencePiece (`▁the`), which is not applied here: `generate` {what}"));
    Ok(())
}

/// Says that a language model has no tokenizer, that the one which was copied as it is is none that `generate` reads,
/// or not what its configuration says.
#[cfg(feature = "tokenizers")]
fn note_of_tokenizer(report: &ExportReport) {
    /// Tokenizers of transformers that are no `tokenizer.json`.
    const SOURCES: [&str; 2] = ["tokenizer.model", "vocab.json"];
    let Some(folder) = file_of(report, GENAI_CONFIG).map(folder_of) else { return };
    let why = match HubTokenizer::read(folder) {
        Ok(Some(tokenizer)) => return note_of_contradiction(&tokenizer, "generate"),
        Ok(None) if SOURCES.iter().any(|name| folder.join(name).exists()) => format!(
            "no {TOKENIZER_FILE} lies beside the checkpoint; transformers makes it of the files there: \
             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ),
        Ok(None) => format!("no {TOKENIZER_FILE} lies beside the checkpoint"),
        Err(error) => error.to_string(),
    };
    note(&format!("{why}; `generate` takes token ids with --token-ids alone"));
}

/// Says that the folder asks onnxruntime-genai for a library that does not lie in it, or that one was there before.
fn note_of_library(report: &ExportReport, arguments: &ExportArguments) {
    let library = arguments.output.join(library_file(ORT_LIBRARY));
    if library.is_file() && !arguments.with_library {
        let library = library.display();
        return note(&match arguments.form {
            FormArgument::Standard => format!("{library} was there before; graphs in the form standard need none"),
            _ => format!("{library} was there before: where it is of another version, --with-library replaces it"),
        });
    }
    let mut names = report.files.iter().filter_map(|file| file.path.file_name());
    let for_genai = names.any(|name| name == GENAI_CONFIG);
    if for_genai && arguments.form == FormArgument::Fused && !arguments.with_library {
        note(&format!(
            "{GENAI_CONFIG} names the operator library, which onnxruntime-genai takes from the folder: copy it there, or \
             export with --with-library"
        ));
    }
}

fn text(report: &ExportReport, arguments: &ExportArguments) -> String {
    let mut text = wrote(report);
    if !arguments.verify {
        let ExportArguments { output, checkpoint, config, .. } = arguments;
        let config = config.as_deref().map(path_word).map(|path| path.map(|path| format!(" --config {path}")));
        // A file is not found again under a name with a slash behind it.
        let output = output.components().collect::<PathBuf>();
        let paths = [&output, checkpoint].map(|path| path_word(path));
        // A path that is no text is shown otherwise than it is, so there is no command to copy.
        if let ([Some(output), Some(checkpoint)], Some(config)) = (paths, config.unwrap_or_else(|| Some(String::new())))
        {
            text.push_str(&format!("next: moa-export verify {output} --checkpoint {checkpoint}{config}\n"));
        }
    }
    text
}
