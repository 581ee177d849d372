//! Latency that somebody else can believe.
//!
//! Contestants are models on backends. In this order: each runtime starts with a graph that is dropped again; each
//! contestant is loaded and called once at every point of the grid; those of one model must agree on the inputs that
//! are timed; then at every point all of them are called in turns, A B A B …, so that what slows the machine down slows
//! all of them, and the ratio of two stays; last, where the runtime records nodes, a pass of its own says where the
//! time goes. What is timed is the runtime's own call: inputs are bound before, outputs stay where the runtime put
//! them.

mod allocator;
mod contest;
mod cut;
mod error;
mod experts;
#[cfg(feature = "ort")]
mod operators;
mod receipt;
mod regression;
mod result;
mod sampler;
mod shapes;
mod statistics;
mod steering;
mod subjects;

pub use contest::{place, point_text};
pub use error::LatencyError;
pub use experts::ExpertLoad;
pub use receipt::{Options, Receipt, Threads};
pub use regression::{Change, Incomparable, Outcome, Regression, compare};
#[cfg(test)]
pub(crate) use result::sample;
pub use result::{
    BenchResult, Clock, DeviceTimes, NodeTime, OperatorTimes, ParityRow, Row, SessionRow, Skipped, Subject, Verdict,
    layers,
};
pub use sampler::{Budget, End, Series, nanoseconds};
pub use shapes::{BATCH, Grid, PAST, Point, SEQUENCE, SOURCE, axes, inputs_at, tokens};
pub use statistics::{Estimate, Summary, Times, median};
pub use steering::Choice;
pub use subjects::{LeftOut, Model, left_out, own_inputs};

use moa_schema::parameter;

use contest::Contest;
use shapes::{point_of, random_inputs};
use subjects::{Job, Member, common_parts, jobs};

use crate::{
    backend::{Backend, BackendError, BackendKind, Bound, OrtOptions, Runner, caches_in_place, uses_operators},
    onnx::OnnxFile,
    provenance::Moment,
    random::Random,
    tensor::{NamedTensors, Tensor, TensorData},
};

/// What is timed, and how.
pub struct Setup<'a> {
    /// Models.
    pub models: &'a [Model],
    /// Backends.
    pub backends: &'a [Box<dyn Backend>],
    /// Whether the user named them, so that one that cannot be used is an error.
    pub backends_are_named: bool,
    /// ONNX Runtime without our library, which others are compared with.
    pub bodies: Option<&'a dyn Backend>,
    /// How ONNX Runtime computes.
    pub ort: OrtOptions,
    /// Shapes of random inputs.
    pub grid: Grid,
    /// What the result will be compared with.
    pub older: Option<&'a BenchResult>,
    /// Inputs, where they are not random.
    pub inputs: Option<NamedTensors>,
    /// Who decides about the experts; anything but the data times operators one by one.
    pub choice: Choice,
    /// Seed of random inputs.
    pub seed: u64,
    /// How much is measured of a point.
    pub budget: Budget,
    /// What a verification against the checkpoint said, by model and backend.
    pub verified: Option<Vec<Vec<Verdict>>>,
    /// Whether to time what computes something else.
    pub allow_failed_parity: bool,
    /// Whether caches are updated in place where graph and backend can.
    pub in_place: bool,
    /// Whether to record where the time goes.
    pub record_operators: bool,
    /// Sees the progress.
    pub watch: &'a dyn Watch,
}

/// Rows that a cache has room for beyond those that a call fills, as a caller would have it who goes on.
const ROOM: usize = 8;

/// Sees the progress of a benchmark; is never called while something is timed.
pub trait Watch {
    /// So many points are going to be timed.
    fn begin(&self, points: usize);

    /// What is done next.
    fn does(&self, what: &str);

    /// One more point was timed.
    fn timed(&self);
}

