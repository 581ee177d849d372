//! The box around curves: grid, ticks and axis titles.

use std::fmt::Write;

use crate::report::{
    axis::{Axis, Scale},
    markup::{Escaped, Px, text_width},
};

/// Width of every plot; the page shows it at most so wide, so that its type keeps its size.
pub(super) const WIDTH: f64 = 816.0;

const TOP: f64 = 34.0;
const PLOT_HEIGHT: f64 = 260.0;
const RIGHT: f64 = 16.0;
const BELOW: f64 = 46.0;

/// A grid with two axes.
pub(super) struct Frame {
    pub(super) x: Scale,
    pub(super) y: Scale,
    pub(super) left: f64,
    pub(super) svg: String,
}

impl Frame {
    /// The frame for points with these coordinates.
    pub(super) fn new(x_axis: &Axis, y_axis: &Axis, xs: &[f64], ys: &[f64]) -> Self {
        let y = y_axis.scale(ys, TOP + PLOT_HEIGHT, TOP, 52.0);
        let widest = y.ticks.iter().map(|(_, label)| text_width(label)).fold(0.0, f64::max);
        let left = widest + 14.0;
        let x = x_axis.scale(xs, left, WIDTH - RIGHT, 110.0);
        let mut svg = String::new();
        for (value, label) in &y.ticks {
            let at = y.at(*value);
            line(&mut svg, "grid", [left, at, WIDTH - RIGHT, at]);
            text(&mut svg, "end", left - 8.0, at + 4.0, label);
        }
        let floor = TOP + PLOT_HEIGHT;
        for (value, label) in &x.ticks {
            let at = x.at(*value);
            line(&mut svg, "axis", [at, floor, at, floor + 5.0]);
            text(&mut svg, "middle", at, floor + 19.0, label);
        }
        line(&mut svg, "axis", [left, floor, WIDTH - RIGHT, floor]);
        text(&mut svg, "name", 0.0, 12.0, &y_axis.title());
        text(&mut svg, "name middle", f64::midpoint(left, WIDTH - RIGHT), floor + 38.0, &x_axis.title());
        Self { x, y, left, svg }
    }

    pub(super) const fn right() -> f64 {
        WIDTH - RIGHT
    }

    pub(super) const fn height() -> f64 {
        TOP + PLOT_HEIGHT + BELOW
    }
}

pub(super) fn line(svg: &mut String, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
    let (x1, y1, x2, y2) = (Px(x1), Px(y1), Px(x2), Px(y2));
    let _ = writeln!(svg, "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>");
}

pub(super) fn text(svg: &mut String, class: &str, x: f64, y: f64, label: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(svg, "<text{class} x=\"{}\" y=\"{}\">{}</text>", Px(x), Px(y), Escaped(label));
}

/// A rectangle, with what a pointer over it shows.
pub(super) fn rectangle(svg: &mut String, attributes: &str, [x, y, width, height]: [f64; 4], shown: &str) {
    let (x, y, width, height) = (Px(x), Px(y), Px(width), Px(height));
    let place = format!("x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"");
    let _ = writeln!(svg, "<rect {attributes} {place}><title>{}</title></rect>", Escaped(shown));
}

/// The path through `points`.
pub(super) fn path(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (place, (x, y)) in points.iter().enumerate() {
        let command = if place == 0 { 'M' } else { 'L' };
        let _ = write!(path, "{command}{} {}", Px(*x), Px(*y));
    }
    path
}
