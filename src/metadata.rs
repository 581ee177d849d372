//! Keys of the metadata that every exported file carries.

/// How each of them begins.
pub const PREFIX: &str = "moa.";

/// SHA-256 of the trained values: for every weight rank, dimensions, name of the stored type and stored bytes.
pub const SOURCE: &str = "moa.source.sha256";
/// `model_type` of the configuration.
pub const FAMILY: &str = "moa.family";
/// [`moa_graphs::Form`].
pub const FORM: &str = "moa.form";
/// [`moa_graphs::Precision`].
pub const DTYPE: &str = "moa.dtype";
/// `last` where `logits` holds the last position only.
pub const LOGITS: &str = "moa.logits";
/// Value of [`LOGITS`].
pub const LAST: &str = "last";
/// [`moa_schema::GateMode`] where the user replaced the family's.
pub const GATE_MODE: &str = "moa.gate_mode";
/// Whether routing is a graph output.
pub const ROUTER_OUTPUTS: &str = "moa.router_outputs";
/// What decides the numbers that the graphs of an export compute together.
pub const OF_NUMBERS: [&str; 4] = [SOURCE, FAMILY, DTYPE, GATE_MODE];
/// `model_type` names one family; this says which of its graphs the file holds.
pub const PART: &str = "moa.part";
