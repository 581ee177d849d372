//! How large and how small values are: whether AMX tiles may multiply them, by the bounds that `tiles` derives.

/// The largest magnitude among values, and the smallest that is not 0. The default is that of no values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Magnitudes {
    /// Bits of the largest magnitude; those of a NaN are larger than all others.
    pub(super) largest: u32,
    /// Bits of the smallest magnitude that is not 0, less 1.
    pub(super) below_smallest: u32,
}

impl Default for Magnitudes {
    fn default() -> Self {
        Self { largest: 0, below_smallest: u32::MAX }
    }
}

impl Magnitudes {
    /// Of values that nobody looked at: they suit nothing.
    pub(crate) const UNKNOWN: Self = Self { largest: u32::MAX, below_smallest: 0 };

    /// Of both.
    pub(crate) fn join(self, other: Self) -> Self {
        Self { largest: self.largest.max(other.largest), below_smallest: self.below_smallest.min(other.below_smallest) }
    }

    /// As one number, which is not 0.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.largest) << 32 | u64::from(self.below_smallest)
    }

    /// What [`Magnitudes::to_bits`] was given; `None` for 0.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self { largest: (bits >> 32) as u32, below_smallest: bits as u32 })
    }

    fn largest(self) -> f32 {
        f32::from_bits(self.largest)
    }

    /// Infinite where every value is 0.
    fn smallest(self) -> f32 {
        self.below_smallest.checked_add(1).map_or(f32::INFINITY, f32::from_bits)
    }

    /// Whether tiles multiply `inner` of such values as accurately as fused multiply-adds.
    pub(crate) fn suit(self, other: Self, inner: usize) -> bool {
        const SMALLEST: f32 = f32::from_bits((127 - 96) << 23);
        const LARGEST: f32 = f32::from_bits((127 + 126) << 23);
        let (least, most) = (self.smallest().min(other.smallest()), self.largest().max(other.largest()));
        most <= LARGEST
            && self.largest() * other.largest() * inner as f32 <= LARGEST
            && least >= SMALLEST
            && self.smallest() * other.smallest() >= SMALLEST
    }

    /// Whether tiles multiply such values with weights in `0 ..= 1` of which one is 1.
    ///
    /// Parts of a small weight may be flushed, which costs less than 2^-63 of the smallest value.
    pub(crate) fn suit_weights(self) -> bool {
        const BOUND: u32 = 60;
        self.largest() <= f32::from_bits((127 + BOUND) << 23) && self.smallest() >= f32::from_bits((127 - BOUND) << 23)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_of_nothing_and_of_zeros_suit_all_that_is_finite() {
        let of = |value: f32| Magnitudes { largest: value.to_bits(), below_smallest: value.to_bits().wrapping_sub(1) };
        let nothing = Magnitudes::default();
        assert_eq!(of(0.0), nothing);
        assert_eq!(Magnitudes::from_bits(nothing.to_bits()), Some(nothing));
        assert_eq!(Magnitudes::from_bits(0), None);
        for (a, b, inner, suit) in [
            (1.0, 0.0, 9, true),
            (f32::INFINITY, 0.0, 9, false),
            (f32::NAN, 1.0, 9, false),
            (f32::MAX, 1e-9, 9, false),
            (2f32.powi(63), 2f32.powi(63), 1, true),
            (2f32.powi(63), 2f32.powi(63), 2, false),
            (2f32.powi(-48), 2f32.powi(-48), 9, true),
            (2f32.powi(-48), 2f32.powi(-49), 9, false),
            (1e-40, 1e30, 9, false),
            (1e-40, 0.0, 9, false),
        ] {
            assert_eq!(of(a).suit(of(b), inner), suit, "{a:e} {b:e}");
            assert_eq!(of(b).suit(of(a), inner), suit, "{b:e} {a:e}");
        }
        assert!(of(1.0).suit_weights() && nothing.suit_weights());
        let unknown = Magnitudes::UNKNOWN;
        assert!(!unknown.suit(nothing, 1) && !nothing.suit(unknown, 1) && !unknown.suit_weights());
        assert_eq!(unknown.join(of(1.0)), unknown);
        assert!(!of(f32::NAN).suit_weights() && !of(1e-20).suit_weights() && !of(1e20).suit_weights());
    }
}
