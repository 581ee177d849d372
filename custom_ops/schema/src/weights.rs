//! Attributes against the shapes of weights, before anything is known of tokens.

use crate::{
    Attributes, CrossAttentionDims, ElementType, FeedForwardDims, LmHeadDims, Parameter, SelfAttentionDims, ShapeError,
    parameter, self_attention as own,
};

/// What a node reads as one of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given<'a> {
    /// Nothing.
    Absent,
    /// What a call gives or the graph computes.
    Computed,
    /// A constant of this shape.
    Constant(&'a [usize]),
}

/// Most columns of what is computed: their double is a size too.
const MOST_COLUMNS: usize = usize::MAX / 4;

/// Symbols whose sizes each call says anew.
const OF_CALLS: [&str; 5] = ["B", "T", "P", "P + T", "S"];

/// Refuses attributes and constants that contradict each other, whatever a call gives; `given[i]` is the input `i`.
///
/// # Errors
///
/// As those of a call whose other inputs fit.
pub fn check_constants(attributes: &Attributes, given: &[Given<'_>]) -> Result<(), ShapeError> {
    let sizes = Sizes::of(attributes, given);
    let operator = attributes.operator();
    let is_constant = |index: usize| matches!(given.get(index), Some(Given::Constant(_)));
    let belongs_to_computed = |index| operator.matrices().any(|[matrix, scale]| scale == index && !is_constant(matrix));
    let inputs = operator.inputs.iter().zip(given).enumerate();
    let shapes: Vec<_> = inputs
        .map(|(index, (input, given))| sizes.shape(input, *given).filter(|_| !belongs_to_computed(index)))
        .collect();
    let shapes: Vec<_> = shapes.iter().map(Option::as_deref).collect();
    match attributes {
        Attributes::SelfAttention(attributes) => SelfAttentionDims::new(&shapes, attributes).map(drop),
        Attributes::CrossAttention(attributes) => CrossAttentionDims::new(&shapes, attributes).map(drop),
        Attributes::FeedForward(attributes) => FeedForwardDims::new(&shapes, attributes).map(drop),
        Attributes::LmHead => LmHeadDims::new(&shapes).map(drop),
    }
}

/// Sizes by their symbols, and those that a contract of unknown ones keeps.
struct Sizes {
    known: Vec<(&'static str, usize)>,
    top_k: usize,
    kv_heads: usize,
    gated: bool,
    has_router_input: bool,
}

impl Sizes {
    /// The sizes that constants tell, matrices before all others.
    fn of(attributes: &Attributes, given: &[Given<'_>]) -> Self {
        let (top_k, kv_heads, gated) = match attributes {
            Attributes::SelfAttention(attributes) => (attributes.top_k, attributes.kv_num_heads, false),
            Attributes::CrossAttention(attributes) => (attributes.top_k, attributes.kv_num_heads, false),
            Attributes::FeedForward(attributes) => (attributes.top_k, 1, attributes.gated),
            Attributes::LmHead => (1, 1, false),
        };
        let inputs = || attributes.operator().inputs.iter().zip(given);
        let is_given = |name| inputs().any(|(input, given)| input.name == name && *given != Given::Absent);
        let has_router_input = is_given(parameter::ROUTER_INPUT);
        let mut sizes = Self { known: Vec::new(), top_k, kv_heads, gated, has_router_input };
        for of_matrices in [true, false] {
            let wanted = inputs().filter(|(input, _)| (input.element == ElementType::Weight) == of_matrices);
            for (input, given) in wanted {
                sizes.learn(input, *given);
            }
        }
        let has_no_kv_weight = given.get(own::KV_WEIGHT) == Some(&Given::Absent);
        if matches!(attributes, Attributes::SelfAttention(_)) && has_no_kv_weight {
            let width = sizes.get("C").or(sizes.get("G * D")).unwrap_or_else(|| sizes.size("G * D"));
            sizes.tell("C", width);
            sizes.tell("G * D", width);
        }
        sizes
    }

    fn get(&self, symbol: &str) -> Option<usize> {
        self.known.iter().find(|(known, _)| *known == symbol).map(|(_, size)| *size)
    }

    fn tell(&mut self, symbol: &'static str, size: usize) {
        if self.get(symbol).is_none() {
            self.known.push((symbol, size));
        }
    }

    /// The symbol of a dimension of `input`, which notes of the contract may change.
    fn symbol(&self, input: &Parameter, symbol: &'static str) -> &'static str {
        match symbol {
            "C" if input.name == parameter::ROUTER_WEIGHT && self.has_router_input => "R",
            "F" if input.name == parameter::INPUT_WEIGHT && self.gated => "2 * F",
            symbol => symbol,
        }
    }

    fn learn(&mut self, input: &Parameter, given: Given<'_>) {
        let Given::Constant(shape) = given else { return };
        if shape.len() != input.dims.len() || input.element == ElementType::Scale || is_of_calls(input) {
            return;
        }
        for (symbol, size) in input.dims.iter().zip(shape) {
            match self.symbol(input, symbol) {
                "2 * G * D" => self.tell("G * D", size / 2),
                "2 * F" => self.tell("F", size / 2),
                "D / 2" => {
                    let columns = size.saturating_mul(2).saturating_mul(self.kv_heads);
                    self.tell("G * D", columns.min(MOST_COLUMNS));
                }
                symbol => self.tell(symbol, *size),
            }
        }
    }

    /// The size of a symbol, where constants tell none one that fits.
    fn size(&self, symbol: &'static str) -> usize {
        let twice = |symbol| self.size(symbol).saturating_mul(2);
        self.get(symbol).unwrap_or_else(|| match symbol {
            "E" => self.top_k,
            "G" => self.kv_heads,
            "G * D" => self.kv_heads.saturating_mul(2).min(MOST_COLUMNS),
            "D" => self.size("G * D").checked_div(self.kv_heads).unwrap_or(1),
            "2 * G * D" => twice("G * D"),
            "2 * F" => twice("F"),
            "D / 2" => self.size("D") / 2,
            "P" => 0,
            _ => 1,
        })
    }

    /// The shape of an input, where it is computed one that fits; none of computed scales, which may have two.
    fn shape(&self, input: &Parameter, given: Given<'_>) -> Option<Vec<usize>> {
        match given {
            Given::Absent => None,
            Given::Constant(shape) if !is_of_calls(input) => Some(shape.to_vec()),
            _ if input.element == ElementType::Scale => None,
            _ => Some(input.dims.iter().map(|symbol| self.size(self.symbol(input, symbol))).collect()),
        }
    }
}

fn is_of_calls(input: &Parameter) -> bool {
    input.dims.iter().any(|symbol| OF_CALLS.contains(symbol))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Activation, AttentionMode, CrossAttentionAttributes, FeedForwardAttributes, GateMode, SelfAttentionAttributes,
    };

    fn own_attributes(top_k: usize, kv_num_heads: usize) -> Attributes {
        Attributes::SelfAttention(SelfAttentionAttributes {
            top_k,
            kv_num_heads,
            causal: true,
            scale: 1.0,
            gate_mode: GateMode::TopkSoftmax,
            skip_padded_queries: false,
            attention_mode: AttentionMode::Softmax,
        })
    }

    fn cross_attributes(top_k: usize, kv_num_heads: usize) -> Attributes {
        let (scale, gate_mode) = (1.0, GateMode::SoftmaxTopk);
        Attributes::CrossAttention(CrossAttentionAttributes {
            top_k,
            kv_num_heads,
            scale,
            gate_mode,
            skip_padded_queries: true,
        })
    }

    fn ffn_attributes(top_k: usize, gated: bool) -> Attributes {
        let (gate_mode, activation) = (GateMode::SoftmaxTopk, Activation::Silu);
        Attributes::FeedForward(FeedForwardAttributes { top_k, gate_mode, activation, gated })
    }

    /// The verdict on constants by name; inputs named in `computed` are computed, all others are absent.
    fn verdict(attributes: Attributes, constants: &[(&str, &[usize])], computed: &[&str]) -> Result<(), String> {
        let given = attributes.operator().inputs.iter().map(|input| {
            let constant = constants.iter().find(|(name, _)| *name == input.name);
            match constant {
                Some((_, shape)) => Given::Constant(shape),
                None if computed.contains(&input.name) => Given::Computed,
                None => Given::Absent,
            }
        });
        check_constants(&attributes, &given.collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    const OWN: [(&str, &[usize]); 8] = [
        ("router_weight", &[6, 4]),
        ("query_weight", &[4, 6, 8]),
        ("kv_weight", &[6, 16]),
        ("output_weight", &[4, 8, 6]),
        ("output_bias", &[6]),
        ("cos_cache", &[9, 2]),
        ("sin_cache", &[9, 2]),
        ("query_scale", &[4, 8]),
    ];
    const OF_TOKENS: [&str; 5] = ["hidden_states", "attention_mask", "past_key", "past_value", "position_ids"];

    #[test]
    fn constants_that_fit_are_taken_and_each_that_does_not_is_named() {
        assert_eq!(verdict(own_attributes(4, 2), &OWN, &OF_TOKENS), Ok(()));
        let refused = |top_k, heads, expected: &str| {
            let error = verdict(own_attributes(top_k, heads), &OWN, &OF_TOKENS).unwrap_err();
            assert_eq!(error, format!("MoASelfAttention: {expected}"));
        };
        refused(9, 2, "top_k is 9, but the router has 4 experts");
        refused(2, 3, "query_weight has 8 columns, not a multiple of kv_num_heads = 3");
        refused(2, usize::MAX, &format!("query_weight has 8 columns, not a multiple of kv_num_heads = {}", usize::MAX));
        for place in 0..OWN.len() {
            let mut constants = OWN;
            let wrong: Vec<usize> = constants[place].1.iter().map(|size| size + 2).collect();
            constants[place].1 = &wrong;
            let error = verdict(own_attributes(2, 2), &constants, &OF_TOKENS).unwrap_err();
            assert!(error.starts_with("MoASelfAttention: "), "{:?}: {error}", OWN[place]);
        }
    }

    /// With any one of the weights computed, and with all.
    #[test]
    fn what_is_computed_fits() {
        for computed in OWN.map(|(name, _)| name) {
            let constants: Vec<_> = OWN.into_iter().filter(|(name, _)| *name != computed).collect();
            let others = [OF_TOKENS.as_slice(), &[computed]].concat();
            assert_eq!(verdict(own_attributes(4, 2), &constants, &others), Ok(()), "{computed}");
        }
        let all = |attributes: Attributes| {
            let names: Vec<_> = attributes.operator().inputs.iter().map(|input| input.name).collect();
            verdict(attributes, &[], &names)
        };
        for attributes in [own_attributes(3, 5), cross_attributes(3, 5), ffn_attributes(3, true), Attributes::LmHead] {
            assert_eq!(all(attributes), Ok(()), "{attributes:?}");
        }
        assert!(all(own_attributes(1, usize::MAX)).is_err());
        let error = verdict(
            own_attributes(9, 2),
            &[("router_weight", &[6, 4])],
            &[OF_TOKENS.as_slice(), &["query_weight", "kv_weight", "output_weight"]].concat(),
        );
        assert_eq!(error, Err("MoASelfAttention: top_k is 9, but the router has 4 experts".into()));
    }

    /// What each call says anew is taken as it is, and tells nothing of the other inputs.
    #[test]
    fn constants_of_calls_fit() {
        let caches = [("past_key", &[4, 2, 5, 4][..]), ("past_value", &[4, 2, 5, 4])];
        for constants in [&[("attention_mask", &[4, 7][..])][..], &caches[..1], &caches[1..], &caches] {
            let given = [OWN.as_slice(), constants].concat();
            assert_eq!(verdict(own_attributes(4, 2), &given, &OF_TOKENS), Ok(()), "{constants:?}");
        }
    }

    /// Nothing else tells how many columns such a matrix has.
    #[test]
    fn scales_of_computed_matrices_are_left_to_each_call() {
        for attributes in [own_attributes(2, 2), cross_attributes(2, 2), ffn_attributes(2, true), Attributes::LmHead] {
            let operator = attributes.operator();
            for [_, scale] in operator.matrices() {
                let scale = operator.inputs[scale];
                let shape: &[usize] = if scale.dims.len() == 1 { &[30] } else { &[4, 30] };
                let computed: Vec<_> =
                    operator.inputs.iter().filter(|input| **input != scale).map(|input| input.name).collect();
                assert_eq!(verdict(attributes, &[(scale.name, shape)], &computed), Ok(()), "{}", scale.name);
            }
        }
        let head = [("output_weight", &[6, 9][..]), ("output_scale", &[30])];
        assert!(verdict(Attributes::LmHead, &head, &["hidden_states"]).is_err());
    }

    #[test]
    fn other_layouts_are_known() {
        let own = ["hidden_states", "attention_mask", "query_weight", "output_weight", "router_input"];
        assert_eq!(verdict(own_attributes(2, 2), &[("router_weight", &[5, 4])], &own), Ok(()));
        let shared = [("router_weight", &[8, 4][..]), ("output_weight", &[4, 8, 8])];
        assert_eq!(verdict(own_attributes(2, 2), &shared, &own[..4]), Ok(()));
        assert_eq!(verdict(own_attributes(2, 2), &[("router_weight", &[8, 4])], &own[..4]), Ok(()));
        let gated = [("input_weight", &[4, 6, 10][..]), ("output_weight", &[4, 5, 6])];
        let ffn = ["hidden_states", "router_weight"];
        assert_eq!(verdict(ffn_attributes(2, true), &gated, &ffn), Ok(()));
        for is_gated in [true, false] {
            let computed = ["hidden_states", "router_weight", "output_weight"];
            assert_eq!(verdict(ffn_attributes(2, is_gated), &gated[..1], &computed), Ok(()), "gated: {is_gated}");
        }
        let error = verdict(ffn_attributes(2, false), &gated, &ffn).unwrap_err();
        assert!(error.contains("`input_weight` must be [E, C, F]") && error.contains("[4, 6, 5] is needed"), "{error}");
        let cross = ["hidden_states", "key", "value", "key_mask", "query_mask", "output_weight", "router_weight"];
        assert_eq!(verdict(cross_attributes(2, 2), &[("query_weight", &[4, 6, 8])], &cross), Ok(()));
        assert!(verdict(cross_attributes(2, 3), &[("query_weight", &[4, 6, 8])], &cross).is_err());
        let head = [("output_weight", &[6, 9][..]), ("output_scale", &[8])];
        assert!(verdict(Attributes::LmHead, &head, &["hidden_states"]).is_err());
        assert_eq!(verdict(Attributes::LmHead, &head[..1], &["hidden_states"]), Ok(()));
    }
}
