//! Names of parameters and attributes, for the tables of the operators and for code that looks for one in a node.

/// Names of inputs and outputs.
#[allow(missing_docs)]
pub mod parameter {
    pub const HIDDEN_STATES: &str = "hidden_states";
    pub const ATTENTION_MASK: &str = "attention_mask";
    pub const KEY: &str = "key";
    pub const VALUE: &str = "value";
    pub const KEY_MASK: &str = "key_mask";
    pub const QUERY_MASK: &str = "query_mask";
    pub const ROUTER_WEIGHT: &str = "router_weight";
    pub const QUERY_WEIGHT: &str = "query_weight";
    pub const KV_WEIGHT: &str = "kv_weight";
    pub const INPUT_WEIGHT: &str = "input_weight";
    pub const OUTPUT_WEIGHT: &str = "output_weight";
    pub const OUTPUT_BIAS: &str = "output_bias";
    pub const PAST_KEY: &str = "past_key";
    pub const PAST_VALUE: &str = "past_value";
    pub const COS_CACHE: &str = "cos_cache";
    pub const SIN_CACHE: &str = "sin_cache";
    pub const POSITION_IDS: &str = "position_ids";
    pub const ROUTER_INPUT: &str = "router_input";
    pub const QUERY_SCALE: &str = "query_scale";
    pub const KV_SCALE: &str = "kv_scale";
    pub const INPUT_SCALE: &str = "input_scale";
    pub const OUTPUT_SCALE: &str = "output_scale";

    pub const OUTPUT: &str = "output";
    pub const LOGITS: &str = "logits";
    pub const PRESENT_KEY: &str = "present_key";
    pub const PRESENT_VALUE: &str = "present_value";
    pub const TOPK_INDICES: &str = "topk_indices";
    pub const TOPK_WEIGHTS: &str = "topk_weights";

    /// What a router reads: the input of its own, or where there is none the hidden states.
    pub const READ_BY_ROUTERS: [&str; 2] = [ROUTER_INPUT, HIDDEN_STATES];
}

/// Names of attributes.
#[allow(missing_docs)]
pub mod attribute {
    pub const TOP_K: &str = "top_k";
    pub const KV_NUM_HEADS: &str = "kv_num_heads";
    pub const CAUSAL: &str = "causal";
    pub const SCALE: &str = "scale";
    pub const GATE_MODE: &str = "gate_mode";
    pub const SKIP_PADDED_QUERIES: &str = "skip_padded_queries";
    pub const ATTENTION_MODE: &str = "attention_mode";
    pub const ACTIVATION: &str = "activation";
    pub const GATED: &str = "gated";
}
