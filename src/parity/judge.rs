//! Outputs beside the reference. The verdict on values that are out of tolerance waits for all cases, since a later one
//! may show that rounding does more than was seen so far.

use std::{collections::BTreeMap, rc::Rc};

use crate::{
    reference::Choices,
    tensor::{NamedTensors, Tensor},
};

use super::{
    compare::{Comparison, ToleranceOptions},
    effects::Effects,
    spread::Spread,
};

/// Times the tolerance beyond which no other roundings of the reference are what a value wants.
const FAR: f64 = 4.0;

/// Cases that are evaluated anew.
const CASES_AGAIN: usize = 4;

/// An output of a case and what it is held against, all of one shape.
pub(super) struct Output<'a> {
    /// Where it is, for the reader.
    pub(super) place: &'a str,
    pub(super) name: &'a str,
    pub(super) found: &'a Tensor,
    pub(super) expected: &'a Tensor,
    /// What the reference gives where it rounds.
    pub(super) rounded: Option<&'a Tensor>,
}

/// What a case is evaluated with once more.
pub(super) struct Case {
    pub(super) inputs: NamedTensors,
    pub(super) choices: Choices,
    /// Outputs that were compared, and weights that the file has as outputs.
    pub(super) expected: NamedTensors,
    /// Where positions end whose logits were compared, in place of the last one.
    pub(super) ends: Option<Vec<usize>>,
}

/// An output that is out of tolerance by the effects that were seen so far.
struct Doubtful {
    place: String,
    name: String,
    found: Tensor,
    expected: Tensor,
    case: Option<Rc<Case>>,
}

/// The outputs of all cases so far.
pub(super) struct Judge {
    effects: Effects,
    /// Sums over all cases where kernels may round factors of products, by output.
    spreads: BTreeMap<String, Spread>,
    outputs: Comparison,
    doubtful: Vec<Doubtful>,
}

impl Judge {
    pub(super) fn new(options: ToleranceOptions) -> Self {
        let (spreads, doubtful) = (BTreeMap::new(), Vec::new());
        Self { effects: Effects::of(options), spreads, outputs: Comparison::default(), doubtful }
    }

    /// Compares an output; kernels that may round `products` are held to its spread too.
    pub(super) fn compare(&mut self, output: &Output<'_>, products: bool) {
        let Output { place, name, found, expected, rounded } = *output;
        if let Some(rounded) = rounded.filter(|_| products) {
            self.spreads.entry(name.to_owned()).or_default().add(found, rounded, expected);
        }
        self.see(name, expected, rounded);
        let mut judged = self.outputs.clone();
        judged.add(place, found, expected, self.effects.tolerance(name, expected));
        if judged.mismatches == self.outputs.mismatches {
            self.outputs = judged;
            return;
        }
        let (place, name) = (place.to_owned(), name.to_owned());
        let (found, expected) = (found.clone(), expected.clone());
        self.doubtful.push(Doubtful { place, name, found, expected, case: None });
    }

    /// Takes note of what rounding did to an output.
    pub(super) fn see(&mut self, name: &str, expected: &Tensor, rounded: Option<&Tensor>) {
        self.effects.see(name, expected, rounded);
    }

    /// Outputs whose verdict waits.
    pub(super) fn doubts(&self) -> usize {
        self.doubtful.len()
    }

    /// Keeps what the case was of outputs whose verdict waits, those from `before` on, if there are any.
    pub(super) fn keep(&mut self, before: usize, case: impl FnOnce() -> Case) {
        if self.doubts() > before {
            let case = Rc::new(case());
            self.doubtful[before..].iter_mut().for_each(|doubtful| doubtful.case = Some(Rc::clone(&case)));
        }
    }

    /// Cases that are out of tolerance by less than [`FAR`] says: where few values are far larger than others, the
    /// effect of rounding differs widely between evaluations that round as often.
    pub(super) fn near_misses(&self) -> Vec<Rc<Case>> {
        let mut cases: Vec<Rc<Case>> = Vec::new();
        for Doubtful { place, name, found, expected, case } in &self.doubtful {
            let mut judged = Comparison::default();
            judged.add(place, found, expected, self.effects.tolerance(name, expected));
            let wanted = !judged.passed() && judged.largest_share <= FAR;
            let Some(case) = case.as_ref().filter(|_| wanted) else { continue };
            if !cases.iter().any(|other| Rc::ptr_eq(case, other)) {
                cases.push(Rc::clone(case));
            }
        }
        cases.truncate(CASES_AGAIN);
        cases
    }

    /// The outcome of all cases, and what differs in all by more than rounding explains.
    pub(super) fn finish(mut self) -> (Comparison, Option<String>) {
        for Doubtful { place, name, found, expected, .. } in self.doubtful {
            self.outputs.add(&place, &found, &expected, self.effects.tolerance(&name, &expected));
        }
        let excess = |(name, spread): (&String, &Spread)| Some(format!("{name}: {}", spread.excess()?));
        (self.outputs, self.spreads.iter().find_map(excess))
    }

    /// As if no case had been kept.
    #[cfg(test)]
    pub(super) fn forget_cases(&mut self) {
        self.doubtful.iter_mut().for_each(|doubtful| doubtful.case = None);
    }
}
