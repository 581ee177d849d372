// One node of ours: its operator, its attributes, and which inputs and outputs it has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "contract.h"
#include "moa_cuda.h"
#include "nvinfer.h"

namespace moa {

constexpr std::size_t max_inputs = 16;
constexpr std::size_t max_outputs = 8;

// What an attribute is before it was read; none of the operators' attributes is negative.
constexpr std::int32_t undecided = -1;

class Node {
public:
    // Reads and checks the attributes of a node as ONNX parsers hand them over; throws Refusal.
    static Node from_fields(std::size_t operator_index, const nvinfer1::PluginFieldCollection *fields);

    // Reads what `to_bytes` wrote; throws Refusal for everything else.
    static Node from_bytes(std::size_t operator_index, const void *bytes, std::size_t length);
    std::vector<unsigned char> to_bytes() const;

    const contract::Operator &contract() const { return contract::operators[operator_index_]; }
    std::size_t operator_index() const { return operator_index_; }
    std::int32_t output_count() const { return output_count_; }

    // The schema's position of each of a node's `count` inputs; throws Refusal where it cannot have as many.
    std::vector<std::size_t> positions(std::int32_t count) const;

    // Type of output `index` where hidden_states has type `activation`; TensorRT 8.6, which has no int64, takes int32.
    nvinfer1::DataType output_type(std::size_t index, nvinfer1::DataType activation) const;

    // The output that the kernels write as int64 and TensorRT takes as int32; `undecided` where the node has none.
    std::int32_t narrowed_output() const;

    // Whether the last of `tensors`, inputs and then outputs, may have its type and format beside those before it.
    bool supports(const std::vector<nvinfer1::PluginTensorDesc> &tensors, std::int32_t input_count) const;

    // Shapes of the outputs.
    void shapes(const nvinfer1::DimsExprs *inputs, std::int32_t input_count, nvinfer1::DimsExprs *outputs,
                nvinfer1::IExprBuilder &builder) const;

    // The node as the kernels take it; throws Refusal where they do not know `activation`.
    moa_cuda_node kernel_node(nvinfer1::DataType activation) const;

    // Every attribute in words, and the version of the kernels' interface: equal texts, equal behaviour.
    std::string identity() const;

    // What was settled when the engine was built: inputs, and element type of the kernels; 0 and `undecided` before.
    std::int32_t input_count() const { return input_count_; }
    std::int32_t element() const { return element_; }
    void settle(std::int32_t input_count, std::uint32_t element) {
        input_count_ = input_count;
        element_ = static_cast<std::int32_t>(element);
    }

    // Bytes of workspace that TensorRT was asked for, and the largest of several askings.
    std::uint64_t workspace_bytes() const { return workspace_bytes_; }
    void grant_workspace(std::uint64_t bytes) { workspace_bytes_ = bytes > workspace_bytes_ ? bytes : workspace_bytes_; }

private:
    explicit Node(std::size_t operator_index) : operator_index_(operator_index) {}

    void set(const contract::Attribute &attribute, const nvinfer1::PluginField &field);
    void check() const;
    void check_presence() const;
    std::int32_t &integer(const std::string &name);
    std::int32_t &text(const std::string &name);

    std::size_t operator_index_;
    std::int32_t top_k_ = undecided;
    std::int32_t kv_num_heads_ = undecided;
    std::int32_t causal_ = undecided;
    std::int32_t skip_padded_queries_ = undecided;
    std::int32_t gated_ = undecided;
    std::int32_t gate_mode_ = undecided;
    std::int32_t activation_ = undecided;
    std::int32_t attention_mode_ = undecided;
    float scale_ = 0.0F;
    bool has_scale_ = false;
    // Bit i: input i of the schema is there. 0: the first ones are, as many as the node has.
    std::int32_t present_inputs_ = 0;
    std::int32_t output_count_ = 0;
    std::int32_t input_count_ = 0;
    std::int32_t element_ = undecided;
    std::uint64_t workspace_bytes_ = 0;
};

// The names of the fields that a creator announces.
const std::vector<nvinfer1::PluginField> &field_names(std::size_t operator_index);

}  // namespace moa
