//! Rows that a model has positions for, beside the shapes of an engine.

use super::{InputShapes, ShapeProfile, ShapeProfileError};
use crate::onnx::read::{Dim, OnnxFile, ValueInfo, terms};

/// Fails where a profile is for rows of more tokens than `file` has positions: where no row can have the most frequent
/// sizes, or the largest size of one dimension whatever the others are.
///
/// # Errors
///
/// [`ShapeProfileError::Positions`].
pub fn must_have_positions(file: &OnnxFile, profiles: &[ShapeProfile]) -> Result<(), ShapeProfileError> {
    let Some((mask, table)) = file.longest_row() else { return Ok(()) };
    let inputs = file.inputs();
    let dims = inputs.iter().find(|input| input.name == mask).and_then(|input| input.dims.as_ref());
    let Some((Dim::Symbolic(row), place)) = dims.and_then(|dims| dims.last().zip(dims.len().checked_sub(1))) else {
        return Ok(());
    };
    let positions = table.positions as u64;
    for profile in profiles {
        let Some(shapes) = profile.iter().find(|shapes| shapes.name == mask) else { continue };
        if let Some((what, length)) = too_long(row, size_range(shapes, place), positions, |term| {
            let (input, place) = inputs.iter().find_map(|input| Some((input, place_of(input, term)?)))?;
            profile.iter().find(|shapes| shapes.name == input.name).map(|shapes| size_range(shapes, place))
        }) {
            return Err(ShapeProfileError::Positions { what, length, table: table.name, positions });
        }
    }
    Ok(())
}

/// Which sizes of a row make more than `positions` tokens, and how many; `row` is a dimension or a sum of several.
fn too_long(
    row: &str,
    [least, usual, _]: [u64; 3],
    positions: u64,
    size_of: impl Fn(&str) -> Option<[u64; 3]>,
) -> Option<(String, u64)> {
    for term in terms(row) {
        let Some([smallest, _, largest]) = size_of(term) else { continue };
        let shortest = least.saturating_sub(smallest).saturating_add(largest);
        if shortest > positions {
            return Some((format!("a largest `{term}` of {largest} makes"), shortest));
        }
    }
    (usual > positions).then(|| ("the most frequent sizes make".to_owned(), usual))
}

fn place_of(input: &ValueInfo, name: &str) -> Option<usize> {
    input.dims.as_ref()?.iter().position(|dim| matches!(dim, Dim::Symbolic(text) if text == name))
}

fn size_range(shapes: &InputShapes, place: usize) -> [u64; 3] {
    [&shapes.min, &shapes.opt, &shapes.max].map(|shape| shape.get(place).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of `past + new` tokens where there are 256 positions.
    fn said(past: [u64; 3], new: [u64; 3]) -> Option<(String, u64)> {
        let row = [0, 1, 2].map(|which| past[which].saturating_add(new[which]));
        too_long("past + new", row, 256, |term| if term == "past" { Some(past) } else { Some(new) })
    }

    #[test]
    fn ranges_are_refused_where_no_row_can_have_their_ends() {
        let of = |text: &str, length| Some((text.to_owned(), length));
        for (past, new, expected) in [
            ([0, 0, 0], [1, 256, 256], None),
            // Long prompts without a past, and single tokens after a long one.
            ([0, 64, 255], [1, 1, 256], None),
            ([0, 64, 255], [1, 1, 257], of("a largest `new` of 257 makes", 257)),
            ([0, 64, 256], [1, 1, 64], of("a largest `past` of 256 makes", 257)),
            ([128, 128, 128], [1, 64, 128], None),
            ([129, 129, 129], [1, 64, 128], of("a largest `new` of 128 makes", 257)),
            ([0, 200, 255], [1, 57, 256], of("the most frequent sizes make", 257)),
            ([0, 200, 255], [1, 56, 256], None),
            ([0, 0, u64::MAX], [1, 1, 1], of("a largest `past` of 18446744073709551615 makes", u64::MAX)),
        ] {
            assert_eq!(said(past, new), expected, "{past:?} {new:?}");
        }
        assert_eq!(too_long("tokens", [1, 300, 400], 256, |_| None).unwrap().1, 300);
    }
}
