//! Tables.

use std::fmt::Write;

use super::markup::{Escaped, format_number, with_decimals};

/// Characters up to which a text is not broken: a table that is too wide scrolls, and names stay whole.
const UNBROKEN: usize = 32;

/// A table whose numbers align.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    caption: String,
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

/// The head of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    heading: String,
    number: bool,
}

/// One entry of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// Text, or a number that the caller formatted.
    Text(String),
    /// A judgement with its text.
    Status(Status, String),
}

/// A judgement; shown by a sign and a colour beside its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// As it should be.
    Good,
    /// To be looked at.
    Warning,
    /// Not as it should be.
    Bad,
    /// Not judged, such as a check that was skipped.
    Neutral,
}

impl Status {
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Warning => "warning",
            Self::Bad => "bad",
            Self::Neutral => "neutral",
        }
    }

    pub(super) const fn sign(self) -> &'static str {
        match self {
            Self::Good => "✓",
            Self::Warning => "!",
            Self::Bad => "✗",
            Self::Neutral => "–",
        }
    }
}

impl Column {
    /// A column of text, aligned left.
    pub fn text(heading: impl Into<String>) -> Self {
        Self { heading: heading.into(), number: false }
    }

    /// A column of numbers, aligned right.
    pub fn number(heading: impl Into<String>) -> Self {
        Self { heading: heading.into(), number: true }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<f64> for Cell {
    fn from(value: f64) -> Self {
        Self::Text(format_number(value))
    }
}

impl From<usize> for Cell {
    fn from(value: usize) -> Self {
        Self::from(value as u64)
    }
}

impl From<u64> for Cell {
    #[allow(clippy::cast_precision_loss)]
    fn from(value: u64) -> Self {
        const EXACT: u64 = 1 << 53;
        Self::Text(if value < EXACT { with_decimals(value as f64, 0) } else { value.to_string() })
    }
}

impl From<Option<f64>> for Cell {
    fn from(value: Option<f64>) -> Self {
        value.map_or_else(|| Self::Text("–".into()), Self::from)
    }
}

impl Table {
    /// A table without rows.
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self { caption: String::new(), columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    /// Sets the caption.
    #[must_use]
    pub fn caption(mut self, text: impl Into<String>) -> Self {
        self.caption = text.into();
        self
    }

    /// Adds a row; cells that are missing stay empty, cells beyond the columns are left out.
    #[must_use]
    pub fn row(mut self, cells: impl IntoIterator<Item = Cell>) -> Self {
        self.push(cells);
        self
    }

    /// [`Self::row`] for loops.
    pub fn push(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let mut row: Vec<_> = cells.into_iter().take(self.columns.len()).collect();
        row.resize(self.columns.len(), Cell::Text(String::new()));
        self.rows.push(row);
    }

    pub(super) fn render(&self, html: &mut String) {
        html.push_str("<div class=\"table\" tabindex=\"0\"><table>\n");
        if !self.caption.is_empty() {
            let _ = writeln!(html, "<caption>{}</caption>", Escaped(&self.caption));
        }
        html.push_str("<thead><tr>");
        let classes: Vec<_> = (0..self.columns.len()).map(|place| self.class(place)).collect();
        for (column, class) in self.columns.iter().zip(&classes) {
            let _ = write!(html, "<th scope=\"col\" class=\"{class}\">{}</th>", Escaped(&column.heading));
        }
        html.push_str("</tr></thead>\n<tbody>\n");
        for row in &self.rows {
            html.push_str("<tr>");
            for (place, (cell, class)) in row.iter().zip(&classes).enumerate() {
                render_cell(html, cell, class, place == 0);
            }
            html.push_str("</tr>\n");
        }
        html.push_str("</tbody></table></div>\n");
    }

    /// The class of a column's cells.
    fn class(&self, place: usize) -> &'static str {
        if self.columns[place].number {
            return "number";
        }
        let text = |row: &Vec<Cell>| match &row[place] {
            Cell::Text(text) | Cell::Status(_, text) => text.chars().count(),
        };
        if self.rows.iter().map(text).max() <= Some(UNBROKEN) { "unbroken" } else { "prose" }
    }
}

fn render_cell(html: &mut String, cell: &Cell, class: &str, first: bool) {
    let (open, close) = if first { ("th scope=\"row\"", "th") } else { ("td", "td") };
    let _ = match cell {
        Cell::Text(text) => write!(html, "<{open} class=\"{class}\">{}</{close}>", Escaped(text)),
        Cell::Status(status, text) => {
            let (status, sign) = (status.class(), status.sign());
            let mark = format!("<span class=\"status {status}\"><span aria-hidden=\"true\">{sign}</span> ");
            write!(html, "<{open} class=\"{class}\">{mark}{}</span></{close}>", Escaped(text))
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_whole_and_long_texts_are_broken() {
        let long = "a name-of-many-words that is longer than a column may be";
        let columns = [Column::text("backend"), Column::number("n"), Column::text("why")];
        let table = Table::new(columns).row(["ort-function".into(), 1_usize.into(), long.into()]);
        let mut html = String::new();
        table.render(&mut html);
        for cell in [
            "<th scope=\"col\" class=\"unbroken\">backend</th>",
            "<th scope=\"row\" class=\"unbroken\">ort-function</th>",
            "<td class=\"number\">1</td>",
            &format!("<td class=\"prose\">{long}</td>"),
        ] {
            assert!(html.contains(cell), "{cell}\nis not in\n{html}");
        }
    }
}
