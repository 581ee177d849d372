//! Names of the backends on the command line and in reports.

/// ONNX Runtime with the operator library.
pub const ORT: &str = "ort";

/// ONNX Runtime alone.
pub const ORT_FUNCTION: &str = "ort-function";

/// tract.
pub const TRACT: &str = "tract";

/// TensorRT.
pub const TENSORRT: &str = "tensorrt";
