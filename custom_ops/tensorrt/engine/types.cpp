// The types of 8.6's networks, in which TensorRT chooses the types of layers itself unless it is told.

#include "build.h"

#if NV_TENSORRT_MAJOR >= 10

// From 10 on the network itself is typed.
void moa::engine::hold_types(nvinfer1::INetworkDefinition &, nvinfer1::IBuilderConfig &, bool) {}

#else

#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "contract.h"

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

// Layers that move values and compute none. They are left to TensorRT: 8.6.0 finds no implementation of layers that it
// fuses where such a one among them is held to a type.
bool moves_alone(LayerType type) {
    switch (type) {
        case LayerType::kSHUFFLE:
        case LayerType::kGATHER:
        case LayerType::kSLICE:
        case LayerType::kCONCATENATION: return true;
        default: return false;
    }
}

// The operator of ours that a layer is; NULL where it is something else.
const nvinfer1::IPluginV2DynamicExt *ours(ILayer &layer) {
    if (layer.getType() != LayerType::kPLUGIN_V2) return nullptr;
    nvinfer1::IPluginV2 &plugin = static_cast<nvinfer1::IPluginV2Layer &>(layer).getPlugin();
    const bool is_ours = std::strcmp(plugin.getPluginNamespace(), contract::domain) == 0;
    return is_ours ? static_cast<const nvinfer1::IPluginV2DynamicExt *>(&plugin) : nullptr;
}

// The types that tensors have in the model. A network says f32 of every real output of a plugin but those that it
// returns, and of what is computed from one.
class Types {
public:
    DataType of(const ITensor &tensor) const {
        const auto found = known_.find(&tensor);
        return found == known_.end() ? tensor.getType() : found->second;
    }

    // The types of the outputs of `layer`, whose inputs are known; the type that it computes in, if that is real.
    std::optional<DataType> learn(ILayer &layer) {
        if (const auto *const plugin = ours(layer)) {
            learn(layer, *plugin);
            return {};
        }
        const auto type = is_typed_itself(layer.getType()) ? std::nullopt : computed(layer);
        if (!type) return {};
        for (std::int32_t index = 0; index < layer.getNbOutputs(); ++index) {
            const ITensor *const output = layer.getOutput(index);
            if (output != nullptr && is_real(output->getType())) known_[output] = *type;
        }
        return type;
    }

private:
    void learn(const ILayer &layer, const nvinfer1::IPluginV2DynamicExt &plugin) {
        std::vector<DataType> inputs;
        for (std::int32_t index = 0; index < layer.getNbInputs(); ++index) {
            const ITensor *const input = layer.getInput(index);
            inputs.push_back(input == nullptr ? DataType::kFLOAT : of(*input));
        }
        for (std::int32_t index = 0; index < layer.getNbOutputs(); ++index) {
            known_[layer.getOutput(index)] = plugin.getOutputDataType(index, inputs.data(), layer.getNbInputs());
        }
    }

    // That of its first real input, else of its first real output.
    std::optional<DataType> computed(const ILayer &layer) const {
        for (std::int32_t index = 0; index < layer.getNbInputs(); ++index) {
            const ITensor *const input = layer.getInput(index);
            if (input != nullptr && is_real(of(*input))) return of(*input);
        }
        for (std::int32_t index = 0; index < layer.getNbOutputs(); ++index) {
            const ITensor *const output = layer.getOutput(index);
            if (output != nullptr && is_real(output->getType())) return output->getType();
        }
        return {};
    }

    std::map<const ITensor *, DataType> known_;
};

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
    Types types;
    for (std::int32_t index = 0; index < network.getNbLayers(); ++index) {
        ILayer &layer = *network.getLayer(index);
        const bool is_plugin = layer.getType() == LayerType::kPLUGIN_V2;
        const auto type = types.learn(layer);
        if (moves_alone(layer.getType()) || !(type || is_plugin)) continue;
        // A plugin has inputs of several types, and computes in the one that its outputs are held to.
        if (!is_plugin) layer.setPrecision(*type);
        for (std::int32_t output = 0; output < layer.getNbOutputs(); ++output) {
            const ITensor *const made = layer.getOutput(output);
            if (made != nullptr && is_real(made->getType())) layer.setOutputType(output, types.of(*made));
        }
    }
}

}  // namespace moa::engine

#endif
