//! What may be typed about the sizes of random inputs.

use std::num::IntErrorKind;

use super::Failure;
use crate::latency::{BATCH, Grid, PAST, Point, SEQUENCE, SOURCE};

/// Largest size of an axis: what is larger is a slip.
const LARGEST: usize = 1 << 20;

pub(super) fn size(text: &str) -> Result<usize, String> {
    if text.trim().is_empty() {
        return Err("a size is missing".into());
    }
    let size = text.trim().parse::<usize>().map_err(|error| match error.kind() {
        IntErrorKind::PosOverflow => format!("{text} is more than {LARGEST}"),
        _ => format!("{text:?} is no size: it must be a whole number"),
    })?;
    if size > LARGEST { Err(format!("{size} is more than {LARGEST}")) } else { Ok(size) }
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    match size(text)? {
        0 => Err("it must be at least 1".into()),
        size => Ok(size),
    }
}

/// Most tokens of a point; the inputs of more would fill the memory.
const MOST_TOKENS: usize = 1 << 24;

/// Axes that have an option of their own.
const OWN: [(&str, &str); 4] =
    [(BATCH, "--batch"), (SEQUENCE, "--seq"), (PAST, "--past"), (SOURCE, "--source or --seq")];

pub(super) fn axis(text: &str) -> Result<(String, usize), String> {
    let (name, number) = text.split_once('=').ok_or("give AXIS=N")?;
    let name = name.trim();
    match OWN.iter().find(|(own, _)| *own == name) {
        Some((_, option)) => Err(format!("{option} gives the sizes of the axis {name}")),
        None if name.is_empty() => Err("give AXIS=N".into()),
        None => Ok((name.to_owned(), size(number)?)),
    }
}

/// A grid of the sizes of --batch, --seq, --past and --source, and of `others`.
///
/// # Errors
///
/// Where an axis has two sizes, or inputs would fill the memory.
pub(super) fn grid(typed: [Vec<usize>; 4], others: &[(String, usize)]) -> Result<Grid, Failure> {
    let [batch, sequence, past, source] = typed;
    let mut sizes = Point::new();
    for (axis, size) in others {
        if sizes.insert(axis.clone(), *size).is_some() {
            return Err(Failure::usage(format!("--dim gives the axis {axis} two sizes"), "give it one size"));
        }
    }
    let grid = Grid { batch, sequence, past, source, others: sizes };
    match grid.most_tokens() {
        tokens if tokens <= MOST_TOKENS => Ok(grid),
        tokens => {
            let message = format!("a point of {tokens} tokens is more than {MOST_TOKENS}");
            Err(Failure::usage(message, "give smaller sizes to --batch, --seq, --past and --source"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_ranges() {
        assert_eq!((positive("8"), size("0")), (Ok(8), Ok(0)));
        for wrong in ["0", "-1", "", "1.5", "x", "9999999999999999999999", "1048577"] {
            assert!(positive(wrong).is_err(), "{wrong}");
        }
        assert_eq!(axis("heads=4"), Ok(("heads".into(), 4)));
        assert!(axis("=4").is_err() && axis("heads").is_err());
        assert_eq!(axis("sequence=4"), Err("--seq gives the sizes of the axis sequence".into()));
    }

    #[test]
    fn a_grid_gives_each_axis_one_size_and_fits_the_memory() {
        let typed = [vec![4, 1], vec![8], vec![5], vec![20]];
        let dims = [("heads".to_owned(), 6), ("width".to_owned(), 6)];
        let made = grid(typed.clone(), &dims).unwrap();
        assert_eq!([made.batch, made.sequence, made.past, made.source], typed);
        assert_eq!(made.others.into_iter().collect::<Vec<_>>(), dims);
        let twice = [("heads".to_owned(), 6), ("heads".to_owned(), 6)];
        let message = |typed, dims| grid(typed, dims).unwrap_err().message;
        assert_eq!(message(typed, &twice), "--dim gives the axis heads two sizes");
        let large = [vec![1 << 12], vec![1 << 12], vec![], vec![1]];
        assert_eq!(message(large, &dims), "a point of 16781312 tokens is more than 16777216");
    }
}
