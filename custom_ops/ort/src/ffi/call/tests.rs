//! Calls on a fake runtime: which buffers an output may have.

use moa_schema::FEED_FORWARD;
use moa_schema::feed_forward::{HIDDEN_STATES, OUTPUT, OUTPUT_BIAS, TOPK_WEIGHTS};
use ort_sys::{ONNXTensorElementDataType, OrtApi};

use super::super::api::tests::fake;
use super::super::fake_tensor::{Tensor, answers, table};
use super::*;

const TYPES: NodeTypes = NodeTypes::ALL[0];
const F32: i32 = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT as i32;

/// One call of the fake runtime; where a tensor is absent, the node does not have it.
#[derive(Default)]
struct Context {
    inputs: [Option<Tensor>; FEED_FORWARD.inputs.len()],
    outputs: [Option<Tensor>; FEED_FORWARD.outputs.len()],
}

answers! {
    input_count(raw: *const OrtKernelContext, out: *mut usize) { *out = (*raw.cast::<Context>()).inputs.len(); }
    output_count(raw: *const OrtKernelContext, out: *mut usize) { *out = (*raw.cast::<Context>()).outputs.len(); }
    input(raw: *const OrtKernelContext, index: usize, out: *mut *const OrtValue) {
        let inputs = &(*raw.cast::<Context>()).inputs;
        *out = inputs[index].as_ref().map_or(null(), |tensor| std::ptr::from_ref(tensor).cast());
    }
    output(raw: *mut OrtKernelContext, index: usize, dims: *const i64, rank: usize, out: *mut *mut OrtValue) {
        let outputs = &mut (*raw.cast::<Context>()).outputs;
        *out = outputs[index].as_mut().map_or(null_mut(), |tensor| {
            assert_eq!(tensor.dims, std::slice::from_raw_parts(dims, rank));
            std::ptr::from_mut(tensor).cast()
        });
    }
}

/// `len` floats from `start` on.
fn floats(start: *mut f32, len: usize) -> Option<Tensor> {
    Some(Tensor { code: F32, dims: vec![i64::try_from(len).unwrap()], data: start.cast() })
}

/// Allocates the outputs of a call, of which each has the shape that its tensor says; an empty text where that works.
fn refusal(context: &mut Context, in_place: &[(usize, usize)]) -> String {
    let api = fake(OrtApi {
        KernelContext_GetInputCount: input_count,
        KernelContext_GetOutputCount: output_count,
        KernelContext_GetInput: input,
        KernelContext_GetOutput: output,
        ..table()
    });
    let shapes = context.outputs.each_ref().map(|output| output.as_ref().map_or(0, |tensor| tensor.dims[0] as usize));
    let shapes = shapes.each_ref().map(std::slice::from_ref);
    // SAFETY: a context that the fake runtime knows, and the only call made from it.
    let call = unsafe { Call::new(api, std::ptr::from_mut(context).cast(), &FEED_FORWARD, TYPES, &[]) }.unwrap();
    let (inputs, mut outputs, _) = match call.allocate(&shapes, in_place) {
        Ok(allocated) => allocated,
        Err(failure) => return failure.text,
    };
    for index in [OUTPUT, TOPK_WEIGHTS] {
        outputs.floats(index).unwrap().into_iter().for_each(|values| values.fill(7.0));
    }
    for &(input, _) in in_place {
        assert!(inputs.floats(input).is_err(), "an input that gave its memory can still be read");
    }
    String::new()
}

#[test]
fn an_output_on_an_input_is_refused() {
    let mut memory = [0f32; 12];
    let start = memory.as_mut_ptr();
    for (offset, refused) in [(0, true), (1, true), (3, true), (4, false), (8, false)] {
        let mut context = Context::default();
        context.inputs[OUTPUT_BIAS] = floats(start, 4);
        context.outputs[OUTPUT] = floats(start.wrapping_add(offset), 4);
        let text = "output `output` shares memory with input `output_bias`; bind them to different buffers";
        assert_eq!(refusal(&mut context, &[]), if refused { text } else { "" }, "{offset}");
    }
}

#[test]
fn two_outputs_on_one_buffer_are_refused() {
    let mut memory = [0f32; 12];
    let start = memory.as_mut_ptr();
    for (offset, refused) in [(0, true), (1, true), (3, true), (4, false), (8, false)] {
        let mut context = Context::default();
        context.outputs[OUTPUT] = floats(start, 4);
        context.outputs[TOPK_WEIGHTS] = floats(start.wrapping_add(offset), 4);
        let text = "output `topk_weights` shares memory with another";
        assert_eq!(refusal(&mut context, &[]), if refused { text } else { "" }, "{offset}");
    }
}

#[test]
fn an_input_gives_its_memory_where_the_output_has_exactly_that() {
    let mut memory = [0f32; 12];
    let start = memory.as_mut_ptr();
    let mut context = Context::default();
    context.inputs[HIDDEN_STATES] = floats(start, 4);
    context.outputs[OUTPUT] = floats(start, 4);
    assert_eq!(refusal(&mut context, &[(HIDDEN_STATES, OUTPUT)]), "");
    context.outputs[OUTPUT] = floats(start, 5);
    let text = "output `output` shares memory with input `hidden_states`; bind them to different buffers";
    assert_eq!(refusal(&mut context, &[(HIDDEN_STATES, OUTPUT)]), text);
}
