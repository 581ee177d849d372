//! Products that are added to one row of the output.

use crate::simd::Isa;

/// Terms that are added at once, so that the row is read and written less often.
const MOST: usize = 8;

/// Terms `(factor, product)` of one row, added in the order in which they come.
#[derive(Clone, Copy)]
pub(crate) struct Terms<'a> {
    isa: Isa,
    all: [(f32, &'a [f32]); MOST],
    count: usize,
}

impl<'a> Terms<'a> {
    /// None yet.
    pub(crate) fn new(isa: Isa) -> Self {
        Self { isa, all: [(0.0, &[]); MOST], count: 0 }
    }

    /// Takes a term of `row`, and adds all there are to it where there is no room for more.
    pub(crate) fn push(&mut self, factor: f32, product: &'a [f32], row: &mut [f32]) {
        self.all[self.count] = (factor, product);
        self.count += 1;
        if self.count == MOST {
            self.add_to(row);
        }
    }

    /// Adds what is left to `row`.
    pub(crate) fn add_to(&mut self, row: &mut [f32]) {
        self.isa.add_terms(row, &self.all[..self.count]);
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::every_isa;

    /// Of any number of terms, for whole groups of lanes and what is left of them.
    #[test]
    fn terms_are_added_in_their_order() {
        let value = |index: usize| ((index * 37 % 101) as f32 * 0.71).sin();
        for isa in every_isa() {
            for (len, count) in [(0, 1), (1, 3), (15, MOST), (16, 1), (47, MOST + 3), (64, 2 * MOST)] {
                let products: Vec<f32> = (0..count * len).map(value).collect();
                let (mut found, mut wanted) = (vec![1.0; len], vec![1.0; len]);
                let mut terms = Terms::new(isa);
                for term in 0..count {
                    let (factor, product) = (value(term + 5), &products[term * len..][..len]);
                    terms.push(factor, product, &mut found);
                    isa.add_terms(&mut wanted, &[(factor, product)]);
                }
                terms.add_to(&mut found);
                assert_eq!(found, wanted, "{isa:?} {len} {count}");
                for (index, found) in found.iter().enumerate() {
                    let sum: f32 = (0..count).map(|term| value(term + 5) * products[term * len + index]).sum();
                    assert!((found - 1.0 - sum).abs() < 1e-5, "{isa:?} {len} {count}: {index}");
                }
            }
        }
    }
}
