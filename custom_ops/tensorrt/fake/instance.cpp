#include "instance.h"

#include <algorithm>
#include <deque>

namespace fake {

namespace {

using namespace nvinfer1;

// What the parser makes of attributes: only those that the creator announces.
struct Fields {
    Fields(const Node &node, const PluginFieldCollection *announced) {
        for (const Attribute &attribute : node.attributes) {
            for (std::int32_t index = 0; index < announced->nbFields; ++index) {
                if (attribute.name == announced->fields[index].name) add(attribute);
            }
        }
        collection = {static_cast<std::int32_t>(all.size()), all.data()};
    }

    void add(const Attribute &attribute) {
        if (attribute.type == 1) all.push_back({attribute.name.c_str(), &attribute.real, PluginFieldType::kFLOAT32, 1});
        if (attribute.type == 2) {
            integers.push_back(static_cast<std::int32_t>(attribute.integer));
            all.push_back({attribute.name.c_str(), &integers.back(), PluginFieldType::kINT32, 1});
        }
        if (attribute.type == 3) {
            const auto length = static_cast<std::int32_t>(attribute.text.size());
            all.push_back({attribute.name.c_str(), attribute.text.data(), PluginFieldType::kCHAR, length});
        }
    }

    std::deque<std::int32_t> integers;
    std::vector<PluginField> all;
    PluginFieldCollection collection;
};

std::string text_of(const Node &node, const char *name, const char *otherwise) {
    for (const Attribute &attribute : node.attributes) {
        if (attribute.name == name) return attribute.text;
    }
    return otherwise;
}

using Constant = decltype(std::declval<const IDimensionExpr &>().getConstantValue());

class Number final : public IDimensionExpr, public apiv::VDimensionExpr {
public:
    explicit Number(Constant value) : value(value) { this->mImpl = this; }
    bool isConstant() const noexcept override { return true; }
    Constant getConstantValue() const noexcept override { return value; }
#if NV_TENSORRT_MAJOR >= 10
    bool isSizeTensor() const noexcept override { return false; }
#endif

    Constant value;
};

// Expressions over shapes that are known.
class Numbers final : public IExprBuilder, public apiv::VExprBuilder {
public:
    Numbers() { this->mImpl = this; }
    const IDimensionExpr *constant(Constant value) noexcept override { return &all_.emplace_back(value); }
    const IDimensionExpr *operation(DimensionOperation operation, const IDimensionExpr &first,
                                    const IDimensionExpr &second) noexcept override {
        const Constant left = static_cast<const Number &>(first).value, right = static_cast<const Number &>(second).value;
        return constant(operation == DimensionOperation::kSUM ? left + right : left / right);
    }
#if NV_TENSORRT_MAJOR >= 10
    const IDimensionExpr *declareSizeTensor(std::int32_t, const IDimensionExpr &, const IDimensionExpr &) noexcept override {
        return nullptr;
    }
#endif
    std::vector<DimsExprs> shapes(const std::vector<Dims> &dims) {
        std::vector<DimsExprs> made(dims.size());
        for (std::size_t index = 0; index < dims.size(); ++index) {
            made[index].nbDims = dims[index].nbDims;
            for (std::int32_t axis = 0; axis < dims[index].nbDims; ++axis) {
                made[index].d[axis] = constant(dims[index].d[axis]);
            }
        }
        return made;
    }
    static Dims dims(const DimsExprs &shape) {
        Dims made{};
        made.nbDims = shape.nbDims;
        for (std::int32_t axis = 0; axis < shape.nbDims; ++axis) {
            made.d[axis] = static_cast<const Number *>(shape.d[axis])->value;
        }
        return made;
    }

private:
    std::deque<Number> all_;
};

DynamicPluginTensorDesc ranged(const Described &tensor) {
    DynamicPluginTensorDesc made{};
    made.desc = plain(tensor.type, tensor.most);
    for (std::int32_t axis = 0; axis < tensor.most.nbDims; ++axis) {
        if (tensor.least.d[axis] != tensor.most.d[axis]) made.desc.dims.d[axis] = -1;
    }
    made.min = tensor.least;
    made.max = tensor.most;
#if NV_TENSORRT_MAJOR >= 10
    made.opt = tensor.usual;
#endif
    return made;
}

std::vector<DynamicPluginTensorDesc> ranged(const std::vector<Described> &tensors) {
    std::vector<DynamicPluginTensorDesc> made;
    for (const Described &tensor : tensors) made.push_back(ranged(tensor));
    return made;
}

std::int32_t count(std::size_t size) { return static_cast<std::int32_t>(size); }

#if MOA_PLUGIN_V2

class OfV2 final : public Instance {
public:
    explicit OfV2(IPluginV2DynamicExt *plugin) : plugin_(plugin) {}
    ~OfV2() override { plugin_->destroy(); }

