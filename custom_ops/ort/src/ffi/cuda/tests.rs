//! Calls on a fake runtime and a fake driver: what reaches the stream, and where the workspace comes from.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use moa_cuda::{Parameters, entry_points};
use moa_cuda_driver::KernelSet;
use moa_cuda_fake::{Fake, archive};
use moa_schema::{AttentionMode, Attributes, FEED_FORWARD, GateMode, SELF_ATTENTION, SelfAttentionAttributes};
use ort_sys::{ONNXTensorElementDataType, OrtAllocator, OrtApi, OrtMemoryInfo, OrtValue};

use super::super::api::tests::fake;
use super::super::api::{Api, Status};
use super::super::fake_tensor::{Tensor, answers, table};
use super::super::kind::element_code;
use super::super::node_kernel::{Held, create, run};
use super::*;

const F16: i32 = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 as i32;
const F32: i32 = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT as i32;
const I32: i32 = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 as i32;

/// What the allocator of a call was asked.
#[derive(Default)]
struct Memory {
    allocated: Cell<usize>,
    freed: Cell<usize>,
    /// Memory that was freed while these kernels kept their context alive.
    freed_in_context: Cell<usize>,
    kernels: RefCell<Weak<KernelSet>>,
    handles_released: Cell<usize>,
}

/// One call of the fake runtime.
struct Context {
    inputs: Vec<Option<Tensor>>,
    /// Outputs that the node has.
    outputs: Vec<bool>,
    made: RefCell<Vec<Tensor>>,
    stream: usize,
    memory: Rc<Memory>,
}

/// # Safety
///
/// `raw` must be a [`Context`] of a test.
unsafe fn context<'a>(raw: *const OrtKernelContext) -> &'a Context {
    // SAFETY: by the caller's promise.
    unsafe { &*raw.cast::<Context>() }
}

/// # Safety
///
/// `raw` must be a handle that [`allocator`] gave and nobody has released.
unsafe fn allocator_memory<'a>(raw: *mut OrtAllocator) -> &'a Memory {
    // SAFETY: by the caller's promise.
    unsafe { &*raw.cast::<Memory>() }
}

answers! {
    input_count(raw: *const OrtKernelContext, out: *mut usize) { *out = context(raw).inputs.len(); }
    output_count(raw: *const OrtKernelContext, out: *mut usize) { *out = context(raw).outputs.len(); }
    input(raw: *const OrtKernelContext, index: usize, out: *mut *const OrtValue) {
        let tensor = context(raw).inputs[index].as_ref();
        *out = tensor.map_or(std::ptr::null(), |tensor| std::ptr::from_ref(tensor).cast());
    }
    output(
        raw: *mut OrtKernelContext,
        index: usize,
        dims: *const i64,
        rank: usize,
        out: *mut *mut OrtValue
    ) {
        let context = context(raw);
        *out = null_mut();
        if context.outputs[index] {
            let dims = std::slice::from_raw_parts(dims, rank).to_vec();
            let mut made = context.made.borrow_mut();
            made.push(Tensor { code: F16, dims, data: device(40 + index) });
            *out = std::ptr::from_mut(made.last_mut().unwrap()).cast();
        }
    }
    memory(_value: *const OrtValue, out: *mut *const OrtMemoryInfo) { *out = std::ptr::dangling(); }
    ordinal(_memory: *const OrtMemoryInfo, out: *mut c_int) { *out = 0; }
    stream(raw: *const OrtKernelContext, out: *mut *mut c_void) {
        *out = std::ptr::without_provenance_mut(context(raw).stream);
    }
    allocator(raw: *const OrtKernelContext, _memory: *const OrtMemoryInfo, out: *mut *mut OrtAllocator) {
        // As in ONNX Runtime, a handle holds the allocator, which may outlive the call.
        *out = Rc::into_raw(Rc::clone(&context(raw).memory)).cast_mut().cast();
    }
    allocate(raw: *mut OrtAllocator, size: usize, out: *mut *mut c_void) {
        let count = &allocator_memory(raw).allocated;
        count.set(count.get() + 1);
        assert!(size > 0);
        // Off the alignment that kernels ask for.
        *out = std::ptr::without_provenance_mut((80 << 32) + (count.get() << 36) + 64);
    }
    free(raw: *mut OrtAllocator, address: *mut c_void) {
        assert!(!address.is_null());
        let memory = allocator_memory(raw);
        memory.freed.set(memory.freed.get() + 1);
        let in_context = usize::from(memory.kernels.borrow().strong_count() > 0);
        memory.freed_in_context.set(memory.freed_in_context.get() + in_context);
    }
}

