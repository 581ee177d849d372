//! The entry point of the library and the callbacks of its operators.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::{LazyLock, Mutex, PoisonError};

use half::f16;
use moa_kernels::Prepared;
use moa_schema::{Attributes, FloatType, IntegerType, NodeTypes, OPERATORS, OPSET_VERSION, Operator, Parameter};
use ort_sys::{
    ONNXTensorElementDataType, OrtApiBase, OrtCustomOp, OrtCustomOpDomain, OrtCustomOpInputOutputCharacteristic,
    OrtKernelContext, OrtMemType, OrtSessionOptions, OrtStatusPtr,
};

use super::api::{API_VERSION, Api, KernelInfo, Support, ort, ort_plain};
use super::call::Call;
use super::kind::element_code;
use super::node_kernel::{Node, NodeKernel, serve};
use super::shape::Shape;
use crate::failure::{Failure, catch};
use crate::prepare::{Choices, prepare};
use crate::{attributes, compute};

/// The answer about a parameter that there is not.
const UNKNOWN: ONNXTensorElementDataType = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;

/// Entry that marks session options which have the domain: a runtime refuses a domain that is added twice.
const REGISTERED: &CStr = c"ai.moa.operator_library";

/// One operator on one choice of types, as the runtime sees it; the runtime picks the entry by the types of a node and
/// keeps pointers to it, so it lives in a static.
#[repr(C)]
pub(super) struct Entry {
    /// First, so that a pointer to it is a pointer to the entry.
    pub(super) callbacks: OrtCustomOp,
    pub(super) operator: Operator,
    pub(super) types: NodeTypes,
    name: CString,
}

/// The kernel of one node.
struct Kernel {
    attributes: Attributes,
    prepared: Prepared,
    /// Shapes of the constant inputs by position.
    constants: Vec<Option<Shape>>,
}

// SAFETY: it is one.
unsafe impl NodeKernel for Kernel {
    type Entry = Entry;

    const PROVIDER: &'static CStr = c"CPUExecutionProvider";

    /// Packs constant weights too.
    fn make(node: &Node, _: &Entry, info: &KernelInfo) -> Result<Self, Failure> {
        let Node { operator, types, .. } = *node;
        let (attributes, accuracy) = attributes::read(operator, info)?;
        let prepared = prepare(Choices::of_environment()?, &attributes, &|index| {
            info.constant(index, &operator.inputs[index], types)
        });
        let prepared = prepared.with_accuracy(accuracy);
        let shapes = operator.inputs.iter().enumerate();
        let constants = shapes.map(|(index, input)| info.constant_shape(index, input, types)).collect();
        Ok(Self { attributes, prepared, constants })
    }

    unsafe fn run(&self, node: &Node, context: *mut OrtKernelContext) -> Result<(), Failure> {
        // SAFETY: the caller's promise about the context is passed on; constants of a node are the same in every call.
        let call = unsafe { Call::new(node.api, context, node.operator, node.types, &self.constants) }?;
        match node.types.activations {
            FloatType::F16 => compute::run::<f16>(&self.attributes, &self.prepared, call),
            _ => compute::run::<f32>(&self.attributes, &self.prepared, call),
        }
    }
}

static ENTRIES: LazyLock<Vec<Entry>> = LazyLock::new(|| {
    // SAFETY: it is registered as it is.
    let entry = |operator, types| unsafe { Entry::new::<Kernel>(operator, types) };
    let types = |operator: Operator| operator.types().map(move |types| entry(operator, types));
    OPERATORS.into_iter().flat_map(types).collect()
});

/// One domain for each runtime in the process; sessions share it, and it is never released.
static DOMAINS: Mutex<Vec<(Api, Domain)>> = Mutex::new(Vec::new());

#[derive(Clone, Copy)]
struct Domain(*mut OrtCustomOpDomain);

// SAFETY: a domain is complete before it enters `DOMAINS` and is only read from then on.
unsafe impl Send for Domain {}

