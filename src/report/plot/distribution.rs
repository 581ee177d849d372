//! How samples are spread.

use std::fmt::Write;

use super::{
    Drawing, colour, dashes,
    frame::{Frame, path},
};
use crate::report::{
    axis::Axis,
    table::{Cell, Column, Table},
};

/// Points of a drawn cumulative curve at most.
const CURVE_POINTS: usize = 400;

/// The share of samples up to each value.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    title: String,
    axis: Axis,
    series: Vec<(String, Vec<f64>)>,
}

impl Distribution {
    /// For each value, the share of samples that are no larger (empirical cumulative distribution).
    pub fn cumulative(title: impl Into<String>, axis: Axis) -> Self {
        Self { title: title.into(), axis, series: Vec::new() }
    }

    /// Adds samples, in any order.
    #[must_use]
    pub fn series(mut self, name: impl Into<String>, samples: impl IntoIterator<Item = f64>) -> Self {
        self.series.push((name.into(), samples.into_iter().collect()));
        self
    }

    /// The samples of each series that have a place, rising.
    fn sorted(&self) -> Vec<Vec<f64>> {
        let sorted = |samples: &Vec<f64>| {
            let mut samples: Vec<_> = samples.iter().copied().filter(|value| self.axis.takes(*value)).collect();
            samples.sort_by(f64::total_cmp);
            samples
        };
        self.series.iter().map(|(_, samples)| sorted(samples)).collect()
    }

    pub(super) fn draw(&self) -> Drawing {
        let sorted = self.sorted();
        let drawn: usize = sorted.iter().map(Vec::len).sum();
        let given: usize = self.series.iter().map(|(_, samples)| samples.len()).sum();
        let swatch =
            |index: usize| format!("<path class=\"curve {}\"{} d=\"M1 6L25 6\"/>", colour(index), dashes(index));
        let legend = match self.series.len() {
            0 | 1 => Vec::new(),
            _ => self.series.iter().enumerate().map(|(index, (name, _))| (name.clone(), swatch(index))).collect(),
        };
        let svg = (drawn > 0).then(|| (self.svg(&sorted), Frame::height()));
        let numbers = self.numbers(&sorted);
        Drawing { title: self.title.clone(), legend, svg, left_out: given - drawn, numbers }
    }

    fn svg(&self, sorted: &[Vec<f64>]) -> String {
        let share = Axis::linear("samples", "%").from_zero();
        let ends: Vec<f64> = sorted.iter().flat_map(|s| [s.first(), s.last()]).flatten().copied().collect();
        let mut frame = Frame::new(&self.axis, &share, &ends, &[0.0, 100.0]);
        for (index, samples) in sorted.iter().enumerate() {
            let Some(first) = samples.first() else { continue };
            let mut places = vec![(frame.x.at(*first), frame.y.at(0.0))];
            for count in steps(samples.len()) {
                let x = frame.x.at(samples[count - 1]);
                places.push((x, places.last().map_or(0.0, |(_, y)| *y)));
                places.push((x, frame.y.at(percent(count, samples.len()))));
            }
            let _ = writeln!(
                frame.svg,
                "<path class=\"curve {}\"{} d=\"{}\"/>",
                colour(index),
                dashes(index),
                path(&places)
            );
        }
        frame.svg
    }

    fn numbers(&self, sorted: &[Vec<f64>]) -> Table {
        let quantiles = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99];
        let mut columns = vec![Column::text("series"), Column::number("samples"), Column::number("min")];
        columns.extend(quantiles.iter().map(|q| Column::number(format!("p{}", (q * 100.0_f64).round()))));
        columns.push(Column::number("max"));
        let mut table = Table::new(columns).caption(self.axis.title());
        for ((name, _), samples) in self.series.iter().zip(sorted) {
            let mut row = vec![Cell::from(name.as_str()), samples.len().into(), samples.first().copied().into()];
            let value = |q: &f64| Cell::from(is_told(samples.len(), *q).then(|| quantile(samples, *q)));
            row.extend(quantiles.iter().map(value));
            row.push(samples.last().copied().into());
            table.push(row);
        }
        table
    }
}

/// Numbers of samples at which a cumulative curve of `count` samples has a step, the last one included.
fn steps(count: usize) -> impl Iterator<Item = usize> {
    let every = count.div_ceil(CURVE_POINTS).max(1);
    (1..=count).filter(move |step| step % every == 0 || *step == count || *step == 1)
}

#[allow(clippy::cast_precision_loss)]
fn percent(part: usize, all: usize) -> f64 {
    100.0 * part as f64 / all.max(1) as f64
}

/// Whether `samples` samples tell the quantile `q`: of those beyond the quartiles, ten must lie further out, as for the
/// percentiles of a benchmark.
#[allow(clippy::cast_precision_loss)]
fn is_told(samples: usize, q: f64) -> bool {
    /// Ten, less what `1 - q` may lose by rounding.
    const BEYOND: f64 = 10.0 - 1e-6;
    let outside = q.min(1.0 - q);
    samples > 0 && (outside >= 0.25 || samples as f64 * outside >= BEYOND)
}

/// The smallest sample that at least the share `q` of all do not exceed (nearest rank); `sorted` is not empty.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_quantiles_need_ten_samples_beyond_them() {
        for (samples, told) in [(0, 0), (1, 3), (99, 3), (100, 5), (999, 5), (1000, 7)] {
            let quantiles = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99];
            assert_eq!(quantiles.iter().filter(|q| is_told(samples, **q)).count(), told, "{samples} samples");
        }
    }

    #[test]
    fn quantiles_are_samples() {
        let samples = [1.0, 2.0, 3.0, 4.0];
        assert_eq!([0.01, 0.25, 0.5, 0.75, 0.99].map(|q| quantile(&samples, q)), [1.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn many_samples_make_a_short_curve_that_ends_at_all() {
        let places: Vec<_> = steps(100_000).collect();
        assert!(places.len() <= CURVE_POINTS + 2);
        assert_eq!(places.last(), Some(&100_000));
        assert_eq!(steps(3).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn equal_samples_and_none_at_all_can_be_drawn() {
        let plot = || Distribution::cumulative("t", Axis::linear("", ""));
        let drawing = plot().series("a", [2.0, 2.0]).series("b", []).draw();
        assert!(!drawing.svg.unwrap().0.contains("NaN"));
        assert!(plot().series("a", [f64::NAN]).draw().svg.is_none());
    }
}
