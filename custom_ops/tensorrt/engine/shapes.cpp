#include "shapes.h"

#include <limits>

namespace moa::engine {

namespace {

using Size = std::remove_reference_t<decltype(nvinfer1::Dims{}.d[0])>;

static_assert(nvinfer1::Dims::MAX_DIMS == MOA_TRT_MAX_RANK);

// ONNX's numbers in the order of nvinfer1::DataType, which only ever grew.
constexpr std::int32_t elements[] = {MOA_TRT_FLOAT,        MOA_TRT_FLOAT16, MOA_TRT_INT8,  MOA_TRT_INT32,
                                     MOA_TRT_BOOL,         MOA_TRT_UINT8,   MOA_TRT_FLOAT8E4M3FN, MOA_TRT_BFLOAT16,
                                     MOA_TRT_INT64,        MOA_TRT_INT4,    MOA_TRT_FLOAT4E2M1,   MOA_TRT_FLOAT8E8M0};

std::uint64_t bits_of(std::int32_t element) {
    switch (element) {
        case MOA_TRT_INT64: return 64;
        case MOA_TRT_FLOAT:
        case MOA_TRT_INT32: return 32;
        case MOA_TRT_FLOAT16:
        case MOA_TRT_BFLOAT16: return 16;
        case MOA_TRT_INT4:
        case MOA_TRT_FLOAT4E2M1: return 4;
        default: return 8;
    }
}

}  // namespace

std::string text(const moa_trt_shape &shape) {
    std::string sizes;
    for (std::int32_t axis = 0; axis < shape.rank && axis < MOA_TRT_MAX_RANK; ++axis) {
        sizes += (axis == 0 ? "" : ", ") + std::to_string(shape.dims[axis]);
    }
    return "[" + sizes + "]";
}

nvinfer1::Dims to_dims(const moa_trt_shape &shape, const std::string &what, std::int32_t code) {
    if (shape.rank < 0 || shape.rank > MOA_TRT_MAX_RANK) {
        throw Error(code, what + " has " + std::to_string(shape.rank) + " dimensions, and TensorRT takes 0 to " +
                              std::to_string(MOA_TRT_MAX_RANK));
    }
    nvinfer1::Dims dims{};
    dims.nbDims = shape.rank;
    for (std::int32_t axis = 0; axis < shape.rank; ++axis) {
        if (shape.dims[axis] < 0 || shape.dims[axis] > std::numeric_limits<Size>::max()) {
            throw Error(code, what + " has the impossible shape " + text(shape));
        }
        dims.d[axis] = static_cast<Size>(shape.dims[axis]);
    }
    return dims;
}

moa_trt_shape from_dims(const nvinfer1::Dims &dims) {
    moa_trt_shape shape{};
    shape.rank = dims.nbDims < 0 || dims.nbDims > MOA_TRT_MAX_RANK ? -1 : dims.nbDims;
    for (std::int32_t axis = 0; axis < shape.rank; ++axis) shape.dims[axis] = dims.d[axis];
    return shape;
}

std::int32_t element_of(nvinfer1::DataType type) {
    const auto index = static_cast<std::size_t>(type);
    if (index < sizeof elements / sizeof elements[0]) return elements[index];
    throw Error(MOA_TRT_UNSUPPORTED, "TensorRT's data type " + std::to_string(index) + " is unknown");
}

std::uint64_t bytes_of(const moa_trt_shape &shape, std::int32_t element, const std::string &name) {
    if (shape.rank < 0) throw Error(MOA_TRT_UNSUPPORTED, "`" + name + "` has no shape");
    std::uint64_t count = 1;
    for (std::int32_t axis = 0; axis < shape.rank; ++axis) {
        const std::int64_t size = shape.dims[axis];
        if (size < 0) throw Error(MOA_TRT_UNSUPPORTED, "`" + name + "` has the shape " + text(shape));
        if (__builtin_mul_overflow(count, static_cast<std::uint64_t>(size), &count) || count >> 56 != 0) {
            throw Error(MOA_TRT_MEMORY, "`" + name + "` of shape " + text(shape) + " is larger than any memory");
        }
    }
    return (count * bits_of(element) + 7) / 8;
}

}  // namespace moa::engine
