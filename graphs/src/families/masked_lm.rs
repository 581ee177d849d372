//! `moa_roberta`: an MoA encoder with fairseq's RoBERTa head.

use super::{
    Config, ImportOptions,
    fairseq::{Side, Stack, check_padding, is_buffer, refuse_unsupported},
    importer::Importer,
};
use crate::{
    ImportError, TensorDirectory,
    model::{LanguageModelHead, Linear, MaskedLm, Model},
};

const PREFIX: &str = "encoder.sentence_encoder";
const TOKENS: &str = "encoder.sentence_encoder.embed_tokens.weight";
const OUTPUT: &str = "encoder.lm_head.weight";

pub(super) fn import(
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<Model, ImportError> {
    refuse_unsupported(config)?;
    let stack = Stack::new(config, Side::Encoder, PREFIX, "max_source_positions", options)?;
    let tied = !config.flag_or("untie_weights_roberta", false)?;
    let mut importer = Importer::new(tensors);
    let embedding = stack.embedding(&mut importer, if tied { &[OUTPUT, TOKENS] } else { &[TOKENS] })?;
    check_padding(config, &embedding.tokens)?;
    let vocabulary = embedding.tokens.shape()[0];
    if config.optional_size("vocab_size")?.is_some_and(|size| size != vocabulary) {
        return Err(config.invalid("vocab_size", format!("{vocabulary}, the rows of \"{}\"", embedding.tokens.name())));
    }
    let encoder = stack.encoder(&mut importer, embedding)?;
    let output_names: &[&str] = if tied { &[OUTPUT, TOKENS] } else { &[OUTPUT] };
    let (width, head) = (stack.width, "encoder.lm_head");
    let head = LanguageModelHead {
        dense: Linear {
            weight: importer.take(&format!("{head}.dense.weight"), &[width, width])?,
            bias: importer.take(&format!("{head}.dense.bias"), &[width])?,
        },
        activation: stack.activation(),
        norm: stack.norm(&mut importer, &format!("{head}.layer_norm"))?,
        weight: importer.take_shared(output_names, &[Some(vocabulary), Some(width)])?,
        bias: importer.take(&format!("{head}.bias"), &[vocabulary])?,
    };
    importer.finish("moa_roberta", is_buffer)?;
    Ok(Model::MaskedLm(MaskedLm { encoder, head }))
}
