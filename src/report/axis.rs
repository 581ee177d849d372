//! Axes: from values to places, with round numbers as ticks.

use super::markup::{format_number, with_decimals};

/// What is measured along one side of a plot.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    label: String,
    unit: String,
    log: bool,
    from_zero: bool,
    at_values: bool,
    tight: bool,
}

impl Axis {
    /// Equal distances for equal differences; `unit` may be empty.
    pub fn linear(label: impl Into<String>, unit: impl Into<String>) -> Self {
        Self { label: label.into(), unit: unit.into(), log: false, from_zero: false, at_values: false, tight: false }
    }

    /// Equal distances for equal ratios; values that are not positive cannot be drawn and are counted in a note.
    pub fn log(label: impl Into<String>, unit: impl Into<String>) -> Self {
        Self { log: true, ..Self::linear(label, unit) }
    }

    /// Lets a linear axis begin at zero.
    #[must_use]
    pub fn from_zero(mut self) -> Self {
        self.from_zero = true;
        self
    }

    /// Puts ticks at the values that were measured, such as the sequence lengths 1, 128 and 512, where they fit.
    #[must_use]
    pub fn ticks_at_values(mut self) -> Self {
        self.at_values = true;
        self
    }

    /// Lets the axis end at the least and the greatest value, such as those of ranks, beyond which there is nothing.
    #[must_use]
    pub fn tight(mut self) -> Self {
        self.tight = true;
        self
    }

    /// Label and unit as they stand beside the axis.
    pub(super) fn title(&self) -> String {
        match (self.label.is_empty(), self.unit.is_empty()) {
            (_, true) => self.label.clone(),
            (true, false) => self.unit.clone(),
            (false, false) => format!("{} ({})", self.label, self.unit),
        }
    }

    /// A value with its unit.
    pub(super) fn value(&self, value: f64) -> String {
        match self.unit.as_str() {
            "" => format_number(value),
            unit => format!("{} {unit}", format_number(value)),
        }
    }

    /// Whether `value` has a place on this axis.
    pub(super) fn takes(&self, value: f64) -> bool {
        value.is_finite() && (!self.log || value > 0.0)
    }

    /// The scale for `values`, from place `start` to place `end`, with about one tick per `spacing`.
    pub(super) fn scale(&self, values: &[f64], start: f64, end: f64, spacing: f64) -> Scale {
        let drawn = || values.iter().copied().filter(|value| self.takes(*value));
        let low = drawn().fold(f64::INFINITY, f64::min);
        let high = drawn().fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (if self.log { 1.0 } else { 0.0 }, 1.0) };
        let count = ((end - start).abs() / spacing).max(2.0);
        let (low, high, ticks) = match self.log {
            true => log_ticks(low, high, count),
            false => linear_ticks(if self.from_zero { low.min(0.0) } else { low }, high, count),
        };
        let mut scale = Scale { low, high, start, end, log: self.log, ticks };
        if self.tight {
            scale.tighten(drawn().collect());
        }
        if self.at_values {
            scale.ticks_at(drawn().collect());
        }
        scale
    }
}

/// Where values lie.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    start: f64,
    end: f64,
    log: bool,
    /// Values and their labels, rising.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Scale {
    /// The place of `value`.
    pub(super) fn at(&self, value: f64) -> f64 {
        let (low, high, value) = match self.log {
            true => (self.low.log10(), self.high.log10(), value.log10()),
            false => (self.low, self.high, value),
        };
        self.start + (value - low) / (high - low) * (self.end - self.start)
    }

    /// The place where bars begin: zero, or the end of the axis nearest to it.
    pub(super) fn base(&self) -> f64 {
        if self.log { self.start } else { self.at(0.0_f64.clamp(self.low, self.high)) }
    }

    /// Ends at the least and the greatest of several `values`.
    fn tighten(&mut self, mut values: Vec<f64>) {
        values.sort_by(f64::total_cmp);
        if let [low, .., high] = values[..]
            && low < high
        {
            (self.low, self.high) = (low, high);
            self.ticks.retain(|(tick, _)| (low..=high).contains(tick));
        }
    }

    /// Replaces the ticks by `values`, unless they are many or their labels would touch.
    fn ticks_at(&mut self, mut values: Vec<f64>) {
        values.sort_by(f64::total_cmp);
        values.dedup();
        if values.is_empty() || values.len() > 12 {
            return;
        }
        let labels: Vec<_> = values.iter().map(|value| (*value, format_number(*value))).collect();
        let room = |pair: &[(f64, String)]| {
            let width = super::markup::text_width(&pair[0].1) / 2.0 + super::markup::text_width(&pair[1].1) / 2.0;
            (self.at(pair[1].0) - self.at(pair[0].0)).abs() > width + 6.0
        };
        if labels.windows(2).all(room) {
            self.ticks = labels;
        }
    }
}

/// A range of round numbers around `low` and `high`, in about `count` steps of 1, 2 or 5 times a power of ten.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn linear_ticks(low: f64, high: f64, count: f64) -> (f64, f64, Vec<(f64, String)>) {
    let (low, high) = if high - low > low.abs().max(high.abs()) * 1e-12 {
        (low, high)
    } else {
        let pad = if low == 0.0 { 1.0 } else { low.abs() * 0.5 };
        (low - if low == 0.0 { 0.0 } else { pad }, high + pad)
    };
    let rough = (high - low) / count;
    let power = rough.log10().floor();
    let unit = 10f64.powf(power);
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|nice| nice * unit).find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(unit * 10.0);
    let (first, last) = ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    let steps = (last - first).clamp(1.0, 100.0) as usize;
    let ticks = (0..=steps).map(|index| {
        let value = (first + index as f64) * step;
        let plain = decimals <= 6 && value.abs() < 1e7;
        (value, if plain { with_decimals(value, decimals) } else { format_number(value) })
    });
    (first * step, (first + steps as f64) * step, ticks.collect())
}

