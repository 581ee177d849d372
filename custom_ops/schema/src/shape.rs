//! Shape rules: from the shapes of a node's inputs to the sizes that every implementation works with.

use crate::{
    CROSS_ATTENTION, CrossAttentionAttributes, ElementType, FEED_FORWARD, FeedForwardAttributes, IntegerType, LM_HEAD,
    Operator, Parameter, SELF_ATTENTION, SelfAttentionAttributes, cross_attention as cross, feed_forward as ffn,
    lm_head as head, self_attention as own,
};

/// Why the inputs of a node cannot be computed; the text names operator, input, expected and found shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeError {
    operator: &'static str,
    what: String,
}

impl ShapeError {
    /// The text without the operator, for a message that names the node.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl std::fmt::Display for ShapeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { operator, what } = self;
        write!(f, "{operator}: {what}")
    }
}

impl std::error::Error for ShapeError {}

/// Refuses weights in integers, for an implementation that has matrices of floats alone; `shapes[i]` is the shape of
/// input `i`.
///
/// # Errors
///
/// Names the first scale that is given.
pub fn refuse_integers(operator: &Operator, shapes: &[Option<&[usize]>]) -> Result<(), ShapeError> {
    let is_scale =
        |(input, shape): &(&Parameter, &Option<&[usize]>)| shape.is_some() && input.element == ElementType::Scale;
    let Some((input, _)) = operator.inputs.iter().zip(shapes).find(is_scale) else { return Ok(()) };
    let what = format!("input `{}` is for weights in integers, which are not served here", input.name);
    Err(ShapeError { operator: operator.name, what })
}

/// Sizes of a `MoASelfAttention` node; symbols as in the crate documentation.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelfAttentionDims {
    pub batch: usize,
    pub tokens: usize,
    pub past: usize,
    pub width: usize,
    pub experts: usize,
    pub top_k: usize,
    pub kv_heads: usize,
    pub head: usize,
}

/// Sizes of a `MoACrossAttention` node; symbols as in the crate documentation.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossAttentionDims {
    pub batch: usize,
    pub tokens: usize,
    pub keys: usize,
    pub width: usize,
    pub experts: usize,
    pub top_k: usize,
    pub kv_heads: usize,
    pub head: usize,
}

/// Sizes of a `MoEFeedForward` node; symbols as in the crate documentation.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeedForwardDims {
    pub batch: usize,
    pub tokens: usize,
    pub width: usize,
    pub experts: usize,
    pub top_k: usize,
    pub hidden: usize,
}

/// Sizes of an `LMHead` node; symbols as in the crate documentation.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmHeadDims {
    pub batch: usize,
    pub tokens: usize,
    pub width: usize,
    pub vocabulary: usize,
}

/// Input shapes of one node, by position; `None` where an optional input is absent.
struct Shapes<'a> {
    operator: &'static Operator,
    shapes: &'a [Option<&'a [usize]>],
}

