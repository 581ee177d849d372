//! `moa_roberta`: an MoA encoder with fairseq's RoBERTa head, and its baseline `roberta`.

use super::{
    Config, ImportOptions,
    fairseq::{Side, Stack, StackAttention, check_padding, is_buffer},
    fairseq_refused::refuse_unsupported,
    importer::Importer,
};
use crate::{
    ImportError, TensorDirectory,
    model::{LanguageModelHead, Linear, MaskedLm},
};

const PREFIX: &str = "encoder.sentence_encoder";
const TOKENS: &str = "encoder.sentence_encoder.embed_tokens.weight";
const OUTPUT: &str = "encoder.lm_head.weight";
const POSITIONS: &str = "max_source_positions";

pub(super) fn import<A: StackAttention>(
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<MaskedLm<A>, ImportError> {
    let config = &with_defaults(config.clone());
    refuse_unsupported(config)?;
    let stack = Stack::new(config, Side::Encoder, PREFIX, POSITIONS, options)?;
    let tied = !config.flag_or("untie_weights_roberta", false)?;
    let mut importer = Importer::new(config, tensors);
    let token_names: &[&str] = if tied { &[OUTPUT, TOKENS] } else { &[TOKENS] };
    let embedding = stack.embedding(config, &mut importer, token_names, &["vocab_size"])?;
    check_padding(config, &importer, &embedding.tokens)?;
    let vocabulary = embedding.tokens.shape()[0];
    if config.optional_size("vocab_size")?.is_some_and(|size| size != vocabulary) {
        let tokens = importer.stored_name(embedding.tokens.name());
        return Err(config.invalid("vocab_size", format!("{vocabulary}, the rows of \"{tokens}\"")));
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
    importer.finish(config.model_type(), is_buffer)?;
    Ok(MaskedLm { encoder, head })
}

/// What fairseq's RoBERTa has where its configuration says nothing, and its encoder-decoder has not.
///
/// Source: `base_architecture` and `RobertaModel` of `fairseq/models/roberta/model.py`, 0.12.2.
fn with_defaults(config: Config) -> Config {
    let stated = ["max_positions", "tokens_per_sample"].into_iter().find(|key| config.has(key));
    let config = match stated.and_then(|key| config.keys().get(key)).cloned() {
        Some(positions) => config.with(POSITIONS, positions),
        None => config,
    };
    let defaults = [
        ("encoder_layers", 12.into()),
        ("encoder_embed_dim", 768.into()),
        ("encoder_ffn_embed_dim", 3072.into()),
        ("encoder_learned_pos", true.into()),
        ("layernorm_embedding", true.into()),
        ("no_scale_embedding", true.into()),
        ("activation_fn", "gelu".into()),
        (POSITIONS, 512.into()),
    ];
    defaults.into_iter().fold(config, |config, (key, value)| match config.has(key) {
        true => config,
        false => config.with(key, value),
    })
}