/// A range around `low` and `high` with ticks at powers of ten, and between them where that leaves about `count`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn log_ticks(low: f64, high: f64, count: f64) -> (f64, f64, Vec<(f64, String)>) {
    const SIMPLE: &[f64] = &[1.0, 2.0, 5.0];
    let (low, high) = if high > low * 1.001 { (low, high) } else { (low / 2.0, high * 2.0) };
    let (first, last) = (low.log10().floor() as i32 - 1, high.log10().ceil() as i32 + 1);
    let multiples = |digits: &[f64]| -> Vec<f64> {
        (first..=last).flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power))).collect()
    };
    let range = |digits: &[f64]| {
        let ends = multiples(if digits.len() > 1 { digits } else { SIMPLE });
        let low = ends.iter().copied().filter(|end| *end <= low * 1.000_001).fold(f64::MIN_POSITIVE, f64::max);
        let high = ends.iter().copied().filter(|end| *end >= high * 0.999_999).fold(f64::INFINITY, f64::min);
        let within: Vec<f64> = multiples(digits).into_iter().filter(|tick| (low..=high).contains(tick)).collect();
        (low, high, within)
    };
    let within_a_decade = (high / low).log10() <= 1.2;
    let between = range(if within_a_decade { &[1.0, 2.0, 3.0, 5.0, 7.0] } else { SIMPLE });
    let (low, high, ticks) = if between.2.len() as f64 <= count + 3.0 { between } else { range(&[1.0]) };
    let every = (ticks.len() as f64 / (count + 3.0)).ceil().max(1.0) as usize;
    (low, high, ticks.into_iter().step_by(every).map(|tick| (tick, format_number(tick))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, values: &[f64]) -> Vec<String> {
        axis.scale(values, 0.0, 600.0, 100.0).ticks.into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn linear_ticks_are_round() {
        assert_eq!(labels(&Axis::linear("", ""), &[0.3, 9.7]), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(
            labels(&Axis::linear("", "").from_zero(), &[0.07, 0.21]),
            ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25"]
        );
        assert_eq!(labels(&Axis::linear("", ""), &[-3.0, 3.0]), ["−3", "−2", "−1", "0", "1", "2", "3"]);
    }

    #[test]
    fn log_ticks_are_powers_or_simple_multiples() {
        assert_eq!(
            labels(&Axis::log("", ""), &[1.0, 1e5]),
            ["1", "10", "100", "1000", "10\u{202f}000", "100\u{202f}000"]
        );
        assert_eq!(labels(&Axis::log("", ""), &[12.0, 480.0]), ["10", "20", "50", "100", "200", "500"]);
        let short = Axis::log("", "").scale(&[0.23, 24.0], 0.0, 250.0, 50.0);
        let labels: Vec<_> = short.ticks.iter().map(|(_, label)| label.as_str()).collect();
        assert_eq!(labels, ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]);
    }

    #[test]
    fn measured_values_become_ticks_where_they_fit() {
        let axis = Axis::log("", "").ticks_at_values();
        assert_eq!(labels(&axis, &[512.0, 1.0, 128.0, 128.0]), ["1", "128", "512"]);
        let crowded = labels(&axis, &[1.0, 1.01, 1e4]);
        assert!(!crowded.contains(&"1.01".to_owned()), "{crowded:?}");
    }

    #[test]
    fn a_tight_axis_has_no_place_without_a_value() {
        let axis = Axis::linear("", "").tight();
        assert_eq!(labels(&axis, &[1.0, 16.0]), ["5", "10", "15"]);
        let scale = axis.scale(&[1.0, 16.0], 0.0, 600.0, 100.0);
        assert_eq!((scale.at(1.0), scale.at(16.0)), (0.0, 600.0));
        assert!(labels(&axis, &[7.0]).len() >= 2);
    }

    #[test]
    fn nothing_and_one_value_still_make_an_axis() {
        for values in [&[][..], &[0.0], &[7.0], &[f64::NAN, -1.0]] {
            for axis in [Axis::linear("", ""), Axis::log("", "")] {
                let scale = axis.scale(values, 0.0, 100.0, 25.0);
                assert!(scale.ticks.len() >= 2 && scale.low < scale.high, "{values:?}: {scale:?}");
                assert!(scale.ticks.iter().all(|(value, _)| scale.at(*value).is_finite()));
            }
        }
    }

    #[test]
    fn all_values_lie_within_the_axis() {
        for values in [[0.1, 0.3], [999.0, 1001.0], [1e-9, 3e9], [5.0, 5.0]] {
            for axis in [Axis::linear("", ""), Axis::log("", "")] {
                let scale = axis.scale(&values, 10.0, 90.0, 20.0);
                for value in values {
                    assert!((9.999..90.001).contains(&scale.at(value)), "{value} of {values:?}: {scale:?}");
                }
            }
        }
    }
}