    std::vector<DataType> types(const std::vector<DataType> &inputs) const override {
        std::vector<DataType> found;
        for (std::int32_t index = 0; index < plugin_->getNbOutputs(); ++index) {
            found.push_back(plugin_->getOutputDataType(index, inputs.data(), count(inputs.size())));
        }
        return found;
    }
    // A network of 8.6 shows plugins f32 for every real type, and takes every real type of theirs as f32.
    std::vector<DataType> told_types(const std::vector<DataType> &inputs) const override {
        const auto shown = [](DataType type) { return type == DataType::kHALF ? DataType::kFLOAT : type; };
        std::vector<DataType> given = inputs;
        std::transform(given.begin(), given.end(), given.begin(), shown);
        std::vector<DataType> found = types(given);
        std::transform(found.begin(), found.end(), found.begin(), shown);
        return found;
    }
    IPluginV2 *plugin() const override { return plugin_; }
    std::vector<Dims> shapes(const std::vector<Dims> &inputs) override {
        Numbers numbers;
        const auto given = numbers.shapes(inputs);
        std::vector<Dims> found;
        for (std::int32_t index = 0; index < plugin_->getNbOutputs(); ++index) {
            const auto shape = plugin_->getOutputDimensions(index, given.data(), count(given.size()), numbers);
            if (shape.nbDims < 0) throw Refused("the plugin refuses the shapes of its inputs");
            found.push_back(Numbers::dims(shape));
        }
        return found;
    }
    std::size_t build(const std::vector<Described> &inputs, const std::vector<Described> &outputs) override {
        std::vector<PluginTensorDesc> all;
        for (const auto *tensors : {&inputs, &outputs}) {
            for (const Described &tensor : *tensors) all.push_back(plain(tensor.type, tensor.most));
        }
        for (std::size_t place = 0; place < all.size(); ++place) {
            if (!plugin_->supportsFormatCombination(count(place), all.data(), count(inputs.size()), count(outputs.size()))) {
                throw Refused("the plugin takes no format at place " + std::to_string(place));
            }
        }
        const auto in = ranged(inputs), out = ranged(outputs);
        plugin_->configurePlugin(in.data(), count(in.size()), out.data(), count(out.size()));
        return plugin_->getWorkspaceSize(all.data(), count(inputs.size()), all.data() + inputs.size(), count(outputs.size()));
    }
    std::string state() override {
        std::string bytes(plugin_->getSerializationSize(), '\0');
        plugin_->serialize(bytes.data());
        return bytes;
    }
    std::unique_ptr<Instance> attached() const override {
        auto *const copy = static_cast<IPluginV2DynamicExt *>(plugin_->clone());
        if (copy == nullptr || copy->initialize() != 0) throw Refused("the plugin does not start");
        copy->attachToContext(nullptr, nullptr, nullptr);
        return std::make_unique<OfV2>(copy);
    }
    bool enqueue(const std::vector<PluginTensorDesc> &inputs, const std::vector<PluginTensorDesc> &outputs,
                 const std::vector<const void *> &from, const std::vector<void *> &to, void *workspace,
                 cudaStream_t stream) override {
        const auto in = of_call(inputs), out = of_call(outputs);
        plugin_->configurePlugin(in.data(), count(in.size()), out.data(), count(out.size()));
        return plugin_->enqueue(inputs.data(), outputs.data(), from.data(), to.data(), workspace, stream) == 0;
    }

private:
    // As a context tells the shapes of a call: without their range.
    static std::vector<DynamicPluginTensorDesc> of_call(const std::vector<PluginTensorDesc> &tensors) {
        std::vector<DynamicPluginTensorDesc> made(tensors.size());
        for (std::size_t index = 0; index < tensors.size(); ++index) made[index].desc = tensors[index];
        return made;
    }

