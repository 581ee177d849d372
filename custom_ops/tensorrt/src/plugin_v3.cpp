// The operators as IPluginV3, for TensorRT 10.0 and newer.

#include "library.h"

#if !MOA_PLUGIN_V2

#include "failure.h"
#include "layer.h"

namespace moa {

namespace {

using namespace nvinfer1;

constexpr std::int32_t failed = -1;

// The one field of an engine's state.
constexpr const char *state_field = "state";

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
public:
    explicit Plugin(Layer layer) : layer_(std::move(layer)), identity_(layer_.node().identity()) {}
    Plugin(const Plugin &other) : Plugin(other.layer_) {}

    // IPluginV3

    IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
            case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore *>(this);
            case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild *>(this);
            case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime *>(this);
        }
        return nullptr;
    }

    Plugin *clone() noexcept override {
        return guarded<Plugin *>(nullptr, [&] { return new Plugin(*this); });
    }

    // IPluginV3OneCore

    const char *getPluginName() const noexcept override { return layer_.node().contract().name; }
    const char *getPluginVersion() const noexcept override { return contract::opset_version; }
    const char *getPluginNamespace() const noexcept override { return contract::domain; }

    // IPluginV3OneBuild

    std::int32_t getNbOutputs() const noexcept override { return layer_.node().output_count(); }

    std::int32_t getOutputDataTypes(DataType *outputs, std::int32_t output_count, const DataType *inputs,
                                    std::int32_t input_count) const noexcept override {
        return guarded(failed, [&] {
            layer_.node().positions(input_count);
            check_outputs(output_count);
            for (std::int32_t index = 0; index < output_count; ++index) {
                outputs[index] = layer_.node().output_type(static_cast<std::size_t>(index), inputs[0]);
            }
            return 0;
        });
    }

    std::int32_t getOutputShapes(const DimsExprs *inputs, std::int32_t input_count, const DimsExprs *,
                                 std::int32_t shape_input_count, DimsExprs *outputs, std::int32_t output_count,
                                 IExprBuilder &builder) noexcept override {
        return guarded(failed, [&] {
            if (shape_input_count != 0) throw Refusal(std::string(getPluginName()) + " has no shape inputs");
            check_outputs(output_count);
            layer_.node().shapes(inputs, input_count, outputs, builder);
            return 0;
        });
    }

    bool supportsFormatCombination(std::int32_t position, const DynamicPluginTensorDesc *tensors,
                                   std::int32_t input_count, std::int32_t output_count) noexcept override {
        return guarded(false, [&] {
            if (position < 0 || position >= input_count + output_count) return false;
            Tensors given;
            for (std::int32_t index = 0; index <= position; ++index) given.push_back(tensors[index].desc);
            return layer_.node().supports(given, input_count);
        });
    }

    std::int32_t configurePlugin(const DynamicPluginTensorDesc *inputs, std::int32_t input_count,
                                 const DynamicPluginTensorDesc *, std::int32_t output_count) noexcept override {
        return guarded(failed, [&] {
            check_outputs(output_count);
            layer_.configure(Range(inputs, input_count));
            return 0;
        });
    }

    std::size_t getWorkspaceSize(const DynamicPluginTensorDesc *, std::int32_t, const DynamicPluginTensorDesc *,
                                 std::int32_t) const noexcept override {
        return layer_.workspace_bytes();
    }

    const char *getTimingCacheID() noexcept override { return identity_.c_str(); }
    const char *getMetadataString() noexcept override { return identity_.c_str(); }

    // IPluginV3OneRuntime

    std::int32_t onShapeChange(const PluginTensorDesc *inputs, std::int32_t input_count, const PluginTensorDesc *,
                               std::int32_t output_count) noexcept override {
        return guarded(failed, [&] {
            check_outputs(output_count);
            layer_.prepare(inputs, input_count);
            return 0;
        });
    }

    std::int32_t enqueue(const PluginTensorDesc *inputs, const PluginTensorDesc *, const void *const *input_addresses,
                         void *const *output_addresses, void *workspace, cudaStream_t stream) noexcept override {
        return guarded(failed, [&] {
            layer_.enqueue(inputs, input_addresses, output_addresses, workspace, stream);
            return 0;
        });
    }

    IPluginV3 *attachToContext(IPluginResourceContext *) noexcept override {
        return guarded<IPluginV3 *>(nullptr, [&] {
            auto copy = std::make_unique<Plugin>(*this);
            copy->layer_.attach();
            return copy.release();
        });
    }

    const PluginFieldCollection *getFieldsToSerialize() noexcept override {
        return guarded<const PluginFieldCollection *>(nullptr, [&] {
            state_ = layer_.node().to_bytes();
            field_ = {state_field, state_.data(), PluginFieldType::kINT8, static_cast<std::int32_t>(state_.size())};
            fields_ = {1, &field_};
            return &fields_;
        });
    }

private:
    void check_outputs(std::int32_t count) const {
        if (count != getNbOutputs()) {
            throw Refusal(std::string(getPluginName()) + " has " + std::to_string(getNbOutputs()) +
                          " outputs, and TensorRT asks for " + std::to_string(count));
        }
    }

    Layer layer_;
    std::string identity_;
    std::vector<unsigned char> state_;
    PluginField field_;
    PluginFieldCollection fields_;
};

class Creator final : public IPluginCreatorV3One {
public:
    explicit Creator(std::size_t operator_index) : operator_index_(operator_index) {}

    IPluginV3 *createPlugin(const char *, const PluginFieldCollection *fields, TensorRTPhase phase) noexcept override {
        return guarded<IPluginV3 *>(nullptr, [&]() -> IPluginV3 * {
            if (phase == TensorRTPhase::kBUILD) {
                return new Plugin(Layer(Node::from_fields(operator_index_, fields), false));
            }
            const bool is_state = fields != nullptr && fields->nbFields == 1 && fields->fields != nullptr &&
                                  fields->fields[0].name != nullptr && fields->fields[0].length >= 0 &&
                                  fields->fields[0].type == PluginFieldType::kINT8 &&
                                  std::string(fields->fields[0].name) == state_field;
            if (!is_state) throw Refusal(std::string(getPluginName()) + ": the engine has no state of this plugin");
            const auto &field = fields->fields[0];
            const auto length = static_cast<std::size_t>(field.length);
            return new Plugin(Layer(Node::from_bytes(operator_index_, field.data, length), true));
        });
    }

    const PluginFieldCollection *getFieldNames() noexcept override {
        return guarded<const PluginFieldCollection *>(nullptr, [&] {
            const auto &names = field_names(operator_index_);
            fields_ = {static_cast<std::int32_t>(names.size()), names.data()};
            return &fields_;
        });
    }

    const char *getPluginName() const noexcept override { return contract::operators[operator_index_].name; }
    const char *getPluginVersion() const noexcept override { return contract::opset_version; }
    const char *getPluginNamespace() const noexcept override { return contract::domain; }

private:
    std::size_t operator_index_;
    PluginFieldCollection fields_;
};

}  // namespace

IPluginCreatorInterface *const *creators(std::int32_t &count) {
    static Creator all[] = {Creator(0), Creator(1), Creator(2)};
    static IPluginCreatorInterface *const list[] = {&all[0], &all[1], &all[2]};
    static_assert(contract::operators.count == 3);
    count = 3;
    return list;
}

}  // namespace moa

#endif
