//! Random numbers that are the same on every machine.

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// The generator of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The generator whose seed is the `index`-th number of the generator of `seed`, counted from 0.
    pub const fn stream(seed: u64, index: usize) -> Self {
        let mut seeds = Self(seed.wrapping_add((index as u64).wrapping_mul(Self::STEP)));
        Self(seeds.next())
    }

    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// An integer below `end`.
    #[allow(clippy::cast_possible_truncation)]
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// A number from -1 to 1.
    #[allow(clippy::cast_precision_loss)]
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// A number from -1.7 to 1.7, whose variance is about 1, as that of a row after a layer norm.
    pub fn normalised(&mut self) -> f32 {
        1.7 * self.unit()
    }

    /// A number from 0, below 1.
    #[allow(clippy::cast_precision_loss)]
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut random = Random::new(1_234_567);
        let numbers: Vec<_> = (0..3).map(|_| random.next()).collect();
        assert_eq!(numbers, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn streams_have_numbers_of_their_own() {
        let first = |seed, index| Random::stream(seed, index).next();
        assert_eq!(first(3, 1), first(3, 1));
        assert_ne!(first(3, 1), first(3, 0));
        assert_ne!(first(3, 1), first(4, 1));
        let mut seeds = Random::new(3);
        let seeds = [seeds.next(), seeds.next()];
        assert_eq!(seeds.map(|seed| Random::new(seed).next()), [first(3, 0), first(3, 1)]);
    }

    #[test]
    fn numbers_stay_in_their_ranges() {
        let mut random = Random::new(0);
        for _ in 0..10_000 {
            assert!(random.below(7) < 7);
            assert!((-1.0..1.0).contains(&random.unit()));
            assert!((0.0..1.0).contains(&random.fraction()));
        }
        let squares: f32 = (0..10_000).map(|_| random.normalised().powi(2)).sum();
        assert!((squares / 10_000.0 - 1.0).abs() < 0.05);
    }
}
