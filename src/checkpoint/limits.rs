//! Largest inputs that are read; the table is in the documentation of [`crate::checkpoint`].

/// Bytes of a safetensors header.
pub(super) const HEADER: u64 = 16 << 20;
/// Bytes of a header above which the format itself calls a file malformed.
pub(super) const FORMAT_HEADER: u64 = 100_000_000;
/// Tensors of a checkpoint, entries of its metadata, and aliases.
pub(super) const TENSORS: usize = 200_000;
/// Dimensions of a tensor.
pub(super) const RANK: usize = 8;
/// Bytes of a tensor's name.
pub(super) const NAME: usize = 1024;
/// Elements that the tensors of a PyTorch file have beyond those of their storages, unless all storages hold more.
pub(super) const EXPANDED: u64 = 1 << 28;
/// Files of a sharded checkpoint.
pub(super) const SHARDS: usize = 4096;
/// Bytes of a shard index.
pub(super) const INDEX: u64 = 64 << 20;
/// Bytes of a configuration.
pub(super) const CONFIG: u64 = 4 << 20;
/// Nesting of a configuration.
pub(super) const DEPTH: usize = 64;
/// Bytes of the pickle of a PyTorch file.
pub(super) const PICKLE: u64 = 64 << 20;
/// Values that a pickle memorises.
pub(super) const MEMO: usize = 1_000_000;
/// Values and marks on the stack of a pickle.
pub(super) const STACK: usize = 10_000;
/// Values that a pickle makes or repeats.
pub(super) const OBJECTS: u64 = 4_000_000;
/// Entries of a zip archive.
pub(super) const ZIP_ENTRIES: u64 = 65_536;
/// Bytes of the directory of a zip archive.
pub(super) const ZIP_DIRECTORY: u64 = 64 << 20;
