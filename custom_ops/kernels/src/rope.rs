//! Rotary position embedding in the rotate-half form.

use crate::KernelError;

/// The caches and positions of one call, proved to fit each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotary<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    position_ids: &'a [i64],
    half: usize,
}

/// The optional rotary inputs as they come: caches `[positions, D / 2]`, `position_ids [B, T]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RotaryInputs<'a> {
    pub(crate) cos_cache: Option<&'a [f32]>,
    pub(crate) sin_cache: Option<&'a [f32]>,
    pub(crate) position_ids: Option<&'a [i64]>,
}

impl<'a> Rotary<'a> {
    /// Checks the inputs, which are all there or none; `None` where there is none.
    pub(crate) fn new(
        inputs: RotaryInputs<'a>,
        batch: usize,
        tokens: usize,
        head: usize,
    ) -> Result<Option<Self>, KernelError> {
        let (cos, sin) = match (inputs.cos_cache, inputs.sin_cache) {
            (None, None) if inputs.position_ids.is_none() => return Ok(None),
            (None, None) => return Err(KernelError::Missing { name: "cos_cache", because: "position_ids" }),
            (Some(cos), Some(sin)) => (cos, sin),
            (Some(_), None) => return Err(KernelError::Missing { name: "sin_cache", because: "cos_cache" }),
            (None, Some(_)) => return Err(KernelError::Missing { name: "cos_cache", because: "sin_cache" }),
        };
        let Some(position_ids) = inputs.position_ids else {
            return Err(KernelError::Missing { name: "position_ids", because: "cos_cache" });
        };
        if head == 0 || !head.is_multiple_of(2) {
            return Err(KernelError::OddHead { head });
        }
        let half = head / 2;
        let positions = cos.len() / half;
        crate::check::length("cos_cache", cos.len(), &[positions, half])?;
        crate::check::length("sin_cache", sin.len(), &[positions, half])?;
        crate::check::length("position_ids", position_ids.len(), &[batch, tokens])?;
        let outside = |&id: &i64| usize::try_from(id).map_or(true, |id| id >= positions);
        if let Some(at) = position_ids.iter().position(outside) {
            let (batch, token) = (at / tokens, at % tokens);
            return Err(KernelError::Position { batch, token, position: position_ids[at], positions });
        }
        Ok(Some(Self { cos, sin, position_ids, half }))
    }

    /// Rotates one head row `[D]` of `token`, which counts through the whole batch.
    pub(crate) fn rotate(&self, token: usize, row: &mut [f32]) {
        let start = self.position_ids[token] as usize * self.half;
        let angles = self.cos[start..start + self.half].iter().zip(&self.sin[start..start + self.half]);
        let (first, second) = row.split_at_mut(self.half);
        for ((a, b), (&cos, &sin)) in first.iter_mut().zip(second).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INPUTS: RotaryInputs<'static> = RotaryInputs {
        cos_cache: Some(&[1.0, 1.0, 0.0, -1.0]),
        sin_cache: Some(&[0.0, 0.0, 1.0, 0.0]),
        position_ids: Some(&[0, 1]),
    };

    #[test]
    fn halves_turn_by_the_position_s_angles() {
        let rotary = Rotary::new(INPUTS, 1, 2, 4).unwrap().unwrap();
        let mut row = [1.0, 2.0, 3.0, 4.0];
        rotary.rotate(0, &mut row);
        assert_eq!(row, [1.0, 2.0, 3.0, 4.0]);
        rotary.rotate(1, &mut row);
        assert_eq!(row, [-3.0, -2.0, 1.0, -4.0]);
    }

    #[test]
    fn misfits_are_named() {
        fn refused(inputs: RotaryInputs<'_>, head: usize) -> KernelError {
            Rotary::new(inputs, 1, 2, head).unwrap_err()
        }
        for id in [2, -1, i64::MAX] {
            let ids = [1, id];
            let error = refused(RotaryInputs { position_ids: Some(&ids), ..INPUTS }, 4);
            assert_eq!(error, KernelError::Position { batch: 0, token: 1, position: id, positions: 2 });
        }
        let error = refused(RotaryInputs { sin_cache: None, ..INPUTS }, 4);
        assert_eq!(error, KernelError::Missing { name: "sin_cache", because: "cos_cache" });
        let error = refused(RotaryInputs { cos_cache: None, ..INPUTS }, 4);
        assert_eq!(error, KernelError::Missing { name: "cos_cache", because: "sin_cache" });
        let error = refused(RotaryInputs { position_ids: None, ..INPUTS }, 4);
        assert_eq!(error, KernelError::Missing { name: "position_ids", because: "cos_cache" });
        assert_eq!(refused(INPUTS, 3), KernelError::OddHead { head: 3 });
        let error = refused(RotaryInputs { sin_cache: Some(&[0.0; 2]), ..INPUTS }, 4);
        assert_eq!(error, KernelError::Length { name: "sin_cache", expected: 4, found: 2 });
    }
}
