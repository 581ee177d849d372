#include "network.h"

#include <sstream>

namespace fake {

using namespace nvinfer1;

bool is_told(const std::string &word) { return number_told(word, 0) != 0; }

int number_told(const std::string &word, int otherwise) {
    const char *const all = std::getenv("MOA_FAKE_TENSORRT");
    std::istringstream words(all == nullptr ? "" : all);
    for (std::string one; std::getline(words, one, ',');) {
        if (one == word) return 1;
        if (one.rfind(word + "=", 0) == 0) return std::atoi(one.c_str() + word.size() + 1);
    }
    return otherwise;
}

DataType type_of(std::int32_t element) {
    switch (element) {
        case 1: return DataType::kFLOAT;
        case 10: return DataType::kHALF;
        case 6: return DataType::kINT32;
#if NV_TENSORRT_MAJOR >= 10
        case 7: return DataType::kINT64;
        case 16: return DataType::kBF16;
#else
        // The parser of 8.6 takes int64 as int32.
        case 7: return DataType::kINT32;
#endif
        default: throw Refused("ONNX's type " + std::to_string(element) + " is not supported");
    }
}

Dims dims_of(const std::vector<std::int64_t> &sizes) {
    Dims made{};
    made.nbDims = static_cast<std::int32_t>(sizes.size());
    if (made.nbDims > Dims::MAX_DIMS) throw Refused("a tensor has more than 8 dimensions");
    for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
        made.d[axis] = static_cast<std::remove_reference_t<decltype(made.d[0])>>(sizes[axis]);
    }
    return made;
}

Known Graph::known(const std::map<std::string, Dims> &inputs) const {
    Known found;
    for (const Value &constant : model.constants) {
        found[constant.name] = {type_of(constant.element), dims_of(constant.dims)};
    }
    for (const Value &input : model.inputs) found[input.name] = {type_of(input.element), inputs.at(input.name)};
    for (std::size_t index = 0; index < model.nodes.size(); ++index) {
        const Node &node = model.nodes[index];
        std::vector<DataType> types;
        std::vector<Dims> shapes;
        for (const std::string &input : node.inputs) {
            types.push_back(found.at(input).first);
            shapes.push_back(found.at(input).second);
        }
        const auto made_types = plugins[index]->types(types);
        const auto made_shapes = plugins[index]->shapes(shapes);
        for (std::size_t output = 0; output < node.outputs.size(); ++output) {
            found[node.outputs[output]] = {made_types.at(output), made_shapes.at(output)};
        }
    }
    return found;
}

namespace {

using TensorTable = Table<apiv::VTensor, Tensor>;
using LayerTable = Table<apiv::VLayer, Layer>;
using NetworkTable = Table<apiv::VNetworkDefinition, Network>;

const TensorTable &tensor_table() {
    static const TensorTable table =
        TensorTable()
            .on(&apiv::VTensor::getName, [](auto *face) -> const char * { return face->owner->name.c_str(); })
            .on(&apiv::VTensor::getDimensions, [](auto *face) { return face->owner->dims; })
            .on(&apiv::VTensor::getType, [](auto *face) { return face->owner->type; })
            .on(&apiv::VTensor::isShapeTensor, [](auto *) { return false; });
    return table;
}

const LayerTable &layer_table() {
    static const LayerTable table = [] {
        LayerTable made;
        made.on(&apiv::VLayer::getType, [](auto *face) {
                // What is no plugin plays a layer whose types TensorRT chooses.
                if (!face->owner->is_plugin) return face->owner->moves_alone ? LayerType::kSHUFFLE : LayerType::kELEMENTWISE;
#if MOA_PLUGIN_V2
                return LayerType::kPLUGIN_V2;
#else
                return LayerType::kPLUGIN_V3;
#endif
            })
            .on(&apiv::VLayer::getNbInputs, [](auto *face) { return static_cast<std::int32_t>(face->owner->inputs.size()); })
            .on(&apiv::VLayer::getNbOutputs, [](auto *face) { return static_cast<std::int32_t>(face->owner->outputs.size()); })
            .on(&apiv::VLayer::getInput, [](auto *face, std::int32_t index) -> ITensor * { return face->owner->inputs.at(static_cast<std::size_t>(index)); })
            .on(&apiv::VLayer::getOutput, [](auto *face, std::int32_t index) -> ITensor * { return face->owner->outputs.at(static_cast<std::size_t>(index)); });
#if NV_TENSORRT_MAJOR < 10
        made.on(&apiv::VLayer::setPrecision, [](auto *face, DataType type) { face->owner->precision = static_cast<std::int32_t>(type); })
            .on(&apiv::VLayer::setOutputType, [](auto *face, std::int32_t index, DataType type) {
                face->owner->output_types.at(static_cast<std::size_t>(index)) = static_cast<std::int32_t>(type);
            });
#endif
        return made;
    }();
    return table;
}

#if MOA_PLUGIN_V2
using PluginTable = Table<apiv::VPluginV2Layer, Layer>;

const PluginTable &plugin_table() {
    static const PluginTable table = PluginTable().on(
        &apiv::VPluginV2Layer::getPlugin, [](auto *face) -> IPluginV2 & { return *face->owner->instance.plugin(); });
    return table;
}
#endif

const NetworkTable &network_table() {
    static const NetworkTable table =
        NetworkTable()
            .on(&apiv::VNetworkDefinition::getNbInputs, [](auto *face) { return static_cast<std::int32_t>(face->owner->inputs.size()); })
            .on(&apiv::VNetworkDefinition::getInput, [](auto *face, std::int32_t index) -> ITensor * { return face->owner->inputs.at(static_cast<std::size_t>(index)); })
            .on(&apiv::VNetworkDefinition::getNbLayers, [](auto *face) { return static_cast<std::int32_t>(face->owner->layers.size()); })
            .on(&apiv::VNetworkDefinition::getLayer, [](auto *face, std::int32_t index) -> ILayer * { return &face->owner->layers.at(static_cast<std::size_t>(index)); });
    return table;
}

}  // namespace