/// Does everything that `setup` says; the receipt is completed on the way.
///
/// # Errors
///
/// Where a model, an input or a runtime is missing or does not fit, and where backends disagree.
pub fn bench(setup: &Setup<'_>, mut receipt: Receipt) -> Result<BenchResult, LatencyError> {
    let jobs = setup.jobs()?;
    if let Some(older) = setup.older {
        regression::can_be_compared(&receipt, setup.models, &jobs, older)?;
    }
    let mut members = jobs.iter().flat_map(|job| &job.members);
    let can_be_in_place = setup.backends.iter().any(|backend| backend.kind() == BackendKind::Ort)
        && members.any(|member| !caches_in_place(&member.file).is_empty());
    if setup.in_place && !can_be_in_place {
        return Err(LatencyError::NotInPlace { skipped: None });
    }
    receipt.before = Moment::read();
    let mut result = BenchResult {
        receipt,
        parity: Vec::new(),
        sessions: Vec::new(),
        skipped: Vec::new(),
        rows: Vec::new(),
        experts: Vec::new(),
        operators: Vec::new(),
    };
    setup.watch.begin(jobs.iter().map(|job| job.points.len()).sum());
    setup.watch.does("starting the runtimes");
    setup.start(&jobs);
    let mut contests = Vec::new();
    for job in jobs {
        let module = job.module.as_deref().map_or(String::new(), |module| format!(" {module}"));
        setup.watch.does(&format!("loading {}{module}", job.part.as_str()));
        let mut contest = Contest::load(setup, job, &mut result)?;
        if let Some(older) = setup.older {
            regression::are_known(&result.receipt, &contest.contestants, &contest.job.points, older)?;
        }
        contest.check(&mut result)?;
        contests.push(contest);
    }
    let mut contestants = contests.iter().flat_map(|contest| &contest.contestants);
    if setup.in_place && !contestants.any(|contestant| contestant.in_place) {
        let skipped = result.skipped.iter().find(|skipped| skipped.subject.backend == BackendKind::Ort.name());
        return Err(LatencyError::NotInPlace { skipped: skipped.map(|skipped| skipped.why.clone()) });
    }
    for contest in &mut contests {
        contest.time(&mut result)?;
    }
    if setup.record_operators {
        for contest in &contests {
            setup.watch.does(&format!("recording the nodes of {}", contest.job.part.as_str()));
            setup.record(contest, &mut result);
        }
    }
    result.receipt.finish();
    Ok(result)
}

/// Bytes of a graph's files.
fn bytes_of(file: &OnnxFile) -> u64 {
    file.files().iter().filter_map(|path| std::fs::metadata(path).ok()).map(|metadata| metadata.len()).sum()
}