impl<'a> Shapes<'a> {
    fn get(&self, index: usize) -> Option<&'a [usize]> {
        self.shapes.get(index).copied().flatten()
    }

    fn fail<T>(&self, index: usize, found: &str) -> Result<T, ShapeError> {
        let input = self.operator.inputs[index];
        self.error(&format!("input `{}` must be {}, found {found}", input.name, input.shape()))
    }

    /// The shape of a required input of rank `N`.
    fn required<const N: usize>(&self, index: usize) -> Result<[usize; N], ShapeError> {
        let Some(shape) = self.get(index) else { return self.fail(index, "nothing") };
        match shape.try_into() {
            Ok(dims) => Ok(dims),
            Err(_) => self.fail(index, &format!("{shape:?}")),
        }
    }

    /// Checks an input that must have exactly `expected`.
    fn expect(&self, index: usize, expected: &[usize]) -> Result<(), ShapeError> {
        match self.get(index) {
            Some(shape) if shape == expected => Ok(()),
            Some(shape) => self.fail(index, &format!("{shape:?} where {expected:?} is needed")),
            None => self.fail(index, "nothing"),
        }
    }

    /// As [`Self::expect`], for an input that may be absent.
    fn expect_optional(&self, index: usize, expected: &[usize]) -> Result<(), ShapeError> {
        if self.get(index).is_some() { self.expect(index, expected) } else { Ok(()) }
    }

    /// Checks the scales, where they are there, of a matrix `[.., inner, columns]` in whichever type of integers.
    fn expect_scales(&self, index: usize, matrix: &[usize]) -> Result<(), ShapeError> {
        let Some(shape) = self.get(index) else { return Ok(()) };
        if IntegerType::ALL.iter().any(|integers| integers.fits(shape, matrix)) {
            return Ok(());
        }
        let [columns, blocks] = IntegerType::ALL.map(|integers| integers.scale_shape(matrix));
        self.fail(index, &format!("{shape:?} where {columns:?} is needed, or {blocks:?} for int4"))
    }

    fn error<T>(&self, text: &str) -> Result<T, ShapeError> {
        Err(ShapeError { operator: self.operator.name, what: text.to_owned() })
    }

    fn check_top_k(&self, top_k: usize, experts: usize) -> Result<(), ShapeError> {
        if (1..=experts).contains(&top_k) {
            return Ok(());
        }
        self.error(&format!("top_k is {top_k}, but the router has {experts} experts"))
    }

    fn check_hidden(&self, [batch, tokens, width]: [usize; 3]) -> Result<(), ShapeError> {
        if batch == 0 || tokens == 0 {
            return self.error(&format!("hidden_states holds no token (batch {batch}, sequence {tokens})"));
        }
        if width == 0 { self.error("hidden_states has no columns") } else { Ok(()) }
    }

    /// Checks a router and what it reads, where that is given.
    fn check_router(
        &self,
        [weight, input]: [usize; 2],
        [batch, tokens, width]: [usize; 3],
        experts: usize,
    ) -> Result<(), ShapeError> {
        if self.get(input).is_none() {
            return self.expect(weight, &[width, experts]);
        }
        let [_, _, read] = self.required(input)?;
        self.expect(input, &[batch, tokens, read])?;
        if read == 0 {
            return self.error("router_input has no columns");
        }
        self.expect(weight, &[read, experts])
    }

    /// Checks the projection of keys and values, without which they are the hidden states.
    fn check_kv_weight(&self, [width, columns]: [usize; 2]) -> Result<(), ShapeError> {
        if self.get(own::KV_WEIGHT).is_some() {
            return self.expect(own::KV_WEIGHT, &[width, 2 * columns]);
        }
        if self.get(own::KV_SCALE).is_some() {
            return self.error("kv_scale is there and kv_weight is not");
        }
        if width == columns {
            return Ok(());
        }
        self.error(&format!(
            "without kv_weight, query_weight must have {width} columns as hidden_states, found {columns}"
        ))
    }

    /// Splits `G * D` columns into heads.
    fn head(&self, columns: usize, kv_heads: usize) -> Result<usize, ShapeError> {
        if kv_heads == 0 || columns == 0 || !columns.is_multiple_of(kv_heads) {
            return self
                .error(&format!("query_weight has {columns} columns, not a multiple of kv_num_heads = {kv_heads}"));
        }
        Ok(columns / kv_heads)
    }
}

impl SelfAttentionDims {
    /// Proves the input shapes of a node against each other, for an implementation without shared caches.
    ///
    /// `shapes[i]` is the shape of input `i`, `None` where it is absent.
    ///
    /// # Errors
    ///
    /// Names the first input whose shape does not fit; shared caches are refused.
    pub fn new(shapes: &[Option<&[usize]>], attributes: &SelfAttentionAttributes) -> Result<Self, ShapeError> {
        match Self::with_capacity(shapes, attributes)? {
            (dims, None) => Ok(dims),
            (dims, Some(rows)) => Err(dims.short_mask(rows, "which ONNX Runtime's kernels take")),
        }
    }

    /// Why a mask is refused that covers fewer tokens than a cache of `rows` rows and the new ones, for an
    /// implementation that serves shared caches, which these are not.
    pub fn separate_caches(&self, rows: usize) -> ShapeError {
        let room = "where past_key and present_key, and past_value and present_value, are bound to one buffer each";
        self.short_mask(rows, room)
    }

