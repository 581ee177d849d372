// A plugin of a node, behind one face for both interfaces.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "headers.h"
#include "model.h"

namespace fake {

struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Described {
    nvinfer1::DataType type;
    nvinfer1::Dims least, usual, most;
};

class Instance {
public:
    virtual ~Instance() = default;

    // Throw Refused where the registry has no such plugin, or it refuses.
    static std::unique_ptr<Instance> of_node(nvinfer1::IPluginRegistry &registry, const Node &node);
    static std::unique_ptr<Instance> of_state(nvinfer1::IPluginRegistry &registry, const Node &node,
                                              const std::string &state);

    virtual std::vector<nvinfer1::DataType> types(const std::vector<nvinfer1::DataType> &inputs) const = 0;
    // Types of the outputs as a network tells them.
    virtual std::vector<nvinfer1::DataType> told_types(const std::vector<nvinfer1::DataType> &inputs) const { return types(inputs); }
#if MOA_PLUGIN_V2
    // NULL: it is no plugin.
    virtual nvinfer1::IPluginV2 *plugin() const { return nullptr; }
#endif
    virtual std::vector<nvinfer1::Dims> shapes(const std::vector<nvinfer1::Dims> &inputs) = 0;
    // Asks for formats and configures; bytes of workspace.
    virtual std::size_t build(const std::vector<Described> &inputs, const std::vector<Described> &outputs) = 0;
    virtual std::string state() = 0;
    virtual std::unique_ptr<Instance> attached() const = 0;
    virtual bool enqueue(const std::vector<nvinfer1::PluginTensorDesc> &inputs,
                         const std::vector<nvinfer1::PluginTensorDesc> &outputs, const std::vector<const void *> &from,
                         const std::vector<void *> &to, void *workspace, cudaStream_t stream) = 0;
};

// ONNX's Cast, which needs no plugin, and Reshape, which plays one.
inline bool is_copy(const Node &node) { return node.op == "Cast" || node.op == "Reshape"; }
std::unique_ptr<Instance> cast_of(const Node &node);

nvinfer1::PluginTensorDesc plain(nvinfer1::DataType type, const nvinfer1::Dims &dims);

}  // namespace fake