Tensor::Tensor(std::string name, DataType type, Dims dims)
    : name(std::move(name)), type(type), dims(dims), face_(tensor_table().face(this)) {
    mImpl = face_.as_interface();
}

Layer::Layer(std::vector<Tensor *> inputs, std::vector<Tensor *> outputs, const Instance &instance, const Node &node)
    : inputs(std::move(inputs)), outputs(std::move(outputs)), instance(instance), is_plugin(!is_copy(node)), moves_alone(node.op == "Reshape"),
      output_types(this->outputs.size(), -1), face_(layer_table().face(this)) {
    mLayer = face_.as_interface();
#if MOA_PLUGIN_V2
    plugin_face_ = plugin_table().face(this);
    mImpl = plugin_face_.as_interface();
#endif
}

Network::Network(std::uint32_t flags) : flags(flags), face_(network_table().face(this)) { mImpl = face_.as_interface(); }

std::vector<Problem> Network::fill(const std::string &bytes, const std::string &folder) {
    using nvonnxparser::ErrorCode;
    graph.bytes = bytes;
    graph.folder = folder;
    if (!read_model(bytes, folder, graph.model)) {
        return {{ErrorCode::kMODEL_DESERIALIZE_FAILED, -1, "", "", "Failed to parse the ONNX model."}};
    }
    std::map<std::string, Tensor *> by_name;
    const auto add = [&](const std::string &name, DataType type, const Dims &dims) {
        return by_name[name] = &tensors.emplace_back(name, type, dims);
    };
    for (const Value &input : graph.model.inputs) inputs.push_back(add(input.name, type_of(input.element), dims_of(input.dims)));
    for (const Value &constant : graph.model.constants) add(constant.name, type_of(constant.element), dims_of(constant.dims));
    std::vector<Problem> problems;
    for (std::size_t index = 0; index < graph.model.nodes.size(); ++index) {
        const Node &node = graph.model.nodes[index];
        std::vector<Tensor *> from, to;
        try {
            graph.plugins.push_back(is_told("forget") ? throw Refused("getPluginCreator could not find plugin: " + node.op)
                                                      : Instance::of_node(registry(), node));
            std::vector<DataType> types;
            for (const std::string &input : node.inputs) {
                const auto found = by_name.find(input);
                if (found == by_name.end()) throw Refused("the input " + input + " is unknown");
                from.push_back(found->second);
                types.push_back(found->second->type);
            }
            const auto made = graph.plugins.back()->told_types(types);
            for (std::size_t output = 0; output < node.outputs.size(); ++output) {
                to.push_back(add(node.outputs[output], made.at(output), Dims{}));
            }
            layers.emplace_back(from, to, *graph.plugins.back(), node);
        } catch (const Refused &refused) {
            problems.push_back({ErrorCode::kUNSUPPORTED_NODE, static_cast<std::int32_t>(index), node.name, node.op, refused.what()});
        }
    }
    for (const Value &output : graph.model.outputs) {
        const auto found = by_name.find(output.name);
        if (found != by_name.end()) found->second->type = type_of(output.element);
    }
    return problems;
}

}  // namespace fake
