//! Calls in turns: A B A B …, so that a ratio survives a noisy machine.

use std::time::Duration;

use super::statistics::{Times, median};

/// Calls in a window of the warm-up.
const WINDOW: usize = 8;

/// Largest relative difference of the medians of two neighbouring windows in a steady state.
const STEADY: f64 = 0.05;

/// Turns in which a number of samples is taken, where it is large enough.
const TURNS: usize = 200;

/// Turns for which the time of a point should do, where calls are slow.
const TURNS_IN_TIME: u32 = 40;

/// Most timed calls of a turn.
const LONGEST_TURN: usize = 5;

/// What ends a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Samples of every contestant.
    Samples(usize),
    /// Time of all timed calls together.
    Time(Duration),
    /// Samples of every contestant or time of all timed calls, what comes first.
    Either(usize, Duration),
}

/// How much is measured of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// When the point is done.
    pub end: End,
    /// Most time of a warm-up.
    pub warm_up: Duration,
}

impl Budget {
    /// Samples of every contestant, where they end a point.
    pub const fn samples(&self) -> Option<usize> {
        match self.end {
            End::Samples(samples) | End::Either(samples, _) => Some(samples),
            End::Time(_) => None,
        }
    }

    /// Time of all timed calls together, where it ends a point.
    pub const fn time(&self) -> Option<Duration> {
        match self.end {
            End::Time(time) | End::Either(_, time) => Some(time),
            End::Samples(_) => None,
        }
    }

    /// Timed calls of a turn, one to five, where a round of single calls takes `round`: so few that the samples make
    /// two hundred turns, and the time forty.
    pub fn turn(&self, round: Duration) -> usize {
        let by_samples = self.samples().map_or(LONGEST_TURN, |samples| samples / TURNS);
        let rounds = |time: Duration| time.as_nanos() / (TURNS_IN_TIME * round).as_nanos().max(1);
        let by_time = self.time().map_or(LONGEST_TURN, |time| usize::try_from(rounds(time)).unwrap_or(LONGEST_TURN));
        by_samples.min(by_time).clamp(1, LONGEST_TURN)
    }

    fn is_done(&self, samples: usize, spent: Duration) -> bool {
        self.samples().is_some_and(|wanted| samples >= wanted) || self.time().is_some_and(|most| spent >= most)
    }
}

/// What was measured of one contestant.
#[derive(Debug, Clone)]
pub struct Series {
    /// Every timed call.
    pub times: Times,
    /// Median of each turn, in nanoseconds.
    pub turns: Vec<u64>,
    /// The same calls on the device's own clock, where every one of them told its time there.
    pub device: Option<DeviceSeries>,
    /// Calls of the warm-up.
    pub warm_up_calls: usize,
    /// Whether the warm-up ended in a steady state.
    pub steady: bool,
}

/// What was measured of one contestant between events on its device.
#[derive(Debug, Clone)]
pub struct DeviceSeries {
    /// Every timed call.
    pub times: Times,
    /// Median of each turn, in nanoseconds.
    pub turns: Vec<u64>,
}

/// How long a call took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallTime {
    /// By the host's clock, from the call to its return.
    pub wall: Duration,
    /// Between two events on the device, where the backend tells.
    pub device: Option<Duration>,
}

impl From<Duration> for CallTime {
    fn from(wall: Duration) -> Self {
        Self { wall, device: None }
    }
}

/// One call of a contestant, and how long it took.
pub(super) type TimedCall<'a, E> = Box<dyn FnMut() -> Result<CallTime, E> + 'a>;

