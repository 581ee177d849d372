//! What may be said about a series of times.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest time that the histogram tells apart from longer ones, in nanoseconds: an hour.
const LONGEST: u64 = 3_600_000_000_000;

/// Decimal digits that the histogram keeps of every time.
const DIGITS: u8 = 3;

/// Samples that must lie beyond a percentile before it is said: p99 from 1,000 samples, p99.9 from 10,000.
const BEYOND: u64 = 10;

/// Chance that an interval holds the median it is for.
const CONFIDENCE: f64 = 0.95;

/// Times of one contestant at one point, in nanoseconds.
///
/// Every different time is kept with how often it was seen. Calls that take `t` nanoseconds have about `t` different
/// times at most, and in a second there are `1e9 / t` of them: in a minute no more than some 250,000, whatever `t` is.
#[derive(Debug, Clone, Default)]
pub struct Times {
    counts: BTreeMap<u64, u64>,
    samples: u64,
}

/// What [`Times`] say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Times.
    pub samples: u64,
    /// Shortest, in nanoseconds as all that follow.
    pub min: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median: a measured time, by nearest rank as all percentiles.
    pub p50: u64,
    /// 90th percentile, from 100 samples on.
    pub p90: Option<u64>,
    /// 99th percentile, from 1,000 samples on.
    pub p99: Option<u64>,
    /// 99.9th percentile, from 10,000 samples on.
    pub p99_9: Option<u64>,
    /// Longest.
    pub max: u64,
    /// Upper ends of steps of three digits, and how many times lie in each.
    pub histogram: Vec<(u64, u64)>,
}

impl Times {
    /// Adds one time.
    pub fn add(&mut self, nanoseconds: u64) {
        *self.counts.entry(nanoseconds).or_default() += 1;
        self.samples += 1;
    }

    /// The shortest time that `thousandths` of all do not exceed, where enough samples lie beyond it.
    pub fn percentile(&self, thousandths: u64) -> Option<u64> {
        is_supported(self.samples, thousandths).then(|| self.nearest_rank(thousandths)).flatten()
    }

    fn nearest_rank(&self, thousandths: u64) -> Option<u64> {
        let rank = (u128::from(self.samples) * u128::from(thousandths)).div_ceil(1000);
        let mut seen = 0;
        let reached = |(time, count): (&u64, &u64)| {
            seen += u128::from(*count);
            (seen >= rank).then_some(*time)
        };
        self.counts.iter().find_map(reached)
    }

    /// Everything that these times support; `None` where there are none.
    #[allow(clippy::cast_precision_loss)]
    pub fn summary(&self) -> Option<Summary> {
        let sum: u128 = self.counts.iter().map(|(time, count)| u128::from(*time) * u128::from(*count)).sum();
        Some(Summary {
            samples: self.samples,
            min: *self.counts.first_key_value()?.0,
            mean: sum as f64 / self.samples as f64,
            p50: self.nearest_rank(500)?,
            p90: self.percentile(900),
            p99: self.percentile(990),
            p99_9: self.percentile(999),
            max: *self.counts.last_key_value()?.0,
            histogram: self.steps()?,
        })
    }

    /// Upper ends of steps of three digits, and how many times lie in each.
    fn steps(&self) -> Option<Vec<(u64, u64)>> {
        let mut histogram = Histogram::<u64>::new_with_bounds(1, LONGEST, DIGITS).ok()?;
        self.counts.iter().for_each(|(time, count)| histogram.saturating_record_n((*time).max(1), *count));
        Some(histogram.iter_recorded().map(|step| (step.value_iterated_to(), step.count_at_value())).collect())
    }
}

/// Whether ten of `samples` lie beyond the percentile of `thousandths`.
fn is_supported(samples: u64, thousandths: u64) -> bool {
    u128::from(samples) * u128::from(1000_u64.saturating_sub(thousandths)) >= u128::from(1000 * BEYOND)
}

/// A median and the interval that holds the median of the distribution with a chance of at least 95 %.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Median of the sample, by nearest rank.
    pub value: f64,
    /// The interval; `None` below six values, where no order statistic reaches the chance.
    pub interval: Option<[f64; 2]>,
}

