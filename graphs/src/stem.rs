//! Stems of the names of the files that graphs are written to.

/// Of a model that is one graph.
pub const MODEL: &str = "model";

/// Of the encoder of an encoder and decoder.
pub const ENCODER: &str = "encoder_model";

/// Of the decoder of an encoder and decoder.
pub const DECODER: &str = "decoder_model";
