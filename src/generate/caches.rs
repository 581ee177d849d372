//! Keys and values of the tokens so far, from one step of a decoder to the next.

use crate::{
    backend::{BackendError, OrtCache, OrtOperators, OrtSession, OrtValue, RowMoves, caches_in_place},
    onnx::OnnxFile,
};

/// The caches of a decoder: keys and values, layer by layer.
#[derive(Debug, Clone)]
pub(super) struct CacheLayout {
    /// Names of inputs.
    past: Vec<String>,
    /// Names of outputs, in the same order.
    present: Vec<String>,
    /// Key/value heads and their width, in the same order.
    sizes: Vec<[usize; 2]>,
    /// Whether the model writes where it reads.
    shared: bool,
}

/// What the rows of one batch have in their caches.
pub(super) struct Caches {
    rows: usize,
    /// Tokens of each row.
    length: usize,
    /// Most tokens that a row will have.
    most: usize,
    kept: Kept,
}

enum Kept {
    /// Buffers with room for `capacity` tokens, which the model writes in place.
    Shared { caches: Vec<OrtCache>, capacity: usize },
    /// Outputs of the last step, which are inputs of the next.
    Passed(Vec<OrtValue>),
}

impl CacheLayout {
    /// Whether the model writes caches where it reads them.
    pub(super) const fn shared(&self) -> bool {
        self.shared
    }

    /// `sizes` are key/value heads and their width by layer.
    pub(super) fn new(
        graph: &OnnxFile,
        operators: OrtOperators,
        past: Vec<String>,
        present: Vec<String>,
        sizes: &[[usize; 2]],
    ) -> Self {
        let shared = operators == OrtOperators::Library && writes_in_place(graph, &past, &present);
        let sizes = sizes.iter().flat_map(|sizes| [*sizes; 2]).collect();
        Self { past, present, sizes, shared }
    }

    fn shape(&self, index: usize, rows: usize, tokens: usize) -> [usize; 4] {
        let [heads, width] = self.sizes[index];
        [rows, heads, tokens, width]
    }
}

/// Whether the library updates each cache in place.
fn writes_in_place(graph: &OnnxFile, past: &[String], present: &[String]) -> bool {
    let own = caches_in_place(graph);
    past.iter().zip(present).all(|(past, present)| own.iter().any(|[from, to]| from == past && to == present))
}

/// Room for some steps more than `needed` tokens, so that a long text moves its caches seldom.
fn room(needed: usize, most: usize) -> usize {
    (needed + needed / 2 + 8).min(most).max(needed)
}

impl Caches {
    /// Nothing for `rows` rows, which will have `most` tokens at most.
    pub(super) fn new(
        session: &OrtSession,
        layout: &CacheLayout,
        rows: usize,
        most: usize,
    ) -> Result<Self, BackendError> {
        let kept = if layout.shared {
            Kept::Shared { caches: Vec::new(), capacity: 0 }
        } else {
            let empty = layout.past.iter().enumerate();
            let empty = empty.map(|(index, name)| session.zeros(name, &layout.shape(index, rows, 0)));
            Kept::Passed(empty.collect::<Result<_, _>>()?)
        };
        Ok(Self { rows, length: 0, most, kept })
    }

    /// Binds the caches for the next step, which appends `tokens` tokens to each row.
    pub(super) fn bind(
        &mut self,
        session: &mut OrtSession,
        layout: &CacheLayout,
        tokens: usize,
    ) -> Result<(), BackendError> {
        let needed = self.length + tokens;
        match &mut self.kept {
            Kept::Passed(values) => {
                for (name, value) in layout.past.iter().zip(values) {
                    session.bind(name, value)?;
                }
            }
            Kept::Shared { capacity, .. } if needed <= *capacity => {}
            Kept::Shared { caches, capacity } => {
                *capacity = room(needed, self.most);
                let rows: Vec<_> = (0..self.rows).collect();
                if caches.is_empty() {
                    let empty = layout.past.iter().enumerate();
                    let empty =
                        empty.map(|(index, name)| session.cache(name, layout.shape(index, rows.len(), *capacity)));
                    *caches = empty.collect::<Result<_, _>>()?;
                    bind_shared(session, layout, caches)?;
                } else {
                    rearrange(session, layout, caches, &rows, [self.length, *capacity])?;
                }
            }
        }
        self.length = needed;
        Ok(())
    }

    /// Takes over what the step computed after `first` outputs.
    pub(super) fn take(&mut self, outputs: &mut Vec<OrtValue>, first: usize) {
        if let Kept::Passed(values) = &mut self.kept {
            *values = outputs.split_off(first);
        }
    }

    /// Row `i` becomes what row `parents[i]` was; there may be fewer or more rows than before.
    pub(super) fn reorder(
        &mut self,
        session: &mut OrtSession,
        layout: &CacheLayout,
        parents: &[usize],
    ) -> Result<(), BackendError> {
        let same_count = parents.len() == self.rows;
        self.rows = parents.len();
        match &mut self.kept {
            Kept::Passed(values) => {
                for value in values {
                    *value = session.gather(value, parents)?;
                }
            }
            Kept::Shared { caches, .. } if same_count => {
                let moves = RowMoves::new(parents);
                for cache in caches {
                    session.reorder(cache, &moves, self.length)?;
                }
            }
            Kept::Shared { caches, capacity } => {
                rearrange(session, layout, caches, parents, [self.length, *capacity])?;
            }
        }
        Ok(())
    }
}

fn bind_shared(session: &mut OrtSession, layout: &CacheLayout, caches: &mut [OrtCache]) -> Result<(), BackendError> {
    for ((past, present), cache) in layout.past.iter().zip(&layout.present).zip(caches) {
        session.bind_cache(past, present, cache)?;
    }
    Ok(())
}

/// Moves the caches to memory of another shape.
fn rearrange(
    session: &mut OrtSession,
    layout: &CacheLayout,
    caches: &mut [OrtCache],
    rows: &[usize],
    sizes: [usize; 2],
) -> Result<(), BackendError> {
    for ((past, present), cache) in layout.past.iter().zip(&layout.present).zip(caches) {
        *cache = session.rearranged(past, cache, rows, sizes)?;
        session.bind_cache(past, present, cache)?;
    }
    Ok(())
}