impl Entry {
    /// Of an operator whose nodes have kernels of this kind.
    ///
    /// # Safety
    ///
    /// It is registered as a part of a `K::Entry`.
    pub(super) unsafe fn new<K: NodeKernel>(operator: Operator, types: NodeTypes) -> Self {
        // SAFETY: a version number and optional function pointers: all zeros is a value of each field.
        let absent: OrtCustomOp = unsafe { std::mem::zeroed() };
        let mut callbacks = OrtCustomOp {
            version: API_VERSION,
            GetName: Some(name),
            GetInputType: Some(input_type),
            GetInputTypeCount: Some(input_count),
            GetOutputType: Some(output_type),
            GetOutputTypeCount: Some(output_count),
            GetInputCharacteristic: Some(input_characteristic),
            GetOutputCharacteristic: Some(output_characteristic),
            GetInputMemoryType: Some(input_memory),
            GetVariadicInputMinArity: Some(no_variadic),
            GetVariadicInputHomogeneity: Some(no_variadic),
            GetVariadicOutputMinArity: Some(no_variadic),
            GetVariadicOutputHomogeneity: Some(no_variadic),
            GetStartVersion: Some(start_version),
            GetEndVersion: Some(end_version),
            ..absent
        };
        serve::<K>(&mut callbacks);
        Self { callbacks, operator, types, name: CString::new(operator.name).unwrap_or_default() }
    }

    /// The ONNX code of a parameter's elements.
    fn code(&self, of: fn(&Operator) -> &'static [Parameter], index: usize) -> ONNXTensorElementDataType {
        element_code(of(&self.operator)[index].element, self.types)
    }
}

/// Adds the domain `ai.moa` with its operators, on every choice of their types that the runtime has, to session
/// options; returns null on success.
///
/// The runtime calls it when a session asks for this library. Any number of sessions and threads may do so, and the
/// same options more than once.
///
/// # Errors
///
/// A status where the runtime is older than 1.18 or refuses the domain.
///
/// # Safety
///
/// `base` must be null or the `OrtApiBase` of a runtime, `options` null or session options of the same runtime.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn RegisterCustomOps(
    options: *mut OrtSessionOptions,
    base: *const OrtApiBase,
) -> OrtStatusPtr {
    // SAFETY: the caller's promise about `base` is passed on.
    match unsafe { Api::from_base(base) } {
        None => OrtStatusPtr(null_mut()),
        Some(Support::TooOld(api, failure)) => api.status(Err(failure)),
        // SAFETY: the caller's promise about `options` is passed on.
        Some(Support::Full { api, int4 }) => api.status(catch(|| unsafe { register(api, int4, options) })),
    }
}

/// # Safety
///
/// `options` must be null or session options of the runtime of `api`.
unsafe fn register(api: Api, int4: bool, options: *mut OrtSessionOptions) -> Result<(), Failure> {
    if options.is_null() {
        return Err(Failure::runtime("RegisterCustomOps was called without session options"));
    }
    let mut registered = 0;
    // SAFETY: `options` is valid, the key is a C string.
    unsafe { ort!(api, HasSessionConfigEntry(options, REGISTERED.as_ptr(), &mut registered)) }.check()?;
    if registered != 0 {
        return Ok(());
    }
    let domain = domain(api, int4)?;
    // SAFETY: `options` is valid; the domain is never released.
    unsafe { ort!(api, AddCustomOpDomain(options, domain.0)) }.check()?;
    // SAFETY: `options` is valid; the runtime copies key and value.
    unsafe { ort!(api, AddSessionConfigEntry(options, REGISTERED.as_ptr(), c"1".as_ptr())) }.check()
}

