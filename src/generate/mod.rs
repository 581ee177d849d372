//! Translating text with an exported folder: only what the folder holds is read.
//!
//! ```no_run
//! use moa_export::generate::{SearchOptions, Translator, TranslatorOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut translator = Translator::open("OUT".as_ref(), TranslatorOptions::default())?;
//! let options = SearchOptions { beam: 4, nbest: 2, ..SearchOptions::default() };
//! for hypotheses in translator.translate(&["nine hundred", "twelve"], &options)? {
//!     for hypothesis in hypotheses {
//!         println!("{:.4}\t{}", hypothesis.score, hypothesis.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod decoder;
mod error;
mod graphs;
mod options;
mod profile;
mod scores;
mod search;
mod translator;

pub use error::GenerateError;
pub use options::{SearchOptions, Stop};
pub use profile::{NodeTime, Profile};
pub use translator::{Hypothesis, Translator, TranslatorOptions};
