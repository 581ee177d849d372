//! Binding a plan, and putting it on a stream.

use std::sync::Arc;

use moa_cuda::{Buffer, Element, Options, SOURCE_HASH, entry_points};
use moa_cuda_driver::{Buffers, Caches, KernelSet, Node, Stream};
use moa_cuda_fake::{Fake, archive};
use moa_schema::{SELF_ATTENTION, self_attention as own};

use crate::support::{ELEMENT, SHAPES, WANTED, bind, kernels, node, plan};

/// Addresses that are far apart: input `i` and output `i` of the node.
const INPUTS: [u64; 9] = [1 << 32, 2 << 32, 3 << 32, 4 << 32, 5 << 32, 6 << 32, 0, 7 << 32, 8 << 32];
const OUTPUTS: [u64; 3] = [9 << 32, 10 << 32, 11 << 32];
const WORKSPACE: u64 = 12 << 32;

const BUFFERS: Buffers<'static> =
    Buffers { inputs: &INPUTS, outputs: &OUTPUTS, workspace: WORKSPACE, workspace_bytes: 1 << 30 };

fn refused(buffers: &Buffers<'_>) -> String {
    let fake = Fake::load();
    let bound = bind(&kernels(&fake)).unwrap();
    fake.taken_log();
    let error = bound.enqueue(buffers, Stream(3)).unwrap_err().to_string();
    let log = fake.taken_log();
    assert!(!log.iter().any(|line| line.starts_with("cuLaunch")), "{log:?}");
    error
}

#[test]
fn launches_follow_the_plan_and_call_nothing_else() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    let bound = bind(&kernels).unwrap();
    let plan = plan(&kernels.facts().device);
    assert_eq!((bound.launches(), bound.workspace_bytes()), (plan.launches.len(), plan.workspace_bytes));
    fake.taken_log();
    bound.enqueue(&BUFFERS, Stream(3)).unwrap();
    let launches = plan.launches.iter().map(|launch| {
        let overlap = if launch.overlap { " attribute 6=1" } else { "" };
        format!(
            "cuLaunchKernelEx {} grid {} 1 1 block {} 1 1 shared {} stream 3{overlap} context 1000",
            launch.kernel, launch.grid, launch.block, launch.shared_bytes
        )
    });
    let mut expected = vec!["cuCtxPushCurrent 1000".to_owned()];
    expected.extend(launches);
    expected.push("cuCtxPopCurrent".into());
    for index in 0..plan.launches.len() {
        let mut status = 0;
        let wanted = plan.launches[index].parameters.bytes(|buffer| match buffer {
            Buffer::Null => 0,
            Buffer::Input(input) => INPUTS.get(input).copied().unwrap_or(0),
            Buffer::Output(output) => OUTPUTS.get(output).copied().unwrap_or(0),
            Buffer::Workspace(offset) => WORKSPACE + offset as u64,
            Buffer::Status => status,
        });
        let mut found = fake.parameters(index, wanted.len());
        // The status word lies where the kernels put it; every launch names the same one.
        let place = plan.launches[index].parameters.pointers().iter().position(|(_, buffer)| *buffer == Buffer::Status);
        if let Some(place) = place {
            let bytes = &mut found[8 * place..8 * place + 8];
            status = u64::from_le_bytes(bytes.try_into().unwrap());
            assert_ne!(status, 0);
            bytes.fill(0);
        }
        assert_eq!(found, wanted, "launch {index}");
    }
    assert_eq!(fake.taken_log(), expected);
}

/// Code for less than compute capability 9.0 cannot wait on the device, on whatever device it runs.
#[test]
fn launches_overlap_only_where_kernels_wait_on_the_device() {
    let fake = Fake::load();
    let cases = [(80, None, false), (90, Some((8, 0)), false), (90, None, true), (100, None, true)];
    for (capability, forced, overlaps) in cases {
        fake.set_capability(capability);
        let archive = archive(&["sm_80", "compute_80", "sm_90a", "sm_100"], &entry_points(ELEMENT, (9, 0)));
        let set = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, forced).unwrap();
        let bound = bind(&Arc::new(set)).unwrap();
        fake.taken_log();
        bound.enqueue(&BUFFERS, Stream(3)).unwrap();
        let launches = fake.taken_log().into_iter().filter(|line| line.starts_with("cuLaunchKernelEx"));
        let found: Vec<_> = launches.map(|line| line.contains("attribute 6=1")).collect();
        let expected: Vec<_> = (0..bound.launches()).map(|index| overlaps && index > 0).collect();
        assert_eq!(found, expected, "{capability} {forced:?}");
    }
}

#[test]
fn launches_overlap_only_where_the_driver_can_capture_that() {
    let fake = Fake::load();
    for (version, overlaps) in [(12_000, false), (12_020, false), (12_030, true), (13_000, true)] {
        fake.set_version(version);
        let bound = bind(&kernels(&fake)).unwrap();
        fake.taken_log();
        bound.enqueue(&BUFFERS, Stream(3)).unwrap();
        let log = fake.taken_log();
        assert_eq!(log.iter().any(|line| line.contains("attribute 6=1")), overlaps, "{version}");
        assert_eq!(log.iter().filter(|line| line.starts_with("cuLaunchKernelEx")).count(), bound.launches());
    }
}

