//! Curves, with bands around them.

use std::fmt::Write;

use super::{
    Drawing, colour, dashes,
    frame::{Frame, line, path, text},
};
use crate::report::{
    axis::Axis,
    markup::{Escaped, Px},
    table::{Cell, Column, Table},
};

/// Points from which on a curve has no marks.
const MARKS_UP_TO: usize = 40;

/// Curves over a common axis, such as latency against length.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    title: String,
    x: Axis,
    y: Axis,
    series: Vec<Series>,
    reference: Option<(f64, String)>,
}

/// One curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    name: String,
    points: Vec<(f64, f64)>,
    band: Vec<(f64, f64)>,
}

impl Series {
    /// A curve without points.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), points: Vec::new(), band: Vec::new() }
    }

    /// Sets the points, in the order in which they are joined.
    #[must_use]
    pub fn points(mut self, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        self.points = points.into_iter().collect();
        self
    }

    /// Sets the lower and upper end of the band at each point, such as p10 and p90.
    #[must_use]
    pub fn band(mut self, band: impl IntoIterator<Item = (f64, f64)>) -> Self {
        self.band = band.into_iter().collect();
        self
    }
}

impl Lines {
    /// A plot without curves.
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> Self {
        Self { title: title.into(), x, y, series: Vec::new(), reference: None }
    }

    /// Adds a curve.
    #[must_use]
    pub fn series(mut self, series: Series) -> Self {
        self.series.push(series);
        self
    }

    /// Draws a horizontal line at `value`, such as the load of equally used experts.
    #[must_use]
    pub fn reference(mut self, value: f64, label: impl Into<String>) -> Self {
        self.reference = Some((value, label.into()));
        self
    }

    fn takes(&self, (x, y): (f64, f64)) -> bool {
        self.x.takes(x) && self.y.takes(y)
    }

    pub(super) fn draw(&self) -> Drawing {
        let all = || self.series.iter().flat_map(|series| series.points.iter().copied());
        let left_out = all().filter(|point| !self.takes(*point)).count();
        let legend = match self.series.len() {
            0 | 1 => Vec::new(),
            _ => self.series.iter().enumerate().map(|(index, s)| (s.name.clone(), swatch(index, s))).collect(),
        };
        Drawing {
            title: self.title.clone(),
            legend,
            svg: (left_out < all().count()).then(|| (self.svg(), Frame::height())),
            left_out,
            numbers: self.numbers(),
        }
    }

    fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|series| series.points.iter());
        let xs: Vec<f64> = points().map(|(x, _)| *x).collect();
        let bands = self.series.iter().flat_map(|series| series.band.iter().flat_map(|(low, high)| [*low, *high]));
        let reference = self.reference.iter().map(|(value, _)| *value);
        let ys: Vec<f64> = points().map(|(_, y)| *y).chain(bands).chain(reference).collect();
        let mut frame = Frame::new(&self.x, &self.y, &xs, &ys);
        for (index, series) in self.series.iter().enumerate() {
            self.draw_band(&mut frame, index, series);
        }
        if let Some((value, label)) = self.reference.as_ref().filter(|(value, _)| self.y.takes(*value)) {
            let at = frame.y.at(*value);
            line(&mut frame.svg, "reference", [frame.left, at, Frame::right(), at]);
            text(&mut frame.svg, "end halo", Frame::right(), at - 6.0, label);
        }
        for (index, series) in self.series.iter().enumerate() {
            self.draw_curve(&mut frame, index, series);
        }
        frame.svg
    }

    fn draw_band(&self, frame: &mut Frame, index: usize, series: &Series) {
        let band: Vec<_> = series
            .points
            .iter()
            .zip(&series.band)
            .filter(|((x, _), (low, high))| self.x.takes(*x) && self.y.takes(*low) && self.y.takes(*high))
            .map(|((x, _), (low, high))| (frame.x.at(*x), frame.y.at(*low), frame.y.at(*high)))
            .collect();
        if band.len() < 2 {
            for (x, low, high) in band {
                line(&mut frame.svg, &colour(index), [x, low, x, high]);
            }
            return;
        }
        let upper = band.iter().map(|(x, _, high)| (*x, *high));
        let lower = band.iter().rev().map(|(x, low, _)| (*x, *low));
        let outline = path(&upper.chain(lower).collect::<Vec<_>>());
        let _ = writeln!(frame.svg, "<path class=\"band {}\" d=\"{outline}Z\"/>", colour(index));
    }

    fn draw_curve(&self, frame: &mut Frame, index: usize, series: &Series) {
        let class = colour(index);
        let drawn: Vec<_> = series.points.iter().copied().filter(|point| self.takes(*point)).collect();
        let places: Vec<_> = drawn.iter().map(|(x, y)| (frame.x.at(*x), frame.y.at(*y))).collect();
        let curve = path(&places);
        let _ = writeln!(frame.svg, "<path class=\"curve {class}\"{} d=\"{curve}\"/>", dashes(index));
        if drawn.len() > MARKS_UP_TO {
            return;
        }
        for ((x, y), (left, top)) in drawn.iter().zip(places) {
            let mut shown = format!("{}: {}", self.x.value(*x), self.y.value(*y));
            if !series.name.is_empty() {
                shown = format!("{}, {shown}", series.name);
            }
            let outline = mark(index, left, top);
            let _ = writeln!(
                frame.svg,
                "<path class=\"mark {class}\" d=\"{outline}\"><title>{}</title></path>",
                Escaped(&shown)
            );
        }
    }

    fn numbers(&self) -> Table {
        let mut xs: Vec<f64> = self.series.iter().flat_map(|s| s.points.iter().map(|(x, _)| *x)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup_by(|a, b| a.total_cmp(b).is_eq());
        let y = self.y.title();
        let mut columns = vec![Column::number(self.x.title())];
        for series in &self.series {
            let name = if series.name.is_empty() { &y } else { &series.name };
            columns.push(Column::number(name));
            if !series.band.is_empty() {
                columns.extend(["low", "high"].map(|end| Column::number(format!("{name}, {end}"))));
            }
        }
        let mut table = Table::new(columns).caption(y);
        for x in xs {
            let mut row = vec![Cell::from(x)];
            for series in &self.series {
                let place = series.points.iter().position(|(other, _)| other.total_cmp(&x).is_eq());
                row.push(place.map(|place| series.points[place].1).into());
                if !series.band.is_empty() {
                    let ends = place.and_then(|place| series.band.get(place));
                    row.extend([ends.map(|(low, _)| *low).into(), ends.map(|(_, high)| *high).into()]);
                }
            }
            table.push(row);
        }
        table
    }
}

