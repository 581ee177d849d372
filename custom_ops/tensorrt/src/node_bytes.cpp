// A node as bytes: the state that an engine keeps.
//
// Layout, little-endian: magic, version, length of all of it, kernel ABI, operator, the attributes, workspace, and a
// CRC-32 of everything before. An engine file is untrusted, so each value is checked as those of a parser are.

#include <cmath>
#include <cstring>

#include "failure.h"
#include "node.h"

namespace moa {

namespace {

constexpr char magic[4] = {'M', 'o', 'A', 'p'};
constexpr std::uint32_t version = 2;

std::uint32_t checksum(const unsigned char *bytes, std::size_t length) {
    std::uint32_t crc = 0xFFFFFFFFU;
    for (std::size_t index = 0; index < length; ++index) {
        crc ^= bytes[index];
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1U ? 0xEDB88320U : 0U);
    }
    return ~crc;
}

struct Record {
    char magic[4];
    std::uint32_t version;
    std::uint32_t length;
    std::uint32_t kernel_abi;
    std::uint32_t operator_index;
    std::int32_t top_k, kv_num_heads, causal, skip_padded_queries, gated, gate_mode, activation;
    float scale;
    std::int32_t present_inputs, output_count, input_count, element;
    std::uint32_t has_scale;
    std::uint64_t workspace_bytes;
    std::int32_t attention_mode;
    std::uint32_t checksum;
};

static_assert(sizeof(Record) == 88, "no padding between the fields");

}  // namespace

std::vector<unsigned char> Node::to_bytes() const {
    Record record{};
    std::memcpy(record.magic, magic, sizeof magic);
    record.version = version;
    record.length = sizeof record;
    record.kernel_abi = MOA_CUDA_ABI_VERSION;
    record.operator_index = static_cast<std::uint32_t>(operator_index_);
    record.top_k = top_k_;
    record.kv_num_heads = kv_num_heads_;
    record.causal = causal_;
    record.skip_padded_queries = skip_padded_queries_;
    record.gated = gated_;
    record.gate_mode = gate_mode_;
    record.activation = activation_;
    record.attention_mode = attention_mode_;
    record.scale = scale_;
    record.present_inputs = present_inputs_;
    record.output_count = output_count_;
    record.input_count = input_count_;
    record.element = element_;
    record.workspace_bytes = workspace_bytes_;
    record.has_scale = has_scale_ ? 1U : 0U;
    std::vector<unsigned char> bytes(sizeof record);
    std::memcpy(bytes.data(), &record, sizeof record);
    record.checksum = checksum(bytes.data(), offsetof(Record, checksum));
    std::memcpy(bytes.data(), &record, sizeof record);
    return bytes;
}

Node Node::from_bytes(std::size_t operator_index, const void *bytes, std::size_t length) {
    Node node(operator_index);
    const std::string name = node.contract().name;
    const auto refuse = [&](const std::string &what) { throw Refusal(name + ": the engine's state of this plugin " + what); };
    Record record{};
    if (bytes == nullptr || length != sizeof record) refuse("has another length than this library writes");
    std::memcpy(&record, bytes, sizeof record);
    if (std::memcmp(record.magic, magic, sizeof magic) != 0) refuse("is not one of this library");
    if (record.version != version || record.length != sizeof record) refuse("was written by another version");
    if (record.checksum != checksum(static_cast<const unsigned char *>(bytes), offsetof(Record, checksum))) {
        refuse("is damaged");
    }
    if (record.kernel_abi != MOA_CUDA_ABI_VERSION) refuse("is for other kernels; build the engine again");
    if (record.operator_index != operator_index) refuse("is that of another operator");
    const auto known = [](std::int32_t value, const contract::List<const char *> &names) {
        return value >= undecided && value < static_cast<std::int32_t>(names.count);
    };
    const std::int32_t integers[] = {record.top_k,  record.kv_num_heads,   record.causal,
                                     record.gated,  record.present_inputs, record.skip_padded_queries};
    for (const std::int32_t value : integers) {
        if (value < undecided) refuse("has a negative attribute");
    }
    if (!known(record.gate_mode, contract::gate_modes) || !known(record.activation, contract::activations) ||
        !known(record.attention_mode, contract::attention_modes) ||
        !std::isfinite(record.scale) || record.has_scale > 1 || record.present_inputs < 0 ||
        record.element < undecided || record.element > MOA_CUDA_BF16) {
        refuse("has an impossible attribute");
    }
    node.top_k_ = record.top_k;
    node.kv_num_heads_ = record.kv_num_heads;
    node.causal_ = record.causal;
    node.skip_padded_queries_ = record.skip_padded_queries;
    node.gated_ = record.gated;
    node.gate_mode_ = record.gate_mode;
    node.activation_ = record.activation;
    node.attention_mode_ = record.attention_mode;
    node.scale_ = record.scale;
    node.has_scale_ = record.has_scale != 0;
    node.present_inputs_ = record.present_inputs;
    node.output_count_ = record.output_count;
    node.input_count_ = record.input_count;
    node.element_ = record.element;
    node.workspace_bytes_ = record.workspace_bytes;
    node.check();
    if (node.input_count_ != 0) node.positions(node.input_count_);
    return node;
}

}  // namespace moa
