// The host's face for IPluginV3.

#include "expressions.h"

#if !MOA_PLUGIN_V2

#include <dlfcn.h>

namespace host {

namespace {

using namespace nvinfer1;

IPluginCreatorV3One &creator(std::size_t index) {
    auto *list = reinterpret_cast<IPluginCreatorInterface *const *(*)(std::int32_t &)>(dlsym(library(), "getCreators"));
    std::int32_t count = 0;
    auto *const *creators = list(count);
    CHECK(count == 3);
    CHECK(std::string(creators[index]->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE");
    return *static_cast<IPluginCreatorV3One *>(creators[index]);
}

std::vector<DynamicPluginTensorDesc> dynamic(const std::vector<DataType> &types, const std::vector<Sizes> &least,
                                             const std::vector<Sizes> &most) {
    std::vector<DynamicPluginTensorDesc> made(types.size());
    for (std::size_t index = 0; index < types.size(); ++index) {
        Sizes open = least[index];
        for (std::size_t axis = 0; axis < open.size(); ++axis) open[axis] = least[index] == most[index] ? open[axis] : -1;
        made[index] = {tensor(types[index], open), dims(least[index]), dims(most[index]), dims(most[index])};
    }
    return made;
}

std::vector<PluginTensorDesc> concrete(const std::vector<DataType> &types, const std::vector<Sizes> &shapes) {
    std::vector<PluginTensorDesc> made;
    for (std::size_t index = 0; index < types.size(); ++index) made.push_back(tensor(types[index], shapes[index]));
    return made;
}

class V3 final : public Plugin {
public:
    explicit V3(IPluginV3 *plugin)
        : plugin_(plugin),
          core_(static_cast<IPluginV3OneCore *>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE))),
          build_(static_cast<IPluginV3OneBuild *>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD))),
          runtime_(static_cast<IPluginV3OneRuntime *>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME))) {
        CHECK(std::string(build_->getInterfaceInfo().kind) == "PLUGIN_V3ONE_BUILD" &&
              build_->getInterfaceInfo().major == 1);
        CHECK(std::string(runtime_->getInterfaceInfo().kind) == "PLUGIN_V3ONE_RUNTIME");
    }

    std::string name() const override { return core_->getPluginName(); }
    std::string version() const override { return core_->getPluginVersion(); }
    std::string space() const override { return core_->getPluginNamespace(); }
    std::int32_t outputs() const override { return build_->getNbOutputs(); }

    std::optional<std::vector<DataType>> types(const std::vector<DataType> &inputs) const override {
        std::vector<DataType> found(static_cast<std::size_t>(outputs()));
        const auto code = build_->getOutputDataTypes(found.data(), outputs(), inputs.data(),
                                                     static_cast<std::int32_t>(inputs.size()));
        if (code != 0) return {};
        return found;
    }

    std::optional<std::vector<std::string>> shapes(const std::vector<Sizes> &inputs) override {
        Expressions expressions;
        std::vector<DimsExprs> given, found(static_cast<std::size_t>(outputs()));
        for (const auto &input : inputs) given.push_back(expressions.shape(input));
        const auto count = static_cast<std::int32_t>(given.size());
        if (build_->getOutputShapes(given.data(), count, nullptr, 0, found.data(), outputs(), expressions) != 0) return {};
        std::vector<std::string> texts;
        for (const auto &shape : found) texts.push_back(Expressions::text(shape));
        return texts;
    }

    bool supports(std::int32_t position, const std::vector<PluginTensorDesc> &tensors, std::int32_t inputs) override {
        std::vector<DynamicPluginTensorDesc> given(tensors.size());
        for (std::size_t index = 0; index < tensors.size(); ++index) given[index].desc = tensors[index];
        return build_->supportsFormatCombination(position, given.data(), inputs, outputs());
    }

    bool configure(const std::vector<DataType> &types, const std::vector<Sizes> &least,
                   const std::vector<Sizes> &most) override {
        inputs_ = dynamic(types, least, most);
        return build_->configurePlugin(inputs_.data(), static_cast<std::int32_t>(inputs_.size()), nullptr,
                                       outputs()) == 0;
    }

    std::size_t workspace() const override {
        return build_->getWorkspaceSize(inputs_.data(), static_cast<std::int32_t>(inputs_.size()), nullptr, outputs());
    }
    std::string identity() override { return build_->getTimingCacheID(); }

    std::vector<unsigned char> state() override {
        const auto *fields = runtime_->getFieldsToSerialize();
        CHECK(fields != nullptr && fields->nbFields == 1);
        const auto &field = fields->fields[0];
        CHECK(std::string(field.name) == "state" && field.type == PluginFieldType::kINT8);
        const auto *start = static_cast<const unsigned char *>(field.data);
        return {start, start + field.length};
    }

    std::unique_ptr<Plugin> clone() override { return std::make_unique<V3>(plugin_->clone()); }

    std::unique_ptr<Plugin> attached() override {
        auto *made = runtime_->attachToContext(nullptr);
        CHECK(made != plugin_.get());
        return made == nullptr ? nullptr : std::make_unique<V3>(made);
    }

    bool shapes_change(const std::vector<DataType> &types, const std::vector<Sizes> &shapes) override {
        const auto given = concrete(types, shapes);
        return runtime_->onShapeChange(given.data(), static_cast<std::int32_t>(given.size()), nullptr, outputs()) == 0;
    }

    bool enqueue(const std::vector<DataType> &types, const std::vector<Sizes> &shapes,
                 const std::vector<const void *> &inputs, const std::vector<void *> &outputs, void *workspace,
                 void *stream) override {
        const auto given = concrete(types, shapes);
        return runtime_->enqueue(given.data(), nullptr, inputs.data(), outputs.data(), workspace,
                                 static_cast<cudaStream_t>(stream)) == 0;
    }

private:
    std::unique_ptr<IPluginV3> plugin_;
    IPluginV3OneCore *core_;
    IPluginV3OneBuild *build_;
    IPluginV3OneRuntime *runtime_;
    std::vector<DynamicPluginTensorDesc> inputs_;
};

std::unique_ptr<Plugin> wrapped(IPluginV3 *plugin) { return plugin == nullptr ? nullptr : std::make_unique<V3>(plugin); }

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
    return wrapped(creator(index).createPlugin("node", &collection, TensorRTPhase::kBUILD));
}

std::unique_ptr<Plugin> create_from_nothing(std::size_t index) {
    return wrapped(creator(index).createPlugin("node", nullptr, TensorRTPhase::kBUILD));
}

std::unique_ptr<Plugin> restore(std::size_t index, const std::vector<unsigned char> &state) {
    const auto length = static_cast<std::int32_t>(state.size());
    const PluginField field{"state", state.data(), PluginFieldType::kINT8, length};
    const PluginFieldCollection collection{1, &field};
    return wrapped(creator(index).createPlugin("node", &collection, TensorRTPhase::kRUNTIME));
}

}  // namespace host

#endif
