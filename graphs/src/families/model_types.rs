//! `model_type` of the configurations of each family.

/// fairseq's MoA encoder-decoder.
pub const MOA_TRANSFORMER: &str = "moa_transformer";
/// MoA masked language models on fairseq's RoBERTa.
pub const MOA_ROBERTA: &str = "moa_roberta";
/// JetMoE.
pub const JETMOE: &str = "jetmoe";
/// MoLM, after the architecture of its models, ModuleFormer.
pub const MOLM: &str = "moduleformer";
/// A single MoA layer.
pub const MOA_LAYER: &str = "moa_layer";
/// A standard Transformer, encoder-decoder.
pub const TRANSFORMER: &str = "transformer";
/// A standard Transformer as a masked language model.
pub const ROBERTA: &str = "roberta";
