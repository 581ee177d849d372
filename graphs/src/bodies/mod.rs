//! What the `ai.moa` operators mean, in standard ONNX operators.
//!
//! One function per operator writes its nodes; it serves both as the body that accompanies a node
//! ([`crate::Form::Function`]) and in place of the node ([`crate::Form::Standard`]). No `TopK` used as a
//! sort, no data-dependent shape, no `Loop` or `If`: every expert is projected by one matrix product, the
//! chosen ones are gathered, and experts that were not chosen contribute an exact 0.

mod attention;
mod feed_forward;
mod lm_head;
mod matrix;
mod routing;

pub(crate) use attention::{CrossValues, Heads, SelfValues, cross_attention, self_attention};
pub(crate) use feed_forward::{FeedForwardSizes, FeedForwardValues, activation, feed_forward, gelu_float32};
pub(crate) use lm_head::lm_head;
pub(crate) use matrix::Matrix;
pub(crate) use routing::Routed;
