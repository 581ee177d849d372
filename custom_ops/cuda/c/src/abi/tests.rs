//! The interface as a C caller uses it, on a fake driver.

use std::ptr::{null, null_mut};

use moa_cuda::{Element, entry_points};
use moa_cuda_fake::{Fake, archive};

use super::*;

/// What a call says: its code and its text.
fn said(call: impl FnOnce(*mut RawError) -> i32) -> (i32, String) {
    let mut error = RawError { text: [b'x'; ERROR_BYTES] };
    let code = call(&raw mut error);
    let text = error.text.split(|byte| *byte == 0).next().unwrap_or_default();
    (code, if code == 0 { String::new() } else { String::from_utf8(text.to_vec()).unwrap() })
}

const FINE: (i32, String) = (0, String::new());

fn refused(text: &str) -> (i32, String) {
    (Code::Argument as i32, text.into())
}

/// A feed-forward layer with k 2.
static NODE: RawNode =
    RawNode { struct_size: size_of::<RawNode>() as u32, operator_id: 2, element: 1, top_k: 2, ..RawNode::DEFAULT };

/// Its inputs for B 2, T 3, C 64, E 4, F 128.
fn inputs() -> [RawShape; 4] {
    [&[2, 3, 64][..], &[64, 4], &[4, 64, 128], &[4, 128, 64]].map(RawShape::of)
}

fn output_shapes(node: *const RawNode, inputs: &[RawShape], outputs: &mut [RawShape]) -> (i32, String) {
    let (count, wanted_count) = (inputs.len(), outputs.len());
    let (given, wanted) = (inputs.as_ptr(), outputs.as_mut_ptr());
    // SAFETY: arrays of as many members as is said.
    said(|error| unsafe { moa_cuda_output_shapes(node, given, count, wanted, wanted_count, error) })
}

#[test]
fn shapes_of_outputs_are_written() {
    let mut outputs = [RawShape::of(&[]); 3];
    assert_eq!(output_shapes(&raw const NODE, &inputs(), &mut outputs), FINE);
    let dims = outputs.map(|shape| shape.dims().unwrap().unwrap());
    assert_eq!(dims, [vec![2, 3, 64], vec![2, 3, 2], vec![2, 3, 2]]);
    let few = output_shapes(&raw const NODE, &inputs(), &mut outputs[..2]);
    assert_eq!(few, refused("MoEFeedForward has 3 outputs, `outputs` has 2"));
}

#[test]
fn activations_are_those_of_the_header() {
    for (activation, known) in [(0, true), (1, true), (2, true), (3, true), (4, false)] {
        let node = RawNode { activation, ..NODE };
        let found = output_shapes(&raw const node, &inputs(), &mut [RawShape::of(&[]); 3]);
        let expected = if known { FINE } else { refused("`activation` must be below 4, found 4") };
        assert_eq!(found, expected);
    }
}

#[test]
fn structures_of_another_size_are_refused_unread() {
    let whole = size_of::<RawNode>() as u32;
    for size in [0, 4, whole - 8, whole + 4, u32::MAX] {
        // Nothing but the size is there.
        let node = Box::new(size);
        let found = output_shapes((&raw const *node).cast(), &inputs(), &mut [RawShape::of(&[]); 3]);
        let text = format!("`moa_cuda_node` has struct_size {size}, this library knows {whole}");
        assert_eq!(found, refused(&text));
    }
    assert_eq!(output_shapes(null(), &inputs(), &mut []), refused("`moa_cuda_node` is null"));
}

/// A node without what came later has the defaults of that.
#[test]
fn structures_of_older_callers_are_taken() {
    let bytes = std::mem::offset_of!(RawNode, attention_mode);
    let old = RawNode { struct_size: bytes as u32, attention_mode: 9, ..NODE };
    assert_eq!(output_shapes(&raw const old, &inputs(), &mut [RawShape::of(&[]); 3]), FINE);
    // SAFETY: more than its first field says.
    let read = unsafe { super::read(&raw const old) }.ok().map(|node: RawNode| node.attention_mode);
    assert_eq!(read, Some(0));
}