fn swatch(index: usize, series: &Series) -> String {
    let class = colour(index);
    let curve = format!("<path class=\"curve {class}\"{} d=\"M1 6L25 6\"/>", dashes(index));
    if series.points.len() > MARKS_UP_TO {
        return curve;
    }
    format!("{curve}<path class=\"mark {class}\" d=\"{}\"/>", mark(index, 13.0, 6.0))
}

/// Outline of the mark of series `index`: a disc, a square, a diamond or a triangle.
fn mark(index: usize, x: f64, y: f64) -> String {
    let corners = |corners: &[(f64, f64)]| {
        let places: Vec<_> = corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
        format!("{}Z", path(&places))
    };
    match index % 4 {
        0 => format!("M{} {}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", Px(x - 4.0), Px(y)),
        1 => corners(&[(-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)]),
        2 => corners(&[(0.0, -5.0), (5.0, 0.0), (0.0, 5.0), (-5.0, 0.0)]),
        _ => corners(&[(0.0, -4.8), (4.6, 3.4), (-4.6, 3.4)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_all_series_meet_at_their_x() {
        let y = Axis::linear("latency", "ms");
        let plot = Lines::new("t", Axis::log("length", ""), y)
            .series(Series::new("a").points([(8.0, 1.0), (1.0, 2.0)]).band([(0.5, 1.5), (1.5, 2.5)]))
            .series(Series::new("b").points([(8.0, 4.0)]));
        let expected = Table::new(["length", "a", "a, low", "a, high", "b"].map(Column::number))
            .caption("latency (ms)")
            .row([1.0.into(), 2.0.into(), 1.5.into(), 2.5.into(), None.into()])
            .row([8.0.into(), 1.0.into(), 0.5.into(), 1.5.into(), 4.0.into()]);
        assert_eq!(plot.draw().numbers, expected);
    }

    #[test]
    fn what_has_no_place_is_counted() {
        let plot = Lines::new("t", Axis::log("", ""), Axis::linear("", "")).series(Series::new("a").points([
            (0.0, 1.0),
            (1.0, f64::NAN),
            (2.0, 1.0),
        ]));
        let drawing = plot.draw();
        assert_eq!(drawing.left_out, 2);
        assert!(!drawing.svg.unwrap().0.contains("NaN"));
        assert!(drawing.legend.is_empty(), "one series needs no legend");
    }

    #[test]
    fn a_plot_of_nothing_is_no_picture() {
        assert!(Lines::new("t", Axis::linear("", ""), Axis::linear("", "")).draw().svg.is_none());
    }
}
