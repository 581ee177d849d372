//! A plan whose kernels are resolved, ready to be put on a stream.

use std::ops::Range;
use std::sync::Arc;

use moa_cuda::plan::{Plan, Regime};
use moa_cuda::{Buffer, Element, Parameters, WORKSPACE_ALIGNMENT};
use moa_schema::{Parameter, ShapeError, self_attention::SHARED_CACHES};

use crate::context::Entered;
use crate::error::Error;
use crate::ffi::{Function, Stream};
use crate::kernels::KernelSet;
use crate::launch::{Launch, PARAMETER_BYTES};
use crate::node::{Node, element_bytes};

/// Device addresses of one call; 0 where a tensor is absent or empty.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// Inputs, in the order of the schema.
    pub inputs: &'a [u64],
    /// Outputs, in the order of the schema.
    pub outputs: &'a [u64],
    /// Start of the workspace, a multiple of [`WORKSPACE_ALIGNMENT`]; its content does not matter.
    pub workspace: u64,
    /// Bytes of the workspace.
    pub workspace_bytes: usize,
}

/// The launches of one node for one set of shapes.
pub struct BoundPlan {
    kernels: Arc<KernelSet>,
    plan: Plan,
    functions: Vec<Function>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    /// The error of a call in which [`SHARED_CACHES`] are not one buffer each, where they must be.
    separate: Option<ShapeError>,
}

/// A tensor that a call must give.
struct Tensor {
    name: &'static str,
    /// 0 where it is absent or empty, and any address will do.
    bytes: usize,
    /// Bytes of one element, at a multiple of which it begins.
    element_bytes: usize,
}

impl Tensor {
    fn new(parameter: &Parameter, element: Element, shape: Option<&[usize]>) -> Self {
        let elements = shape.map_or(0, |shape| shape.iter().product());
        let element_bytes = element_bytes(parameter.element, element);
        Self { name: parameter.name, bytes: elements * element_bytes, element_bytes }
    }
}

impl BoundPlan {
    pub(crate) fn new(
        kernels: Arc<KernelSet>,
        node: &Node,
        element: Element,
        plan: Plan,
        functions: Vec<Function>,
        shapes: &[Option<&[usize]>],
        wanted: &[bool],
    ) -> Result<Self, Error> {
        let operator = node.operator();
        let produced = node.output_shapes(shapes)?;
        let given = operator.inputs.iter().enumerate();
        let inputs = given.map(|(index, input)| Tensor::new(input, element, shapes.get(index).copied().flatten()));
        let made = operator.outputs.iter().zip(&produced).enumerate().map(|(index, (output, shape))| {
            let asked = wanted.get(index).copied().unwrap_or(false);
            Tensor::new(output, element, asked.then_some(&**shape))
        });
        let separate = node.shares_caches(shapes)?;
        Ok(Self { inputs: inputs.collect(), outputs: made.collect(), kernels, plan, functions, separate })
    }