#[test]
fn a_current_context_is_not_pushed_again() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    let bound = bind(&kernels).unwrap();
    fake.make_current(1000);
    fake.taken_log();
    bound.enqueue(&BUFFERS, Stream(0)).unwrap();
    assert!(fake.taken_log().iter().all(|line| line.starts_with("cuLaunchKernelEx")));
    fake.make_current(0);
}

#[test]
fn a_launch_that_fails_stops_the_rest_and_restores_the_context() {
    let fake = Fake::load();
    let bound = bind(&kernels(&fake)).unwrap();
    assert!(bound.launches() > 1, "the case needs two launches");
    fake.taken_log();
    fake.fail("cuLaunchKernelEx", 2, 700);
    let error = bound.enqueue(&BUFFERS, Stream(3)).unwrap_err().to_string();
    let text = "cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access was encountered";
    assert_eq!(error, text);
    let log = fake.taken_log();
    assert_eq!(log.len(), 4, "{log:?}");
    assert_eq!(log[3], "cuCtxPopCurrent");
}

#[test]
fn memory_that_cannot_be_right_is_refused_before_anything_is_launched() {
    let mut inputs = INPUTS;
    inputs[3] = 0;
    assert_eq!(refused(&Buffers { inputs: &inputs, ..BUFFERS }), "input `query_weight` has no memory");
    assert_eq!(refused(&Buffers { outputs: &[0], ..BUFFERS }), "output `output` has no memory");
    inputs[3] = INPUTS[3] + 1;
    let error = "begins at an address that is no multiple of its elements' 2 bytes; give it aligned memory";
    assert_eq!(refused(&Buffers { inputs: &inputs, ..BUFFERS }), format!("input `query_weight` {error}"));
    let outputs = [OUTPUTS[0] + 1, OUTPUTS[1], OUTPUTS[2]];
    assert_eq!(refused(&Buffers { outputs: &outputs, ..BUFFERS }), format!("output `output` {error}"));
    let error = refused(&Buffers { outputs: &[INPUTS[0] + 16, OUTPUTS[1], OUTPUTS[2]], ..BUFFERS });
    assert_eq!(error, "output `output` shares memory with input `hidden_states`; bind them to different buffers");
    let error = refused(&Buffers { outputs: &[OUTPUTS[0], OUTPUTS[1], OUTPUTS[1] + 64], ..BUFFERS });
    assert_eq!(error, "output `present_value` shares memory with another");
    let error = refused(&Buffers { outputs: &[WORKSPACE, OUTPUTS[1], OUTPUTS[2]], ..BUFFERS });
    assert_eq!(error, "output `output` lies in the workspace");
    let error = refused(&Buffers { workspace: WORKSPACE + 128, ..BUFFERS });
    assert_eq!(error, "the workspace must begin at a multiple of 256 bytes, found 0xc00000080");
    let error = refused(&Buffers { workspace_bytes: 0, ..BUFFERS });
    assert!(error.starts_with("the workspace holds 0 bytes, "), "{error}");
}

#[test]
fn weights_in_integers_are_refused() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    let mut shapes = SHAPES.to_vec();
    shapes.resize(SELF_ATTENTION.inputs.len(), None);
    shapes[own::QUERY_SCALE] = Some(&[4, 64]);
    let refused = kernels.plan(&node(), ELEMENT, &shapes, &WANTED, Options::default()).err();
    let text = "MoASelfAttention: input `query_scale` is for weights in integers, which are not served here";
    assert_eq!(refused.map(|error| error.to_string()), Some(text.to_owned()));
}

/// A router that reads an input of its own runs by kernels of f32, which are loaded for it.
#[test]
fn routers_with_an_input_take_the_kernels_of_f32() {
    let fake = Fake::load();
    let mut shapes = SHAPES.to_vec();
    shapes.resize(SELF_ATTENTION.inputs.len(), None);
    shapes[own::ROUTER_INPUT] = Some(&[2, 3, 24]);
    shapes[own::ROUTER_WEIGHT] = Some(&[24, 4]);
    let found = |kernels: &Arc<KernelSet>| kernels.plan(&node(), ELEMENT, &shapes, &WANTED, Options::default());
    // The archive of that function has the names of f16 alone.
    let lacks = found(&kernels(&fake)).err().map(|error| error.to_string()).unwrap();
    assert!(lacks.contains("f32") && lacks.contains("moa_project_plain_"), "{lacks}");
    let mut names: Vec<_> = [ELEMENT, Element::F32].iter().flat_map(|element| entry_points(*element, (9, 0))).collect();
    names.sort();
    names.dedup();
    let archive = archive(&["sm_90a", "compute_80"], &names);
    let kernels = Arc::new(KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).unwrap());
    fake.taken_log();
    let bound = found(&kernels).unwrap();
    let loads = fake.taken_log().iter().filter(|line| line.starts_with("cuModuleLoad")).count();
    assert_eq!((loads, bound.launches()), (2, 4));
}

