//! One job: contestants are loaded, checked against each other, and timed in turns.

use std::time::Instant;

use super::{
    LatencyError, Setup,
    allocator::release_free_memory,
    experts::{ExpertLoad, count, experts_by_module},
    result::{BenchResult, DeviceTimes, ParityRow, Row, SessionRow, Skipped, Subject, Verdict},
    sampler::{CallTime, Series, TimedCall, interleave, nanoseconds},
    shapes::{Point, tokens},
    statistics::{estimate_median, paired_ratio},
    subjects::{Job, Member},
};
use crate::{
    backend::{BackendKind, Runner, repeats_ort, uses_operators},
    onnx::expose_routing,
    parity::{SAME, Yardstick, choices_of},
    provenance::{Moment, reset_peak_memory, resident_memory},
    tensor::NamedTensors,
};

/// Inputs that are tried until rounding alone does not change the choice of an expert.
const ATTEMPTS: u64 = 5;

/// A graph on a backend.
pub(super) struct Contestant {
    /// Who.
    pub(super) subject: Subject,
    /// Place of the backend.
    pub(super) backend: usize,
    /// Place of the graph among the job's members.
    pub(super) member: usize,
    /// Whether its caches are updated in place.
    pub(super) in_place: bool,
    /// First calls, point by point.
    pub(super) first_calls: Vec<u64>,
    runner: Box<dyn Runner>,
    load: u64,
    peak_memory: Option<u64>,
}

/// A job whose contestants are loaded and whose inputs are chosen.
pub(super) struct Contest<'a> {
    /// The job.
    pub(super) job: Job,
    /// Contestants, model by model.
    pub(super) contestants: Vec<Contestant>,
    /// Inputs by point, then by member.
    pub(super) inputs: Vec<Vec<NamedTensors>>,
    setup: &'a Setup<'a>,
}

/// The routing of one member, and who is compared with what.
struct Judge {
    /// Or why there is none.
    yardstick: Result<Yardstick, String>,
    /// The graph with its routing as outputs, by contestant.
    routed: Vec<(usize, Box<dyn Runner>)>,
    modules: Vec<String>,
}

/// What a judge says of one point.
struct Judgement {
    verdicts: Vec<(usize, Verdict)>,
    experts: Vec<ExpertLoad>,
    /// Whether other inputs would say more.
    undecided: bool,
}

impl<'a> Contest<'a> {
    /// Loads every contestant and calls each once at every point.
    ///
    /// # Errors
    ///
    /// Where a graph or its inputs cannot be had, and where no backend takes it.
    pub(super) fn load(setup: &'a Setup<'a>, job: Job, result: &mut BenchResult) -> Result<Self, LatencyError> {
        let inputs = (0..job.points.len()).map(|point| setup.inputs_of(&job, point, 0)).collect::<Result<_, _>>()?;
        let mut contest = Self { job, contestants: Vec::new(), inputs, setup };
        for member in 0..contest.job.members.len() {
            let mut refusal = None;
            let before = contest.contestants.len();
            for backend in 0..setup.backends.len() {
                if !setup.backends_are_named && contest.repeats(member, backend) {
                    let subject = contest.subject(member, backend);
                    result.skipped.push(Skipped { subject, why: SAME.to_owned() });
                    continue;
                }
                match contest.contestant(member, backend) {
                    Ok(contestant) => contest.contestants.push(contestant),
                    Err(LatencyError::Backend(error))
                        if !setup.backends_are_named && error.is_skip() && !error.is_asked_for() =>
                    {
                        let subject = contest.subject(member, backend);
                        result.skipped.push(Skipped { subject, why: error.to_string() });
                        refusal = Some(error);
                    }
                    Err(error) => return Err(error),
                }
            }
            if let Some(error) = refusal.filter(|_| contest.contestants.len() == before) {
                return Err(error.into());
            }
        }
        result.sessions.extend(contest.contestants.iter().map(|contestant| SessionRow {
            subject: contestant.subject.clone(),
            load: contestant.load,
            peak_memory: contestant.peak_memory,
        }));
        Ok(contest)
    }

