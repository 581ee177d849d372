//! A field of cells, darker where the value is larger.

use super::{
    Drawing,
    frame::{WIDTH, rectangle, text},
};
use crate::report::{
    axis::Axis,
    markup::{Px, shortened, text_width, with_decimals},
    table::{Cell, Column, Table},
};

const TOP: f64 = 22.0;
const LABEL: usize = 40;
/// Opacity of the smallest value; below it a cell could not be told from the page.
const FAINTEST: f64 = 0.04;

/// Values by row and column, such as the load of each expert of each layer.
#[derive(Debug, Clone, PartialEq)]
pub struct HeatMap {
    title: String,
    columns_title: String,
    value: Axis,
    columns: Vec<String>,
    rows: Vec<(String, Vec<Option<f64>>)>,
}

impl HeatMap {
    /// A field without rows; `value` says what a cell shows, on an axis that begins at zero.
    pub fn new(title: impl Into<String>, value: Axis) -> Self {
        let value = value.from_zero();
        Self { title: title.into(), columns_title: String::new(), value, columns: Vec::new(), rows: Vec::new() }
    }

    /// Names the columns, and what they are.
    #[must_use]
    pub fn columns<S: Into<String>>(mut self, title: impl Into<String>, names: impl IntoIterator<Item = S>) -> Self {
        self.columns_title = title.into();
        self.columns = names.into_iter().map(Into::into).collect();
        self
    }

    /// Adds a row; a value that is absent is an empty cell.
    #[must_use]
    pub fn row(mut self, label: impl Into<String>, values: impl IntoIterator<Item = Option<f64>>) -> Self {
        self.rows.push((label.into(), values.into_iter().take(self.columns.len()).collect()));
        self
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().flat_map(|(_, values)| values.iter().flatten().copied())
    }

    pub(super) fn draw(&self) -> Drawing {
        let left_out = self.values().filter(|value| !self.value.takes(*value)).count();
        let svg = (left_out < self.values().count()).then(|| self.svg());
        let numbers = self.numbers();
        Drawing { title: self.title.clone(), legend: Vec::new(), svg, left_out, numbers }
    }

    #[allow(clippy::cast_precision_loss)]
    fn svg(&self) -> (String, f64) {
        let labels: Vec<_> = self.rows.iter().map(|(label, _)| shortened(label, LABEL)).collect();
        let left = labels.iter().map(|label| text_width(label)).fold(24.0, f64::max) + 10.0;
        let cell = ((WIDTH - left) / self.columns.len().max(1) as f64).min(72.0);
        let height = cell.clamp(16.0, 26.0);
        let values: Vec<_> = self.values().collect();
        let shade = self.value.scale(&values, FAINTEST, 1.0, 0.15);
        let decimals = usize::from(values.iter().any(|value| value.fract() != 0.0 && value.abs() < 100.0));
        let texts = |value: &f64| with_decimals(*value, decimals);
        let in_cells = values.iter().all(|value| text_width(&texts(value)) + 6.0 <= cell) && height >= 16.0;
        let mut svg = String::new();
        text(&mut svg, "name", left, 11.0, &self.columns_title);
        let top = TOP + 14.0;
        self.column_labels(&mut svg, left, cell);
        for (index, (label, values)) in self.rows.iter().enumerate() {
            let y = top + height * index as f64;
            text(&mut svg, "name end", left - 8.0, y + height / 2.0 + 4.0, &labels[index]);
            for (column, value) in values.iter().enumerate() {
                let place = [left + cell * column as f64, y, cell, height];
                let name = format!("{label}, {} {}", self.columns_title, self.columns[column]);
                let Some(value) = value.filter(|value| self.value.takes(*value)) else {
                    let inner = [place[0] + 1.0, place[1] + 1.0, (cell - 2.0).max(0.0), height - 2.0];
                    rectangle(&mut svg, "class=\"empty\"", inner, &format!("{name}: no value"));
                    continue;
                };
                let opacity = shade.at(value);
                let attributes = format!("class=\"cell heat\" fill-opacity=\"{}\"", Px(opacity));
                rectangle(&mut svg, &attributes, place, &format!("{name}: {}", self.value.value(value)));
                if in_cells {
                    text(&mut svg, text_class(opacity), place[0] + cell / 2.0, y + height / 2.0 + 4.0, &texts(&value));
                }
            }
        }
        let below = top + height * self.rows.len() as f64 + 18.0;
        self.key(&mut svg, &shade.ticks, left, below);
        (svg, below + 36.0)
    }

    /// As many names as fit.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn column_labels(&self, svg: &mut String, left: f64, cell: f64) {
        let widest = self.columns.iter().map(|name| text_width(name)).fold(0.0, f64::max);
        let every = ((widest + 8.0) / cell).ceil().max(1.0) as usize;
        for (column, name) in self.columns.iter().enumerate().step_by(every) {
            text(svg, "middle", left + cell * (column as f64 + 0.5), TOP + 8.0, name);
        }
    }

    /// The scale of shades, under the field.
    #[allow(clippy::cast_precision_loss)]
    fn key(&self, svg: &mut String, ticks: &[(f64, String)], left: f64, top: f64) {
        const STEPS: usize = 24;
        const LENGTH: f64 = 240.0;
        for step in 0..STEPS {
            let opacity = FAINTEST + (1.0 - FAINTEST) * (step as f64 + 0.5) / STEPS as f64;
            let width = LENGTH / STEPS as f64;
            let attributes = format!("class=\"heat\" fill-opacity=\"{}\"", Px(opacity));
            rectangle(svg, &attributes, [left + width * step as f64, top, width, 8.0], &self.value.title());
        }
        if let [(_, low), .., (_, high)] = ticks {
            text(svg, "", left, top + 23.0, low);
            text(svg, "end", left + LENGTH, top + 23.0, high);
        }
        text(svg, "name", left + LENGTH + 12.0, top + 8.0, &self.value.title());
    }

    fn numbers(&self) -> Table {
        let columns = [Column::text(&self.columns_title)];
        let columns = columns.into_iter().chain(self.columns.iter().map(Column::number));
        let mut table = Table::new(columns).caption(self.value.title());
        for (label, values) in &self.rows {
            table.push([label.as_str().into()].into_iter().chain(values.iter().map(|value| Cell::from(*value))));
        }
        table
    }
}

/// The class of the number in a cell of this opacity. Which ink has more contrast changes earlier on a dark page than
/// on a light one; between the two changes the page's style decides.
const fn text_class(opacity: f64) -> &'static str {
    if opacity < 0.6 {
        "middle name"
    } else if opacity < 0.78 {
        "middle on-half-heat"
    } else {
        "middle on-heat"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shades(values: &[Option<f64>]) -> Vec<String> {
        let names = (0..values.len()).map(|index| index.to_string());
        let plot = HeatMap::new("t", Axis::linear("load", "%")).columns("expert", names).row("m", values.to_vec());
        let svg = plot.draw().svg.unwrap().0;
        let cells = svg.lines().filter(|line| line.contains("cell heat"));
        cells.map(|line| line.split("fill-opacity=\"").nth(1).unwrap().split('"').next().unwrap().to_owned()).collect()
    }

    #[test]
    fn larger_values_are_darker() {
        assert_eq!(shades(&[Some(0.0), Some(50.0), Some(100.0)]), ["0.04", "0.52", "1"]);
    }

    #[test]
    fn absent_values_are_empty_and_not_zero() {
        assert_eq!(shades(&[Some(1.0), None, Some(f64::NAN)]).len(), 1);
    }
}