/// As [`SHAPES`], behind caches of 8 rows.
const WITH_ROOM: [Option<&[usize]>; 9] = {
    let cache: Option<&[usize]> = Some(&[2, 1, 8, 64]);
    let [hidden, mask, router, query, kv, output, bias, ..] = SHAPES;
    [hidden, mask, router, query, kv, output, bias, cache, cache]
};

#[test]
fn caches_with_room_are_the_memory_of_the_past() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    assert_eq!(*node().output_shapes(&WITH_ROOM).unwrap()[1], [2, 1, 8, 64]);
    let bound = kernels.plan(&node(), ELEMENT, &WITH_ROOM, &WANTED, Options::default()).unwrap();
    let shared = [OUTPUTS[0], INPUTS[7], INPUTS[8]];
    bound.enqueue(&Buffers { outputs: &shared, ..BUFFERS }, Stream(3)).unwrap();
    fake.taken_log();
    let refused = |outputs: &[u64]| bound.enqueue(&Buffers { outputs, ..BUFFERS }, Stream(3)).unwrap_err().to_string();
    for outputs in [OUTPUTS, [OUTPUTS[0], INPUTS[7], OUTPUTS[2]], [OUTPUTS[0], INPUTS[8], INPUTS[7]]] {
        assert!(refused(&outputs).contains("attention_mask has 7 columns, expected 11: 8 of the past and 3"));
    }
    let error = refused(&[INPUTS[7] + 64, INPUTS[7], INPUTS[8]]);
    assert_eq!(error, "output `output` shares memory with input `past_key`; bind them to different buffers");
    let Node::SelfAttention(attributes, _) = node() else { panic!("another node") };
    let separate = Node::SelfAttention(attributes, Caches::Separate);
    assert!(separate.output_shapes(&WITH_ROOM).is_err());
    assert!(kernels.plan(&separate, ELEMENT, &WITH_ROOM, &WANTED, Options::default()).is_err());
    assert_eq!(fake.taken_log().iter().filter(|line| line.starts_with("cuLaunch")).count(), 0);
}

#[test]
fn shapes_and_versions_that_do_not_fit_are_named() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    let mut shapes = SHAPES;
    shapes[4] = Some(&[64, 64]);
    let error = kernels.plan(&node(), ELEMENT, &shapes, &WANTED, Options::default()).err().unwrap().to_string();
    assert!(error.starts_with("MoASelfAttention: input `kv_weight` must be [C, 2 * G * D]"), "{error}");

    let mut other = archive(&["sm_90a"], &entry_points(ELEMENT, (9, 0)));
    let hash = other.windows(SOURCE_HASH.len()).position(|bytes| bytes == SOURCE_HASH.as_bytes()).unwrap();
    other[hash..][..SOURCE_HASH.len()].fill(b'0');
    let error = KernelSet::on_device(Arc::clone(&fake.driver), other.into(), 0, None).err().unwrap().to_string();
    let text = format!("compiled from other sources ({}) than this library ({SOURCE_HASH})", "0".repeat(64));
    assert!(error.contains(&text), "{error}");

    let old = archive(&["sm_90a"], &["another".to_owned()]);
    let old = Arc::new(KernelSet::on_device(Arc::clone(&fake.driver), old.into(), 0, None).unwrap());
    let error = bind(&old).err().unwrap().to_string();
    assert!(error.starts_with("the f16 kernels of the archive lack `"), "{error}");
}

/// Warpgroup products run where the archive has them.
#[test]
fn warpgroup_products_run_where_they_are() {
    let fake = Fake::load();
    let every = entry_points(ELEMENT, (9, 0));
    let without: Vec<_> = every.iter().filter(|name| !name.contains("_wgmma_")).cloned().collect();
    let tokens = 32_768;
    let hidden = [1, tokens, 512];
    let mask = [1, tokens];
    let shapes = [hidden.as_slice(), &mask, &[512, 4], &[4, 512, 128], &[512, 256], &[4, 128, 512]].map(Some);
    for (kernels, expected) in [(&every, 2), (&without, 0)] {
        let archive = archive(&["sm_90a"], kernels);
        let set = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).unwrap();
        let bound = Arc::new(set).plan(&node(), ELEMENT, &shapes, &[true], Options::default()).unwrap();
        let inputs = INPUTS.map(|address| address << 8);
        let buffers = Buffers { inputs: &inputs, outputs: &[1 << 60], workspace: 1 << 61, workspace_bytes: 1 << 40 };
        fake.taken_log();
        bound.enqueue(&buffers, Stream(3)).unwrap();
        let found = fake.taken_log().iter().filter(|line| line.contains("_wgmma_128x256")).count();
        assert_eq!(found, expected);
    }
}

#[test]
fn a_stream_says_whether_it_is_captured() {
    let fake = Fake::load();
    assert!(!fake.driver.is_capturing(Stream(1)).unwrap());
    fake.set_capturing(true);
    assert!(fake.driver.is_capturing(Stream(1)).unwrap());
}

#[test]
fn faults_are_read_from_the_device() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    kernels.load(Element::F32).unwrap();
    assert_eq!(kernels.faults().unwrap(), 0);
}