unsafe extern "system" fn release_allocator(raw: *mut OrtAllocator) {
    // SAFETY: a handle that `allocator` gave, for the last time.
    let memory = unsafe { Rc::from_raw(raw.cast::<Memory>().cast_const()) };
    memory.handles_released.set(memory.handles_released.get() + 1);
}

/// The start of a buffer on the device.
fn device(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number << 32)
}

fn api() -> Api {
    fake(OrtApi {
        KernelContext_GetInputCount: input_count,
        KernelContext_GetOutputCount: output_count,
        KernelContext_GetInput: input,
        KernelContext_GetOutput: output,
        GetTensorMemoryInfo: memory,
        MemoryInfoGetId: ordinal,
        KernelContext_GetGPUComputeStream: stream,
        KernelContext_GetAllocator: allocator,
        AllocatorAlloc: allocate,
        AllocatorFree: free,
        ReleaseAllocator: release_allocator,
        ..table()
    })
}

/// A self-attention of B 2, C 64, E 4, k 2, G 1, D 64 over `tokens` new tokens.
fn call(tokens: i64, stream: usize) -> Context {
    let shapes: [(i32, Vec<i64>); 6] = [
        (F16, vec![2, tokens, 64]),
        (I32, vec![2, tokens]),
        (F32, vec![64, 4]),
        (F16, vec![4, 64, 64]),
        (F16, vec![64, 128]),
        (F16, vec![4, 64, 64]),
    ];
    let tensors = shapes.into_iter().enumerate();
    let inputs = tensors.map(|(index, (code, dims))| Some(Tensor { code, dims, data: device(1 + index) }));
    Context {
        inputs: inputs.collect(),
        outputs: vec![true, false, false, true],
        made: RefCell::default(),
        stream,
        memory: Rc::default(),
    }
}

const ATTRIBUTES: SelfAttentionAttributes = SelfAttentionAttributes {
    top_k: 2,
    kv_num_heads: 1,
    causal: true,
    scale: 0.125,
    gate_mode: GateMode::SoftmaxTopk,
    skip_padded_queries: true,
    attention_mode: AttentionMode::Softmax,
};

fn kernel_set(fake: &Fake) -> Arc<KernelSet> {
    let archive = archive(&["sm_90a"], &entry_points(Element::F16, (9, 0)));
    Arc::new(KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).unwrap())
}

fn kernel(fake: &Fake) -> Held<GpuKernel> {
    kernel_of(kernel_set(fake))
}

fn kernel_of(kernels: Arc<KernelSet>) -> Held<GpuKernel> {
    let element = Element::F16;
    let kernel = GpuKernel::with_kernels(&Attributes::SelfAttention(ATTRIBUTES), element, kernels);
    let node = Node { api: api(), operator: &SELF_ATTENTION, types: types_of(element), name: "n".into() };
    Held { node, kernel }
}

fn compute(kernel: &Held<GpuKernel>, call: &Context) -> Result<(), Failure> {
    let raw = std::ptr::from_ref(kernel).cast_mut().cast();
    // SAFETY: a kernel as `create` makes it, and a context that the fake runtime knows.
    let status =
        unsafe { Status::new(kernel.node.api, run::<GpuKernel>(raw, std::ptr::from_ref(call).cast_mut().cast())) };
    status.check()
}

