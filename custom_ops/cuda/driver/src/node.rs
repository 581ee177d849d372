//! A node of a graph: which operator, with which attributes.

use moa_cuda::plan::{self, Plan, SelfAttentionSettings};
use moa_cuda::{Device, Element, Options};
use moa_schema::{
    Attributes, CrossAttentionAttributes, CrossAttentionDims, ElementType, FeedForwardAttributes, FeedForwardDims,
    Operator, OutputShape, SelfAttentionAttributes, SelfAttentionDims, ShapeError, feed_forward as ffn,
    refuse_integers, self_attention as own,
};

use crate::error::Error;

/// Where the new caches of `MoASelfAttention` may stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caches {
    /// In memory of their own.
    Separate,
    /// As [`Self::Separate`]; or, where the mask says that the caches have room, in the memory of the past.
    Shared,
}

/// One operator with its attributes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Node {
    /// `MoASelfAttention`.
    SelfAttention(SelfAttentionAttributes, Caches),
    /// `MoACrossAttention`.
    CrossAttention(CrossAttentionAttributes),
    /// `MoEFeedForward`.
    FeedForward(FeedForwardAttributes),
}

impl Caches {
    /// Sizes, and the rows of caches that have room.
    fn dims(
        self,
        inputs: &[Option<&[usize]>],
        attributes: &SelfAttentionAttributes,
    ) -> Result<(SelfAttentionDims, Option<usize>), ShapeError> {
        match self {
            Self::Separate => Ok((SelfAttentionDims::new(inputs, attributes)?, None)),
            Self::Shared => SelfAttentionDims::with_capacity(inputs, attributes),
        }
    }
}

impl Node {
    /// The contract of the operator.
    pub const fn operator(&self) -> &'static Operator {
        self.attributes().operator()
    }

    const fn attributes(&self) -> Attributes {
        match *self {
            Self::SelfAttention(attributes, _) => Attributes::SelfAttention(attributes),
            Self::CrossAttention(attributes) => Attributes::CrossAttention(attributes),
            Self::FeedForward(attributes) => Attributes::FeedForward(attributes),
        }
    }

    /// Shapes of all outputs, in the order of the schema, from the shapes of the inputs; `None` is an absent input.
    ///
    /// # Errors
    ///
    /// Names the first input whose shape does not fit.
    pub fn output_shapes(&self, inputs: &[Option<&[usize]>]) -> Result<Vec<OutputShape>, ShapeError> {
        Ok(match self {
            Self::SelfAttention(attributes, caches) => {
                let (dims, capacity) = caches.dims(inputs, attributes)?;
                dims.output_shapes(capacity).into()
            }
            Self::CrossAttention(attributes) => CrossAttentionDims::new(inputs, attributes)?.output_shapes().into(),
            Self::FeedForward(attributes) => FeedForwardDims::new(inputs, attributes)?.output_shapes().into(),
        })
    }

    /// The error of a call whose new caches are not in the memory of the past, where these shapes ask for that; `None`
    /// where they do not.
    pub(crate) fn shares_caches(&self, inputs: &[Option<&[usize]>]) -> Result<Option<ShapeError>, ShapeError> {
        let Self::SelfAttention(attributes, caches) = self else { return Ok(None) };
        let (dims, capacity) = caches.dims(inputs, attributes)?;
        Ok(capacity.map(|rows| dims.separate_caches(rows)))
    }

    /// Plans the launches; `wanted[i]` says whether somebody asks for output `i`.
    pub(crate) fn plan(
        &self,
        inputs: &[Option<&[usize]>],
        wanted: &[bool],
        element: Element,
        device: &Device,
        options: Options,
    ) -> Result<Plan, Error> {
        refuse_integers(self.operator(), inputs)?;
        Ok(match self {
            Self::SelfAttention(attributes, caches) => {
                let (dims, capacity) = caches.dims(inputs, attributes)?;
                let is_wanted = |output: usize| wanted.get(output).copied().unwrap_or(false);
                let positions = inputs.get(own::COS_CACHE).copied().flatten().and_then(|shape| shape.first().copied());
                let settings = SelfAttentionSettings {
                    rotary_positions: positions,
                    router_width: columns(inputs, own::ROUTER_INPUT),
                    keeps_hidden: inputs.get(own::KV_WEIGHT).is_none_or(Option::is_none),
                    capacity,
                    returns_keys: is_wanted(own::PRESENT_KEY),
                    returns_values: is_wanted(own::PRESENT_VALUE),
                };
                plan::self_attention(&dims, attributes, &settings, element, device, options)?
            }
            Self::CrossAttention(attributes) => {
                let dims = CrossAttentionDims::new(inputs, attributes)?;
                plan::cross_attention(&dims, attributes, element, device, options)?
            }
            Self::FeedForward(attributes) => {
                let dims = FeedForwardDims::new(inputs, attributes)?;
                let router_width = columns(inputs, ffn::ROUTER_INPUT);
                plan::feed_forward(&dims, attributes, router_width, element, device, options)?
            }
        })
    }
}

/// Columns of input `index`, where it is given.
fn columns(inputs: &[Option<&[usize]>], index: usize) -> Option<usize> {
    inputs.get(index).copied().flatten().and_then(|shape| shape.last().copied())
}

/// Bytes of one element of a parameter where activations are of type `element`.
pub(crate) fn element_bytes(parameter: ElementType, element: Element) -> usize {
    match parameter {
        ElementType::Activation | ElementType::Weight => element.bytes(),
        ElementType::Float32 | ElementType::Scale | ElementType::Int32 => 4,
        ElementType::Int64 => 8,
    }
}