/// The median of `values` with a distribution-free interval between two of its order statistics: as many values
/// are cut off at each end as leave a binomial chance of 95 % (David and Nagaraja, *Order Statistics*, 7.1).
///
/// `None` where there is no value.
pub(super) fn estimate_median(values: &[f64]) -> Option<Estimate> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let value = median_of_sorted(&sorted)?;
    let interval = cut(sorted.len()).map(|cut| [sorted[cut], sorted[sorted.len() - 1 - cut]]);
    Some(Estimate { value, interval })
}

/// The median of `values` by nearest rank, as every percentile here: the shortest that half of them do not exceed, so
/// the lower one of the middle two where their number is even.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    median_of_sorted(&sorted)
}

fn median_of_sorted(sorted: &[f64]) -> Option<f64> {
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

/// Values to cut off at each end of `count` sorted ones; `None` where even all of them are too few.
#[allow(clippy::cast_precision_loss)]
fn cut(count: usize) -> Option<usize> {
    let n = count as f64;
    let chance = |successes: f64| {
        let ways = libm::lgamma(n + 1.0) - libm::lgamma(successes + 1.0) - libm::lgamma(n - successes + 1.0);
        (ways - n * std::f64::consts::LN_2).exp()
    };
    let mut outside = 0.0;
    let mut cut = None;
    for index in 0..count / 2 {
        outside += 2.0 * chance(index as f64);
        if outside > 1.0 - CONFIDENCE {
            break;
        }
        cut = Some(index);
    }
    cut
}

/// How long one contestant takes beside another: the median of the ratios of their turns, each turn's time being
/// its median. The interval knows nothing of what differs between sessions of one model, such as where their memory
/// lies. The turns of a round follow each other at once, so that what slows the machine for longer than a
/// round slows both and leaves the ratio.
///
/// `None` where there is no common round.
#[allow(clippy::cast_precision_loss)]
pub(super) fn paired_ratio(turns: &[u64], beside: &[u64]) -> Option<Estimate> {
    let ratios: Vec<f64> = turns.iter().zip(beside).map(|(a, b)| *a as f64 / (*b).max(1) as f64).collect();
    estimate_median(&ratios)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random::Random;

    fn times(values: impl IntoIterator<Item = u64>) -> Times {
        let mut times = Times::default();
        values.into_iter().for_each(|value| times.add(value));
        times
    }

    /// Uniform on (0, 1].
    fn unit(random: &mut Random) -> f64 {
        (random.below(1 << 40) + 1) as f64 / (1u64 << 40) as f64
    }

    #[test]
    fn percentiles_need_ten_samples_beyond_them() {
        for (thousandths, needed) in [(900, 100), (990, 1_000), (999, 10_000)] {
            assert!(!is_supported(needed - 1, thousandths), "{thousandths}");
            assert!(is_supported(needed, thousandths), "{thousandths}");
        }
        let summary = times(1..1_000).summary().unwrap();
        assert_eq!((summary.p99, summary.p99_9), (None, None));
        let summary = times(1..=1_000).summary().unwrap();
        assert_eq!((summary.p99, summary.p99_9), (Some(990), None));
        assert_eq!(times(1..=10_000).summary().unwrap().p99_9, Some(9_990));
        assert_eq!(times([]).summary(), None);
    }

    #[test]
    fn percentiles_of_known_distributions() {
        let mut random = Random::new(1);
        let exponential = times((0..20_000).map(|_| (-1e6 * unit(&mut random).ln()) as u64));
        let summary = exponential.summary().unwrap();
        let expected = [(summary.p50, 0.5), (summary.p90.unwrap(), 0.9), (summary.p99.unwrap(), 0.99)];
        for (found, quantile) in expected {
            let exact = -1e6 * (1.0f64 - quantile).ln();
            assert!((found as f64 / exact - 1.0).abs() < 0.06, "{quantile}: {found} instead of {exact}");
        }
        assert!((summary.mean / 1e6 - 1.0).abs() < 0.03, "{}", summary.mean);
    }

    #[test]
    fn the_cut_leaves_the_chance_that_tables_give() {
        // Conover, Practical Nonparametric Statistics, table A3 with p = 0.5.
        for (count, expected) in [(5, None), (6, Some(0)), (9, Some(1)), (20, Some(5)), (100, Some(39))] {
            assert_eq!(cut(count), expected, "{count}");
        }
        assert!(cut(100_000).is_some_and(|cut| (49_600..49_750).contains(&cut)));
    }

    #[test]
    fn intervals_hold_the_true_median_as_often_as_they_say() {
        let mut random = Random::new(7);
        let (mut held, trials) = (0, 2_000);
        for _ in 0..trials {
            let sample: Vec<f64> = (0..25).map(|_| -unit(&mut random).ln()).collect();
            let [low, high] = estimate_median(&sample).unwrap().interval.unwrap();
            held += i32::from((low..=high).contains(&std::f64::consts::LN_2));
        }
        assert!(f64::from(held) >= 0.94 * f64::from(trials), "{held} of {trials}");
        assert!(held < trials, "an interval that always holds says nothing");
    }

    #[test]
    fn a_machine_that_slows_down_leaves_the_ratio() {
        let mut random = Random::new(3);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for round in 0..60u32 {
            let load = if (20..40).contains(&round) { 3.0 } else { 1.0 };
            let noise = |random: &mut Random| 1.0 + 0.02 * unit(random);
            a.push((1e5 * load * noise(&mut random)) as u64);
            b.push((2.5e5 * load * noise(&mut random)) as u64);
        }
        let ratio = paired_ratio(&b, &a).unwrap();
        let [low, high] = ratio.interval.unwrap();
        assert!(low <= 2.5 && 2.5 <= high && high - low < 0.05, "{ratio:?}");
    }

    #[test]
    fn few_values_have_a_median_and_no_interval() {
        assert_eq!(estimate_median(&[3.0, 1.0, 2.0]), Some(Estimate { value: 2.0, interval: None }));
        assert_eq!(estimate_median(&[]), None);
        assert_eq!(paired_ratio(&[], &[1]), None);
    }

    #[test]
    fn a_median_is_the_50th_percentile() {
        for (values, expected) in
            [(&[][..], None), (&[7], Some(7)), (&[4, 1], Some(1)), (&[9, 1, 3], Some(3)), (&[8, 2, 6, 4], Some(4))]
        {
            let floats: Vec<f64> = values.iter().map(|value| *value as f64).collect();
            assert_eq!(median(&floats), expected.map(|value: u64| value as f64), "{values:?}");
            assert_eq!(estimate_median(&floats).map(|estimate| estimate.value), median(&floats), "{values:?}");
            assert_eq!(times(values.iter().copied()).summary().map(|summary| summary.p50), expected, "{values:?}");
        }
    }

    proptest! {
        #[test]
        fn percentiles_are_measured_times(values in prop::collection::vec(0u64..5_000_000_000, 1..400)) {
            let summary = times(values.iter().copied()).summary().unwrap();
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let rank = |thousandths: usize| sorted[(thousandths * sorted.len()).div_ceil(1000) - 1];
            prop_assert_eq!((summary.min, summary.max), (sorted[0], sorted[sorted.len() - 1]));
            prop_assert_eq!(summary.p50, rank(500));
            prop_assert_eq!(summary.p90, (sorted.len() >= 100).then(|| rank(900)));
            prop_assert_eq!(summary.mean, values.iter().sum::<u64>() as f64 / values.len() as f64);
            prop_assert_eq!(summary.histogram.iter().map(|(_, count)| count).sum::<u64>(), summary.samples);
        }

        #[test]
        fn the_interval_surrounds_the_median(values in prop::collection::vec(0.1f64..10.0, 6..80)) {
            let estimate = estimate_median(&values).unwrap();
            let [low, high] = estimate.interval.unwrap();
            prop_assert!(low <= estimate.value && estimate.value <= high);
        }
    }
}
