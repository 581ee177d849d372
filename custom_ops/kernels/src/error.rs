//! What a kernel refuses.

/// Why a kernel computed nothing; the outputs then hold unspecified values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A slice does not have the length that the dims give it.
    #[error("`{name}` must hold {expected} elements, found {found}")]
    Length {
        /// Formal name of the parameter.
        name: &'static str,
        /// Elements that the dims demand.
        expected: usize,
        /// Elements in the slice.
        found: usize,
    },
    /// A size that must be at least 1 is 0.
    #[error("the size {symbol} is 0")]
    Empty {
        /// Symbol of the size in the contract.
        symbol: &'static str,
    },
    /// An optional input is useless without another one that is absent.
    #[error("`{name}` is needed where `{because}` is given")]
    Missing {
        /// The absent input.
        name: &'static str,
        /// The input that calls for it.
        because: &'static str,
    },
    /// A shared key/value cache has too few rows for the past and the new tokens.
    #[error("the key/value caches have room for {capacity} tokens, and {needed} are needed")]
    Capacity {
        /// Rows of each head, `M`.
        capacity: usize,
        /// `P + T`.
        needed: usize,
    },
    /// `top_k` is not in `1 ..= E`.
    #[error("top_k is {top_k}, but there are {experts} experts")]
    TopK {
        /// The attribute.
        top_k: usize,
        /// Experts of the router.
        experts: usize,
    },
    /// More experts than their numbers as f32 can be told apart.
    #[error("the router has {experts} experts, and {most} are the most")]
    Experts {
        /// Experts of the router.
        experts: usize,
        /// The most that are served.
        most: usize,
    },
    /// Rotary embedding of a head that has no two halves.
    #[error("rotary embedding needs an even head width, found {head}")]
    OddHead {
        /// Head width `D`.
        head: usize,
    },
    /// A routed token has a NaN or infinite router logit, so no expert can be chosen.
    #[error("the router logits of batch {batch}, token {token} {}", moa_schema::LOGITS_NOT_FINITE)]
    RouterLogits {
        /// Row of the batch.
        batch: usize,
        /// Token within the row.
        token: usize,
    },
    /// A position id lies outside the cosine and sine caches.
    #[error("position_ids of batch {batch}, token {token} is {position}, but cos_cache holds {positions} positions")]
    Position {
        /// Row of the batch.
        batch: usize,
        /// Token within the row.
        token: usize,
        /// The id found.
        position: i64,
        /// Rows of the caches.
        positions: usize,
    },
}