    /// Whether `backend` computes what a contestant computes.
    fn repeats(&self, member: usize, backend: usize) -> bool {
        let runs = |one: &Contestant| one.member == member && one.subject.backend == BackendKind::Ort.name();
        let file = &self.job.members[member].file;
        self.contestants.iter().any(runs) && repeats_ort(self.setup.backends[backend].as_ref(), [file])
    }

    fn subject(&self, member: usize, backend: usize) -> Subject {
        Subject {
            model: self.setup.models[self.job.members[member].model].label.clone(),
            backend: self.setup.backends[backend].name().to_owned(),
            part: self.job.part.as_str().to_owned(),
            module: self.job.module.clone(),
        }
    }

    fn contestant(&self, member: usize, backend: usize) -> Result<Contestant, LatencyError> {
        release_free_memory();
        let before = resident_memory().filter(|_| reset_peak_memory());
        let start = Instant::now();
        let mut runner = self.setup.backends[backend].load(&self.job.members[member].file)?;
        let load = nanoseconds(start.elapsed());
        let (mut first_calls, mut in_place) = (Vec::new(), false);
        for (inputs, point) in self.inputs.iter().zip(&self.job.points) {
            let (mut call, shared) = self.setup.bind(runner.as_mut(), &inputs[member], point)?;
            in_place |= shared > 0;
            let start = Instant::now();
            call()?;
            first_calls.push(nanoseconds(start.elapsed()));
        }
        let peak_memory = Moment::read().peak_memory.zip(before).map(|(peak, before)| peak.saturating_sub(before));
        let subject = self.subject(member, backend);
        Ok(Contestant { subject, backend, member, in_place, first_calls, runner, load, peak_memory })
    }

    /// Compares the contestants of each model with each other on the timed inputs, beside what a checkpoint said of
    /// them, and counts the tokens of every expert.
    ///
    /// # Errors
    ///
    /// [`LatencyError::Disagreement`] where one computes something else and that is not allowed.
    pub(super) fn check(&mut self, result: &mut BenchResult) -> Result<(), LatencyError> {
        for (index, Contestant { backend, member, .. }) in self.contestants.iter().enumerate() {
            if let Some(verified) = &self.setup.verified {
                let verdict = verified[self.job.members[*member].model][*backend].clone();
                self.accept_verdict(index, None, verdict, result)?;
            }
        }
        let mut judges = (0..self.job.members.len()).map(|member| self.judge(member)).collect::<Result<Vec<_>, _>>()?;
        for point in 0..self.job.points.len() {
            let attempts = if self.setup.inputs.is_some() { 1 } else { ATTEMPTS };
            for attempt in 0..attempts {
                let inputs = self.setup.inputs_of(&self.job, point, attempt)?;
                let mut judgements = Vec::new();
                for (member, judge) in judges.iter_mut().enumerate() {
                    judgements.push(self.judgement(judge, member, point, &inputs[member])?);
                }
                let undecided = judgements.iter().any(|judgement| judgement.undecided);
                if undecided && attempt + 1 < attempts {
                    continue;
                }
                self.inputs[point] = inputs;
                for judgement in judgements {
                    self.accept(point, judgement, result)?;
                }
                break;
            }
        }
        Ok(())
    }

    fn judge(&self, member: usize) -> Result<Judge, LatencyError> {
        let Member { file, .. } = &self.job.members[member];
        let mut model = file.model().clone();
        let modules = expose_routing(&mut model);
        let routed_file = file.with_model(model)?;
        let own: Vec<usize> =
            (0..self.contestants.len()).filter(|index| self.contestants[*index].member == member).collect();
        let compared: Vec<usize> = own.iter().copied().filter(|index| self.is_compared(*index)).collect();
        let yardstick = match self.setup.bodies {
            None => Err("this build has no ONNX Runtime".into()),
            Some(_) if compared.is_empty() => Err(match uses_operators(file) {
                true => "only ort-function is timed, which computes the bodies itself".into(),
                false => "standard operators only, and no other runtime than ONNX Runtime is timed".into(),
            }),
            Some(bodies) => match Yardstick::load(bodies, file) {
                Err(error) if error.is_skip() => Err(error.to_string()),
                loaded => Ok(loaded?),
            },
        };
        let contestants = if yardstick.is_ok() { compared } else { own.into_iter().take(1).collect() };
        let mut routed = Vec::with_capacity(contestants.len());
        for index in contestants {
            let backend = &self.setup.backends[self.contestants[index].backend];
            routed.push((index, backend.load(&routed_file)?));
        }
        Ok(Judge { yardstick, routed, modules })
    }