/// The domain of a runtime, made at the first request; it has entries for int4 where the runtime knows that type.
fn domain(api: Api, int4: bool) -> Result<Domain, Failure> {
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, domain)) = domains.iter().find(|(owner, _)| *owner == api) {
        return Ok(*domain);
    }
    let name = CString::new(moa_schema::DOMAIN).unwrap_or_default();
    let mut raw = null_mut();
    // SAFETY: the runtime copies the name; `raw` is written on success.
    unsafe { ort!(api, CreateCustomOpDomain(name.as_ptr(), &mut raw)) }.check()?;
    // The pointer is made from the whole entry, so that callbacks may read past its first field.
    let known = |entry: &&Entry| int4 || entry.types != NodeTypes::integers(IntegerType::Int4);
    let own = ENTRIES.iter().filter(known).map(|entry| (&raw const *entry).cast());
    // SAFETY: `raw` is the domain made above; the entry lives in a static.
    let add = |entry| unsafe { ort!(api, CustomOpDomain_Add(raw, entry)) }.check();
    own.chain(gpu_entries()).try_for_each(add).inspect_err(|_| {
        // SAFETY: no session has seen the domain.
        unsafe { ort_plain!(api, ReleaseCustomOpDomain(raw)) };
    })?;
    domains.push((api, Domain(raw)));
    Ok(Domain(raw))
}

#[cfg(feature = "cuda")]
fn gpu_entries() -> impl Iterator<Item = *const OrtCustomOp> {
    super::cuda::entries()
}

#[cfg(not(feature = "cuda"))]
fn gpu_entries() -> impl Iterator<Item = *const OrtCustomOp> {
    std::iter::empty()
}

/// The entry behind the pointer that the runtime hands to a callback.
///
/// # Safety
///
/// `op` must be a pointer that [`domain`] registered.
pub(super) unsafe fn entry(op: *const OrtCustomOp) -> &'static Entry {
    // SAFETY: registered pointers point to whole entries in a static.
    unsafe { &*op.cast::<Entry>() }
}

/// Runs a callback that cannot report an error; after a panic it answers `fallback`.
pub(super) fn or_else<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    catch(|| Ok(body())).unwrap_or(fallback)
}

unsafe extern "system" fn name(op: *const OrtCustomOp) -> *const c_char {
    // SAFETY: the runtime passes what was registered.
    or_else(null(), || unsafe { entry(op) }.name.as_ptr())
}

unsafe extern "system" fn input_count(op: *const OrtCustomOp) -> usize {
    // SAFETY: the runtime passes what was registered.
    or_else(0, || unsafe { entry(op) }.operator.inputs.len())
}

unsafe extern "system" fn output_count(op: *const OrtCustomOp) -> usize {
    // SAFETY: the runtime passes what was registered.
    or_else(0, || unsafe { entry(op) }.operator.outputs.len())
}

unsafe extern "system" fn input_type(op: *const OrtCustomOp, index: usize) -> ONNXTensorElementDataType {
    // SAFETY: the runtime passes what was registered.
    or_else(UNKNOWN, || unsafe { entry(op) }.code(|operator| operator.inputs, index))
}

unsafe extern "system" fn output_type(op: *const OrtCustomOp, index: usize) -> ONNXTensorElementDataType {
    // SAFETY: the runtime passes what was registered.
    or_else(UNKNOWN, || unsafe { entry(op) }.code(|operator| operator.outputs, index))
}

unsafe extern "system" fn input_characteristic(
    op: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    // SAFETY: the runtime passes what was registered.
    characteristic(unsafe { entry(op) }.operator.inputs, index)
}

unsafe extern "system" fn output_characteristic(
    op: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    // SAFETY: the runtime passes what was registered.
    characteristic(unsafe { entry(op) }.operator.outputs, index)
}

fn characteristic(parameters: &[Parameter], index: usize) -> OrtCustomOpInputOutputCharacteristic {
    if parameters.get(index).is_some_and(|parameter| parameter.optional) {
        OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL
    } else {
        OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED
    }
}

unsafe extern "system" fn input_memory(_: *const OrtCustomOp, _: usize) -> OrtMemType {
    OrtMemType::OrtMemTypeDefault
}

unsafe extern "system" fn no_variadic(_: *const OrtCustomOp) -> c_int {
    0
}

