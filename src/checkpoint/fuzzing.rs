//! What the fuzz targets call; no part of the interface.

use std::io::Cursor;

use super::{CheckpointError, config, header::Header, shard_index::ShardIndex, torch};

/// Reads the header of a safetensors file with these bytes, and gives the number of tensors.
///
/// # Errors
///
/// As [`super::Checkpoint::open`].
pub fn header(file: &[u8]) -> Result<usize, CheckpointError> {
    Header::read("input", file.len() as u64, file).map(|header| header.tensors.len())
}

/// Parses a shard index, and gives the number of tensors.
///
/// # Errors
///
/// As [`super::Checkpoint::open`].
pub fn shard_index(text: &[u8]) -> Result<usize, CheckpointError> {
    ShardIndex::parse("input", text).map(|index| index.tensors.len())
}

/// Parses a configuration.
///
/// # Errors
///
/// As [`super::Checkpoint::open`].
pub fn config(text: &[u8]) -> Result<moa_graphs::families::Config, CheckpointError> {
    config::parse("input", text)
}

/// Describes the checkpoint in a pickle, and gives the number of tensors.
///
/// # Errors
///
/// As [`super::Checkpoint::open`].
pub fn torch_pickle(bytes: &[u8]) -> Result<usize, CheckpointError> {
    torch::describe_pickle("input", bytes)
}

/// Describes a PyTorch file with these bytes, and gives the number of tensors.
///
/// # Errors
///
/// As [`super::Checkpoint::open`].
pub fn torch_zip(file: &[u8]) -> Result<usize, CheckpointError> {
    torch::describe("input", file.len() as u64, Cursor::new(file))
}