    /// Whether a contestant computes otherwise than the yardstick, which is ONNX Runtime without our library.
    fn is_compared(&self, contestant: usize) -> bool {
        let Contestant { subject, member, .. } = &self.contestants[contestant];
        match BackendKind::of_name(&subject.backend) {
            Some(BackendKind::OrtFunction) => false,
            Some(BackendKind::Ort) => uses_operators(&self.job.members[*member].file),
            Some(BackendKind::Tract | BackendKind::TensorRt) | None => true,
        }
    }

    fn judgement(
        &mut self,
        judge: &mut Judge,
        member: usize,
        point: usize,
        inputs: &NamedTensors,
    ) -> Result<Judgement, LatencyError> {
        let mut judgement = Judgement { verdicts: Vec::new(), experts: Vec::new(), undecided: false };
        let expected = judge.yardstick.as_mut().ok().map(|yardstick| yardstick.expect(inputs)).transpose()?;
        judgement.undecided = expected.as_ref().is_some_and(crate::parity::Expected::is_undecided);
        for (position, (index, routed)) in judge.routed.iter_mut().enumerate() {
            let routed = routed.run(inputs)?;
            if position == 0 {
                judgement.experts = self.loads(member, point, &routed, &judge.modules)?;
            }
            let Some(expected) = &expected else { continue };
            let outputs = self.contestants[*index].runner.run(inputs)?;
            let agreement = expected.compare(&outputs, &routed)?;
            judgement.undecided |= agreement.ties > 0;
            let verdict = match &agreement.fault {
                Some(fault) => Verdict::Failed { fault: fault.clone() },
                None if agreement.ties > 0 => Verdict::NotChecked {
                    why: "on every input that was tried, rounding alone changes the choice of an expert".into(),
                },
                None => Verdict::Agrees { with: BackendKind::OrtFunction.name().into(), agreement },
            };
            judgement.verdicts.push((*index, verdict));
        }
        let judged = |index: usize| judgement.verdicts.iter().any(|(judged, _)| *judged == index);
        let own = (0..self.contestants.len()).filter(|index| self.contestants[*index].member == member);
        let rest: Vec<usize> = own.filter(|index| !judged(*index)).collect();
        // What a checkpoint says is enough where there is nothing to compare with.
        for index in rest.into_iter().filter(|_| self.setup.verified.is_none()) {
            let verdict = match &judge.yardstick {
                Ok(_) => Verdict::Yardstick,
                Err(why) => Verdict::NotChecked { why: why.clone() },
            };
            judgement.verdicts.push((index, verdict));
        }
        Ok(judgement)
    }

    /// Tokens by expert in every module, which must be those that were asked for.
    fn loads(
        &self,
        member: usize,
        point: usize,
        routed: &NamedTensors,
        modules: &[String],
    ) -> Result<Vec<ExpertLoad>, LatencyError> {
        let Member { model, file, operator } = &self.job.members[member];
        let experts = experts_by_module(file);
        let choices = choices_of(routed, modules)?;
        let mut loads = Vec::new();
        for module in modules {
            let Some(found) = choices.get(module) else { continue };
            if let Some(wanted) = operator.as_ref().and_then(|_| self.setup.wanted(&self.job, member, point)) {
                check_choice(module, &wanted?, |token| found.experts(token))?;
            }
            let known = experts.get(module).copied().unwrap_or(0);
            let (tokens, counts) = count(&found.indices, &found.weights, found.top_k, known);
            loads.push(ExpertLoad {
                model: self.setup.models[*model].label.clone(),
                part: self.job.part.as_str().to_owned(),
                module: module.clone(),
                point: self.job.points[point].clone(),
                tokens,
                counts,
            });
        }
        Ok(loads)
    }

