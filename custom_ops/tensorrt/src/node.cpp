#include "node.h"

#include <cmath>
#include <cstring>

#include "failure.h"

namespace moa {

namespace {

using contract::Element;
using contract::Kind;
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// Attributes that a parser reads for itself.
constexpr const char *of_parsers[] = {contract::plugin_version, contract::plugin_namespace,
                                      "tensorrt_plugin_shape_input_indices"};

const char *kind_name(Kind kind) {
    return kind == Kind::integer ? "INT" : kind == Kind::real ? "FLOAT" : "STRING";
}

[[noreturn]] void refuse(const std::string &where, const std::string &what) { throw Refusal(where + ": " + what); }

std::int32_t one_integer(const std::string &where, const PluginField &field) {
    std::int64_t value = 0;
    if (field.data == nullptr || field.length != 1) refuse(where, "an INT is expected, found another length");
    if (field.type == PluginFieldType::kINT32) {
        std::int32_t narrow = 0;
        std::memcpy(&narrow, field.data, sizeof narrow);
        value = narrow;
#if NV_TENSORRT_MAJOR >= 10
    } else if (field.type == PluginFieldType::kINT64) {
        std::memcpy(&value, field.data, sizeof value);
#endif
    } else {
        refuse(where, "an INT is expected, found another type");
    }
    if (value < 0 || value > INT32_MAX) refuse(where, "must be between 0 and 2147483647, found " + std::to_string(value));
    return static_cast<std::int32_t>(value);
}

float one_real(const std::string &where, const PluginField &field) {
    float value = 0.0F;
    if (field.data == nullptr || field.length != 1 || field.type != PluginFieldType::kFLOAT32) {
        refuse(where, "a FLOAT is expected, found another type or length");
    }
    std::memcpy(&value, field.data, sizeof value);
    if (!std::isfinite(value)) refuse(where, "must be finite, found " + std::to_string(value));
    return value;
}

// Parsers give the length; whether a zero is counted differs.
std::string one_text(const std::string &where, const PluginField &field) {
    constexpr std::int32_t longest = 64;
    const bool has_text = field.data != nullptr || field.length == 0;
    if (!has_text || field.length < 0 || field.length > longest || field.type != PluginFieldType::kCHAR) {
        refuse(where, "a STRING is expected, found another type or length");
    }
    if (field.length == 0) return "";
    std::string text(static_cast<const char *>(field.data), static_cast<std::size_t>(field.length));
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
}

std::int32_t one_of(const std::string &where, const contract::List<const char *> &known, const std::string &found) {
    std::string names;
    for (std::size_t index = 0; index < known.count; ++index) {
        if (found == known[index]) return static_cast<std::int32_t>(index);
        names += (index == 0 ? "" : ", ") + std::string(known[index]);
    }
    refuse(where, "must be one of " + names + ", found \"" + found + "\"");
}

// Those before the first that is int64, `topk_indices`.
std::int32_t default_output_count(const contract::Operator &contract) {
    std::int32_t count = 0;
    for (const auto &output : contract.outputs) {
        if (output.element == Element::int64) break;
        ++count;
    }
    return count;
}

}  // namespace

std::int32_t &Node::integer(const std::string &name) {
    if (name == "top_k") return top_k_;
    if (name == "kv_num_heads") return kv_num_heads_;
    if (name == "causal") return causal_;
    if (name == "skip_padded_queries") return skip_padded_queries_;
    if (name == "gated") return gated_;
    throw Refusal("the contract has an attribute that this library does not know: " + name);
}

std::int32_t &Node::text(const std::string &name) {
    if (name == "gate_mode") return gate_mode_;
    if (name == "activation") return activation_;
    if (name == "attention_mode") return attention_mode_;
    throw Refusal("the contract has an attribute that this library does not know: " + name);
}

void Node::set(const contract::Attribute &attribute, const PluginField &field) {
    const std::string where = std::string(contract().name) + ": attribute `" + attribute.name + "`";
    switch (attribute.kind) {
        case Kind::integer: integer(attribute.name) = one_integer(where, field); break;
        case Kind::real:
            scale_ = one_real(where, field);
            has_scale_ = true;
            break;
        case Kind::text: {
            std::int32_t &place = text(attribute.name);
            const auto &known = &place == &gate_mode_    ? contract::gate_modes
                                : &place == &activation_ ? contract::activations
                                                         : contract::attention_modes;
            place = one_of(where, known, one_text(where, field));
            break;
        }
    }
}

Node Node::from_fields(std::size_t operator_index, const nvinfer1::PluginFieldCollection *fields) {
    Node node(operator_index);
    const std::string name = node.contract().name;
    if (fields == nullptr || fields->nbFields < 0 || (fields->nbFields > 0 && fields->fields == nullptr)) {
        throw Refusal(name + ": there are no fields");
    }
    for (std::int32_t index = 0; index < fields->nbFields; ++index) {
        const PluginField &field = fields->fields[index];
        const std::string given = field.name == nullptr ? "" : field.name;
        const std::string where = name + ": attribute `" + given + "`";
        bool known = false;
        for (const char *other : of_parsers) known = known || given == other;
        for (const auto &attribute : node.contract().attributes) {
            if (given != attribute.name) continue;
            node.set(attribute, field);
            known = true;
        }
        if (given == contract::present_inputs) {
            node.present_inputs_ = one_integer(where, field);
            known = true;
        } else if (given == contract::output_count) {
            node.output_count_ = one_integer(where, field);
            known = true;
        }
        if (!known) throw Refusal(where + " is unknown");
    }
    if (node.output_count_ == 0) node.output_count_ = default_output_count(node.contract());
    node.check();
    return node;
}

// Every attribute of the operator was read, and no value is impossible whatever the shapes are.
void Node::check() const {
    const std::string name = contract().name;
    const auto &expected = contract().attributes;
    for (const auto &attribute : expected) {
        const std::string given = attribute.name;
        const bool missing = attribute.kind == Kind::integer ? const_cast<Node *>(this)->integer(given) == undecided
                             : attribute.kind == Kind::real  ? !has_scale_
                                                             : const_cast<Node *>(this)->text(given) == undecided;
        if (missing) {
            throw Refusal(name + ": attribute `" + given + "` of type " + kind_name(attribute.kind) + " is missing");
        }
    }
    const auto at_least_one = [&](const char *what, std::int32_t value) {
        if (value == 0) throw Refusal(name + ": attribute `" + what + "` must be at least 1, found 0");
    };
    const auto flag = [&](const char *what, std::int32_t value) {
        if (value > 1) {
            throw Refusal(name + ": attribute `" + what + "` must be 0 or 1, found " + std::to_string(value));
        }
    };
    at_least_one("top_k", top_k_);
    at_least_one("kv_num_heads", kv_num_heads_);
    flag("causal", causal_);
    flag("skip_padded_queries", skip_padded_queries_);
    flag("gated", gated_);
    if (attention_mode_ > MOA_CUDA_SOFTMAX && causal_ == 0) {
        throw Refusal(name + ": attribute `attention_mode` is stick_breaking, which needs `causal` = 1");
    }
    check_presence();
}

void Node::check_presence() const {
    const std::string name = contract().name;
    const auto outputs = static_cast<std::int32_t>(contract().outputs.count);
    if (output_count_ < 1 || output_count_ > outputs) {
        throw Refusal(name + ": attribute `" + contract::output_count + "` must be between 1 and " +
                      std::to_string(outputs) + ", found " + std::to_string(output_count_));
    }
    if (present_inputs_ == 0) return;
    if (present_inputs_ >= std::int32_t{1} << contract().inputs.count) {
        throw Refusal(name + ": attribute `" + contract::present_inputs + "` names inputs that the operator does not have");
    }
    for (std::size_t index = 0; index < contract().inputs.count; ++index) {
        const auto &input = contract().inputs[index];
        if (!input.optional && (present_inputs_ >> index & 1) == 0) {
            throw Refusal(name + ": attribute `" + contract::present_inputs + "` lacks `" + input.name + "`");
        }
    }
}

std::vector<std::size_t> Node::positions(std::int32_t count) const {
    const auto &inputs = contract().inputs;
    std::vector<std::size_t> found;
    for (std::size_t index = 0; index < inputs.count; ++index) {
        const bool given = present_inputs_ == 0 ? static_cast<std::int32_t>(index) < count
                                                : (present_inputs_ >> index & 1) != 0;
        if (given) found.push_back(index);
    }
    std::size_t required = 0;
    for (const auto &input : inputs) required += input.optional ? 0 : 1;
    if (count < 0 || found.size() != static_cast<std::size_t>(count) || found.size() < required) {
        throw Refusal(std::string(contract().name) + ": " + std::to_string(count) +
                      " inputs do not fit the operator and the attribute `" + contract::present_inputs + "`");
    }
    if (operator_index_ == MOA_CUDA_SELF_ATTENTION) {
        const auto together = [&](std::size_t first, std::size_t last) {
            std::size_t here = 0;
            for (const std::size_t position : found) here += position >= first && position <= last ? 1 : 0;
            if (here != 0 && here != last - first + 1) {
                throw Refusal(std::string(contract().name) + ": `" + inputs[first].name + "` to `" + inputs[last].name +
                              "` are given together or not at all");
            }
        };
        together(contract::self_attention::past_key, contract::self_attention::past_value);
        together(contract::self_attention::cos_cache, contract::self_attention::position_ids);
    }
    return found;
}

DataType Node::output_type(std::size_t index, DataType activation) const {
    switch (contract().outputs[index].element) {
        case Element::activation: return activation;
        case Element::float32: return DataType::kFLOAT;
#if !MOA_PLUGIN_V2
        case Element::int64: return DataType::kINT64;
#endif
        default: return DataType::kINT32;
    }
}

std::int32_t Node::narrowed_output() const {
    const std::int32_t wide = default_output_count(contract());
    return MOA_PLUGIN_V2 != 0 && wide < output_count_ ? wide : undecided;
}

bool Node::supports(const std::vector<nvinfer1::PluginTensorDesc> &tensors, std::int32_t input_count) const {
    if (tensors.empty() || tensors.back().format != nvinfer1::TensorFormat::kLINEAR) return false;
    const DataType activation = tensors.front().type;
    const DataType type = tensors.back().type;
    const std::size_t index = tensors.size() - 1;
    const auto inputs = positions(input_count);
    if (index >= inputs.size()) {
        const std::size_t output = index - inputs.size();
        return output < static_cast<std::size_t>(output_count_) && type == output_type(output, activation);
    }
    switch (contract().inputs[inputs[index]].element) {
        case Element::activation:
        case Element::weight:
#if NV_TENSORRT_MAJOR >= 10
            if (activation == DataType::kBF16) return type == activation;
#endif
            return (activation == DataType::kFLOAT || activation == DataType::kHALF) && type == activation;
        case Element::float32: return type == DataType::kFLOAT;
        case Element::int32: return type == DataType::kINT32;
        case Element::int64:
            // A parser of TensorRT 8.6 narrows int64 inputs to int32; they are widened before the kernels run.
#if NV_TENSORRT_MAJOR >= 10
            if (type == DataType::kINT64) return true;
#endif
            return type == DataType::kINT32;
    }
    return false;
}

moa_cuda_node Node::kernel_node(DataType activation) const {
    moa_cuda_node node{};
    node.struct_size = sizeof node;
    node.operator_id = static_cast<std::uint32_t>(operator_index_);
    switch (activation) {
        case DataType::kFLOAT: node.element = MOA_CUDA_F32; break;
        case DataType::kHALF: node.element = MOA_CUDA_F16; break;
#if NV_TENSORRT_MAJOR >= 10
        case DataType::kBF16: node.element = MOA_CUDA_BF16; break;
#endif
        default: throw Refusal(std::string(contract().name) + ": `hidden_states` must be fp32, fp16 or bf16");
    }
    const auto number = [](std::int32_t value) { return value == undecided ? 0U : static_cast<std::uint32_t>(value); };
    node.top_k = number(top_k_);
    node.kv_num_heads = number(kv_num_heads_);
    node.gate_mode = number(gate_mode_);
    node.activation = number(activation_);
    node.attention_mode = number(attention_mode_);
    node.causal = number(causal_);
    node.skip_padded_queries = number(skip_padded_queries_);
    node.gated = number(gated_);
    node.scale = scale_;
    return node;
}

std::string Node::identity() const {
    std::uint32_t scale_bits = 0;
    std::memcpy(&scale_bits, &scale_, sizeof scale_bits);
    std::string text = contract().name;
    const auto add = [&](const char *name, std::int64_t value) {
        text += std::string(";") + name + "=" + std::to_string(value);
    };
    add("top_k", top_k_);
    add("kv_num_heads", kv_num_heads_);
    add("causal", causal_);
    add("skip_padded_queries", skip_padded_queries_);
    add("gated", gated_);
    add("gate_mode", gate_mode_);
    add("activation", activation_);
    add("attention_mode", attention_mode_);
    add("scale_bits", scale_bits);
    add(contract::present_inputs, present_inputs_);
    add(contract::output_count, output_count_);
    add("kernel_abi", MOA_CUDA_ABI_VERSION);
    return text;
}

const std::vector<PluginField> &field_names(std::size_t operator_index) {
    static const std::vector<std::vector<PluginField>> all = [] {
        std::vector<std::vector<PluginField>> lists;
        for (const auto &contract : contract::operators) {
            auto &list = lists.emplace_back();
            for (const auto &attribute : contract.attributes) {
                const auto type = attribute.kind == Kind::integer ? PluginFieldType::kINT32
                                  : attribute.kind == Kind::real  ? PluginFieldType::kFLOAT32
                                                                  : PluginFieldType::kCHAR;
                list.emplace_back(attribute.name, nullptr, type, attribute.kind == Kind::text ? 0 : 1);
            }
            list.emplace_back(contract::present_inputs, nullptr, PluginFieldType::kINT32, 1);
            list.emplace_back(contract::output_count, nullptr, PluginFieldType::kINT32, 1);
        }
        return lists;
    }();
    return all.at(operator_index);
}

}  // namespace moa
