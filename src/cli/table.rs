//! Plain text tables, and numbers in them.

use std::fmt::Display;

/// Rows under a header, columns padded to their widest cell, two spaces between.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<_> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &[&str]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", padded.collect::<Vec<_>>().join("  ").trim_end())
    };
    let mut text = line(header);
    for row in rows {
        text.push_str(&line(&row.iter().map(String::as_str).collect::<Vec<_>>()));
    }
    text
}

/// How many of `what` there are.
pub(super) fn counted<N: Copy + Display + PartialEq + From<u8>>(count: N, what: &str) -> String {
    format!("{count} {}", noun(count, what))
}

/// `what` as it follows its number.
pub(super) fn noun<N: PartialEq + From<u8>>(count: N, what: &str) -> String {
    if count == N::from(1) { what.to_owned() } else { format!("{what}s") }
}

/// A number of bytes for people.
#[allow(clippy::cast_precision_loss)]
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["long".to_owned(), "22".to_owned()]];
        assert_eq!(table(&["x", "y"], &rows), "x     y\na     1\nlong  22\n");
    }

    #[test]
    fn one_is_no_plural() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "node")), ["0 nodes", "1 node", "2 nodes"]);
    }

    #[test]
    fn sizes_change_units() {
        assert_eq!(size(999), "999 B");
        assert_eq!(size(4_350_000), "4.3 MB");
        assert_eq!(size(17_044_475_904), "17.0 GB");
    }
}