    IPluginV2DynamicExt *plugin_;
};

using Creator = IPluginCreator;

Creator *find(IPluginRegistry &registry, const Node &node) {
    return registry.getPluginCreator(node.op.c_str(), text_of(node, "plugin_version", "1").c_str(),
                                     text_of(node, "plugin_namespace", "").c_str());
}
std::unique_ptr<Instance> made(IPluginV2 *plugin) {
    if (plugin == nullptr) throw Refused("the creator makes no plugin");
    return std::make_unique<OfV2>(static_cast<IPluginV2DynamicExt *>(plugin));
}
std::unique_ptr<Instance> built(Creator &creator, const Node &node, const PluginFieldCollection &fields) {
    return made(creator.createPlugin(node.name.c_str(), &fields));
}
std::unique_ptr<Instance> restored(Creator &creator, const Node &node, const std::string &state) {
    return made(creator.deserializePlugin(node.name.c_str(), state.data(), state.size()));
}

#else

class OfV3 final : public Instance {
public:
    explicit OfV3(IPluginV3 *plugin)
        : plugin_(plugin),
          build_(static_cast<IPluginV3OneBuild *>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD))),
          run_(static_cast<IPluginV3OneRuntime *>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME))) {}

    std::vector<DataType> types(const std::vector<DataType> &inputs) const override {
        std::vector<DataType> found(static_cast<std::size_t>(build_->getNbOutputs()));
        if (build_->getOutputDataTypes(found.data(), count(found.size()), inputs.data(), count(inputs.size())) != 0) {
            throw Refused("the plugin refuses the types of its inputs");
        }
        return found;
    }
    std::vector<Dims> shapes(const std::vector<Dims> &inputs) override {
        Numbers numbers;
        const auto given = numbers.shapes(inputs);
        std::vector<DimsExprs> all(static_cast<std::size_t>(build_->getNbOutputs()));
        if (build_->getOutputShapes(given.data(), count(given.size()), nullptr, 0, all.data(), count(all.size()), numbers) != 0) {
            throw Refused("the plugin refuses the shapes of its inputs");
        }
        std::vector<Dims> found;
        for (const DimsExprs &shape : all) found.push_back(Numbers::dims(shape));
        return found;
    }
    std::size_t build(const std::vector<Described> &inputs, const std::vector<Described> &outputs) override {
        const auto in = ranged(inputs), out = ranged(outputs);
        auto all = in;
        all.insert(all.end(), out.begin(), out.end());
        for (std::size_t place = 0; place < all.size(); ++place) {
            if (!build_->supportsFormatCombination(count(place), all.data(), count(in.size()), count(out.size()))) {
                throw Refused("the plugin takes no format at place " + std::to_string(place));
            }
        }
        if (build_->configurePlugin(in.data(), count(in.size()), out.data(), count(out.size())) != 0) {
            throw Refused("the plugin refuses its shapes");
        }
        return build_->getWorkspaceSize(in.data(), count(in.size()), out.data(), count(out.size()));
    }
    std::string state() override {
        const auto *const fields = run_->getFieldsToSerialize();
        if (fields == nullptr || fields->nbFields != 1) throw Refused("the plugin has no state");
        return {static_cast<const char *>(fields->fields[0].data), static_cast<std::size_t>(fields->fields[0].length)};
    }
    std::unique_ptr<Instance> attached() const override {
        IPluginV3 *const copy = run_->attachToContext(nullptr);
        if (copy == nullptr) throw Refused("the plugin does not start");
        return std::make_unique<OfV3>(copy);
    }
    bool enqueue(const std::vector<PluginTensorDesc> &inputs, const std::vector<PluginTensorDesc> &outputs,
                 const std::vector<const void *> &from, const std::vector<void *> &to, void *workspace,
                 cudaStream_t stream) override {
        return run_->onShapeChange(inputs.data(), count(inputs.size()), outputs.data(), count(outputs.size())) == 0 &&
               run_->enqueue(inputs.data(), outputs.data(), from.data(), to.data(), workspace, stream) == 0;
    }

private:
    std::unique_ptr<IPluginV3> plugin_;
    IPluginV3OneBuild *build_;
    IPluginV3OneRuntime *run_;
};

using Creator = IPluginCreatorV3One;

Creator *find(IPluginRegistry &registry, const Node &node) {
    return static_cast<Creator *>(registry.getCreator(node.op.c_str(), text_of(node, "plugin_version", "1").c_str(),
                                                      text_of(node, "plugin_namespace", "").c_str()));
}
std::unique_ptr<Instance> made(IPluginV3 *plugin) {
    if (plugin == nullptr) throw Refused("the creator makes no plugin");
    return std::make_unique<OfV3>(plugin);
}
std::unique_ptr<Instance> built(Creator &creator, const Node &node, const PluginFieldCollection &fields) {
    return made(creator.createPlugin(node.name.c_str(), &fields, TensorRTPhase::kBUILD));
}
std::unique_ptr<Instance> restored(Creator &creator, const Node &node, const std::string &state) {
    const PluginField field("state", state.data(), PluginFieldType::kINT8, count(state.size()));
    const PluginFieldCollection fields{1, &field};
    return made(creator.createPlugin(node.name.c_str(), &fields, TensorRTPhase::kRUNTIME));
}

#endif

Creator &creator_of(IPluginRegistry &registry, const Node &node) {
    Creator *const found = find(registry, node);
    if (found == nullptr) throw Refused("getPluginCreator could not find plugin: " + node.op);
    return *found;
}

}  // namespace

PluginTensorDesc plain(DataType type, const Dims &dims) {
    PluginTensorDesc made{};
    made.dims = dims;
    made.type = type;
    made.format = TensorFormat::kLINEAR;
    made.scale = 1.0F;
    return made;
}

std::unique_ptr<Instance> Instance::of_node(IPluginRegistry &registry, const Node &node) {
    if (is_copy(node)) return cast_of(node);
    Creator &creator = creator_of(registry, node);
    const Fields fields(node, creator.getFieldNames());
    return built(creator, node, fields.collection);
}

std::unique_ptr<Instance> Instance::of_state(IPluginRegistry &registry, const Node &node, const std::string &state) {
    if (is_copy(node)) return cast_of(node);
    return restored(creator_of(registry, node), node, state);
}

}  // namespace fake
