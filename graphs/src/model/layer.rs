//! One MoA layer by itself.

use super::Attention;

/// A self- or cross-attention layer without residual or normalisation.
#[derive(Debug, Clone)]
pub struct MoaLayer {
    /// The layer.
    pub attention: Attention,
    /// Whether keys and values come from a second input, `memory`.
    pub cross_attention: bool,
}
