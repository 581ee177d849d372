//! A node on a GPU: its kernels, its plans and its workspace.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use moa_cuda::{Element, Options};
use moa_cuda_driver::{BoundPlan, Buffers, Caches, Context, Driver, Error, KernelSet, Node, Stream, find_archive};
use moa_schema::{Attributes, LM_HEAD};

use crate::failure::{Failure, Fault};
use crate::ffi::{DeviceCall, DeviceMemory};

/// Plans that a node keeps; a decoder asks for a new one at each step.
const KEPT_PLANS: usize = 32;

/// Workspaces grow to powers of two from here on, so that those that were outgrown hold no more than the last one.
const LEAST_WORKSPACE: usize = 1 << 20;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let fault = match error {
            Error::Shape(_) | Error::Argument(_) | Error::Plan(_) => Fault::Argument,
            _ => Fault::Runtime,
        };
        Self { fault, text: error.to_string() }
    }
}

/// The node for the driver; caches may be shared.
fn node_of(attributes: &Attributes) -> Result<Node, Failure> {
    Ok(match *attributes {
        Attributes::SelfAttention(attributes) => Node::SelfAttention(attributes, Caches::Shared),
        Attributes::CrossAttention(attributes) => Node::CrossAttention(attributes),
        Attributes::FeedForward(attributes) => Node::FeedForward(attributes),
        Attributes::LmHead => {
            return Err(Failure { fault: Fault::Bug, text: format!("{} has no CUDA kernel", LM_HEAD.name) });
        }
    })
}

/// Whose kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Context(Context),
    Device(i32),
}

/// Kernel sets of this process; nodes share one, and the last one takes it along.
static SETS: Mutex<Vec<(Place, Weak<KernelSet>)>> = Mutex::new(Vec::new());

/// The kernels of a place, loaded at the first request.
fn kernels_at(place: Place) -> Result<Arc<KernelSet>, Failure> {
    let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
    sets.retain(|(_, set)| set.strong_count() > 0);
    if let Some(set) = sets.iter().find(|(other, _)| *other == place).and_then(|(_, set)| set.upgrade()) {
        return Ok(set);
    }
    let (driver, archive) = (Driver::system()?, find_archive()?);
    let made = match place {
        Place::Context(_) => KernelSet::in_current_context(driver, archive, None)?,
        Place::Device(ordinal) => KernelSet::on_device(driver, archive, ordinal, None)?,
    };
    let made = Arc::new(made);
    sets.push((place, Arc::downgrade(&made)));
    Ok(made)
}

/// A plan with what it was made for.
struct Kept {
    shapes: Vec<Option<Vec<usize>>>,
    wanted: Vec<bool>,
    plan: Arc<BoundPlan>,
}

/// Memory stands before the kernels, which may be what keeps its context alive: fields are dropped in this order.
#[derive(Default)]
struct State {
    /// One for each stream: runs on different streams overlap.
    workspaces: Vec<(Stream, DeviceMemory)>,
    /// Workspaces that were outgrown. A captured graph may still write to them.
    outgrown: Vec<DeviceMemory>,
    /// The youngest last.
    plans: Vec<Kept>,
    kernels: Option<Arc<KernelSet>>,
}

/// The kernel of one node on the CUDA provider.
pub(crate) struct GpuKernel {
    node: Node,
    element: Element,
    state: Mutex<State>,
}

impl GpuKernel {
    /// Loads the kernels, if the thread has a context already: the runtime gives it one when it makes a session.
    pub(crate) fn new(attributes: &Attributes, element: Element) -> Result<Self, Failure> {
        let node = node_of(attributes)?;
        let mut state = State::default();
        if let Some(context) = Driver::system()?.current_context().map_err(Error::from)? {
            let kernels = kernels_at(Place::Context(context))?;
            kernels.load(element)?;
            state.kernels = Some(kernels);
        }
        Ok(Self { node, element, state: Mutex::new(state) })
    }