#[test]
fn sticks_need_an_order_of_keys() {
    let node = RawNode { operator_id: 0, kv_num_heads: 1, attention_mode: 1, ..NODE };
    let found = |node: RawNode| node.node().err().map(|failure| failure.text);
    assert_eq!(found(node).as_deref(), Some("`attention_mode` breaks sticks, which needs `causal`"));
    assert_eq!(found(RawNode { causal: 1, ..node }), None);
    let text = "`attention_mode` must be below 2, found 2";
    assert_eq!(found(RawNode { attention_mode: 2, ..node }).as_deref(), Some(text));
}

#[test]
fn arrays_that_cannot_be_are_refused_unread() {
    for (pointer, count) in [(null(), 1), (inputs().as_ptr(), MAX_TENSORS + 1), (null(), usize::MAX)] {
        // SAFETY: an array that is refused is not read.
        let found =
            said(|error| unsafe { moa_cuda_output_shapes(&raw const NODE, pointer, count, null_mut(), 0, error) });
        assert_eq!(found, refused(&format!("`inputs` has {count} members, or is null")));
    }
}

#[test]
fn an_archive_larger_than_memory_is_refused_unread() {
    for archive_bytes in [u64::MAX, 1 << 63] {
        let archive = [0_u8; 4];
        let struct_size = size_of::<RawOptions>() as u32;
        let options = RawOptions {
            struct_size,
            archive: archive.as_ptr().expose_provenance(),
            archive_bytes,
            ..RawOptions::DEFAULT
        };
        let mut kernels = null_mut();
        // SAFETY: an archive that is refused is not read.
        let found = said(|error| unsafe { moa_cuda_create(&raw const options, &raw mut kernels, error) });
        let expected = format!("`archive_bytes` is {archive_bytes}, and the most are {}", isize::MAX);
        assert_eq!((found, kernels.is_null()), (refused(&expected), true));
    }
}

#[test]
fn a_text_ends_inside_its_buffer_with_a_whole_character() {
    for length in [ERROR_BYTES - 2, ERROR_BYTES - 1, ERROR_BYTES, 2 * ERROR_BYTES] {
        let text = format!("{}é\0", "a".repeat(length - 2));
        // SAFETY: `said` passes an error of its own.
        let (_, found) = said(|error| unsafe { answer(error, Err(Failure::argument(text.clone()))) });
        let whole = text.replace('\0', " ");
        assert!(whole.starts_with(&found) && found.len() >= whole.len().min(ERROR_BYTES - 2), "{length}: {found}");
    }
    // SAFETY: a caller who wants no text.
    assert_eq!(unsafe { answer(null_mut(), catch(|| panic!("a\0b"))) }, Code::Internal as i32);
}

#[test]
fn null_handles_are_refused() {
    // SAFETY: null is allowed everywhere, and refused.
    unsafe {
        moa_cuda_destroy(null_mut());
        moa_cuda_plan_destroy(null_mut());
        assert_eq!(moa_cuda_plan_workspace_bytes(null()), 0);
        assert_eq!(said(|error| moa_cuda_create(null(), null_mut(), error)), refused("`kernels` is null"));
        assert_eq!(said(|error| moa_cuda_load(null_mut(), 0, error)), refused("`kernels` is null"));
        assert_eq!(said(|error| moa_cuda_device_facts(null(), null_mut(), error)), refused("`kernels` is null"));
        assert_eq!(said(|error| moa_cuda_faults(null(), null_mut(), error)), refused("`kernels` is null"));
        assert_eq!(said(|error| moa_cuda_plan_describe(null(), null_mut(), error)), refused("`plan` is null"));
        let none = |error| {
            let (nowhere, nothing) = (null_mut(), null());
            moa_cuda_enqueue(null(), nothing, 0, nothing, 0, nowhere, 0, nowhere, error)
        };
        assert_eq!(said(none), refused("`plan` is null"));
    }
}