    fn accept(&self, point: usize, judgement: Judgement, result: &mut BenchResult) -> Result<(), LatencyError> {
        result.experts.extend(judgement.experts);
        for (index, verdict) in judgement.verdicts {
            self.accept_verdict(index, Some(&self.job.points[point]), verdict, result)?;
        }
        Ok(())
    }

    fn accept_verdict(
        &self,
        index: usize,
        point: Option<&Point>,
        verdict: Verdict,
        result: &mut BenchResult,
    ) -> Result<(), LatencyError> {
        let subject = self.contestants[index].subject.clone();
        if let Verdict::Failed { fault } = &verdict
            && !self.setup.allow_failed_parity
        {
            let place = place(&subject, point);
            return Err(LatencyError::Disagreement { place, fault: fault.clone() });
        }
        let row = ParityRow { subject, point: point.cloned(), verdict };
        if !result.parity.contains(&row) {
            result.parity.push(row);
        }
        Ok(())
    }

    /// Times every point.
    ///
    /// # Errors
    ///
    /// Where the runtime fails.
    pub(super) fn time(&mut self, result: &mut BenchResult) -> Result<(), LatencyError> {
        for point in 0..self.job.points.len() {
            self.setup.watch.does(&format!("timing {}", place_of_job(&self.job, &self.job.points[point])));
            let inputs = &self.inputs[point];
            let mut calls: Vec<TimedCall<'_, LatencyError>> = Vec::with_capacity(self.contestants.len());
            for Contestant { runner, member, .. } in &mut self.contestants {
                let (mut call, _) = self.setup.bind(runner.as_mut(), &inputs[*member], &self.job.points[point])?;
                calls.push(Box::new(move || {
                    let start = Instant::now();
                    let device = call()?;
                    Ok(CallTime { wall: start.elapsed(), device })
                }));
            }
            let series = interleave(&mut calls, &self.setup.budget)?;
            drop(calls);
            for (index, timed) in series.iter().enumerate() {
                let beside = series.first().filter(|_| index > 0);
                result.rows.extend(row(&self.contestants[index], &self.job.points[point], point, timed, beside));
            }
            self.setup.watch.timed();
        }
        Ok(())
    }
}

#[allow(clippy::cast_precision_loss)]
fn row(contestant: &Contestant, point: &Point, index: usize, series: &Series, beside: Option<&Series>) -> Option<Row> {
    let times = series.times.summary()?;
    let turns: Vec<f64> = series.turns.iter().map(|turn| *turn as f64).collect();
    Some(Row {
        subject: contestant.subject.clone(),
        point: point.clone(),
        first_call: contestant.first_calls.get(index).copied().unwrap_or_default(),
        warm_up_calls: series.warm_up_calls,
        steady: series.steady,
        in_place: contestant.in_place,
        tokens_per_second: tokens(point) as f64 * 1e9 / times.p50.max(1) as f64,
        times,
        turns: turns.len(),
        turn_median: estimate_median(&turns)?,
        turn_medians: series.turns.clone(),
        ratio: beside.and_then(|beside| paired_ratio(&series.turns, &beside.turns)),
        device: device_times(series, beside),
    })
}

/// Times on the device, beside those of the first contestant where that has some too.
fn device_times(series: &Series, beside: Option<&Series>) -> Option<DeviceTimes> {
    let series = series.device.as_ref()?;
    let beside = beside.and_then(|beside| beside.device.as_ref());
    Some(DeviceTimes {
        times: series.times.summary()?,
        ratio: beside.and_then(|beside| paired_ratio(&series.turns, &beside.turns)),
        turn_medians: series.turns.clone(),
    })
}

/// Fails where a token went to other experts than it should; `found` gives those of a token by rising number.
fn check_choice(module: &str, wanted: &[Vec<usize>], found: impl Fn(usize) -> Vec<i64>) -> Result<(), LatencyError> {
    for (token, wanted) in wanted.iter().enumerate() {
        let mut wanted: Vec<i64> = wanted.iter().filter_map(|expert| i64::try_from(*expert).ok()).collect();
        wanted.sort_unstable();
        let found = found(token);
        if wanted != found {
            let why = format!("token {token} goes to experts {found:?} instead of {wanted:?}");
            return Err(LatencyError::Steering { module: module.to_owned(), why });
        }
    }
    Ok(())
}