    /// `room` says when a cache may have room.
    fn short_mask(&self, rows: usize, room: &str) -> ShapeError {
        let Self { tokens, past, .. } = *self;
        let what = format!(
            "attention_mask has {} columns, expected {}: {rows} of the past and {tokens} of hidden_states; fewer are \
             for caches with room, {room}",
            past + tokens,
            rows + tokens,
        );
        ShapeError { operator: SELF_ATTENTION.name, what }
    }

    /// As [`SelfAttentionDims::new`], for an implementation that serves shared caches: beside the sizes the capacity
    /// `M` of a shared cache, `None` where the caches hold the past alone.
    ///
    /// # Errors
    ///
    /// Names the first input whose shape does not fit.
    pub fn with_capacity(
        shapes: &[Option<&[usize]>],
        attributes: &SelfAttentionAttributes,
    ) -> Result<(Self, Option<usize>), ShapeError> {
        let s = Shapes { operator: &SELF_ATTENTION, shapes };
        let [batch, tokens, width] = s.required(own::HIDDEN_STATES)?;
        let [_, experts] = s.required(own::ROUTER_WEIGHT)?;
        let [_, _, columns] = s.required(own::QUERY_WEIGHT)?;
        s.check_hidden([batch, tokens, width])?;
        s.check_top_k(attributes.top_k, experts)?;
        let kv_heads = attributes.kv_num_heads;
        let head = s.head(columns, kv_heads)?;
        s.check_router([own::ROUTER_WEIGHT, own::ROUTER_INPUT], [batch, tokens, width], experts)?;
        s.expect(own::QUERY_WEIGHT, &[experts, width, columns])?;
        s.check_kv_weight([width, columns])?;
        s.expect(own::OUTPUT_WEIGHT, &[experts, columns, width])?;
        s.expect_optional(own::OUTPUT_BIAS, &[width])?;
        s.expect_scales(own::QUERY_SCALE, &[experts, width, columns])?;
        s.expect_scales(own::KV_SCALE, &[width, 2 * columns])?;
        s.expect_scales(own::OUTPUT_SCALE, &[experts, columns, width])?;
        let rows = match s.get(own::PAST_KEY) {
            Some(_) => s.required::<4>(own::PAST_KEY)?[2],
            None => 0,
        };
        if s.get(own::PAST_KEY).is_some() || s.get(own::PAST_VALUE).is_some() {
            s.expect(own::PAST_KEY, &[batch, kv_heads, rows, head])?;
            s.expect(own::PAST_VALUE, &[batch, kv_heads, rows, head])?;
        }
        let [_, keys] = s.required(own::ATTENTION_MASK)?;
        let (past, capacity) = if (tokens..=rows).contains(&keys) { (keys - tokens, Some(rows)) } else { (rows, None) };
        if rows > 0 && keys != past + tokens {
            return s.error(&format!(
                "attention_mask has {keys} columns, expected {}: {rows} of the past and {tokens} of hidden_states; a \
                 cache that is both past and present has room for {rows}",
                rows + tokens,
            ));
        }
        s.expect(own::ATTENTION_MASK, &[batch, past + tokens])?;
        if [own::COS_CACHE, own::SIN_CACHE, own::POSITION_IDS].into_iter().any(|input| s.get(input).is_some()) {
            let [positions, _] = s.required(own::COS_CACHE)?;
            if !head.is_multiple_of(2) {
                return s.error(&format!("rotary embedding needs an even head width, found {head}"));
            }
            if positions == 0 {
                return s.error("cos_cache has no rows, and every token needs one");
            }
            s.expect(own::COS_CACHE, &[positions, head / 2])?;
            s.expect(own::SIN_CACHE, &[positions, head / 2])?;
            s.expect(own::POSITION_IDS, &[batch, tokens])?;
        }
        Ok((Self { batch, tokens, past, width, experts, top_k: attributes.top_k, kv_heads, head }, capacity))
    }
}

