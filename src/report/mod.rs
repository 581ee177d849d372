//! One self-contained HTML page: text, tables and plots, without scripts and without a network.
//!
//! ```
//! use moa_export::report::{Axis, Column, Lines, Report, Series, Table};
//!
//! let mut report = Report::new("Latency", "one layer on two threads");
//! let section = report.section("Against length");
//! section.paragraph("Lower is better.");
//! let x = Axis::log("sequence length", "tokens");
//! let y = Axis::linear("latency", "ms");
//! let series = Series::new("ort").points([(1.0, 0.2), (128.0, 3.7)]);
//! section.plot(Lines::new("Median latency", x, y).series(series));
//! section.table(Table::new([Column::text("backend"), Column::number("p50 / ms")]).row(["ort".into(), 3.7.into()]));
//! assert!(report.to_html().starts_with("<!doctype html>"));
//! ```
//!
//! Everything that a caller gives is escaped. The same report gives the same bytes.

mod axis;
mod markup;
mod page;
mod plot;
mod table;

pub use axis::Axis;
pub use markup::{format_number, shortened, signed};
pub use plot::{Bars, Distribution, HeatMap, Lines, Plot, Series};
pub use table::{Cell, Column, Status, Table};

/// A page under construction.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    title: String,
    about: String,
    subtitle: String,
    footer: String,
    verdict: Option<(Status, String)>,
    sections: Vec<Section>,
}

/// A heading and what stands under it.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    heading: String,
    blocks: Vec<Block>,
}

#[derive(Debug, Clone, PartialEq)]
enum Block {
    Paragraph(String),
    Facts(Vec<(String, String)>),
    Table(Table),
    Folded(String, Table),
    Plot(Plot),
}

impl Report {
    /// A page without sections.
    pub fn new(title: impl Into<String>, subtitle: impl Into<String>) -> Self {
        let (title, subtitle) = (title.into(), subtitle.into());
        Self { title, about: String::new(), subtitle, footer: String::new(), verdict: None, sections: Vec::new() }
    }

    /// Sets what the page is about, such as a model: the title of its window begins with it.
    pub fn about(&mut self, text: impl Into<String>) -> &mut Self {
        self.about = text.into();
        self
    }

    /// Sets what stands under everything, such as the program that wrote the page.
    pub fn footer(&mut self, text: impl Into<String>) -> &mut Self {
        self.footer = text.into();
        self
    }

    /// Sets the one line that a hasty reader takes away, shown under the title.
    pub fn verdict(&mut self, status: Status, text: impl Into<String>) -> &mut Self {
        self.verdict = Some((status, text.into()));
        self
    }

    /// Adds a section and returns it to be filled.
    pub fn section(&mut self, heading: impl Into<String>) -> &mut Section {
        let place = self.sections.len();
        self.sections.push(Section { heading: heading.into(), blocks: Vec::new() });
        &mut self.sections[place]
    }

    /// The page, UTF-8.
    pub fn to_html(&self) -> String {
        page::render(self)
    }
}

impl Section {
    /// Adds a paragraph of text.
    pub fn paragraph(&mut self, text: impl Into<String>) -> &mut Self {
        self.blocks.push(Block::Paragraph(text.into()));
        self
    }

    /// Adds pairs of a name and a value.
    pub fn facts<K: Into<String>, V: Into<String>>(&mut self, facts: impl IntoIterator<Item = (K, V)>) -> &mut Self {
        self.blocks.push(Block::Facts(facts.into_iter().map(|(name, value)| (name.into(), value.into())).collect()));
        self
    }

    /// Adds a table.
    pub fn table(&mut self, table: Table) -> &mut Self {
        self.blocks.push(Block::Table(table));
        self
    }

    /// Adds a table that unfolds under `summary`.
    pub fn folded(&mut self, summary: impl Into<String>, table: Table) -> &mut Self {
        self.blocks.push(Block::Folded(summary.into(), table));
        self
    }

    /// Adds a plot, with its numbers as a table that unfolds.
    pub fn plot(&mut self, plot: impl Into<Plot>) -> &mut Self {
        self.blocks.push(Block::Plot(plot.into()));
        self
    }
}
