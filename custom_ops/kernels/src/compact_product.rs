//! Rows from anywhere, times compact panels: multiplied as they are packed where rows are few, unpacked where many
//! share the work.

use crate::grid::Tile;
use crate::rows::{RowProduct, even};
use crate::simd::compact::{Compact, CompactPanels};
use crate::simd::{Ahead, Element, Form, Isa, Left, Memory, PANEL, Right, with_rounded};

impl RowProduct<'_> {
    /// The product on vectors, with the bits of the same weights in bf16.
    pub(crate) fn compute_compact(&self, compact: &Compact, isa: Isa, out: &mut Tile<'_, f32>) {
        let first = self.weights.geometry().number(self.matrix, self.block, self.first_column / PANEL);
        let panels = compact.panels_from(first);
        if isa.rounds() {
            with_rounded((isa, Form::Pairs), self.left, self.epoch, |left| {
                self.compute_unpacked((left, panels), |right| right.pairs(), isa, out);
            });
        } else if !panels.multiply(isa, self.left, (self.rows, self.columns), self.factors, out) {
            self.compute_unpacked((self.left, panels), |right| right, isa, out);
        }
    }

    /// The rows `left` times panels that are unpacked, as `view` shows them.
    fn compute_unpacked<W: Element>(
        &self,
        (left, panels): (Left<'_>, CompactPanels<'_>),
        view: impl for<'w> Fn(Right<'w, [half::bf16; 2]>) -> Right<'w, W>,
        isa: Isa,
        out: &mut Tile<'_, f32>,
    ) {
        let total = even(0..left.starts.len(), left.most()).count();
        for column in (0..self.columns).step_by(panels.at_a_time() * PANEL) {
            let columns = column..self.columns.min(column + panels.at_a_time() * PANEL);
            let (met, first) = (columns.len().div_ceil(PANEL), column / PANEL);
            let later = match self.next.filter(|_| columns.end == self.columns) {
                Some(next) => next.memory(),
                None => Memory::of(panels.words().get((first + met) * panels.panel_words()..).unwrap_or_default()),
            };
            let later = later.panels(panels.panel_words() * size_of::<u32>());
            panels.panels_from(first).with_unpacked(isa, met, |right| {
                let ahead = |index| Some(Ahead::Later(later.share(index, total)));
                self.compute_blocks((left, view(right)), columns, ahead, isa, out);
            });
        }
    }
}
