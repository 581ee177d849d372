//! Writes the files of an export: large weights as they are read, the models around them when their hash is known.

use std::{io, iter, ops::ControlFlow, path::Path, thread};

use moa_graphs::{NamedGraph, Part, graph::Buffers, model::Model};

use super::{
    ExportError, Watch, WrittenFile,
    pace::{Follower, Leader, Pace},
    plan::{Plan, PlannedFile},
};
use crate::{
    onnx::{DataFile, EncodeError, Encoded, Staging, WRITE_BLOCK, WriteError, encode, weight_bytes},
    side_files::SideFile,
    source::{hash, stored_bytes},
};

/// Files on their way, and their sizes in the same order.
pub(super) struct Outputs<'a> {
    staging: Staging,
    folder: &'a Path,
    watch: &'a dyn Watch,
    sizes: Vec<u64>,
}

impl<'a> Outputs<'a> {
    /// Claims the places of all files, and writes the side files.
    pub(super) fn begin(
        plan: &'a Plan,
        side_files: &[SideFile],
        force: bool,
        watch: &'a dyn Watch,
    ) -> Result<Self, ExportError> {
        let graph_names = plan.files.iter().flat_map(|file| file.data.iter().chain([&file.model]).cloned());
        let names: Vec<_> = side_files.iter().map(|file| file.name.clone()).chain(graph_names).collect();
        let staging = Staging::begin(&plan.folder, &names, force)?;
        let mut outputs = Self { staging, folder: &plan.folder, watch, sizes: Vec::new() };
        for file in side_files {
            outputs.write_file(&file.name, |writer| Ok(writer.write_all(&file.bytes)?))?;
        }
        Ok(outputs)
    }

    /// Writes all graphs and returns the hash of the trained values, which `metadata` makes part of each.
    pub(super) fn write(
        &mut self,
        model: &Model,
        plan: &Plan,
        graphs: &[NamedGraph],
        opset: i64,
        metadata: impl Fn(Part, &str) -> Vec<(String, String)>,
    ) -> Result<String, ExportError> {
        self.watch.begin(graphs.iter().map(|graph| weight_bytes(&graph.graph)).sum());
        let (encoded, source_sha256) = self.write_data_and_hash(model, plan, graphs, opset)?;
        for ((file, graph), encoded) in plan.files.iter().zip(graphs).zip(encoded) {
            let metadata = metadata(graph.part, &source_sha256);
            self.write_file(&file.model, |writer| encoded.write(&metadata, writer))?;
        }
        Ok(source_sha256)
    }

    /// Moves every file to its place.
    pub(super) fn commit(self) -> Result<Vec<WrittenFile>, WriteError> {
        let paths = self.staging.commit()?;
        Ok(paths.into_iter().zip(self.sizes).map(|(path, bytes)| WrittenFile { path, bytes }).collect())
    }

    /// Writes the data files, and reads the checkpoint a second time meanwhile for its hash.
    fn write_data_and_hash<'g>(
        &mut self,
        model: &Model,
        plan: &Plan,
        graphs: &'g [NamedGraph],
        opset: i64,
    ) -> Result<(Vec<Encoded<'g>>, String), ExportError> {
        let large = |(file, graph): (&PlannedFile, &NamedGraph)| file.data.as_ref().map(|_| weight_bytes(&graph.graph));
        let pace = Pace::new(stored_bytes(model), iter::zip(&plan.files, graphs).filter_map(large).sum());
        let watch = self.watch;
        thread::scope(|scope| {
            let mut leader = Leader::of(&pace);
            let hashed = || {
                let mut follower = Follower::of(&pace, watch);
                hash(model, &mut |bytes| follower.wait_for(bytes))
            };
            let hashing = thread::Builder::new().spawn_scoped(scope, hashed);
            let encoded: Result<Vec<_>, _> = iter::zip(&plan.files, graphs)
                .map(|(file, graph)| match &file.data {
                    Some(location) => self.write_data(location, graph, opset, &mut leader),
                    None => Ok(encode(&graph.graph, opset, None)?),
                })
                .collect();
            let encoded = encoded?;
            leader.finish();
            let hash = match hashing {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_no_thread) => hashed(),
            };
            match hash? {
                ControlFlow::Continue(hash) => Ok((encoded, hash)),
                ControlFlow::Break(()) => Err(ExportError::Cancelled),
            }
        })
    }

    /// Writes the large weights of one graph to the file `location`.
    fn write_data<'g>(
        &mut self,
        location: &str,
        graph: &'g NamedGraph,
        opset: i64,
        leader: &mut Leader<'_>,
    ) -> Result<Encoded<'g>, ExportError> {
        let mut encoded = None;
        self.write_counted(location, &mut |bytes| leader.wrote(bytes), |writer| {
            let location = location.to_owned();
            let data = DataFile { location, writer, position: 0, buffers: Buffers::default() };
            encoded = Some(encode(&graph.graph, opset, Some(data))?);
            Ok(())
        })?;
        encoded.ok_or(ExportError::Cancelled)
    }

    fn write_file(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut dyn io::Write) -> Result<(), EncodeError>,
    ) -> Result<(), ExportError> {
        self.write_counted(name, &mut |_| {}, fill)
    }

    /// Writes the file `name` through `fill`, and tells `wrote` how many more bytes there are.
    fn write_counted(
        &mut self,
        name: &str,
        wrote: &mut dyn FnMut(u64),
        fill: impl FnOnce(&mut dyn io::Write) -> Result<(), EncodeError>,
    ) -> Result<(), ExportError> {
        let (folder, watch, mut bytes) = (self.folder, self.watch, 0);
        let mut count = |more| {
            bytes += more;
            wrote(more);
        };
        self.staging.file::<ExportError>(name, |writer| {
            fill(&mut Watched { writer, watch, wrote: &mut count }).map_err(|error| match error {
                _ if watch.is_cancelled() => ExportError::Cancelled,
                EncodeError::Data(source) => WriteError::Io { path: folder.join(name), source }.into(),
                error => error.into(),
            })
        })?;
        self.sizes.push(bytes);
        Ok(())
    }
}

/// A writer whose progress is seen, and that fails where nobody wants the file any more.
struct Watched<'a> {
    writer: &'a mut dyn io::Write,
    watch: &'a dyn Watch,
    wrote: &'a mut dyn FnMut(u64),
}

impl io::Write for Watched<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.watch.is_cancelled() {
            return Err(io::Error::other("interrupted"));
        }
        let written = self.writer.write(&buffer[..buffer.len().min(WRITE_BLOCK)])?;
        self.watch.wrote(written as u64);
        (self.wrote)(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
