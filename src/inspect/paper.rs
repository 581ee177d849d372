//! The paper's printed parameters and multiply-accumulates beside ours.
//!
//! Source of the printed numbers: Zhang et al., "Mixture of Attention Heads: Selecting Attention Heads Per Token",
//! EMNLP 2022, Tables 1 to 3.
//!
//! The paper does not state vocabularies and conventions fully. Those used here are the ones under which most printed
//! numbers come out to the last digit:
//!
//! * parameters, translation: one vocabulary of 37,000 for English–German and of 44,512 for English–French, router
//!   included, no biases in the experts;
//! * multiply-accumulates, translation: 10 source and 10 target tokens, a vocabulary of 31,960, the convention `paper`
//!   of [`super::Cost::paper_macs`];
//! * parameters, masked language model: a vocabulary of 50,265, biases in the experts;
//! * multiply-accumulates, masked language model: 128 tokens; the Transformer by the convention `paper`, MoA with each
//!   attention product booked twice beside it.

use moa_graphs::{ImportError, SyntheticTensors, families, families::ImportOptions};
use serde_json::json;

use super::{
    cost::{Cost, Lengths},
    inspect,
    preset::{ENGLISH_GERMAN, Preset},
};

/// Rows of the English–French embedding.
const ENGLISH_FRENCH: u64 = 44_512;

/// Rows of the embedding when multiply-accumulates of translation were counted.
const COUNTED_WITH: u64 = 31_960;

/// What is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// `#Params`; English–German for translation.
    Parameters,
    /// `#Params`, English–French.
    ParametersFrench,
    /// `MACs`.
    Macs,
}

/// How many digits are printed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Digits {
    Decimals(i32),
    Significant(i32),
}

/// One printed number.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Printed {
    table: u8,
    preset: &'static str,
    figure: Figure,
    /// In millions, or thousands of millions for the multiply-accumulates of Table 2.
    value: f64,
    note: Option<&'static str>,
}

const fn printed(table: u8, preset: &'static str, figure: Figure, value: f64) -> Printed {
    Printed { table, preset, figure, value, note: None }
}

const fn noted(table: u8, preset: &'static str, figure: Figure, value: f64, note: &'static str) -> Printed {
    Printed { table, preset, figure, value, note: Some(note) }
}

use Figure::{Macs, Parameters, ParametersFrench};

const QUOTED: &str = "quoted by the paper from the model's own paper, with another vocabulary";

const PRINTED: [Printed; 40] = [
    noted(1, "transformer-base", Parameters, 65.0, QUOTED),
    noted(1, "transformer-base", ParametersFrench, 62.0, QUOTED),
    printed(1, "transformer-base", Macs, 604.0),
    printed(1, "transformer-big", Macs, 2090.0),
    printed(1, "admin-18l-18l", Macs, 1490.0),
    printed(1, "admin-60l-12l", Macs, 2550.0),
    printed(1, "moa-base", Parameters, 65.0),
    printed(1, "moa-base", ParametersFrench, 69.0),
    printed(1, "moa-base", Macs, 628.0),
    printed(1, "moa-big", Parameters, 200.0),
    printed(1, "moa-big", ParametersFrench, 204.0),
    printed(1, "moa-big", Macs, 1220.0),
    printed(2, "mlm-transformer", Parameters, 51.34),
    printed(2, "mlm-transformer", Macs, 6.55),
    noted(2, "mlm-8k8e128d", Parameters, 52.45, "1,024 more parameters in every row would print as all of them do"),
    noted(2, "mlm-8k8e128d", Macs, 7.27, "no whole number of products gives it; 7.22 would be ours"),
    printed(2, "mlm-8k8e256d", Parameters, 61.89),
    printed(2, "mlm-8k8e256d", Macs, 8.97),
    printed(2, "mlm-8k16e256d", Parameters, 78.75),
    printed(2, "mlm-8k16e256d", Macs, 8.97),
    printed(2, "mlm-8k32e256d", Parameters, 112.47),
    printed(2, "mlm-8k32e256d", Macs, 8.98),
    printed(2, "mlm-8k64e256d", Parameters, 179.91),
    noted(2, "mlm-8k64e256d", Macs, 8.98, "the number of half as many experts, though their router is twice as large"),
    printed(3, "moa-base", Parameters, 65.0),
    printed(3, "moa-base", Macs, 628.0),
    printed(3, "moa-a", Parameters, 87.0),
    printed(3, "moa-a", Macs, 841.0),
    printed(3, "moa-b", Parameters, 125.0),
    printed(3, "moa-b", Macs, 841.0),
    printed(3, "moa-c", Parameters, 83.0),
    printed(3, "moa-c", Macs, 524.0),
    noted(3, "moa-d", Parameters, 123.0, "no vocabulary fits all rows; this one fits the others"),
    printed(3, "moa-d", Macs, 631.0),
    printed(3, "moa-e", Parameters, 200.0),
    noted(3, "moa-e", Macs, 841.0, "the number of (A) and (B); the router of 32 experts adds 2M"),
    printed(3, "moa-f", Parameters, 200.0),
    printed(3, "moa-f", Macs, 654.0),
    printed(3, "moa-big", Parameters, 200.0),
    printed(3, "moa-big", Macs, 1220.0),
];