    /// As [`Self::new`], with kernels that are given.
    #[cfg(test)]
    pub(crate) fn with_kernels(attributes: &Attributes, element: Element, kernels: Arc<KernelSet>) -> Self {
        let state = State { kernels: Some(kernels), ..State::default() };
        Self { node: node_of(attributes).unwrap(), element, state: Mutex::new(state) }
    }

    /// Shapes of the first input of every plan that is kept, the longest unused first.
    #[cfg(test)]
    pub(crate) fn kept_plans(&self) -> Vec<Option<Vec<usize>>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.plans.iter().map(|kept| kept.shapes.first().cloned().flatten()).collect()
    }

    /// Puts one call on the stream of the run.
    pub(crate) fn compute(&self, call: &DeviceCall<'_>) -> Result<(), Failure> {
        let (shapes, inputs, stream) = (call.shapes(), call.addresses(), call.stream()?);
        let outputs = call.outputs(&self.node.output_shapes(&shapes)?)?;
        let wanted: Vec<bool> = outputs.iter().map(Option::is_some).collect();
        let addresses: Vec<u64> = outputs.into_iter().map(Option::unwrap_or_default).collect();
        // Held until all is enqueued: the launches of two calls on one stream must not mix, which share a workspace.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let kernels = match &state.kernels {
            Some(kernels) => Arc::clone(kernels),
            None => Arc::clone(state.kernels.insert(kernels_at(Place::Device(call.device()?))?)),
        };
        let plan = state.plan(self, &kernels, &shapes, &wanted)?;
        let (workspace, workspace_bytes) = state.workspace(&kernels, call, stream, plan.workspace_bytes())?;
        plan.enqueue(&Buffers { inputs: &inputs, outputs: &addresses, workspace, workspace_bytes }, stream)?;
        Ok(())
    }
}

impl State {
    /// The plan for these shapes, made where it is new.
    fn plan(
        &mut self,
        kernel: &GpuKernel,
        kernels: &Arc<KernelSet>,
        shapes: &[Option<&[usize]>],
        wanted: &[bool],
    ) -> Result<Arc<BoundPlan>, Failure> {
        let fits =
            |kept: &Kept| kept.wanted == wanted && kept.shapes.iter().map(Option::as_deref).eq(shapes.iter().copied());
        if let Some(place) = self.plans.iter().position(fits) {
            let kept = self.plans.remove(place);
            self.plans.push(kept);
        } else {
            let plan = kernels.plan(&kernel.node, kernel.element, shapes, wanted, Options::default())?;
            if self.plans.len() == KEPT_PLANS {
                self.plans.remove(0);
            }
            let shapes = shapes.iter().map(|shape| shape.map(<[usize]>::to_vec)).collect();
            self.plans.push(Kept { shapes, wanted: wanted.to_vec(), plan: Arc::new(plan) });
        }
        let youngest = self.plans.last().map(|kept| Arc::clone(&kept.plan));
        youngest.ok_or_else(|| Failure { fault: Fault::Bug, text: "no plan was kept".into() })
    }

    /// Address and size of a workspace of at least `needed` bytes that only work on `stream` uses.
    fn workspace(
        &mut self,
        kernels: &KernelSet,
        call: &DeviceCall<'_>,
        stream: Stream,
        needed: usize,
    ) -> Result<(u64, usize), Failure> {
        let place = self.workspaces.iter().position(|(owner, _)| *owner == stream);
        if let Some((_, memory)) = place.map(|place| &self.workspaces[place])
            && memory.bytes() >= needed
        {
            return Ok((memory.address(), memory.bytes()));
        }
        if needed == 0 {
            return Ok((0, 0));
        }
        if kernels.driver().is_capturing(stream).map_err(Error::from)? {
            return Err(Failure::runtime(format!(
                "the workspace must grow to {needed} bytes while the stream is captured; run these shapes once before"
            )));
        }
        let memory = call.allocate(needed.max(LEAST_WORKSPACE).next_power_of_two())?;
        let found = (memory.address(), memory.bytes());
        if let Some(place) = place {
            let (_, old) = self.workspaces.swap_remove(place);
            self.outgrown.push(old);
        }
        self.workspaces.push((stream, memory));
        Ok(found)
    }
}