impl Setup<'_> {
    /// Lets each runtime load and call the smallest graph that it takes, with our operators if there is one, and drops
    /// it: what a runtime does once in a process is then part of no contestant's figures. The library and the bodies
    /// are computed in one ONNX Runtime. What fails here fails again where it is said. An engine of TensorRT may take
    /// minutes, and is not built twice.
    fn start(&self, jobs: &[Job]) {
        let members = jobs.iter().flat_map(|job| (0..job.members.len()).map(move |member| (job, member)));
        let mut graphs: Vec<(&Job, usize)> = members.collect();
        graphs.sort_by_key(|(job, member)| {
            let file = &job.members[*member].file;
            (!uses_operators(file), bytes_of(file))
        });
        let all = self.backends.iter().map(Box::as_ref);
        let mut backends: Vec<&dyn Backend> = all.filter(|backend| backend.kind() != BackendKind::TensorRt).collect();
        backends.sort_by_key(|backend| backend.kind() == BackendKind::OrtFunction);
        let mut has_ort = false;
        for backend in backends {
            if has_ort && backend.kind() == BackendKind::OrtFunction {
                continue;
            }
            let called = graphs.iter().find_map(|(job, member)| {
                let inputs = self.inputs_of(job, 0, 0).ok()?;
                let mut runner = backend.load(&job.members[*member].file).ok()?;
                runner.bind(&inputs[*member]).ok()?().ok()
            });
            has_ort |= called.is_some() && backend.kind() == BackendKind::Ort;
        }
    }

    /// Calls of a contestant on `inputs`, with caches as they were asked for, and how many of these are in place.
    fn bind<'b>(
        &self,
        runner: &'b mut dyn Runner,
        inputs: &'b NamedTensors,
        point: &Point,
    ) -> Result<(Bound<'b>, usize), BackendError> {
        let new = point.get(SEQUENCE).copied().unwrap_or(1);
        if self.in_place { runner.bind_in_place(inputs, new + ROOM) } else { Ok((runner.bind(inputs)?, 0)) }
    }

    fn jobs(&self) -> Result<Vec<Job>, LatencyError> {
        let Some(inputs) = &self.inputs else { return jobs(self.models, &self.grid, &self.choice) };
        let left_out = left_out(self.models, inputs)?;
        let mut jobs = Vec::new();
        for (part, members) in common_parts(self.models)? {
            if left_out.iter().all(|left| left.part != part) {
                let point =
                    |member: &Member| Ok::<_, BackendError>(point_of(&member.file, &own_inputs(&member.file, inputs)?));
                let points = vec![members.last().map(point).transpose()?.unwrap_or_default()];
                jobs.push(Job { part, module: None, members, points });
            }
        }
        Ok(jobs)
    }

    /// The inputs of a point, member by member; `attempt` numbers other ones of the same shape.
    fn inputs_of(&self, job: &Job, point: usize, attempt: u64) -> Result<Vec<NamedTensors>, LatencyError> {
        let sizes = &job.points[point];
        let mut all = Vec::new();
        for (index, member) in job.members.iter().enumerate() {
            if let Some(given) = &self.inputs {
                all.push(own_inputs(&member.file, given)?);
                continue;
            }
            let mut random = Random::new(self.seed.wrapping_add(attempt << 32));
            let mut inputs = random_inputs(&member.file, sizes, &mut random)?;
            if let (Some(operator), Some(wanted)) = (&member.operator, self.wanted(job, index, point)) {
                let states = operator
                    .router
                    .steer(&wanted?, &mut random)
                    .map_err(|why| LatencyError::Steering { module: operator.module.clone(), why })?;
                let read = parameter::READ_BY_ROUTERS.into_iter().find(|name| inputs.contains_key(*name));
                if let Some(place) = read.and_then(|name| inputs.get_mut(name)) {
                    let states = Tensor::new(place.shape(), TensorData::F32(states))?;
                    *place = if matches!(place.data(), TensorData::F16(_)) { states.to_f16() } else { states };
                }
            }
            all.push(inputs);
        }
        Ok(all)
    }

    /// The experts that a member's tokens should go to.
    fn wanted(&self, job: &Job, member: usize, point: usize) -> Option<Result<Vec<Vec<usize>>, LatencyError>> {
        let operator = job.members[member].operator.as_ref()?;
        let sizes = [operator.router.experts, operator.top_k];
        let mut random = Random::new(self.seed);
        self.choice.experts(&operator.module, tokens(&job.points[point]), sizes, &mut random).transpose()
    }

    /// Where the time goes at the largest point of a contest, for contestants on ONNX Runtime. What was timed is worth
    /// its table without that.
    #[cfg(feature = "ort")]
    fn record(&self, contest: &Contest<'_>, result: &mut BenchResult) {
        let size = |point: &&usize| {
            let sizes = &contest.job.points[**point];
            sizes.values().map(|size| size.max(&1)).product::<usize>()
        };
        let points: Vec<usize> = (0..contest.job.points.len()).collect();
        let Some(point) = points.iter().max_by_key(size).copied() else { return };
        for contestant in contest.contestants.iter().filter(|_| contest.job.module.is_none()) {
            let kind = BackendKind::of_name(&contestant.subject.backend);
            let Some(operators) = kind.and_then(BackendKind::ort_operators) else { continue };
            let file = &contest.job.members[contestant.member].file;
            let inputs = &contest.inputs[point][contestant.member];
            let call = contestant.first_calls.get(point).copied().unwrap_or(1);
            let subject = contestant.subject.clone();
            match operators::record(file, operators, &self.ort, inputs, call) {
                Ok((calls, nodes)) => {
                    let point = contest.job.points[point].clone();
                    result.operators.push(OperatorTimes { subject, point, calls, nodes });
                }
                Err(error) => {
                    result.skipped.push(Skipped { subject, why: format!("its nodes were not recorded: {error}") });
                }
            }
        }
    }

    #[cfg(not(feature = "ort"))]
    fn record(&self, _contest: &Contest<'_>, _result: &mut BenchResult) {}
}
