//! From text to token ids and back: dictionaries, segmentation into symbols, and the file `generation.json` that
//! says which of them belong to an exported model.
//!
//! Nothing here knows a model or a runtime.

mod bpe;
mod dictionary;
mod error;
mod hub;
#[cfg(feature = "tokenizers")]
mod hub_tokenizer;
mod read;
mod tokenizer;
mod translation_config;

pub use bpe::BpeCodes;
pub use dictionary::Dictionary;
pub use error::TextError;
pub use hub::{Keys, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
#[cfg(feature = "tokenizers")]
pub use hub_tokenizer::{HubTokenizer, Pieces};
pub(crate) use read::read_bytes;
pub use tokenizer::Tokenizer;
pub use translation_config::{Segmentation, TRANSLATION_CONFIG, TranslationConfig};
