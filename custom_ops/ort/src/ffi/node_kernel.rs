//! The callbacks that make, call and drop the kernel of a node, the same on every provider.

use std::ffi::{CStr, c_char, c_void};

use moa_schema::{NodeTypes, Operator};
use ort_sys::{OrtApi, OrtCustomOp, OrtKernelContext, OrtKernelInfo, OrtStatusPtr};

use super::api::{Api, KernelInfo};
use super::library::{Entry, entry, or_else};
use crate::failure::{Failure, catch_at_node};

/// A node, as every kernel knows it.
pub(super) struct Node {
    pub(super) api: Api,
    pub(super) operator: &'static Operator,
    pub(super) types: NodeTypes,
    pub(super) name: String,
}

/// The kernel of one node.
///
/// # Safety
///
/// `Entry` is `repr(C)`, and its first field is an [`Entry`], or it is one.
pub(super) unsafe trait NodeKernel: Sized {
    /// What is registered for it.
    type Entry: 'static;

    /// Name of the provider that it computes for.
    const PROVIDER: &'static CStr;

    /// Reads the attributes of a node, and what else serves all of its calls.
    fn make(node: &Node, entry: &Self::Entry, info: &KernelInfo) -> Result<Self, Failure>;

    /// Computes a node.
    ///
    /// # Safety
    ///
    /// The runtime passed the context for this call, and nothing else makes a call from it.
    unsafe fn run(&self, node: &Node, context: *mut OrtKernelContext) -> Result<(), Failure>;
}

/// What the runtime holds: a kernel with its node.
pub(super) struct Held<K> {
    pub(super) node: Node,
    pub(super) kernel: K,
}

/// Lets an entry make kernels of this kind.
pub(super) fn serve<K: NodeKernel>(callbacks: &mut OrtCustomOp) {
    callbacks.GetExecutionProviderType = Some(provider::<K>);
    callbacks.CreateKernelV2 = Some(create::<K>);
    callbacks.KernelComputeV2 = Some(run::<K>);
    callbacks.KernelDestroy = Some(destroy::<K>);
}

unsafe extern "system" fn provider<K: NodeKernel>(_: *const OrtCustomOp) -> *const c_char {
    K::PROVIDER.as_ptr()
}

/// Makes the kernel of a node.
pub(super) unsafe extern "system" fn create<K: NodeKernel>(
    op: *const OrtCustomOp,
    api: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: the runtime passes its table, in the version that the operator declares.
    let Some(api) = (unsafe { Api::from_table(api) }) else { return OrtStatusPtr(std::ptr::null_mut()) };
    // SAFETY: the runtime passes what was registered, a pointer to a whole entry of this kind in a static, and the info
    // of the kernel being created.
    let (base, own, info) = unsafe { (entry(op), &*op.cast::<K::Entry>(), KernelInfo::new(api, info)) };
    let Entry { operator, types, .. } = base;
    let node = Node { api, operator, types: *types, name: or_else(String::new(), || info.node_name()) };
    let result = catch_at_node(operator.name, &node.name, || K::make(&node, own, &info));
    api.status(result.map(|made| {
        let held = Box::new(Held { node, kernel: made });
        // SAFETY: the runtime passes a place for the kernel; `destroy` takes it back.
        unsafe { *kernel = Box::into_raw(held).cast() };
    }))
}

/// Computes a node.
pub(super) unsafe extern "system" fn run<K: NodeKernel>(
    kernel: *mut c_void,
    context: *mut OrtKernelContext,
) -> OrtStatusPtr {
    // SAFETY: the runtime passes what `create` made; kernels are only read, so threads may share one.
    let Held { node, kernel } = unsafe { &*kernel.cast::<Held<K>>() };
    // SAFETY: the runtime passes the context of this call, and only the kernel makes a call from it.
    let body = || unsafe { kernel.run(node, context) };
    node.api.status(catch_at_node(node.operator.name, &node.name, body))
}

unsafe extern "system" fn destroy<K: NodeKernel>(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: the runtime passes what `create` made, once.
        or_else((), || drop(unsafe { Box::from_raw(kernel.cast::<Held<K>>()) }));
    }
}
