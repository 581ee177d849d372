// The operators as IPluginV2DynamicExt, for TensorRT 8.6.

#include "library.h"

#if MOA_PLUGIN_V2

#include <cstring>

#include "failure.h"
#include "layer.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"

namespace moa {

namespace {

using namespace nvinfer1;

constexpr std::int32_t failed = -1;

class Plugin final : public IPluginV2DynamicExt {
public:
    explicit Plugin(Layer layer) : layer_(std::move(layer)) {}
    Plugin(const Plugin &other)
        : layer_(other.layer_), namespace_(other.namespace_), is_refused_(other.is_refused_) {}

    Plugin *clone() const noexcept override {
        return guarded<Plugin *>(nullptr, [&] { return new Plugin(*this); });
    }

    const char *getPluginType() const noexcept override { return layer_.node().contract().name; }
    const char *getPluginVersion() const noexcept override { return contract::opset_version; }
    // A registry that knows no namespace leaves ours, under which nodes look for the plugin.
    void setPluginNamespace(const char *name) noexcept override {
        guarded(false, [&] { return namespace_ = name == nullptr || *name == '\0' ? contract::domain : name, true; });
    }
    const char *getPluginNamespace() const noexcept override { return namespace_.c_str(); }

    std::int32_t getNbOutputs() const noexcept override { return layer_.node().output_count(); }

    DataType getOutputDataType(std::int32_t index, const DataType *inputs, std::int32_t) const noexcept override {
        return guarded(DataType::kFLOAT, [&] {
            check_output(index);
            return layer_.node().output_type(static_cast<std::size_t>(index), inputs[0]);
        });
    }

    DimsExprs getOutputDimensions(std::int32_t index, const DimsExprs *inputs, std::int32_t input_count,
                                  IExprBuilder &builder) noexcept override {
        DimsExprs none{};
        none.nbDims = -1;
        return guarded(none, [&] {
            check_output(index);
            DimsExprs outputs[max_outputs] = {};
            layer_.node().shapes(inputs, input_count, outputs, builder);
            return outputs[index];
        });
    }

    bool supportsFormatCombination(std::int32_t position, const PluginTensorDesc *tensors, std::int32_t input_count,
                                   std::int32_t output_count) noexcept override {
        return guarded(false, [&] {
            if (position < 0 || position >= input_count + output_count) return false;
            return layer_.node().supports(Tensors(tensors, tensors + position + 1), input_count);
        });
    }

    // This interface takes no refusal here: it is kept, and enqueue, which the builder times, fails with it.
    void configurePlugin(const DynamicPluginTensorDesc *inputs, std::int32_t input_count,
                         const DynamicPluginTensorDesc *, std::int32_t) noexcept override {
        is_refused_ = !guarded(false, [&] {
            layer_.configure(Range(inputs, input_count));
            return true;
        });
    }

    std::size_t getWorkspaceSize(const PluginTensorDesc *, std::int32_t, const PluginTensorDesc *,
                                 std::int32_t) const noexcept override {
        return layer_.workspace_bytes();
    }

    std::int32_t enqueue(const PluginTensorDesc *inputs, const PluginTensorDesc *, const void *const *input_addresses,
                         void *const *output_addresses, void *workspace, cudaStream_t stream) noexcept override {
        return guarded(failed, [&] {
            if (is_refused_) throw Refusal(std::string(getPluginType()) + " is enqueued though its shapes were refused");
            layer_.enqueue(inputs, input_addresses, output_addresses, workspace, stream);
            return 0;
        });
    }

    void attachToContext(cudnnContext *, cublasContext *, IGpuAllocator *) noexcept override {
        guarded(false, [&] { return layer_.attach(), true; });
    }
    void detachFromContext() noexcept override { layer_.detach(); }
    std::int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override { layer_.detach(); }
    void destroy() noexcept override { delete this; }

    std::size_t getSerializationSize() const noexcept override {
        return guarded(std::size_t{0}, [&] { return layer_.node().to_bytes().size(); });
    }
    void serialize(void *buffer) const noexcept override {
        guarded(false, [&] {
            const auto bytes = layer_.node().to_bytes();
            std::memcpy(buffer, bytes.data(), bytes.size());
            return true;
        });
    }

private:
    void check_output(std::int32_t index) const {
        if (index < 0 || index >= getNbOutputs()) {
            throw Refusal(std::string(getPluginType()) + " has no output " + std::to_string(index));
        }
    }

    Layer layer_;
    std::string namespace_ = contract::domain;
    bool is_refused_ = false;
};

class Creator final : public IPluginCreator {
public:
    explicit Creator(std::size_t operator_index) : operator_index_(operator_index) {}

    IPluginV2 *createPlugin(const char *, const PluginFieldCollection *fields) noexcept override {
        return guarded<IPluginV2 *>(nullptr, [&] {
            return new Plugin(Layer(Node::from_fields(operator_index_, fields), false));
        });
    }

    IPluginV2 *deserializePlugin(const char *, const void *bytes, std::size_t length) noexcept override {
        return guarded<IPluginV2 *>(nullptr, [&] {
            return new Plugin(Layer(Node::from_bytes(operator_index_, bytes, length), true));
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
    void setPluginNamespace(const char *name) noexcept override {
        guarded(false, [&] { return namespace_ = name == nullptr || *name == '\0' ? contract::domain : name, true; });
    }
    const char *getPluginNamespace() const noexcept override { return namespace_.c_str(); }

private:
    std::size_t operator_index_;
    std::string namespace_ = contract::domain;
    PluginFieldCollection fields_{};
};

}  // namespace

IPluginCreator *const *creators(std::int32_t &count) {
    static Creator all[] = {Creator(0), Creator(1), Creator(2)};
    static IPluginCreator *const list[] = {&all[0], &all[1], &all[2]};
    static_assert(contract::operators.count == 3);
    count = 3;
    return list;
}

}  // namespace moa

#endif
