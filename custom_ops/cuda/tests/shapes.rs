//! What the planner decides for the layers that the kernels are made for, on a V100, an A100 and an H200,
//! whose multiprocessors and shared memory an H100 with SXM has too.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;

use moa_cuda::plan::{self, Launch, Plan, SelfAttentionSettings};
use moa_cuda::{Device, Element, Options};
use moa_schema::{AttentionMode, GateMode, SelfAttentionAttributes, SelfAttentionDims};

const V100: (Device, Element) = (device((7, 0), 80, 98_304), Element::F16);
const A100: (Device, Element) = (device((8, 0), 108, 166_912), Element::Bf16);
const H200: (Device, Element) = (device((9, 0), 132, 232_448), Element::Bf16);

const fn device(compute_capability: (u32, u32), multiprocessors: u32, shared_bytes_per_block: u32) -> Device {
    Device { compute_capability, multiprocessors, shared_bytes_per_block }
}

/// A layer without its batch: width, experts, experts per token, heads of keys, head width, and whether it rotates.
type Layer = (usize, usize, usize, usize, usize, bool);

const BASE: Layer = (512, 8, 8, 1, 128, false);
const BIG: Layer = (512, 32, 16, 1, 256, false);
const JETMOE: Layer = (2048, 8, 2, 16, 128, true);

fn plan_of(layer: Layer, batch: usize, tokens: usize, past: usize, kind: (Device, Element)) -> Plan {
    plan_with(layer, batch, tokens, past, kind, Options::default())
}

fn plan_with(
    layer: Layer,
    batch: usize,
    tokens: usize,
    past: usize,
    (device, element): (Device, Element),
    options: Options,
) -> Plan {
    let (width, experts, top_k, kv_heads, head, rotates) = layer;
    let dims = SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head };
    let attributes = SelfAttentionAttributes {
        top_k,
        kv_num_heads: kv_heads,
        causal: true,
        scale: 1.0,
        gate_mode: GateMode::SoftmaxTopk,
        skip_padded_queries: false,
        attention_mode: AttentionMode::Softmax,
    };
    let settings = SelfAttentionSettings {
        rotary_positions: rotates.then_some(past + tokens),
        ..SelfAttentionSettings::default()
    };
    plan::self_attention(&dims, &attributes, &settings, element, &device, options).unwrap()
}

/// Kernel, blocks, and parts where there are some: `project 16x16 81, attend d128_r16 16/16, output 16x16 128/4`.
fn summary(plan: &Plan) -> String {
    let mut text = String::new();
    for Launch { kernel, grid, parameters, .. } in &plan.launches {
        let words: Vec<&str> = kernel.trim_start_matches("moa_").split('_').collect();
        let (family, tile) = (words[0], words.get(2..).unwrap_or_default().join("_"));
        let splits = parameters.key_splits.max(parameters.output_splits);
        let parts = if splits > 1 { format!("/{splits}") } else { String::new() };
        let name =
            if tile.is_empty() { kernel.trim_start_matches("moa_").to_owned() } else { format!("{family} {tile}") };
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{separator}{name} {grid}{parts}");
    }
    text
}