fn launches(log: &[String]) -> Vec<&String> {
    log.iter().filter(|line| line.starts_with("cuLaunchKernelEx")).collect()
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn a_call_goes_to_the_stream_of_its_run_and_touches_nothing_else() {
    let fake = Fake::load();
    let kernel = kernel(&fake);
    let call = call(300, 7);
    compute(&kernel, &call).unwrap();
    fake.taken_log();
    compute(&kernel, &call).unwrap();
    let log = fake.taken_log();
    assert!(launches(&log).len() > 1, "{log:?}");
    assert!(launches(&log).iter().all(|line| line.contains(" stream 7")), "{log:?}");
    assert_eq!(launches(&log).len() + 2, log.len(), "only the context is pushed and popped: {log:?}");
    assert_eq!(call.memory.allocated.get(), 1, "the workspace of the first call serves the second");
    let shapes: Vec<_> = call.made.borrow().iter().map(|tensor| tensor.dims.clone()).collect();
    assert_eq!(shapes, [vec![2, 300, 64], vec![2, 300, 2], vec![2, 300, 64], vec![2, 300, 2]]);
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn addresses_reach_the_kernels() {
    let fake = Fake::load();
    let kernel = kernel(&fake);
    fake.taken_log();
    let call = call(300, 7);
    compute(&kernel, &call).unwrap();
    let names = Parameters::default().pointers();
    let place = |name| names.iter().position(|(other, _)| *other == name).unwrap();
    let bytes = fake.parameters(0, 8 * names.len());
    let pointer = |name| u64::from_le_bytes(bytes[8 * place(name)..8 * place(name) + 8].try_into().unwrap());
    assert_eq!(pointer("hidden_states"), 1 << 32);
    assert_eq!(pointer("router_weight"), 3 << 32);
    let work: Vec<u64> = names.iter().map(|(name, _)| pointer(name)).filter(|address| *address > 80 << 32).collect();
    assert!(!work.is_empty() && work.iter().all(|address| address.is_multiple_of(256)), "{work:x?}");
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn each_stream_has_a_workspace_and_none_is_freed_while_a_graph_may_use_it() {
    let fake = Fake::load();
    let kernels = kernel_set(&fake);
    let set = Arc::downgrade(&kernels);
    let kernel = kernel_of(kernels);
    let calls = [call(300, 7), call(300, 8), call(6000, 7), call(200, 7)];
    for call in &calls {
        compute(&kernel, call).unwrap();
    }
    // Calls end before their kernel does.
    let memories = calls.map(|call| call.memory);
    let counts = |count: fn(&Memory) -> &Cell<usize>| memories.each_ref().map(|memory| count(memory).get());
    assert_eq!(counts(|memory| &memory.allocated), [1, 1, 1, 0]);
    assert_eq!(counts(|memory| &memory.freed), [0; 4]);
    memories.iter().for_each(|memory| *memory.kernels.borrow_mut() = Weak::clone(&set));
    drop(kernel);
    assert_eq!(set.strong_count(), 0);
    assert_eq!(counts(|memory| &memory.freed), [1, 1, 1, 0]);
    assert_eq!(counts(|memory| &memory.freed_in_context), [1, 1, 1, 0]);
    assert_eq!(counts(|memory| &memory.handles_released), [1, 1, 1, 0]);
    assert!(memories.iter().all(|memory| Rc::strong_count(memory) == 1), "a handle was kept");
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn a_workspace_does_not_grow_while_the_stream_is_captured() {
    let fake = Fake::load();
    let kernel = kernel(&fake);
    compute(&kernel, &call(300, 7)).unwrap();
    fake.set_capturing(true);
    compute(&kernel, &call(300, 7)).unwrap();
    let error = compute(&kernel, &call(6000, 7)).unwrap_err().text;
    assert!(error.starts_with("MoASelfAttention node `n`: the workspace must grow to "), "{error}");
    assert!(error.ends_with("run these shapes once before"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn errors_are_those_of_the_cpu() {
    let fake = Fake::load();
    let kernel = kernel(&fake);
    let mut wrong = call(5, 7);
    wrong.inputs[4].as_mut().unwrap().dims[1] = 64;
    let error = compute(&kernel, &wrong).unwrap_err().text;
    let text = "MoASelfAttention node `n`: input `kv_weight` must be [C, 2 * G * D], keys first, found [64, 64]";
    assert!(error.starts_with(text), "{error}");
    let mut wrong = call(5, 7);
    wrong.inputs[0].as_mut().unwrap().code = F32;
    let error = compute(&kernel, &wrong).unwrap_err().text;
    assert_eq!(error, "MoASelfAttention node `n`: input `hidden_states` must hold float16 elements, found float32");
    fake.fail("cuLaunchKernelEx", 1, 700);
    let error = compute(&kernel, &call(5, 7)).unwrap_err().text;
    let text = "MoASelfAttention node `n`: cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)";
    assert!(error.starts_with(text), "{error}");
}

/// Caches of 16 rows behind a mask of 9 keys, 3 of them new, at the addresses of buffers `key` and `value`.
fn call_with_room(key: usize, value: usize) -> Context {
    let mut call = call(3, 7);
    call.inputs[1].as_mut().unwrap().dims[1] = 9;
    call.inputs.push(None);
    call.inputs.extend([key, value].map(|number| {
        let dims = vec![2, 1, 16, 64];
        Some(Tensor { code: F16, dims, data: device(number) })
    }));
    call.outputs = vec![true, true, true];
    call
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn caches_with_room_are_updated_in_place() {
    let fake = Fake::load();
    let kernel = kernel(&fake);
    let given = call_with_room(41, 42);
    compute(&kernel, &given).unwrap();
    let cache = vec![2, 1, 16, 64];
    let shapes: Vec<_> = given.made.borrow().iter().map(|tensor| tensor.dims.clone()).collect();
    assert_eq!(shapes[..3], [vec![2, 3, 64], cache.clone(), cache]);
    fake.taken_log();
    for (key, value) in [(8, 9), (41, 9), (42, 41)] {
        let error = compute(&kernel, &call_with_room(key, value)).unwrap_err().text;
        let end = "fewer are for caches with room, where past_key and present_key, and past_value and present_value, are \
                   bound to one buffer each";
        assert!(error.starts_with("MoASelfAttention node `n`: ") && error.ends_with(end), "{error}");
    }
    let mut unwanted = call_with_room(41, 42);
    unwanted.outputs.pop();
    assert!(compute(&kernel, &unwanted).unwrap_err().text.contains("expected 19: 16 of the past and 3"));
    assert_eq!(launches(&fake.taken_log()).len(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn shapes_are_planned_once() {
    let fake = Fake::load();
    let kernel = kernel(&fake);
    let run = |tokens| compute(&kernel, &call(tokens, 7)).unwrap();
    let kept = || -> Vec<usize> { kernel.kernel.kept_plans().into_iter().map(|shape| shape.unwrap()[1]).collect() };
    [3, 5, 3].into_iter().for_each(run);
    assert_eq!(kept(), [5, 3]);
    for tokens in 10..60 {
        run(tokens);
        run(3);
    }
    // The shapes in use all the time stay, and of the others the youngest.
    let mut expected: Vec<usize> = (29..60).collect();
    expected.push(3);
    assert_eq!(kept(), expected);
}

#[test]
fn memory_is_given_back_after_its_call() {
    let call = call(3, 7);
    let counts = Rc::clone(&call.memory);
    let raw = std::ptr::from_ref(&call).cast_mut().cast();
    // SAFETY: a context that the fake runtime knows, and that lives longer than `device`.
    let device = unsafe { DeviceCall::new(api(), raw, &SELF_ATTENTION, types_of(Element::F16)) }.unwrap();
    assert_eq!(device.addresses()[..2], [1 << 32, 2 << 32]);
    assert_eq!(device.shapes()[..2], [Some(&[2, 3, 64][..]), Some(&[2, 3])]);
    let outputs = device.outputs(&[vec![2, 3, 64], vec![], vec![], vec![2, 3, 2]]).unwrap();
    assert_eq!(outputs, [Some(40 << 32), None, None, Some(43 << 32)]);
    let memory = device.allocate(1000).unwrap();
    drop(device);
    drop(call);
    assert_eq!((memory.address() % 256, memory.bytes()), (0, 1000));
    assert_eq!(counts.freed.get(), 0);
    drop(memory);
    assert_eq!([&counts.allocated, &counts.freed, &counts.handles_released].map(Cell::get), [1; 3]);
    assert_eq!(Rc::strong_count(&counts), 1, "a handle was kept");
}

#[test]
fn a_call_without_inputs_has_no_device() {
    let mut call = call(3, 7);
    call.inputs.iter_mut().for_each(|input| *input = None);
    let raw = std::ptr::from_ref(&call).cast_mut().cast();
    // SAFETY: a context that the fake runtime knows, and that lives longer than `device`.
    let device = unsafe { DeviceCall::new(api(), raw, &SELF_ATTENTION, types_of(Element::F16)) }.unwrap();
    let refused = Failure::argument("no input says on which device the node runs");
    assert_eq!(device.device(), Err(refused.clone()));
    assert_eq!(device.allocate(1000).err(), Some(refused));
    assert_eq!(call.memory.allocated.get(), 0);
}

#[test]
fn entries_name_their_provider_and_types() {
    assert_eq!(ENTRIES.len(), 9);
    for entry in ENTRIES.iter() {
        let op = std::ptr::from_ref(entry).cast();
        // SAFETY: registered entries.
        let (name, inputs) = unsafe {
            let callbacks = &entry.entry.callbacks;
            let name = CStr::from_ptr(callbacks.GetExecutionProviderType.unwrap()(op));
            (name, callbacks.GetInputTypeCount.unwrap()(op))
        };
        assert_eq!(name, c"CUDAExecutionProvider");
        assert_eq!(inputs, entry.entry.operator.inputs.len());
        let (get_type, wanted) = (entry.entry.callbacks.GetInputType.unwrap(), types_of(entry.element));
        for (index, input) in entry.entry.operator.inputs.iter().enumerate() {
            // SAFETY: as above.
            let found = unsafe { get_type(op, index) };
            assert_eq!(found, element_code(input.element, wanted), "{}", input.name);
        }
    }
}

#[test]
fn a_node_that_cannot_be_made_gets_a_status() {
    let api = fake(ort_sys::stub::api());
    let entry = ENTRIES.iter().find(|entry| entry.entry.operator == FEED_FORWARD).unwrap();
    let mut kernel = null_mut();
    // SAFETY: a registered operator; the fake runtime does not look at the info.
    let status = unsafe {
        let raw =
            create::<GpuKernel>(std::ptr::from_ref(entry).cast(), api.table().as_ptr(), std::ptr::null(), &mut kernel);
        Status::new(api, raw)
    };
    let text = "MoEFeedForward node ``: attribute `top_k` of type INT is missing";
    assert_eq!(status.check(), Err(Failure::runtime(text)));
    assert!(kernel.is_null());
}