impl CrossAttentionDims {
    /// Proves the input shapes of a node against each other; arguments as in [`SelfAttentionDims::new`].
    ///
    /// # Errors
    ///
    /// Names the first input whose shape does not fit.
    pub fn new(shapes: &[Option<&[usize]>], attributes: &CrossAttentionAttributes) -> Result<Self, ShapeError> {
        let s = Shapes { operator: &CROSS_ATTENTION, shapes };
        let [batch, tokens, width] = s.required(cross::HIDDEN_STATES)?;
        let [_, _, keys, _] = s.required(cross::KEY)?;
        let [_, experts] = s.required(cross::ROUTER_WEIGHT)?;
        let [_, _, columns] = s.required(cross::QUERY_WEIGHT)?;
        s.check_hidden([batch, tokens, width])?;
        s.check_top_k(attributes.top_k, experts)?;
        let kv_heads = attributes.kv_num_heads;
        let head = s.head(columns, kv_heads)?;
        s.expect(cross::KEY, &[batch, kv_heads, keys, head])?;
        s.expect(cross::VALUE, &[batch, kv_heads, keys, head])?;
        s.expect(cross::KEY_MASK, &[batch, keys])?;
        s.expect(cross::QUERY_MASK, &[batch, tokens])?;
        s.expect(cross::ROUTER_WEIGHT, &[width, experts])?;
        s.expect(cross::QUERY_WEIGHT, &[experts, width, columns])?;
        s.expect(cross::OUTPUT_WEIGHT, &[experts, columns, width])?;
        s.expect_optional(cross::OUTPUT_BIAS, &[width])?;
        s.expect_scales(cross::QUERY_SCALE, &[experts, width, columns])?;
        s.expect_scales(cross::OUTPUT_SCALE, &[experts, columns, width])?;
        Ok(Self { batch, tokens, keys, width, experts, top_k: attributes.top_k, kv_heads, head })
    }
}

impl FeedForwardDims {
    /// Proves the input shapes of a node against each other; arguments as in [`SelfAttentionDims::new`].
    ///
    /// # Errors
    ///
    /// Names the first input whose shape does not fit.
    pub fn new(shapes: &[Option<&[usize]>], attributes: &FeedForwardAttributes) -> Result<Self, ShapeError> {
        let s = Shapes { operator: &FEED_FORWARD, shapes };
        let [batch, tokens, width] = s.required(ffn::HIDDEN_STATES)?;
        let [_, experts] = s.required(ffn::ROUTER_WEIGHT)?;
        let [_, hidden, _] = s.required(ffn::OUTPUT_WEIGHT)?;
        s.check_hidden([batch, tokens, width])?;
        s.check_top_k(attributes.top_k, experts)?;
        if hidden == 0 {
            return s.error("output_weight has no rows");
        }
        let columns = if attributes.gated { 2 * hidden } else { hidden };
        s.check_router([ffn::ROUTER_WEIGHT, ffn::ROUTER_INPUT], [batch, tokens, width], experts)?;
        s.expect(ffn::INPUT_WEIGHT, &[experts, width, columns])?;
        s.expect(ffn::OUTPUT_WEIGHT, &[experts, hidden, width])?;
        s.expect_optional(ffn::OUTPUT_BIAS, &[width])?;
        s.expect_scales(ffn::INPUT_SCALE, &[experts, width, columns])?;
        s.expect_scales(ffn::OUTPUT_SCALE, &[experts, hidden, width])?;
        Ok(Self { batch, tokens, width, experts, top_k: attributes.top_k, hidden })
    }
}

impl LmHeadDims {
    /// Proves the input shapes of a node against each other; `shapes[i]` is the shape of input `i`, `None` where it is
    /// absent.
    ///
    /// # Errors
    ///
    /// Names the first input whose shape does not fit.
    pub fn new(shapes: &[Option<&[usize]>]) -> Result<Self, ShapeError> {
        let s = Shapes { operator: &LM_HEAD, shapes };
        let [batch, tokens, width] = s.required(head::HIDDEN_STATES)?;
        let [_, vocabulary] = s.required(head::OUTPUT_WEIGHT)?;
        s.check_hidden([batch, tokens, width])?;
        if vocabulary == 0 {
            return s.error("output_weight has no columns");
        }
        s.expect(head::OUTPUT_WEIGHT, &[width, vocabulary])?;
        s.expect_scales(head::OUTPUT_SCALE, &[width, vocabulary])?;
        Ok(Self { batch, tokens, width, vocabulary })
    }
}

#[cfg(test)]
#[path = "shape_tests.rs"]
mod tests;
