// ONNX's Cast, the one operator besides the plugins that the fake computes.

#include <cmath>
#include <cstring>

#include "network.h"

namespace fake {

namespace {

using namespace nvinfer1;

#if NV_TENSORRT_MAJOR >= 10
float wide(std::uint16_t brain) {
    const std::uint32_t bits = std::uint32_t{brain} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// To nearest, ties to even.
std::uint16_t narrow(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif

template <class T>
T at(const void *values, std::size_t index) {
    return static_cast<const T *>(values)[index];
}

double read(DataType type, const void *values, std::size_t index) {
    switch (type) {
        case DataType::kFLOAT: return at<float>(values, index);
        case DataType::kINT32: return at<std::int32_t>(values, index);
#if NV_TENSORRT_MAJOR >= 10
        case DataType::kINT64: return static_cast<double>(at<std::int64_t>(values, index));
        case DataType::kBF16: return wide(at<std::uint16_t>(values, index));
#endif
        default: throw Refused("Cast: the type of its input is not supported");
    }
}

void write(DataType type, void *values, std::size_t index, double value) {
    switch (type) {
        case DataType::kFLOAT: static_cast<float *>(values)[index] = static_cast<float>(value); return;
        case DataType::kINT32: static_cast<std::int32_t *>(values)[index] = static_cast<std::int32_t>(value); return;
#if NV_TENSORRT_MAJOR >= 10
        case DataType::kINT64: static_cast<std::int64_t *>(values)[index] = static_cast<std::int64_t>(value); return;
        case DataType::kBF16: static_cast<std::uint16_t *>(values)[index] = narrow(static_cast<float>(value)); return;
#endif
        default: throw Refused("Cast: the type of its output is not supported");
    }
}

class Cast final : public Instance {
public:
    explicit Cast(DataType to) : to_(to) {}

    std::vector<DataType> types(const std::vector<DataType> &) const override { return {to_}; }
    std::vector<Dims> shapes(const std::vector<Dims> &inputs) override { return inputs; }
    std::size_t build(const std::vector<Described> &, const std::vector<Described> &) override { return 0; }
    std::string state() override { return ""; }
    std::unique_ptr<Instance> attached() const override { return std::make_unique<Cast>(to_); }
    bool enqueue(const std::vector<PluginTensorDesc> &inputs, const std::vector<PluginTensorDesc> &outputs,
                 const std::vector<const void *> &from, const std::vector<void *> &to, void *, cudaStream_t) override {
        std::size_t count = 1;
        for (std::int32_t axis = 0; axis < inputs[0].dims.nbDims; ++axis) count *= static_cast<std::size_t>(inputs[0].dims.d[axis]);
        for (std::size_t index = 0; index < count; ++index) {
            write(outputs[0].type, to[0], index, read(inputs[0].type, from[0], index));
        }
        return true;
    }

private:
    DataType to_;
};

}  // namespace

std::unique_ptr<Instance> cast_of(const Node &node) {
    for (const Attribute &attribute : node.attributes) {
        if (attribute.name == "to") return std::make_unique<Cast>(type_of(static_cast<std::int32_t>(attribute.integer)));
    }
    throw Refused("Cast: the attribute `to` is missing");
}

}  // namespace fake
