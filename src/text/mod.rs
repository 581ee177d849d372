//! From text to token ids and back: dictionaries, segmentation into symbols, and the file `generation.json` that
//! says which of them belong to an exported model.
//!
//! Nothing here knows a model or a runtime.

mod bpe;
mod config;
mod dictionary;
mod error;
mod hub;
#[cfg(feature = "tokenizers")]
mod hub_tokenizer;
mod tokenizer;

pub use bpe::BpeCodes;
pub use config::{CONFIG_FILE, GenerationConfig, Segmentation};
pub use dictionary::Dictionary;
pub use error::TextError;
pub(crate) use error::read_bytes;
pub use hub::{Keys, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
#[cfg(feature = "tokenizers")]
pub use hub_tokenizer::{HubTokenizer, Pieces};
pub use tokenizer::Tokenizer;
