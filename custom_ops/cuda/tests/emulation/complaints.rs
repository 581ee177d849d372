//! The emulator finds what is wrong with a launch.

use moa_cuda::plan::Plan;
use moa_cuda::{Device, Element};
use moa_schema::SelfAttentionDims;

use crate::attention::Case;
use crate::emulator::try_run;
use crate::support::{Random, decode};

/// A case in groups, with attention and output projection in parts where there are many multiprocessors.
fn case(tokens: usize, multiprocessors: u32) -> Case {
    let mut random = Random(2);
    let dims =
        SelfAttentionDims { batch: 1, tokens, past: 70, width: 32, experts: 16, top_k: 8, kv_heads: 1, head: 16 };
    let mut case = Case::random(&mut random, dims, Element::F16, false);
    case.device = Device { compute_capability: (8, 0), multiprocessors, shared_bytes_per_block: 166_912 };
    case.key_mask.fill(1);
    case.all_outputs = true;
    case
}

/// What the emulator says of a plan that `spoil` has changed.
fn complaint(case: &Case, spoil: impl Fn(&mut Plan)) -> String {
    let mut plan = case.plan();
    spoil(&mut plan);
    try_run(&plan, &case.tensors()).expect_err("the emulator runs a spoiled plan")
}

fn launch_of<'a>(plan: &'a mut Plan, family: &str) -> &'a mut moa_cuda::plan::Launch {
    plan.launches.iter_mut().find(|launch| launch.kernel.contains(family)).unwrap()
}

#[test]
fn too_little_shared_memory() {
    for family in ["project", "attend", "output"] {
        let message = complaint(&case(3, 132), |plan| {
            let launch = launch_of(plan, family);
            launch.shared_bytes = 8192;
        });
        assert!(message.contains("shared memory") || message.contains("outside"), "{message}");
    }
}

#[test]
fn too_little_workspace() {
    let message = complaint(&case(3, 132), |plan| plan.workspace_bytes /= 2);
    assert!(message.contains("leaves its buffer") || message.contains("outside its buffers"), "{message}");
}

#[test]
fn a_launch_that_writes_to_an_input() {
    let message = complaint(&case(3, 132), |plan| {
        let launch = launch_of(plan, "project");
        launch.parameters.key = launch.parameters.past_key;
    });
    assert!(message.contains("writes to an input"), "{message}");
}

#[test]
fn a_block_of_another_size() {
    let message = complaint(&case(3, 132), |plan| launch_of(plan, "attend").block *= 2);
    assert!(message.contains("cannot be launched"), "{message}");
}

/// Without the lists of rows, nobody computes them, and the poison in the workspace comes through.
#[test]
fn a_launch_that_is_left_out() {
    let case = case(260, 132);
    let mut plan = case.plan();
    let complete = plan.launches.len();
    plan.launches.retain(|launch| !launch.kernel.contains("list_pairs"));
    assert_eq!(plan.launches.len() + 1, complete);
    let results = try_run(&plan, &case.tensors()).unwrap();
    assert!(decode(case.element, results.outputs[0].as_ref().unwrap()).iter().all(|value| value.is_nan()));
}

/// Results on top of queries that other blocks still read: the order of blocks decides.
#[test]
fn an_order_of_blocks_that_matters() {
    let message = complaint(&case(9, 132), |plan| {
        let launch = launch_of(plan, "attend");
        launch.parameters.attended = launch.parameters.rows;
    });
    assert!(message.contains("order of threads"), "{message}");
}
