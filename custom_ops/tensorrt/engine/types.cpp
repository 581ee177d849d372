// The types of 8.6's networks, in which TensorRT chooses the types of layers itself unless it is told.

#include "build.h"

#if NV_TENSORRT_MAJOR >= 10

// From 10 on the network itself is typed.
void moa::engine::hold_types(nvinfer1::INetworkDefinition &, nvinfer1::IBuilderConfig &, bool) {}

#else

#include <optional>

namespace moa::engine {

namespace {

using nvinfer1::DataType;
using nvinfer1::ILayer;
using nvinfer1::ITensor;
using nvinfer1::LayerType;

bool is_real(DataType type) { return type == DataType::kFLOAT || type == DataType::kHALF; }

// Layers whose types are part of what they do, or that have none.
bool is_typed_itself(LayerType type) {
    switch (type) {
        case LayerType::kCONSTANT:
        case LayerType::kSHAPE:
        case LayerType::kCAST:
        case LayerType::kIDENTITY:
        case LayerType::kQUANTIZE:
        case LayerType::kDEQUANTIZE:
        case LayerType::kASSERTION:
        case LayerType::kTRIP_LIMIT:
        case LayerType::kCONDITION: return true;
        default: return false;
    }
}

// The floating type that a layer computes in: that of its first such input, else of its first such output.
std::optional<DataType> real_type(const ILayer &layer) {
    for (std::int32_t index = 0; index < layer.getNbInputs(); ++index) {
        const ITensor *const input = layer.getInput(index);
        if (input != nullptr && is_real(input->getType())) return input->getType();
    }
    for (std::int32_t index = 0; index < layer.getNbOutputs(); ++index) {
        const ITensor *const output = layer.getOutput(index);
        if (output != nullptr && is_real(output->getType())) return output->getType();
    }
    return {};
}

}  // namespace

void hold_types(nvinfer1::INetworkDefinition &network, nvinfer1::IBuilderConfig &config, bool is_preferred_only) {
    bool has_halves = false, has_bytes = false;
    const auto see = [&](const ITensor *tensor) {
        has_halves = has_halves || (tensor != nullptr && tensor->getType() == DataType::kHALF);
        has_bytes = has_bytes || (tensor != nullptr && tensor->getType() == DataType::kINT8);
    };
    for (std::int32_t index = 0; index < network.getNbInputs(); ++index) see(network.getInput(index));
    for (std::int32_t index = 0; index < network.getNbLayers(); ++index) {
        const ILayer &layer = *network.getLayer(index);
        for (std::int32_t output = 0; output < layer.getNbOutputs(); ++output) see(layer.getOutput(output));
    }
    // A network of f32 alone has one choice.
    if (!has_halves && !has_bytes) return;
    if (has_halves) config.setFlag(nvinfer1::BuilderFlag::kFP16);
    if (has_bytes) config.setFlag(nvinfer1::BuilderFlag::kINT8);
    config.setFlag(is_preferred_only ? nvinfer1::BuilderFlag::kPREFER_PRECISION_CONSTRAINTS
                                     : nvinfer1::BuilderFlag::kOBEY_PRECISION_CONSTRAINTS);
    for (std::int32_t index = 0; index < network.getNbLayers(); ++index) {
        ILayer &layer = *network.getLayer(index);
        const auto type = is_typed_itself(layer.getType()) ? std::nullopt : real_type(layer);
        if (!type) continue;
        // A plugin has inputs of several types, and computes in the one that its outputs are held to.
        if (layer.getType() != LayerType::kPLUGIN_V2) layer.setPrecision(*type);
        for (std::int32_t output = 0; output < layer.getNbOutputs(); ++output) {
            const ITensor *const made = layer.getOutput(output);
            if (made != nullptr && is_real(made->getType())) layer.setOutputType(output, made->getType());
        }
    }
}

}  // namespace moa::engine

#endif