    /// Bytes of workspace that a call needs.
    pub const fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes
    }

    /// How the layer is computed.
    pub const fn regime(&self) -> Regime {
        self.plan.regime
    }

    /// Number of kernels of one call.
    pub const fn launches(&self) -> usize {
        self.plan.launches.len()
    }

    /// Puts the launches on `stream`, a stream of the context of the kernels. Neither waits, nor allocates memory on
    /// the device, nor loads code.
    ///
    /// # Errors
    ///
    /// A tensor that is missing or not aligned to its elements, memory that is shared with an output, a workspace that
    /// is too small, or a launch that the driver refuses; those before it stay enqueued.
    pub fn enqueue(&self, buffers: &Buffers<'_>, stream: Stream) -> Result<(), Error> {
        self.check(buffers)?;
        let driver = self.kernels.driver();
        let _entered = Entered::new(driver, self.kernels.context())?;
        for (launch, function) in self.plan.launches.iter().zip(&self.functions) {
            let parameters = launch.parameters.bytes(|buffer| match buffer {
                Buffer::Null => 0,
                Buffer::Input(index) => address(buffers.inputs, index),
                Buffer::Output(index) => address(buffers.outputs, index),
                Buffer::Workspace(offset) => buffers.workspace + offset as u64,
                Buffer::Status => self.kernels.status_address(),
            });
            const { assert!(Parameters::BYTES <= PARAMETER_BYTES, "a launch takes the parameters") }
            let wanted = Launch {
                grid: launch.grid,
                block: launch.block,
                shared_bytes: launch.shared_bytes,
                overlap: launch.overlap && self.kernels.overlaps(),
                parameters: &parameters,
            };
            driver.launch(stream, *function, &wanted)?;
        }
        Ok(())
    }

    fn check(&self, buffers: &Buffers<'_>) -> Result<(), Error> {
        let needed = self.plan.workspace_bytes;
        if buffers.workspace_bytes < needed {
            return Err(Error::Argument(format!(
                "the workspace holds {} bytes, {needed} are needed",
                buffers.workspace_bytes
            )));
        }
        if needed > 0 && (buffers.workspace == 0 || !buffers.workspace.is_multiple_of(WORKSPACE_ALIGNMENT as u64)) {
            return Err(Error::Argument(format!(
                "the workspace must begin at a multiple of {WORKSPACE_ALIGNMENT} bytes, found {:#x}",
                buffers.workspace
            )));
        }
        let scratch = buffers.workspace..buffers.workspace + needed as u64;
        for (kind, tensors, addresses) in
            [("input", &self.inputs, buffers.inputs), ("output", &self.outputs, buffers.outputs)]
        {
            for (index, tensor) in tensors.iter().enumerate() {
                let range = tensor.range(addresses, index);
                if tensor.bytes > 0 && range.start == 0 {
                    return Err(Error::Argument(format!("{kind} `{}` has no memory", tensor.name)));
                }
                if tensor.bytes > 0 && !range.start.is_multiple_of(tensor.element_bytes as u64) {
                    return Err(Error::Argument(format!(
                        "{kind} `{}` begins at an address that is no multiple of its elements' {} bytes; give it aligned \
                         memory",
                        tensor.name, tensor.element_bytes
                    )));
                }
                if meet(&range, &scratch) {
                    return Err(Error::Argument(format!("{kind} `{}` lies in the workspace", tensor.name)));
                }
            }
        }
        if let Some(separate) = &self.separate
            && SHARED_CACHES
                .iter()
                .any(|&(past, present)| address(buffers.inputs, past) != address(buffers.outputs, present))
        {
            return Err(separate.clone().into());
        }
        self.check_outputs(buffers)
    }

    /// Outputs share memory with nothing but the caches that they update.
    fn check_outputs(&self, buffers: &Buffers<'_>) -> Result<(), Error> {
        for (index, output) in self.outputs.iter().enumerate() {
            let range = output.range(buffers.outputs, index);
            let own_past = SHARED_CACHES.iter().find(|(_, present)| self.separate.is_some() && *present == index);
            let own_past = own_past.map(|(past, _)| *past);
            let shares = |tensors: &[Tensor], addresses, but: Option<usize>| {
                let others = tensors.iter().enumerate().filter(|(place, _)| Some(*place) != but);
                let mut others = others.map(|(place, tensor)| (tensor.name, tensor.range(addresses, place)));
                others.find(|(_, other)| meet(other, &range)).map(|(name, _)| name)
            };
            if let Some(input) = shares(&self.inputs, buffers.inputs, own_past) {
                return Err(Error::Argument(format!(
                    "output `{}` shares memory with input `{input}`; bind them to different buffers",
                    output.name
                )));
            }
            if shares(&self.outputs[..index], buffers.outputs, None).is_some() {
                return Err(Error::Argument(format!("output `{}` shares memory with another", output.name)));
            }
        }
        Ok(())
    }
}

impl Tensor {
    fn range(&self, addresses: &[u64], index: usize) -> Range<u64> {
        let start = address(addresses, index);
        start..start.saturating_add(self.bytes as u64)
    }
}

/// The address of tensor `index`, 0 where it is absent.
fn address(addresses: &[u64], index: usize) -> u64 {
    addresses.get(index).copied().unwrap_or(0)
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}
