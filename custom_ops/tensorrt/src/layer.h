// What a plugin does with its node, whatever class of TensorRT it derives from.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "node.h"

namespace moa {

using Tensors = std::vector<nvinfer1::PluginTensorDesc>;

// The inputs with their smallest and with their largest shapes. TensorRT 8.6 asks for each new shape of a call too: then no size
// is open, and it promises nothing of the smallest and largest ones.
struct Range {
    Range(const nvinfer1::DynamicPluginTensorDesc *inputs, std::int32_t count);

    Tensors least, most;
};

class Layer {
public:
    // `is_built`: the node comes out of an engine, whose workspace does not change any more.
    Layer(Node node, bool is_built) : node_(std::move(node)), is_built_(is_built) {}

    // The copy has the node, and plans of its own.
    Layer(const Layer &other) : node_(other.node_), is_built_(other.is_built_) {}
    Layer &operator=(const Layer &) = delete;

    const Node &node() const { return node_; }

    // Proves the smallest and the largest shapes, and settles the workspace for all between them.
    void configure(const Range &range);

    // Takes and loads the kernels of the current context, where the element type is settled; nothing is loaded later.
    void attach();
    void detach();

    // Plans these shapes, unless they are planned.
    void prepare(const nvinfer1::PluginTensorDesc *inputs, std::int32_t count);

    // Puts the layer on `stream`. For prepared shapes it neither plans nor allocates anything.
    void enqueue(const nvinfer1::PluginTensorDesc *tensors, const void *const *inputs, void *const *outputs,
                 void *workspace, void *stream);

    std::uint64_t workspace_bytes() const { return node_.workspace_bytes(); }

private:
    struct Planned {
        moa_cuda_node described;
        Shapes shapes;
        // Bytes at the start of the workspace where `position_ids` is widened; 0 where it is int64.
        std::uint64_t positions_bytes;
        std::size_t positions_count;
        // Bytes behind those where the kernels write `topk_indices` before it is narrowed; 0 where nothing is.
        std::uint64_t indices_bytes;
        std::size_t indices_count;
        std::unique_ptr<Plan> plan;

        // What this plugin takes of the workspace; the kernels have the rest.
        std::uint64_t own_bytes() const { return positions_bytes + indices_bytes; }
    };

    void load(std::uint32_t element);
    Planned describe(const nvinfer1::PluginTensorDesc *inputs, std::int32_t count);
    const Planned &planned(const nvinfer1::PluginTensorDesc *inputs, std::int32_t count);
    std::uint64_t largest_workspace(const Range &range);

    Node node_;
    bool is_built_;
    // Positions of the inputs in the schema, once their number is known.
    std::vector<std::size_t> positions_;
    std::shared_ptr<Kernels> kernels_;
    std::uint32_t loaded_element_ = UINT32_MAX;
    std::vector<Planned> plans_;
};

}  // namespace moa
