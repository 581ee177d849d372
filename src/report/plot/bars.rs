//! Horizontal bars.

use super::{
    Drawing, colour,
    frame::{WIDTH, line, rectangle, text},
};
use crate::report::{
    axis::Axis,
    markup::{format_number, shortened, text_width},
    table::{Cell, Column, Table},
};

const ROW: f64 = 24.0;
const BAR: f64 = 14.0;
const TOP: f64 = 4.0;
const BELOW: f64 = 44.0;
const LABEL: usize = 40;

/// Bars, each of one part or several, such as the time of each layer by operator.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    title: String,
    axis: Axis,
    parts: Vec<String>,
    rows: Vec<(String, Vec<f64>)>,
    reference: Option<(f64, String)>,
}

impl Bars {
    /// A plot without bars; they begin at zero.
    pub fn new(title: impl Into<String>, axis: Axis) -> Self {
        let axis = axis.from_zero();
        Self { title: title.into(), axis, parts: Vec::new(), rows: Vec::new(), reference: None }
    }

    /// Names the parts of each bar, where it has several.
    #[must_use]
    pub fn parts<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.parts = names.into_iter().map(Into::into).collect();
        self
    }

    /// Adds a bar of one part.
    #[must_use]
    pub fn bar(self, label: impl Into<String>, value: f64) -> Self {
        self.stacked(label, [value])
    }

    /// Adds a bar with a value for each part, set end to end.
    #[must_use]
    pub fn stacked(mut self, label: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        self.rows.push((label.into(), values.into_iter().collect()));
        self
    }

    /// Draws a vertical line at `value`.
    #[must_use]
    pub fn reference(mut self, value: f64, label: impl Into<String>) -> Self {
        self.reference = Some((value, label.into()));
        self
    }

    fn drawn(&self, value: f64) -> bool {
        self.axis.takes(value) && value >= 0.0
    }

    fn sum(&self, values: &[f64]) -> f64 {
        values.iter().filter(|value| self.drawn(**value)).sum()
    }

    pub(super) fn draw(&self) -> Drawing {
        let left_out = self.rows.iter().flat_map(|(_, values)| values).filter(|value| !self.drawn(**value)).count();
        let swatch = |index| format!("<rect class=\"cell {}\" x=\"7\" width=\"12\" height=\"12\"/>", colour(index));
        let legend = match self.parts.len() {
            0 | 1 => Vec::new(),
            _ => self.parts.iter().enumerate().map(|(index, name)| (name.clone(), swatch(index))).collect(),
        };
        let svg = (!self.rows.is_empty()).then(|| self.svg());
        Drawing { title: self.title.clone(), legend, svg, left_out, numbers: self.numbers() }
    }

    #[allow(clippy::cast_precision_loss)]
    fn svg(&self) -> (String, f64) {
        let labels: Vec<_> = self.rows.iter().map(|(label, _)| shortened(label, LABEL)).collect();
        let left = labels.iter().map(|label| text_width(label)).fold(40.0, f64::max) + 10.0;
        let mut totals: Vec<_> = self.rows.iter().map(|(_, values)| self.sum(values)).collect();
        let shown: Vec<_> = totals.iter().map(|total| format_number(*total)).collect();
        let right = WIDTH - shown.iter().map(|text| text_width(text)).fold(0.0, f64::max) - 10.0;
        totals.extend(self.reference.iter().map(|(value, _)| *value));
        let scale = self.axis.scale(&totals, left, right, 110.0);
        let above = if self.reference.is_some() { TOP + 18.0 } else { TOP };
        let floor = above + ROW * self.rows.len() as f64 + 4.0;
        let mut svg = String::new();
        for (value, label) in &scale.ticks {
            let at = scale.at(*value);
            line(&mut svg, "grid", [at, above, at, floor]);
            text(&mut svg, "middle", at, floor + 16.0, label);
        }
        for (index, (label, values)) in self.rows.iter().enumerate() {
            let top = above + ROW * index as f64 + (ROW - BAR) / 2.0;
            text(&mut svg, "name end", left - 8.0, top + BAR - 3.0, &labels[index]);
            let mut before = 0.0;
            for (part, value) in values.iter().enumerate().filter(|(_, value)| self.drawn(**value)) {
                let from = if before > 0.0 { scale.at(before) } else { scale.base() };
                before += value;
                let width = (scale.at(before) - from).max(0.0);
                let name = self.parts.get(part).map(|name| format!("{label}, {name}"));
                let hint = format!("{}: {}", name.as_ref().unwrap_or(label), self.axis.value(*value));
                rectangle(&mut svg, &format!("class=\"cell {}\"", colour(part)), [from, top, width, BAR], &hint);
            }
            text(&mut svg, "", scale.at(before.max(0.0)).max(left) + 6.0, top + BAR - 3.0, &shown[index]);
        }
        if let Some((value, label)) = self.reference.as_ref().filter(|(value, _)| self.drawn(*value)) {
            let at = scale.at(*value);
            line(&mut svg, "reference", [at, above - 2.0, at, floor]);
            text(&mut svg, if at > f64::midpoint(left, right) { "end" } else { "" }, at, above - 8.0, label);
        }
        line(&mut svg, "axis", [scale.base(), above, scale.base(), floor]);
        text(&mut svg, "name middle", f64::midpoint(left, right), floor + 36.0, &self.axis.title());
        (svg, floor + BELOW)
    }

    fn numbers(&self) -> Table {
        let mut columns = vec![Column::text("")];
        match self.parts.len() {
            0 | 1 => columns.push(Column::number(self.axis.title())),
            _ => {
                columns.extend(self.parts.iter().map(Column::number));
                columns.push(Column::number("sum"));
            }
        }
        let mut table = Table::new(columns).caption(self.axis.title());
        for (label, values) in &self.rows {
            let mut row = vec![Cell::from(label.as_str())];
            row.extend(values.iter().map(|value| Cell::from(*value)));
            if self.parts.len() > 1 {
                row.resize(self.parts.len() + 1, "–".into());
                row.push(self.sum(values).into());
            }
            table.push(row);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stand_end_to_end() {
        let plot = Bars::new("t", Axis::linear("time", "ms"))
            .parts(["attention", "router"])
            .stacked("layer 0", [3.0, 1.0])
            .stacked("layer 1", [2.0, f64::NAN]);
        let drawing = plot.draw();
        assert_eq!((drawing.left_out, drawing.legend.len()), (1, 2));
        let svg = drawing.svg.unwrap().0;
        assert!(svg.contains("layer 0, router: 1 ms") && !svg.contains("NaN"), "{svg}");
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<rect"))
            .map(|line| line.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(widths.len(), 3);
        assert!((widths[0] - 3.0 * widths[1]).abs() < 0.05 && (widths[2] - 2.0 * widths[1]).abs() < 0.05, "{widths:?}");
    }

    #[test]
    fn bars_of_nothing_have_no_width() {
        let svg = Bars::new("t", Axis::linear("", "")).bar("a", 0.0).draw().svg.unwrap().0;
        assert!(svg.contains("width=\"0\""), "{svg}");
    }
}
