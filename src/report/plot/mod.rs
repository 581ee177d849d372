//! Plots as SVG.

mod bars;
mod distribution;
mod frame;
mod heat_map;
mod lines;

use std::fmt::Write;

use super::{markup::Escaped, table::Table};

pub use bars::Bars;
pub use distribution::Distribution;
pub use heat_map::HeatMap;
pub use lines::{Lines, Series};

/// Any plot.
#[derive(Debug, Clone, PartialEq)]
pub enum Plot {
    /// Curves.
    Lines(Lines),
    /// How samples are spread.
    Distribution(Distribution),
    /// Horizontal bars.
    Bars(Bars),
    /// A field of cells.
    HeatMap(HeatMap),
}

impl From<Lines> for Plot {
    fn from(plot: Lines) -> Self {
        Self::Lines(plot)
    }
}

impl From<Distribution> for Plot {
    fn from(plot: Distribution) -> Self {
        Self::Distribution(plot)
    }
}

impl From<Bars> for Plot {
    fn from(plot: Bars) -> Self {
        Self::Bars(plot)
    }
}

impl From<HeatMap> for Plot {
    fn from(plot: HeatMap) -> Self {
        Self::HeatMap(plot)
    }
}

/// What every plot gives the page.
struct Drawing {
    title: String,
    /// Names of the series, where there is more than one, and how their swatch looks.
    legend: Vec<(String, String)>,
    /// The SVG element's content and its height; nothing where there is nothing to draw.
    svg: Option<(String, f64)>,
    /// Values that have no place on an axis.
    left_out: usize,
    numbers: Table,
}

impl Plot {
    /// Writes a figure; `number` is unique on the page.
    pub(super) fn render(&self, html: &mut String, number: usize) {
        let drawing = match self {
            Self::Lines(plot) => plot.draw(),
            Self::Distribution(plot) => plot.draw(),
            Self::Bars(plot) => plot.draw(),
            Self::HeatMap(plot) => plot.draw(),
        };
        let id = format!("plot-{number}");
        let _ = writeln!(html, "<figure>\n<figcaption id=\"{id}\">{}</figcaption>", Escaped(&drawing.title));
        if !drawing.legend.is_empty() {
            html.push_str("<ul class=\"legend\">");
            for (name, swatch) in &drawing.legend {
                let swatch = format!("<svg viewBox=\"0 0 26 12\" aria-hidden=\"true\">{swatch}</svg>");
                let _ = write!(html, "<li>{swatch}{}</li>", Escaped(name));
            }
            html.push_str("</ul>\n");
        }
        let Some((content, height)) = &drawing.svg else {
            html.push_str("<p class=\"note\">There is nothing to draw.</p>\n</figure>\n");
            return;
        };
        let view = format!("0 0 {} {}", super::markup::Px(frame::WIDTH), super::markup::Px(*height));
        let _ = writeln!(
            html,
            "<div class=\"plot\" tabindex=\"0\"><svg viewBox=\"{view}\" role=\"img\" aria-labelledby=\"{id}\">\n{content}</svg></div>"
        );
        if drawing.left_out > 0 {
            let what = if drawing.left_out == 1 { "value has" } else { "values have" };
            let _ = writeln!(html, "<p class=\"note\">{} {what} no place on an axis.</p>", drawing.left_out);
        }
        html.push_str("<details><summary>Numbers</summary>\n");
        drawing.numbers.render(html);
        html.push_str("</details>\n</figure>\n");
    }
}

/// Class of the colour of series `index`.
fn colour(index: usize) -> String {
    format!("s{}", index % 8)
}

/// Dashes that tell series apart once the colours repeat.
fn dashes(index: usize) -> &'static str {
    ["", " stroke-dasharray=\"6 4\"", " stroke-dasharray=\"2 4\""][(index / 8) % 3]
}
