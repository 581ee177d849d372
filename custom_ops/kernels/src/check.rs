//! Length checks at the door: past them, every index is in bounds.

use crate::{KernelError, WeightData};

fn product(dims: &[usize]) -> usize {
    dims.iter().fold(1, |product, &dim| product.saturating_mul(dim))
}

/// Proves that a slice of `found` elements has the shape `dims`.
pub(crate) fn length(name: &'static str, found: usize, dims: &[usize]) -> Result<(), KernelError> {
    let expected = product(dims);
    if found == expected { Ok(()) } else { Err(KernelError::Length { name, expected, found }) }
}

/// As [`length`], for a weight.
pub(crate) fn elements(name: &'static str, found: WeightData<'_>, dims: &[usize]) -> Result<(), KernelError> {
    let expected = product(dims);
    if found.has(expected) { Ok(()) } else { Err(KernelError::Length { name, expected, found: found.len() }) }
}

/// Proves that a weight has the shape `[matrices, inner, columns]`, and as many scales as it needs.
pub(crate) fn weight(
    [name, scale]: [&'static str; 2],
    found: WeightData<'_>,
    shape: [usize; 3],
) -> Result<(), KernelError> {
    elements(name, found, &shape)?;
    found.scales(shape).map_or(Ok(()), |(found, needed)| length(scale, found, &needed))
}

/// As [`length`], for a parameter that may be absent.
pub(crate) fn optional_length(name: &'static str, found: Option<usize>, dims: &[usize]) -> Result<(), KernelError> {
    found.map_or(Ok(()), |found| length(name, found, dims))
}

/// Proves that router weights are `[R, E]`, where `R` is the width of what the router reads: `width`, or that of its
/// own `input`, if there is one, for each of some tokens. Returns `R`.
pub(crate) fn router(
    weight: &[f32],
    input: Option<&[f32]>,
    tokens: [usize; 2],
    [width, experts]: [usize; 2],
) -> Result<usize, KernelError> {
    let read = if input.is_some() { weight.len().checked_div(experts).unwrap_or(0) } else { width };
    at_least_one(&[("R", read)])?;
    length("router_weight", weight.len(), &[read, experts])?;
    optional_length("router_input", input.map(<[_]>::len), &[tokens[0], tokens[1], read])?;
    Ok(read)
}

/// Refuses the first size that is 0.
pub(crate) fn at_least_one(sizes: &[(&'static str, usize)]) -> Result<(), KernelError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some(&(symbol, _)) => Err(KernelError::Empty { symbol }),
        None => Ok(()),
    }
}