unsafe extern "system" fn start_version(_: *const OrtCustomOp) -> c_int {
    OPSET_VERSION as c_int
}

unsafe extern "system" fn end_version(_: *const OrtCustomOp) -> c_int {
    OPSET_VERSION as c_int
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ort_sys::OrtApi;

    use super::super::api::Status;
    use super::super::api::tests::{fake, kept};
    use super::super::node_kernel::{Held, create, run};
    use super::*;

    static DOMAINS_MADE: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "system" fn make_domain(name: *const c_char, out: *mut *mut OrtCustomOpDomain) -> OrtStatusPtr {
        // SAFETY: called with a C string and a place for the result.
        unsafe {
            assert_eq!(CStr::from_ptr(name), c"ai.moa");
            *out = std::ptr::without_provenance_mut(DOMAINS_MADE.fetch_add(1, Ordering::SeqCst) + 1);
        }
        OrtStatusPtr(null_mut())
    }

    unsafe extern "system" fn add(_: *mut OrtCustomOpDomain, op: *const OrtCustomOp) -> OrtStatusPtr {
        // SAFETY: called with what is registered.
        let (callbacks, operator) = unsafe { (&*op, &entry(op).operator) };
        assert_eq!(callbacks.version, API_VERSION);
        for (index, input) in operator.inputs.iter().enumerate() {
            // SAFETY: as above.
            let found = unsafe { input_characteristic(op, index) };
            let optional = OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL;
            assert_eq!(found == optional, input.optional, "{}", input.name);
        }
        OrtStatusPtr(null_mut())
    }

    unsafe extern "system" fn add_domain(_: *mut OrtSessionOptions, _: *mut OrtCustomOpDomain) -> OrtStatusPtr {
        OrtStatusPtr(null_mut())
    }

    unsafe extern "system" fn never_registered(
        _: *const OrtSessionOptions,
        _: *const c_char,
        out: *mut c_int,
    ) -> OrtStatusPtr {
        // SAFETY: called with a place for the answer.
        unsafe { *out = 0 };
        OrtStatusPtr(null_mut())
    }

    unsafe extern "system" fn mark(_: *mut OrtSessionOptions, _: *const c_char, _: *const c_char) -> OrtStatusPtr {
        OrtStatusPtr(null_mut())
    }

    #[test]
    fn threads_share_one_domain_of_a_runtime() {
        let api = fake(OrtApi {
            CreateCustomOpDomain: make_domain,
            CustomOpDomain_Add: add,
            AddCustomOpDomain: add_domain,
            HasSessionConfigEntry: never_registered,
            AddSessionConfigEntry: mark,
            ..ort_sys::stub::api()
        });
        std::thread::scope(|scope| {
            for _ in 0..4 {
                // SAFETY: the fake runtime does not look at the options.
                scope.spawn(move || unsafe { register(api, true, std::ptr::dangling_mut()) }.unwrap());
            }
        });
        assert_eq!(DOMAINS_MADE.load(Ordering::SeqCst), 1);
    }

    static RELEASED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "system" fn release(domain: *mut OrtCustomOpDomain) {
        RELEASED.store(domain.addr(), Ordering::SeqCst);
    }

    #[test]
    fn a_domain_that_lacks_an_operator_is_given_back() {
        let stub = ort_sys::stub::api();
        let api = fake(OrtApi { CreateCustomOpDomain: make_another, ReleaseCustomOpDomain: release, ..stub });
        assert!(domain(api, true).is_err_and(|failure| failure.text == "Unimplemented"));
        assert_ne!(RELEASED.load(Ordering::SeqCst), 0);
        assert!(DOMAINS.lock().unwrap().iter().all(|(owner, _)| *owner != api));
    }

    static OF_OLD_RUNTIME: Mutex<Vec<NodeTypes>> = Mutex::new(Vec::new());

    unsafe extern "system" fn note_types(_: *mut OrtCustomOpDomain, op: *const OrtCustomOp) -> OrtStatusPtr {
        // SAFETY: called with what is registered.
        OF_OLD_RUNTIME.lock().unwrap().push(unsafe { entry(op) }.types);
        OrtStatusPtr(null_mut())
    }

    unsafe extern "system" fn make_another(_: *const c_char, out: *mut *mut OrtCustomOpDomain) -> OrtStatusPtr {
        // SAFETY: called with a place for the domain.
        unsafe { *out = std::ptr::dangling_mut() };
        OrtStatusPtr(null_mut())
    }

    #[test]
    fn a_runtime_without_int4_gets_the_other_types() {
        let stub = ort_sys::stub::api();
        let api = fake(OrtApi { CreateCustomOpDomain: make_another, CustomOpDomain_Add: note_types, ..stub });
        domain(api, false).unwrap();
        let mut others: Vec<_> = OPERATORS.iter().flat_map(Operator::types).collect();
        others.retain(|types| *types != NodeTypes::integers(IntegerType::Int4));
        assert_eq!(*OF_OLD_RUNTIME.lock().unwrap(), others);
    }

    unsafe extern "system" fn only_version_17(version: u32) -> *const OrtApi {
        if version > 17 { null() } else { kept(ort_sys::stub::api()) }
    }

    unsafe extern "system" fn no_version(_: u32) -> *const OrtApi {
        null()
    }

    unsafe extern "system" fn version_text() -> *const c_char {
        c"1.17.3".as_ptr()
    }

    #[test]
    fn an_old_runtime_gets_a_status() {
        let api = fake(ort_sys::stub::api());
        let base = OrtApiBase { GetApi: only_version_17, GetVersionString: version_text };
        // SAFETY: the base is valid; the options are not looked at.
        let status = unsafe { Status::new(api, RegisterCustomOps(null_mut(), &raw const base)) };
        let text = "the ai.moa operators need ONNX Runtime 1.18 or newer, this is 1.17.3";
        assert_eq!(status.check(), Err(Failure::runtime(text)));

        let base = OrtApiBase { GetApi: no_version, GetVersionString: version_text };
        // SAFETY: as above.
        assert!(unsafe { RegisterCustomOps(null_mut(), &raw const base) }.0.is_null());
    }

    fn feed_forward() -> &'static Entry {
        ENTRIES.iter().find(|entry| entry.operator == moa_schema::FEED_FORWARD).unwrap()
    }

    #[test]
    fn a_node_without_attributes_gets_a_status() {
        let api = fake(ort_sys::stub::api());
        let mut kernel = null_mut();
        let op = std::ptr::from_ref(feed_forward()).cast();
        // SAFETY: a registered operator; the fake runtime does not look at the info.
        let status = unsafe { Status::new(api, create::<Kernel>(op, api.table().as_ptr(), null(), &mut kernel)) };
        let text = "MoEFeedForward node ``: attribute `top_k` of type INT is missing";
        assert_eq!(status.check(), Err(Failure::runtime(text)));
        assert!(kernel.is_null());
    }

    #[test]
    fn a_call_without_inputs_gets_a_status() {
        let api = fake(ort_sys::stub::api());
        let attributes = moa_schema::FeedForwardAttributes {
            top_k: 1,
            gate_mode: moa_schema::GateMode::TopkSoftmax,
            activation: moa_schema::Activation::Silu,
            gated: true,
        };
        let attributes = Attributes::FeedForward(attributes);
        let Entry { operator, types, .. } = feed_forward();
        let node = Node { api, operator, types: *types, name: "n".into() };
        let kernel = Kernel { attributes, prepared: Prepared::default(), constants: Vec::new() };
        let mut held = Held { node, kernel };
        // SAFETY: a kernel as `create` makes it; the fake runtime refuses to look at the context.
        let status = unsafe { Status::new(api, run::<Kernel>((&raw mut held).cast(), null_mut())) };
        assert_eq!(status.check(), Err(Failure::runtime("MoEFeedForward node `n`: Unimplemented")));
    }
}