/// Layer, batch, new tokens, cached tokens, device and element, and the launches.
type Row = ((Layer, usize, usize, usize, (Device, Element)), &'static str);

/// A change here is a change of what is measured.
const LAUNCHES: [Row; 39] = [
    ((BASE, 1, 1, 127, V100), "project 16x16 81, attend d128_r16 1, output 16x16 32"),
    ((BASE, 1, 1, 127, A100), "project 16x16 81, attend d128_r16 1, output 16x16 32"),
    ((BASE, 1, 1, 127, H200), "project 16x16 81, attend d128_r16 1, output 16x16 32"),
    ((BASE, 1, 1, 2047, V100), "project 16x16 81, attend d128_r16 16/16, output 16x16 32"),
    ((BASE, 1, 1, 2047, A100), "project 16x16 81, attend d128_r16 16/16, output 16x16 32"),
    ((BASE, 1, 1, 2047, H200), "project 16x16 81, attend d128_r16 16/16, output 16x16 32"),
    ((BASE, 8, 1, 2047, V100), "project 16x16 82, attend d128_r16 128/16, output 16x16 32"),
    ((BASE, 8, 1, 2047, A100), "project 16x16 82, attend d128_r16 128/16, output 16x16 32"),
    ((BASE, 8, 1, 2047, H200), "project 16x16 82, attend d128_r16 128/16, output 16x16 32"),
    ((BASE, 64, 1, 2047, V100), "project 64x16 96, attend d128_r16 192/3, output 16x16 128"),
    ((BASE, 64, 1, 2047, A100), "project 64x16 96, attend d128_r16 320/5, output 16x16 128"),
    ((BASE, 64, 1, 2047, H200), "project 64x16 96, attend d128_r16 384/6, output 16x16 128"),
    ((BASE, 1, 128, 0, V100), "project 64x16 192, attend d128_r16 64, output 16x64 64"),
    ((BASE, 1, 128, 0, A100), "project 64x16 192, attend d128_r16 64, output 16x16 256"),
    ((BASE, 1, 128, 0, H200), "project 64x16 192, attend d128_r16 64, output 16x16 256"),
    ((BASE, 8, 2048, 0, V100), "project 128x128 1792, attend d128_r64 2048, output 128x128 512"),
    ((BASE, 8, 2048, 0, A100), "project 128x128 1792, attend d128_r64 2048, output 128x128 512"),
    ((BASE, 8, 2048, 0, H200), "project 128x128 1792, attend d128_r64 2048, output 128x128 512"),
    ((BIG, 1, 1, 2047, V100), "project 16x64 137, attend d256_r16 32/32, output 16x16 128/4"),
    ((BIG, 1, 1, 2047, A100), "project 16x64 137, attend d256_r16 16/16, output 16x16 128/4"),
    ((BIG, 1, 1, 2047, H200), "project 16x64 137, attend d256_r16 16/16, output 16x16 128/4"),
    ((BIG, 8, 1, 2047, V100), "project 16x64 138, attend d256_r16 240/30, output 16x64 64/8"),
    ((BIG, 8, 1, 2047, A100), "project 16x64 138, attend d256_r16 128/16, output 16x16 256/8"),
    ((BIG, 8, 1, 2047, H200), "project 16x64 138, attend d256_r16 128/16, output 16x16 256/8"),
    (
        (BIG, 8, 2048, 0, V100),
        "project 128x128 1024, list_pairs 32, project 128x128 4158, attend d256_r64 4096, output 128x128 512",
    ),
    (
        (BIG, 8, 2048, 0, A100),
        "project 128x128 1024, list_pairs 32, project 128x128 4158, attend d256_r64 4096, output 128x128 512",
    ),
    (
        (BIG, 8, 2048, 0, H200),
        "project 128x128 1024, list_pairs 32, project 128x128 4158, attend d256_r64 4096, output 128x128 512",
    ),
    ((JETMOE, 1, 1, 2047, V100), "project 16x64 321, attend d128_r16 240/15, output 16x64 128/4"),
    ((JETMOE, 1, 1, 2047, A100), "project 16x64 321, attend d128_r16 256/16, output 16x64 128/4"),
    ((JETMOE, 1, 1, 2047, H200), "project 16x64 321, attend d128_r16 256/16, output 16x64 128/4"),
    ((JETMOE, 8, 1, 127, V100), "project 16x64 322, attend d128_r16 128, output 16x64 224/7"),
    ((JETMOE, 8, 1, 127, A100), "project 16x64 322, attend d128_r16 128, output 16x64 320/10"),
    ((JETMOE, 8, 1, 127, H200), "project 16x64 322, attend d128_r16 128, output 16x64 384/12"),
    ((JETMOE, 64, 1, 2047, V100), "project 64x64 336, attend d128_r16 1024, output 64x64 224/7"),
    ((JETMOE, 64, 1, 2047, A100), "project 64x64 336, attend d128_r16 1024, output 64x64 320/10"),
    ((JETMOE, 64, 1, 2047, H200), "project 64x64 336, attend d128_r16 1024, output 64x64 384/12"),
    (
        (JETMOE, 8, 2048, 0, V100),
        "project 128x128 4608, list_pairs 8, project 128x128 4208, attend d128_r64 8192, output 128x128 4208, sum_slots 16384",
    ),
    (
        (JETMOE, 8, 2048, 0, A100),
        "project 128x128 4608, list_pairs 8, project 128x128 4208, attend d128_r64 8192, output 128x128 4208, sum_slots 16384",
    ),
    (
        (JETMOE, 8, 2048, 0, H200),
        "project 128x128 4608, list_pairs 8, project 128x128 4208, attend d128_r64 8192, output 128x128 4208, sum_slots 16384",
    ),
];

#[test]
fn launches_of_known_layers() {
    for ((layer, batch, tokens, past, kind), launches) in LAUNCHES {
        assert_eq!(
            summary(&plan_of(layer, batch, tokens, past, kind)),
            launches,
            "{layer:?} {batch} x {tokens}, {past}"
        );
    }
}

/// Where they are asked for, warpgroup products take the place of the largest tiles, two blocks on a multiprocessor,
/// and of attention of many queries, one block that stays on each. Of more tokens, blocks that stay take the first
/// projections in one launch behind a router, and the output. Nothing changes where there are none.
#[test]
fn warpgroup_products_of_known_layers() {
    let options = Options { wgmma: true, ..Options::default() };
    for (layer, batch, tokens, past, launches) in [
        (BASE, 64, 1, 2047, "project 64x16 96, attend d128_r16 384/6, output 16x16 128"),
        (BASE, 1, 128, 0, "project 64x16 192, attend d128_r16 64, output 16x16 256"),
        (BIG, 1, 128, 0, "project 128x128 100, attend d256_r16 128, output 16x64 384/6"),
        (BASE, 16, 128, 0, "project 128x128 224, attend d128_r64 256, output 64x128 128"),
        (BASE, 1, 2048, 0, "project 128x128 224, attend d128_r128 128, output 64x128 128"),
        (BASE, 8, 2048, 0, "route_tokens 128, project 128x256 132, attend d128_r128 132, output 128x256 132"),
        (
            BIG,
            8,
            2048,
            0,
            "route_tokens 128, list_pairs 32, project 128x256 132, attend d256_r128 132, output 128x256 132",
        ),
        (
            JETMOE,
            8,
            2048,
            0,
            "route_tokens 128, list_pairs 8, project 128x256 132, attend d128_r128 132, output 128x256 132, sum_slots 16384",
        ),
    ] {
        let with = plan_with(layer, batch, tokens, past, H200, options);
        assert_eq!(summary(&with), launches, "{layer:?} {batch} x {tokens}, {past}");
        for launch in with.launches.iter().filter(|launch| launch.kernel.ends_with("x128")) {
            assert!(2 * (launch.shared_bytes + 1024) <= 228 << 10, "{} leaves no room for another", launch.kernel);
        }
        for kind in [V100, A100, (H200.0, Element::F32)] {
            let plans = [options, Options::default()].map(|it| plan_with(layer, batch, tokens, past, kind, it));
            assert_eq!(plans[0], plans[1]);
        }
    }
}

/// Blocks that stay count the columns of all experts from those of the first, as far as they can.
#[test]
fn experts_far_apart_have_tiles_of_their_own() {
    let options = Options { wgmma: true, ..Options::default() };
    for (experts, stays) in [(16, true), (32, false)] {
        let layer = (8192, experts, experts, 32, 256, false);
        let plan = plan_with(layer, 1, 2048, 0, H200, options);
        let is_project = |launch: &&Launch| launch.kernel.contains("_project_") && launch.kernel.ends_with("x256");
        assert_eq!(plan.launches.iter().filter(is_project).count(), usize::from(stays), "{}", summary(&plan));
    }
}

/// Products of a few tokens give most multiprocessors a block, unless a block routes for itself or sums are short:
/// parts of these would be written and read again.
#[test]
fn few_tokens_fill_the_device() {
    for (kind, layer, batch) in [V100, A100, H200]
        .into_iter()
        .flat_map(|kind| [(kind, BASE, 1), (kind, BASE, 8), (kind, BASE, 64), (kind, BIG, 1), (kind, JETMOE, 1)])
    {
        let multiprocessors = kind.0.multiprocessors;
        for launch in plan_of(layer, batch, 1, 127, kind).launches {
            let short = launch.kernel.contains("output") && layer.1 * layer.3 * layer.4 <= 1024;
            if launch.kernel.contains("attend") || short {
                continue;
            }
            let blocks = launch.grid;
            assert!(5 * blocks >= 3 * multiprocessors, "{} has {blocks} blocks for {multiprocessors}", launch.kernel);
        }
    }
}
