//! A small node, and kernels for it.

use std::sync::Arc;

use moa_cuda::{Element, Options, entry_points};
use moa_cuda_driver::{BoundPlan, Caches, Error, KernelSet, Node};
use moa_cuda_fake::{Fake, archive};
use moa_schema::{AttentionMode, GateMode, SelfAttentionAttributes};

/// Shapes of the inputs of [`node`]: B 2, T 3, P 4, C 64, E 4, G 1, D 64.
pub(crate) const SHAPES: [Option<&[usize]>; 9] = [
    Some(&[2, 3, 64]),
    Some(&[2, 7]),
    Some(&[64, 4]),
    Some(&[4, 64, 64]),
    Some(&[64, 128]),
    Some(&[4, 64, 64]),
    None,
    Some(&[2, 1, 4, 64]),
    Some(&[2, 1, 4, 64]),
];

/// Somebody asks for the output and the new cache.
pub(crate) const WANTED: [bool; 3] = [true, true, true];

pub(crate) const ELEMENT: Element = Element::F16;

pub(crate) fn node() -> Node {
    let attributes = SelfAttentionAttributes {
        top_k: 2,
        kv_num_heads: 1,
        causal: true,
        scale: 0.125,
        gate_mode: GateMode::SoftmaxTopk,
        skip_padded_queries: true,
        attention_mode: AttentionMode::Softmax,
    };
    Node::SelfAttention(attributes, Caches::Shared)
}

/// The plan of [`node`], from the planner itself.
pub(crate) fn plan(device: &moa_cuda::Device) -> moa_cuda::plan::Plan {
    let Node::SelfAttention(attributes, _) = node() else { panic!("another node") };
    let dims = moa_schema::SelfAttentionDims::new(&SHAPES, &attributes).unwrap();
    let settings =
        moa_cuda::plan::SelfAttentionSettings { returns_keys: true, returns_values: true, ..Default::default() };
    moa_cuda::plan::self_attention(&dims, &attributes, &settings, ELEMENT, device, Options::default()).unwrap()
}

/// Kernels on the fake device 0 with every kernel that they need.
pub(crate) fn kernels(fake: &Fake) -> Arc<KernelSet> {
    let archive = archive(&["sm_90a", "compute_80"], &entry_points(ELEMENT, (9, 0)));
    Arc::new(KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).unwrap())
}

pub(crate) fn bind(kernels: &Arc<KernelSet>) -> Result<BoundPlan, Error> {
    kernels.plan(&node(), ELEMENT, &SHAPES, &WANTED, Options::default())
}
