//! The compiled kernels: all there, of these sources, and within what the hardware has.
//!
//! `cargo xtask cuda` makes the archive and runs these tests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod machine_code;

use std::fs;

use moa_cuda::archive::{Archive, Image, KernelResources};
use moa_cuda::{Element, SOURCE_HASH, entry_points};

/// Registers of a multiprocessor, on every architecture.
const REGISTERS: u32 = 65_536;

const CODE: [(&str, (u32, u32)); 8] = [
    ("sm_70", (7, 0)),
    ("sm_75", (7, 5)),
    ("sm_80", (8, 0)),
    ("sm_86", (8, 6)),
    ("sm_89", (8, 9)),
    ("sm_90a", (9, 0)),
    ("sm_100", (10, 0)),
    ("sm_120", (12, 0)),
];

const PTX: [(&str, (u32, u32)); 3] = [("compute_70", (7, 0)), ("compute_80", (8, 0)), ("compute_90", (9, 0))];

fn with_archive(test: impl Fn(&Archive<'_>)) {
    let path = std::env::var_os("MOA_CUDA_KERNELS").expect("`cargo xtask cuda` sets MOA_CUDA_KERNELS");
    let bytes = fs::read(path).unwrap();
    test(&Archive::parse(&bytes).unwrap());
}

fn image<'a>(archive: &'a Archive<'_>, element: Element, target: &str) -> &'a Image {
    let images = &archive.manifest().images;
    let found = images.iter().find(|image| image.module == element.module() && image.target == target);
    found.unwrap_or_else(|| panic!("{} is not compiled for {target}", element.module()))
}

/// Runs `test` on every kernel of machine code: its element, the compute capability, a name for messages, its
/// resources.
fn with_kernels(test: impl Fn(Element, (u32, u32), &str, &KernelResources)) {
    with_archive(|archive| {
        for (element, (target, capability)) in Element::ALL.into_iter().flat_map(|e| CODE.map(|target| (e, target))) {
            for kernel in &image(archive, element, target).kernels {
                test(element, capability, &format!("{} {target} {}", element.module(), kernel.name), kernel);
            }
        }
    });
}

#[test]
#[ignore = "needs `cargo xtask cuda`"]
fn the_archive_is_of_these_sources() {
    with_archive(|archive| assert_eq!(archive.manifest().source_hash, SOURCE_HASH));
}

#[test]
#[ignore = "needs `cargo xtask cuda`"]
fn every_kernel_is_compiled_for_every_target() {
    with_archive(|archive| {
        for element in Element::ALL {
            // What differs between 7.0 and 7.5 is f16 alone.
            let turing = (element == Element::F16).then_some(("compute_75", (7, 5)));
            for (target, capability) in CODE.into_iter().chain(PTX).chain(turing) {
                let kernels = &image(archive, element, target).kernels;
                let names: Vec<_> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
                let mut expected = entry_points(element, capability);
                expected.retain(|name| target == "sm_90a" || !name.contains("_wgmma_"));
                assert_eq!(names, expected, "{} {target}", element.module());
            }
        }
    });
}

#[test]
#[ignore = "needs `cargo xtask cuda`"]
fn no_kernel_spills_and_every_block_fits() {
    with_kernels(|_, _, place, kernel| {
        assert_eq!(kernel.local_bytes, 0, "{place}: local memory");
        assert_eq!(kernel.shared_bytes, 0, "{place}: static shared memory is not in the plan");
        let block = kernel.registers.next_multiple_of(8) * kernel.max_threads;
        // One block's copies and sums hide behind another's products.
        let blocks = if kernel.name.contains("_wgmma_128x128") { 2 } else { 1 };
        assert!(kernel.registers > 0 && blocks * block <= REGISTERS, "{place}: {block} registers a block");
        if ["_attend_wgmma_", "_wgmma_128x256"].iter().any(|part| kernel.name.contains(part)) {
            let all = REGISTERS / kernel.max_threads / 8 * 8 * kernel.max_threads;
            assert_eq!(block, all, "{place}: its warpgroups share what it is given when it begins");
        }
    });
}

/// The text of every entry point of a PTX image.
fn entries(ptx: &str) -> impl Iterator<Item = (&str, &str)> {
    ptx.split(".entry ").skip(1).map(|text| text.split_once('(').unwrap())
}

/// Kernels hold the instructions of PTX that they are named after, and no others.
#[test]
#[ignore = "needs `cargo xtask cuda`"]
fn kernels_use_the_units_that_they_name() {
    with_archive(|archive| {
        for (element, target, unit, mma) in [
            (Element::F16, "compute_70", "volta", "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32"),
            (Element::F16, "compute_75", "turing", "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"),
            (Element::F32, "compute_80", "tf32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
            (Element::F16, "compute_80", "tensor", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
            (Element::Bf16, "compute_80", "tensor", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        ] {
            let text = String::from_utf8(archive.bytes(image(archive, element, target)).to_vec()).unwrap();
            let (copies, loads) = (target == "compute_80", matches!(unit, "tensor" | "turing"));
            // The router takes parts of bfloat16 whatever the elements are.
            for (name, body) in entries(&text).filter(|(name, _)| !name.starts_with("moa_route_")) {
                let is_tile = name.split('_').count() > 3;
                let own = name.split('_').nth(2) == Some(unit);
                assert_eq!(body.contains(mma), own, "{name}: {mma}");
                assert_eq!(body.contains("mma.sync"), own, "{name}: another product");
                assert_eq!(body.contains("cp.async.cg.shared.global"), copies && is_tile, "{name}: cp.async");
                assert_eq!(body.contains("ldmatrix.sync"), loads && own, "{name}: ldmatrix");
            }
        }
    });
}

/// A kernel that may begin before the one in front has ended waits for it; on older devices none begins before.
#[test]
#[ignore = "needs `cargo xtask cuda`"]
fn kernels_wait_for_each_other_from_9_0_on() {
    with_archive(|archive| {
        for (element, (target, capability)) in Element::ALL.into_iter().flat_map(|e| PTX.map(|target| (e, target))) {
            let text = String::from_utf8(archive.bytes(image(archive, element, target)).to_vec()).unwrap();
            for (name, body) in entries(&text) {
                for word in ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"] {
                    assert_eq!(
                        body.contains(word),
                        capability >= (9, 0),
                        "{} {target} {name}: {word}",
                        element.module()
                    );
                }
            }
        }
    });
}