/// Kernels of a fake driver behind a handle, as `moa_cuda_create` gives them.
fn kernels(fake: &Fake) -> *mut Kernels {
    let archive = archive(&["sm_90a"], &entry_points(Element::F16, (9, 0)));
    let set = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).unwrap();
    Box::into_raw(Box::new(Kernels(Arc::new(set))))
}

fn plan(kernels: *mut Kernels, wanted: &[u8]) -> *mut Plan {
    let (mut plan, inputs) = (null_mut(), inputs());
    let (given, count) = (inputs.as_ptr(), inputs.len());
    let made = said(|error| {
        let (flags, flag_count) = (wanted.as_ptr(), wanted.len());
        // SAFETY: a live handle, and arrays of as many members as is said.
        unsafe { moa_cuda_plan_create(kernels, &raw const NODE, given, count, flags, flag_count, &raw mut plan, error) }
    });
    assert_eq!(made, FINE);
    plan
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn a_plan_outlives_its_kernels() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    let plan = plan(kernels, &[1, 0, 0]);
    let mut info = RawPlanInfo { struct_size: size_of::<RawPlanInfo>() as u32, ..RawPlanInfo::DEFAULT };
    // SAFETY: live handles, each destroyed once, and arrays of as many members as is said.
    unsafe {
        moa_cuda_destroy(kernels);
        assert_eq!(said(|error| moa_cuda_plan_describe(plan, &raw mut info, error)), FINE);
        let bytes = moa_cuda_plan_workspace_bytes(plan);
        assert_eq!((info.struct_size as usize, info.workspace_bytes), (size_of_val(&info), bytes as u64));
        assert!(info.launches > 0);
        fake.taken_log();
        let inputs: Vec<*const c_void> = (1..=4).map(|place| std::ptr::without_provenance(place << 32)).collect();
        let outputs = [std::ptr::without_provenance(5 << 32), null(), null()];
        let (workspace, stream) =
            (std::ptr::without_provenance_mut(6 << 32), std::ptr::without_provenance_mut::<c_void>(7));
        let enqueue = |count, error| {
            let (given, wanted) = (inputs.as_ptr(), outputs.as_ptr());
            moa_cuda_enqueue(plan, given, count, wanted, outputs.len(), workspace, bytes, stream, error)
        };
        assert_eq!(said(|error| enqueue(4, error)), FINE);
        let launches = fake.taken_log().iter().filter(|line| line.contains(" stream 7")).count();
        assert_eq!(launches, info.launches as usize);
        assert_eq!(said(|error| enqueue(3, error)).0, Code::Argument as i32);
        moa_cuda_plan_destroy(plan);
    }
    let log = fake.taken_log().join("\n");
    assert!(log.contains("Unload"), "{log}");
}

#[test]
#[cfg_attr(miri, ignore = "Miri cannot run the fake driver, which is C++")]
fn facts_are_written_as_far_as_the_caller_knows_them() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    let mut device = RawDevice { struct_size: size_of::<RawDevice>() as u32, ..RawDevice::DEFAULT };
    let mut faults = 9;
    // SAFETY: a live handle, destroyed once; a structure of the size that it says.
    unsafe {
        assert_eq!(said(|error| moa_cuda_device_facts(kernels, &raw mut device, error)), FINE);
        assert_eq!((device.compute, device.device), ([9, 0], [9, 0]));
        device.struct_size -= 4;
        assert_eq!(said(|error| moa_cuda_device_facts(kernels, &raw mut device, error)).0, Code::Argument as i32);
        assert_eq!(said(|error| moa_cuda_load(kernels, 1, error)), FINE);
        assert_eq!(said(|error| moa_cuda_load(kernels, 3, error)), refused("`element` must be below 3, found 3"));
        assert_eq!(said(|error| moa_cuda_faults(kernels, &raw mut faults, error)), FINE);
        moa_cuda_destroy(kernels);
    }
    assert_eq!(faults, 0);
}
