//! `moa_transformer`: the fairseq MoA encoder–decoder, and its baseline `transformer`.

use super::{
    Config, ImportOptions,
    fairseq::{Side, Stack, StackAttention, check_padding, is_buffer},
    fairseq_refused::refuse_unsupported,
    importer::Importer,
};
use crate::{
    ImportError, TensorDirectory, Weight,
    model::{Decoder, DecoderLayer, EncoderDecoder},
};

/// Keys of the size of each vocabulary, the first that is present counts.
const SOURCE_VOCABULARY: &[&str] = &["src_vocab_size", "vocab_size"];
const TARGET_VOCABULARY: &[&str] = &["tgt_vocab_size", "vocab_size"];

/// Keys of special ids, and what fairseq's dictionaries have.
const SPECIAL_IDS: [(&str, usize); 4] =
    [("bos_token_id", 0), ("eos_token_id", 2), ("unk_token_id", 3), ("decoder_start_token_id", 2)];

const ENCODER_TOKENS: &str = "encoder.embed_tokens.weight";
const DECODER_TOKENS: &str = "decoder.embed_tokens.weight";
const OUTPUT: &str = "decoder.output_projection.weight";

pub(super) fn import<A: StackAttention>(
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<EncoderDecoder<A>, ImportError> {
    refuse_unsupported(config)?;
    let encoder = Stack::new(config, Side::Encoder, "encoder", "max_source_positions", options)?;
    let decoder = Stack::new(config, Side::Decoder, "decoder", "max_target_positions", options)?;
    check_decoder_widths(config, decoder.width)?;
    check_generation(config)?;
    let mut importer = Importer::new(config, tensors);
    let embeddings = Embeddings::new(config)?;
    let embedding = encoder.embedding(config, &mut importer, embeddings.encoder, SOURCE_VOCABULARY)?;
    check_vocabulary(config, SOURCE_VOCABULARY, &importer, &embedding.tokens)?;
    let encoder = encoder.encoder(&mut importer, embedding)?;
    let decoder = import_decoder(config, &mut importer, &decoder, &embeddings)?;
    importer.finish(config.model_type(), is_buffer)?;
    Ok(EncoderDecoder { encoder, decoder })
}

/// Under which names each of the three vocabulary matrices may be stored.
struct Embeddings {
    encoder: &'static [&'static str],
    decoder: &'static [&'static str],
    output: &'static [&'static str],
}

impl Embeddings {
    fn new(config: &Config) -> Result<Self, ImportError> {
        const ALL: &[&str] = &[DECODER_TOKENS, ENCODER_TOKENS, OUTPUT];
        const TARGET: &[&str] = &[DECODER_TOKENS, OUTPUT];
        let all = config.flag_or("share_all_embeddings", false)?;
        let target = config.flag_or("share_decoder_input_output_embed", false)?;
        Ok(match (all, target) {
            (true, _) => Self { encoder: ALL, decoder: ALL, output: ALL },
            (false, true) => Self { encoder: &[ENCODER_TOKENS], decoder: TARGET, output: TARGET },
            (false, false) => Self { encoder: &[ENCODER_TOKENS], decoder: &[DECODER_TOKENS], output: &[OUTPUT] },
        })
    }
}

fn import_decoder<A: StackAttention>(
    config: &Config,
    importer: &mut Importer<'_>,
    stack: &Stack<A>,
    embeddings: &Embeddings,
) -> Result<Decoder<A>, ImportError> {
    let embedding = stack.embedding(config, importer, embeddings.decoder, TARGET_VOCABULARY)?;
    check_vocabulary(config, TARGET_VOCABULARY, importer, &embedding.tokens)?;
    let vocabulary = embedding.tokens.shape()[0];
    let output = importer.take_shared(embeddings.output, &[Some(vocabulary), Some(stack.width)])?;
    let layers = (0..stack.layers).map(|index| decoder_layer(importer, stack, index)).collect::<Result<_, _>>()?;
    Ok(Decoder { embedding, layers, norm: stack.stack_norm(importer)?, output })
}

fn decoder_layer<A: StackAttention>(
    importer: &mut Importer<'_>,
    stack: &Stack<A>,
    index: usize,
) -> Result<DecoderLayer<A>, ImportError> {
    let prefix = format!("{}.layers.{index}", stack.prefix);
    Ok(DecoderLayer {
        self_attention: stack.attention(importer, &format!("{prefix}.self_attn"), stack.width, true)?,
        self_attention_norm: stack.norm(importer, &format!("{prefix}.self_attn_layer_norm"))?,
        cross_attention: stack.attention(importer, &format!("{prefix}.encoder_attn"), stack.source_width, false)?,
        cross_attention_norm: stack.norm(importer, &format!("{prefix}.encoder_attn_layer_norm"))?,
        feed_forward: stack.feed_forward(importer, &prefix)?,
        final_norm: stack.norm(importer, &format!("{prefix}.final_layer_norm"))?,
        normalize_before: stack.normalize_before(),
        prefix,
    })
}

/// Upstream can project into and out of the decoder; the export cannot. fairseq's command line stores some of its sizes
/// as texts.
fn check_decoder_widths(config: &Config, width: usize) -> Result<(), ImportError> {
    for key in ["decoder_input_dim", "decoder_output_dim"] {
        let found = config.optional_size_or_text(key)?.unwrap_or(width);
        if found != width {
            return Err(config.unsupported(format!("\"{key}\": {found} beside \"decoder_embed_dim\": {width}")));
        }
    }
    Ok(())
}

/// What a translation is made by: the special ids are those of every fairseq dictionary, whatever else a configuration
/// says, and a sequence has an end beside its first token.
fn check_generation(config: &Config) -> Result<(), ImportError> {
    for (key, id) in SPECIAL_IDS {
        let found = config.id_or(key, id)?;
        if found != id {
            return Err(config.unsupported(format!("\"{key}\": {found}, which is {id} in every fairseq dictionary")));
        }
    }
    for key in ["max_source_positions", "max_target_positions"] {
        if config.optional_size(key)? == Some(1) {
            return Err(config.invalid(key, "at least 2"));
        }
    }
    config.flag_or("left_pad_source", true).map(drop)
}

/// The first of `keys` that the configuration has must agree with the embedding.
fn check_vocabulary(
    config: &Config,
    keys: &[&str],
    importer: &Importer<'_>,
    tokens: &Weight,
) -> Result<(), ImportError> {
    check_padding(config, importer, tokens)?;
    for key in keys {
        let Some(size) = config.optional_size(key)? else { continue };
        let shape = tokens.shape();
        if size == shape[0] {
            return Ok(());
        }
        return Err(ImportError::WrongShape {
            origin: tokens.origin().into(),
            tensor: importer.stored_name(tokens.name()),
            expected: format!("[{size}, {}] (\"{key}\" of {})", shape[1], config.origin()),
            found: format!("{shape:?}"),
        });
    }
    Ok(())
}
