//! Text and numbers as HTML and SVG take them.

use std::fmt::{self, Display, Write};

/// Text with the five characters replaced that mean something to HTML; control characters become spaces.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                character if character.is_control() => f.write_char(' ')?,
                character => f.write_char(character)?,
            }
        }
        Ok(())
    }
}

/// A coordinate: two decimals at most, never `-0` and never an exponent.
pub(super) struct Px(pub(super) f64);

impl Display for Px {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.2}", self.0);
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.write_str(if text == "-0" || text.is_empty() { "0" } else { text })
    }
}

/// `value` with four significant digits, groups of three, and an exponent where it is very large or small.
pub fn format_number(value: f64) -> String {
    if value.is_nan() {
        return "not a number".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "∞" } else { "−∞" }.into();
    }
    let size = value.abs();
    if value.fract() == 0.0 && size < 1e9 {
        return with_decimals(value, 0);
    }
    if !(1e-3..1e9).contains(&size) {
        let text = format!("{value:.3e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let mantissa =
            if mantissa.contains('.') { mantissa.trim_end_matches('0').trim_end_matches('.') } else { mantissa };
        return signed(&format!("{mantissa}e{exponent}"));
    }
    let decimals = [1000.0, 100.0, 10.0, 1.0, 0.1, 0.01].iter().position(|limit| size >= *limit).unwrap_or(6);
    let text = with_decimals(value, decimals);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// `value` with so many decimals, groups of three from five digits on, and a real minus sign.
pub(super) fn with_decimals(value: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", value.abs());
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (place, digit) in whole.chars().enumerate() {
        if whole.len() > 4 && place > 0 && (whole.len() - place) % 3 == 0 {
            grouped.push('\u{202f}');
        }
        grouped.push(digit);
    }
    if !fraction.is_empty() {
        grouped.push('.');
        grouped.push_str(fraction);
    }
    let zero = text.chars().all(|c| matches!(c, '0' | '.'));
    if value < 0.0 && !zero { format!("−{grouped}") } else { grouped }
}

/// `text`, a number that the caller formatted, with real minus signs, its exponent's too.
pub fn signed(text: &str) -> String {
    text.replace('-', "−")
}

/// `text` in at most `limit` characters, its middle left out where it is longer.
pub fn shortened(text: &str, limit: usize) -> String {
    let characters: Vec<char> = text.chars().collect();
    if characters.len() <= limit || limit < 3 {
        return text.into();
    }
    let head = (limit - 1) / 2;
    let tail = limit - 1 - head;
    let start = characters[..head].iter();
    start.chain(&['…']).chain(&characters[characters.len() - tail..]).collect()
}

/// Width of `text` in the plots' type, about; letters are taken for wide rather than narrow.
#[allow(clippy::cast_precision_loss)]
pub(super) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 6.7
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_html_reads_is_escaped() {
        assert_eq!(Escaped("<a b='c\"&\u{1}>").to_string(), "&lt;a b=&#39;c&quot;&amp; &gt;");
    }

    #[test]
    fn numbers_are_short_and_exact_enough() {
        for (value, text) in [
            (0.0, "0"),
            (12.0, "12"),
            (-3.5, "−3.5"),
            (1234.0, "1234"),
            (1_234_567.0, "1\u{202f}234\u{202f}567"),
            (0.123_456, "0.1235"),
            (12.3456, "12.35"),
            (99.999, "100"),
            (1.5e-7, "1.5e−7"),
            (-2e12, "−2e12"),
            (f64::NAN, "not a number"),
            (f64::NEG_INFINITY, "−∞"),
        ] {
            assert_eq!(format_number(value), text, "{value}");
        }
    }

    #[test]
    fn coordinates_have_no_exponent_and_no_negative_zero() {
        assert_eq!(Px(-0.001).to_string(), "0");
        assert_eq!(Px(120.0).to_string(), "120");
        assert_eq!(Px(1e-9).to_string(), "0");
        assert_eq!(Px(3.456).to_string(), "3.46");
    }

    #[test]
    fn long_text_loses_its_middle() {
        assert_eq!(shortened("decoder.layers.11.self_attn", 11), "decod…_attn");
        assert_eq!(shortened("short", 11), "short");
    }
}
