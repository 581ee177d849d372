// The host's face for IPluginV2DynamicExt.

#include "expressions.h"

#if MOA_PLUGIN_V2

#include <dlfcn.h>

namespace host {

namespace {

using namespace nvinfer1;

IPluginCreator &creator(std::size_t index) {
    auto *list = reinterpret_cast<IPluginCreator *const *(*)(std::int32_t &)>(dlsym(library(), "getPluginCreators"));
    std::int32_t count = 0;
    auto *const *creators = list(count);
    CHECK(count == 3);
    return *creators[index];
}

class V2 final : public Plugin {
public:
    explicit V2(IPluginV2DynamicExt *plugin) : plugin_(plugin) {}

    std::string name() const override { return plugin_->getPluginType(); }
    std::string version() const override { return plugin_->getPluginVersion(); }
    std::string space() const override { return plugin_->getPluginNamespace(); }
    std::int32_t outputs() const override { return plugin_->getNbOutputs(); }

    std::optional<std::vector<DataType>> types(const std::vector<DataType> &inputs) const override {
        std::vector<DataType> found;
        for (std::int32_t index = 0; index < outputs(); ++index) {
            found.push_back(plugin_->getOutputDataType(index, inputs.data(), static_cast<std::int32_t>(inputs.size())));
        }
        return found;
    }

    std::optional<std::vector<std::string>> shapes(const std::vector<Sizes> &inputs) override {
        Expressions expressions;
        std::vector<DimsExprs> given;
        for (const auto &input : inputs) given.push_back(expressions.shape(input));
        std::vector<std::string> texts;
        for (std::int32_t index = 0; index < outputs(); ++index) {
            const auto count = static_cast<std::int32_t>(given.size());
            const auto shape = plugin_->getOutputDimensions(index, given.data(), count, expressions);
            if (shape.nbDims < 0) return {};
            texts.push_back(Expressions::text(shape));
        }
        return texts;
    }

    bool supports(std::int32_t position, const std::vector<PluginTensorDesc> &tensors, std::int32_t inputs) override {
        return plugin_->supportsFormatCombination(position, tensors.data(), inputs, outputs());
    }

    // The interface returns nothing: a refusal is in the log.
    bool configure(const std::vector<DataType> &types, const std::vector<Sizes> &least,
                   const std::vector<Sizes> &most) override {
        std::vector<DynamicPluginTensorDesc> given(types.size());
        for (std::size_t index = 0; index < types.size(); ++index) {
            Sizes open = most[index];
            for (std::size_t axis = 0; axis < open.size(); ++axis) open[axis] = least[index] == most[index] ? open[axis] : -1;
            given[index].desc = tensor(types[index], open);
            given[index].min = dims(least[index]);
            given[index].max = dims(most[index]);
        }
        return configured(given);
    }

    bool configured(const std::vector<DynamicPluginTensorDesc> &given) {
        const std::string before = taken_log();
        plugin_->configurePlugin(given.data(), static_cast<std::int32_t>(given.size()), nullptr, outputs());
        const std::string text = taken_log();
        logged_again(before + text);
        return text.empty();
    }

    std::size_t workspace() const override { return plugin_->getWorkspaceSize(nullptr, 0, nullptr, 0); }
    std::string identity() override { return ""; }

    std::vector<unsigned char> state() override {
        std::vector<unsigned char> bytes(plugin_->getSerializationSize());
        plugin_->serialize(bytes.data());
        return bytes;
    }

    std::unique_ptr<Plugin> clone() override { return std::make_unique<V2>(plugin_->clone()); }

    std::unique_ptr<Plugin> attached() override {
        auto made = std::make_unique<V2>(plugin_->clone());
        made->plugin_->initialize();
        made->plugin_->attachToContext(nullptr, nullptr, nullptr);
        return made;
    }

    // A context tells the shapes of a call, and leaves the range as it was made.
    bool shapes_change(const std::vector<DataType> &types, const std::vector<Sizes> &shapes) override {
        std::vector<DynamicPluginTensorDesc> given(types.size());
        for (std::size_t index = 0; index < types.size(); ++index) given[index].desc = tensor(types[index], shapes[index]);
        return configured(given);
    }

    bool enqueue(const std::vector<DataType> &types, const std::vector<Sizes> &shapes,
                 const std::vector<const void *> &inputs, const std::vector<void *> &outputs, void *workspace,
                 void *stream) override {
        std::vector<PluginTensorDesc> given;
        for (std::size_t index = 0; index < types.size(); ++index) given.push_back(tensor(types[index], shapes[index]));
        return plugin_->enqueue(given.data(), nullptr, inputs.data(), outputs.data(), workspace,
                                static_cast<cudaStream_t>(stream)) == 0;
    }

private:
    struct Destroy {
        void operator()(IPluginV2DynamicExt *plugin) const { plugin->destroy(); }
    };

    std::unique_ptr<IPluginV2DynamicExt, Destroy> plugin_;
};

std::unique_ptr<Plugin> wrapped(IPluginV2 *plugin) {
    return plugin == nullptr ? nullptr : std::make_unique<V2>(static_cast<IPluginV2DynamicExt *>(plugin));
}

}  // namespace

std::vector<std::string> creator_names() {
    std::vector<std::string> names;
    for (std::size_t index = 0; index < 3; ++index) {
        auto &one = creator(index);
        names.push_back(std::string(one.getPluginNamespace()) + "::" + one.getPluginName() + " " + one.getPluginVersion());
    }
    return names;
}

std::vector<std::string> creator_fields(std::size_t index) {
    const auto *fields = creator(index).getFieldNames();
    std::vector<std::string> names;
    for (std::int32_t field = 0; field < fields->nbFields; ++field) names.emplace_back(fields->fields[field].name);
    return names;
}

std::unique_ptr<Plugin> create(std::size_t index, const Fields &fields) {
    std::vector<PluginField> given;
    for (const auto &field : fields.all) {
        given.emplace_back(field.name.c_str(), field.data.data(), field.type, field.length);
    }
    const PluginFieldCollection collection{static_cast<std::int32_t>(given.size()), given.data()};
    return wrapped(creator(index).createPlugin("node", &collection));
}

std::unique_ptr<Plugin> create_from_nothing(std::size_t index) { return wrapped(creator(index).createPlugin("node", nullptr)); }

std::unique_ptr<Plugin> restore(std::size_t index, const std::vector<unsigned char> &state) {
    return wrapped(creator(index).deserializePlugin("node", state.data(), state.size()));
}

}  // namespace host

#endif
