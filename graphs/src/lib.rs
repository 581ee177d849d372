//! Typed MoA models, a graph IR, and the lowering of one to the other.
//!
//! ```text
//! TensorDirectory + Config  →  Model  →  Graph
//!          (families)              (lower)
//! ```
//!
//! This crate knows no file and no protobuf: tensors reach it through [`TensorDirectory`], graphs leave it
//! as plain values. A family is one file under `families` (names and configuration to types), a kind of model one
//! under `model` (its types) and one under `lower` (types to nodes).

mod bodies;
pub mod derived_name;
mod error;
pub mod families;
mod float;
pub mod graph;
mod lower;
pub mod model;
mod part;
mod precision;
pub mod quantization;
mod synthetic;
mod weight;

pub use error::{ImportError, Instead};
pub use float::{FloatType, OutOfRange, Rounding};
pub use lower::{Form, LowerError, NamedGraph, Options, lower};
pub use part::Part;
pub use precision::Precision;
pub use synthetic::SyntheticTensors;
pub use weight::{Runs, TensorDirectory, TensorSource, Weight, WeightError};