/// One printed number beside ours.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// Number of the table.
    pub table: u8,
    /// Name of the preset.
    pub preset: &'static str,
    /// The row.
    pub title: &'static str,
    /// The column.
    pub figure: Figure,
    /// `M` for millions, `G` for thousands of millions.
    pub unit: &'static str,
    /// What the paper prints, in `unit`.
    pub printed: f64,
    /// Digits behind the point that the paper prints.
    pub decimals: u8,
    /// What we count.
    pub exact: u64,
    /// The same in `unit`.
    pub computed: f64,
    /// Whether ours, rounded as the paper rounds, is what it prints.
    pub reproduced: bool,
    /// What is known about it.
    pub note: Option<&'static str>,
}

/// Every printed number of `table`, or of all.
///
/// # Errors
///
/// None that a user can cause: every preset has a configuration that can be counted.
pub fn compare(table: Option<u8>) -> Result<Vec<Comparison>, ImportError> {
    PRINTED.iter().filter(|printed| table.is_none_or(|table| table == printed.table)).map(Printed::compare).collect()
}

impl Printed {
    #[allow(clippy::cast_precision_loss)]
    fn compare(&self) -> Result<Comparison, ImportError> {
        let is_masked = self.table == 2;
        let preset = Preset::find(self.preset);
        let exact = preset.map_or(Ok(0), |preset| self.count(preset))?;
        let (unit, divisor) = if is_masked && self.figure == Macs { ("G", 1e9) } else { ("M", 1e6) };
        let computed = exact as f64 / divisor;
        let digits = match self.figure {
            _ if is_masked => Digits::Decimals(2),
            Macs => Digits::Significant(3),
            _ => Digits::Decimals(0),
        };
        Ok(Comparison {
            table: self.table,
            preset: self.preset,
            title: preset.map_or("", |preset| preset.title),
            figure: self.figure,
            unit,
            printed: self.value,
            decimals: if is_masked { 2 } else { 0 },
            exact,
            computed,
            reproduced: (digits.round(computed) - self.value).abs() < 1e-9 * self.value,
            note: self.note,
        })
    }

    fn count(&self, preset: &Preset) -> Result<u64, ImportError> {
        let is_masked = self.table == 2;
        let vocabulary = match self.figure {
            _ if is_masked => None,
            Parameters => Some(ENGLISH_GERMAN),
            ParametersFrench => Some(ENGLISH_FRENCH),
            Macs => Some(COUNTED_WITH),
        };
        let tokens = if is_masked { 128 } else { 10 };
        let Cost { parameters, paper_macs, attention_macs, .. } = total(preset, vocabulary, tokens)?;
        Ok(match self.figure {
            Macs if is_masked && !preset.is_transformer() => paper_macs + 2 * attention_macs,
            Macs => paper_macs,
            _ => parameters,
        })
    }
}

fn total(preset: &Preset, vocabulary: Option<u64>, tokens: u64) -> Result<Cost, ImportError> {
    let mut config = preset.config();
    if let Some(vocabulary) = vocabulary {
        config = config.with("vocab_size", json!(vocabulary));
    }
    let tensors = SyntheticTensors::shapes(config.origin());
    let model = families::import(&config, &tensors, ImportOptions::default())?;
    Ok(inspect(config.model_type(), &model, Lengths { source: tokens, target: tokens }).total)
}

impl Digits {
    fn round(self, value: f64) -> f64 {
        let decimals = match self {
            Self::Decimals(decimals) => decimals,
            #[allow(clippy::cast_possible_truncation)]
            Self::Significant(digits) => digits - 1 - value.abs().log10().floor() as i32,
        };
        let factor = 10f64.powi(decimals);
        (value * factor).round() / factor
    }
}