/// Who and where, for messages.
pub fn place(subject: &Subject, point: Option<&Point>) -> String {
    let Subject { model, backend, part, module } = subject;
    let module = module.as_ref().map(|module| format!(" {module}")).unwrap_or_default();
    let point = point.map(|point| format!(", {}", point_text(point))).unwrap_or_default();
    format!("{model} on {backend}, {part}{module}{point}")
}

pub(super) fn place_of_job(job: &Job, point: &Point) -> String {
    let module = job.module.as_ref().map(|module| format!(" {module}")).unwrap_or_default();
    format!("{}{module}, {}", job.part.as_str(), point_text(point))
}

/// `batch 1, sequence 128`.
pub fn point_text(point: &Point) -> String {
    point.iter().map(|(axis, size)| format!("{axis} {size}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::BackendError,
        latency::{Clock, Times, sampler::DeviceSeries},
    };

    /// Never called.
    struct Idle;

    impl Runner for Idle {
        fn run(&mut self, _: &NamedTensors) -> Result<NamedTensors, BackendError> {
            Ok(NamedTensors::new())
        }
    }

    fn times(turns: &[u64]) -> Times {
        let mut times = Times::default();
        turns.iter().for_each(|turn| times.add(*turn));
        times
    }

    fn series(turn: u64, on_device: u64) -> Series {
        let turns = vec![turn; 8];
        let device = vec![on_device; 8];
        let device = DeviceSeries { times: times(&device), turns: device };
        Series { times: times(&turns), turns, device: Some(device), warm_up_calls: 16, steady: true }
    }

    #[test]
    fn ratios_are_times_beside_those_of_the_first() {
        let subject = Subject { model: "m.onnx".into(), backend: "ort".into(), part: "model".into(), module: None };
        let first_calls = vec![7, 9];
        let contestant = Contestant {
            subject,
            backend: 0,
            member: 0,
            in_place: true,
            first_calls,
            runner: Box::new(Idle),
            load: 1,
            peak_memory: None,
        };
        let point =
            Point::from([("batch".to_owned(), 2), ("sequence".to_owned(), 5), ("past_sequence".to_owned(), 40)]);
        let (slow, first) = (series(2_000, 900), series(500, 300));
        let alone = row(&contestant, &point, 0, &first, None).unwrap();
        assert_eq!((alone.ratio, alone.first_call, alone.times.p50, alone.turns), (None, 7, 500, 8));
        assert!(alone.in_place);
        assert_eq!(alone.tokens_per_second, 10.0 / 500e-9);
        let beside = row(&contestant, &point, 1, &slow, Some(&first)).unwrap();
        let value = |ratio: Option<crate::latency::Estimate>| ratio.map(|ratio| (ratio.value, ratio.interval));
        assert_eq!(value(beside.ratio), Some((4.0, Some([4.0; 2]))), "a slower one has a ratio above 1");
        assert_eq!((beside.first_call, beside.turn_median.value), (9, 2_000.0));
        let (clock, device) = beside.by_clock().nth(1).unwrap();
        assert_eq!((clock, &device.subject), (Clock::Device, &beside.subject));
        assert_eq!((value(device.ratio), device.times.p50), (Some((3.0, Some([3.0; 2]))), 900));
        assert!((device.tokens_per_second * 900e-9 - 10.0).abs() < 1e-9, "{}", device.tokens_per_second);
    }

    #[test]
    fn tokens_must_go_where_they_were_sent() {
        let wanted = [vec![0, 3], vec![2, 1]];
        let check = |found: [[i64; 2]; 2]| check_choice("m", &wanted, |token| found[token].to_vec());
        assert!(check([[0, 3], [1, 2]]).is_ok());
        let error = check([[0, 3], [1, 3]]).unwrap_err().to_string();
        assert!(error.contains("token 1 goes to experts [1, 3] instead of [1, 2]"), "{error}");
    }
}
