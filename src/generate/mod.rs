//! Text with an exported folder: a [`Translator`] translates, a [`TextGenerator`] continues prompts. Only what the
//! folder holds is read.
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
//!
//! A causal language model, greedy unless a temperature is given:
//!
//! ```no_run
//! use moa_export::generate::{Prompt, SamplingOptions, TextGenerator, TextGeneratorOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut generator = TextGenerator::open("OUT".as_ref(), TextGeneratorOptions::default())?;
//! let options = SamplingOptions { temperature: 0.8, top_p: 0.95, seed: 1, ..SamplingOptions::default() };
//! let prompts = [Prompt::from("Once upon a time"), Prompt::Tokens(vec![1, 17, 4])];
//! for continuation in generator.generate(&prompts, &options)? {
//!     println!("{:?} {:?}", continuation.tokens, continuation.text);
//! }
//! # Ok(())
//! # }
//! ```

mod caches;
mod causal_folder;
mod decoder;
mod error;
mod finish;
mod graphs;
mod options;
mod profile;
mod sampling;
mod scores;
mod search;
mod text_generator;
mod translator;

pub use causal_folder::{GenerationSettings, holds_causal_lm};
pub use error::GenerateError;
pub use finish::Finish;
pub use options::{SearchOptions, Stop};
pub use profile::{NodeTime, Profile};
pub use sampling::SamplingOptions;
pub use text_generator::{Continuation, NewToken, Prompt, TextGenerator, TextGeneratorOptions};
pub use translator::{Hypothesis, Translator, TranslatorOptions};
