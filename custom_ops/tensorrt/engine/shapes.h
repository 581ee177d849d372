// Shapes and element types between TensorRT's terms and the interface's.
#pragma once

#include <cstdint>
#include <string>

#include "error.h"
#include "headers.h"

namespace moa::engine {

// "[2, -1, 512]".
std::string text(const moa_trt_shape &shape);

// Throws Error of `code`, which says that `what` is impossible, where TensorRT's Dims cannot hold the shape.
nvinfer1::Dims to_dims(const moa_trt_shape &shape, const std::string &what, std::int32_t code);
moa_trt_shape from_dims(const nvinfer1::Dims &dims);

// ONNX's number of a type; throws Error where it has none.
std::int32_t element_of(nvinfer1::DataType type);

// Bytes of a tensor; throws Error where a size is not known, or they are more than memory can have.
std::uint64_t bytes_of(const moa_trt_shape &shape, std::int32_t element, const std::string &name);

}  // namespace moa::engine