/// Warms up, then times the contestants in turns.
///
/// Warm-up: one call of each in every round, until for every contestant the medians of the last eight calls and of
/// the eight before differ by at most 5 %, or until the time for it is spent. Then rounds of turns; each round
/// begins with another contestant. A turn is one call that is not timed where there are several contestants,
/// since the one before left its data in the caches, and [`Budget::turn`] timed ones.
///
/// # Errors
///
/// The first error of a call.
pub(super) fn interleave<E>(contestants: &mut [TimedCall<'_, E>], budget: &Budget) -> Result<Vec<Series>, E> {
    let warm = warm_up(contestants, budget.warm_up)?;
    let turn = budget.turn(warm.iter().map(|(_, _, pace)| *pace).sum());
    let mut series = Vec::with_capacity(contestants.len());
    for (calls, steady, _) in warm {
        series.push(Series { times: Times::default(), turns: Vec::new(), device: None, warm_up_calls: calls, steady });
    }
    let (count, several) = (contestants.len(), contestants.len() > 1);
    let (mut samples, mut spent, mut round) = (0, Duration::ZERO, 0);
    while count > 0 && !budget.is_done(samples, spent) {
        let turn = budget.samples().map_or(turn, |wanted| turn.min(wanted - samples));
        for index in (0..count).map(|offset| (round + offset) % count) {
            if several {
                contestants[index]()?;
            }
            let mut calls = Vec::with_capacity(turn);
            for _ in 0..turn {
                let call = contestants[index]()?;
                spent += call.wall;
                calls.push(call);
            }
            series[index].add_turn(&calls);
        }
        samples += turn;
        round += 1;
    }
    Ok(series)
}

impl Series {
    fn add_turn(&mut self, calls: &[CallTime]) {
        let is_first = self.turns.is_empty();
        add_turn(&mut self.times, &mut self.turns, calls.iter().map(|call| call.wall));
        let on_device: Option<Vec<Duration>> = calls.iter().map(|call| call.device).collect();
        if is_first && on_device.is_some() {
            self.device = Some(DeviceSeries { times: Times::default(), turns: Vec::new() });
        }
        match (&mut self.device, on_device) {
            (Some(DeviceSeries { times, turns }), Some(calls)) => add_turn(times, turns, calls.into_iter()),
            (device, _) => *device = None,
        }
    }
}

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn add_turn(all: &mut Times, turns: &mut Vec<u64>, calls: impl Iterator<Item = Duration>) {
    let times: Vec<u64> = calls.map(nanoseconds).collect();
    times.iter().for_each(|time| all.add(*time));
    let times: Vec<f64> = times.iter().map(|time| *time as f64).collect();
    turns.extend(median(&times).map(|median| median.round() as u64));
}

/// Nanoseconds of a time, at most those of 584 years.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Calls of each contestant, whether it became steady, and the median of its last calls.
fn warm_up<E>(contestants: &mut [TimedCall<'_, E>], most: Duration) -> Result<Vec<(usize, bool, Duration)>, E> {
    let mut calls: Vec<Vec<f64>> = vec![Vec::new(); contestants.len()];
    let mut spent = Duration::ZERO;
    while spent < most && !calls.iter().all(|calls| is_steady(calls)) {
        for (call, calls) in contestants.iter_mut().zip(&mut calls) {
            let time = call()?.wall;
            spent += time;
            calls.push(time.as_secs_f64());
        }
    }
    let pace = |calls: &[f64]| {
        let last = median(&calls[calls.len().saturating_sub(WINDOW)..]).unwrap_or_default();
        Duration::try_from_secs_f64(last).unwrap_or_default()
    };
    Ok(calls.iter().map(|calls| (calls.len(), is_steady(calls), pace(calls))).collect())
}

fn is_steady(calls: &[f64]) -> bool {
    let Some(start) = calls.len().checked_sub(2 * WINDOW) else { return false };
    let (before, last) = calls[start..].split_at(WINDOW);
    match (median(before), median(last)) {
        (Some(before), Some(last)) => (last / before.max(f64::MIN_POSITIVE) - 1.0).abs() <= STEADY,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    fn budget(end: End) -> Budget {
        Budget { end, warm_up: Duration::from_secs(1) }
    }

    /// A contestant that takes `times` one after another, and the last of them from then on.
    fn scripted(times: Vec<u64>) -> TimedCall<'static, &'static str> {
        let mut times = times.into_iter();
        let mut last = 1_000;
        Box::new(move || {
            last = times.next().unwrap_or(last);
            Ok(Duration::from_nanos(last).into())
        })
    }

    #[test]
    fn turns_alternate_and_begin_with_a_call_that_is_not_timed() {
        let log = Rc::new(RefCell::new(String::new()));
        let named = |name: char| -> TimedCall<'_, &'static str> {
            let log = Rc::clone(&log);
            Box::new(move || {
                log.borrow_mut().push(name);
                Ok(MICROSECOND.into())
            })
        };
        let mut contestants = [named('a'), named('b')];
        let series = interleave(&mut contestants, &budget(End::Samples(600))).unwrap();
        let log = log.borrow();
        let (warm_up, timed) = log.split_at(2 * 2 * WINDOW);
        assert_eq!(warm_up, "ab".repeat(2 * WINDOW));
        assert!(timed.starts_with("aaaabbbbbbbbaaaaaaaabbbb"), "{timed}");
        assert_eq!(timed.len(), 2 * 200 * 4);
        for series in series {
            assert_eq!((series.turns.len(), series.times.summary().unwrap().samples), (200, 600));
            assert_eq!((series.warm_up_calls, series.steady), (2 * WINDOW, true));
        }
    }

    #[test]
    fn the_warm_up_lasts_until_calls_stop_getting_faster() {
        let falling: Vec<u64> = (0..100).map(|call| 200_000 - 1_900 * call).collect();
        let series = interleave(&mut [scripted(falling)], &budget(End::Samples(10))).unwrap();
        assert!(series[0].steady && series[0].warm_up_calls > 90, "{}", series[0].warm_up_calls);
        assert!(series[0].times.summary().unwrap().max < 50_000);
    }

    #[test]
    fn a_warm_up_ends_and_says_that_nothing_became_steady() {
        let rising: Vec<u64> = (0..10_000).map(|call| 1_000_000 + 100_000 * call).collect();
        let brief = Budget { warm_up: Duration::from_millis(40), ..budget(End::Samples(10)) };
        let series = interleave(&mut [scripted(rising)], &brief).unwrap();
        assert!(!series[0].steady && series[0].warm_up_calls < 30, "{}", series[0].warm_up_calls);
    }

    #[test]
    fn samples_or_seconds_end_a_point() {
        let count = |end: End| {
            let mut contestants = [scripted(vec![]), scripted(vec![])];
            let series = interleave(&mut contestants, &budget(end)).unwrap();
            series.iter().map(|series| series.times.summary().unwrap().samples).collect::<Vec<_>>()
        };
        assert_eq!(count(End::Samples(7)), [7, 7]);
        assert_eq!(count(End::Samples(1_003)), [1_003, 1_003]);
        let time = 100 * MICROSECOND;
        assert_eq!(count(End::Time(time)), [50, 50]);
        assert_eq!(count(End::Either(1_000, time)), [50, 50]);
        assert_eq!(count(End::Either(20, time)), [20, 20]);
    }

    #[test]
    fn slow_calls_make_short_turns() {
        let timed = |time| budget(End::Time(Duration::from_secs(time)));
        assert_eq!(timed(10).turn(Duration::from_millis(1)), 5);
        assert_eq!(timed(10).turn(Duration::from_millis(100)), 2);
        assert_eq!(timed(10).turn(Duration::from_secs(3)), 1);
        assert_eq!(
            (budget(End::Samples(1_000)).turn(MICROSECOND), budget(End::Samples(100)).turn(MICROSECOND)),
            (5, 1)
        );
        assert_eq!(timed(1).turn(Duration::ZERO), 5);
    }

    #[test]
    fn the_clock_of_a_device_is_kept_beside_that_of_the_host() {
        let (mut on_device, mut in_part) = (0, 0);
        let call = |wall: u64, device: Option<u64>| {
            Ok(CallTime { wall: Duration::from_nanos(wall), device: device.map(Duration::from_nanos) })
        };
        let mut contestants: [TimedCall<'_, &'static str>; 3] = [
            Box::new(move || {
                on_device += 1;
                call(1_000, Some(100 + on_device % 2))
            }),
            scripted(vec![]),
            Box::new(move || {
                in_part += 1;
                call(2_000, (in_part < 100).then_some(1))
            }),
        ];
        let series = interleave(&mut contestants, &budget(End::Samples(400))).unwrap();
        let device = series[0].device.as_ref().unwrap();
        let summary = device.times.summary().unwrap();
        assert_eq!((summary.samples, summary.min, summary.max), (400, 100, 101));
        assert_eq!((device.turns.len(), series[0].turns.len()), (200, 200));
        assert!(series[0].times.summary().unwrap().min >= 1_000);
        assert!(series[1].device.is_none() && series[2].device.is_none());
    }

    #[test]
    fn the_first_error_ends_everything() {
        let mut failing: [TimedCall<'_, &'static str>; 1] = [Box::new(|| Err("it failed"))];
        assert_eq!(interleave(&mut failing, &budget(End::Samples(5))).unwrap_err(), "it failed");
    }
}
