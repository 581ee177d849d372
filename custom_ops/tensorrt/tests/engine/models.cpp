#include "models.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>

namespace host {

namespace {

std::string varint(std::uint64_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
    return bytes + static_cast<char>(value);
}
std::string field(std::uint64_t number, std::uint64_t value) { return varint(number << 3) + varint(value); }
std::string field(std::uint64_t number, const std::string &bytes) {
    return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string raw(const void *values, std::size_t bytes) { return {static_cast<const char *>(values), bytes}; }

std::string tensor(const Constant &constant, bool is_half) {
    std::string bytes;
    for (const auto size : constant.sizes) bytes += field(1, static_cast<std::uint64_t>(size));
    std::string values = raw(constant.values.data(), constant.values.size() * sizeof(float));
    if (is_half) values = std::string(constant.values.size() * 2, '\0');
    return bytes + field(2, std::uint64_t{is_half ? 10U : 1U}) + field(8, constant.name) + field(9, values);
}

std::string value(const std::string &name, std::uint64_t element, const std::vector<std::int64_t> &sizes) {
    std::string shape;
    for (const auto size : sizes) {
        shape += field(1, size < 0 ? field(2, "n" + std::to_string(-size)) : field(1, static_cast<std::uint64_t>(size)));
    }
    return field(1, name) + field(2, field(1, field(1, element) + field(2, shape)));
}

std::string attribute(const std::string &name, std::int64_t integer) {
    return field(5, field(1, name) + field(3, static_cast<std::uint64_t>(integer)) + field(20, std::uint64_t{2}));
}
std::string attribute(const std::string &name, const std::string &text) {
    return field(5, field(1, name) + field(4, text) + field(20, std::uint64_t{3}));
}
std::string attribute(const std::string &name, float real) {
    return field(5, field(1, name) + varint(2 << 3 | 5) + raw(&real, sizeof real) + field(20, std::uint64_t{1}));
}

// The number behind `key`, and the numbers of a list.
std::vector<std::int64_t> numbers_behind(const std::string &text, const std::string &key, std::size_t from) {
    std::istringstream rest(text.substr(text.find('[', text.find(key, from)) + 1));
    std::vector<std::int64_t> found;
    for (std::int64_t number = 0; rest >> number; rest.ignore(1)) {
        found.push_back(number);
        if (rest.peek() == ']') break;
    }
    return found;
}

}  // namespace

std::map<std::string, Stored> read_layer(const std::string &name) {
    std::ifstream file(paths().root + "/tests/data/layers/" + name + ".safetensors", std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    const std::string bytes = all.str();
    if (bytes.size() < 8) throw Failed{"the layer " + name + " is not there"};
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    const std::string header = bytes.substr(8, length);
    std::map<std::string, Stored> found;
    for (std::size_t at = header.find("\"dtype\""); at != std::string::npos; at = header.find("\"dtype\"", at + 1)) {
        const std::size_t end = header.rfind('"', header.rfind('{', at)), start = header.rfind('"', end - 1);
        if (header.compare(at + 8, 5, "\"F32\"") != 0) continue;
        Stored &one = found[header.substr(start + 1, end - start - 1)];
        one.sizes = numbers_behind(header, "\"shape\"", at);
        const auto place = numbers_behind(header, "\"data_offsets\"", at);
        one.values.resize(static_cast<std::size_t>(place.at(1) - place.at(0)) / sizeof(float));
        std::memcpy(one.values.data(), bytes.data() + 8 + length + place.at(0), one.values.size() * sizeof(float));
    }
    return found;
}

LayerModel LayerModel::golden() {
    const auto layer = read_layer("self_small");
    LayerModel model;
    const auto &experts = layer.at("weight.q_proj.experts.w");
    model.experts = experts.sizes.at(0);
    model.width = experts.sizes.at(1);
    model.head = experts.sizes.at(2);
    // K and V are stored as [D, C] each, and the operator has [C, 2 D].
    const auto width = static_cast<std::size_t>(model.width), head = static_cast<std::size_t>(model.head);
    std::vector<float> both(width * 2 * head);
    for (std::size_t which = 0; which < 2; ++which) {
        const auto &half = layer.at(which == 0 ? "weight.k_proj.weight" : "weight.v_proj.weight").values;
        for (std::size_t row = 0; row < head; ++row) {
            for (std::size_t column = 0; column < width; ++column) {
                both[column * 2 * head + which * head + row] = half[row * width + column];
            }
        }
    }
    model.constants = {{"router", {model.width, model.experts}, layer.at("weight.q_proj.w_gate").values},
                       {"query", experts.sizes, experts.values},
                       {"kv", {model.width, 2 * model.head}, both},
                       {"out", layer.at("weight.q_proj.output_experts.w").sizes, layer.at("weight.q_proj.output_experts.w").values}};
    return model;
}

std::string LayerModel::bytes() const {
    const std::uint64_t element = is_half ? 10 : 1;
    std::string node, graph;
    for (const char *input : {"hidden", "mask", "router", "query", "kv", "out"}) node += field(1, std::string(input));
    node += field(2, std::string("output"));
    for (const char *output : {"key", "value", "indices"}) node += is_routed ? field(2, std::string(output)) : "";
    node += field(3, node_name) + field(4, op) + field(7, std::string("ai.moa"));
    node += attribute("top_k", top_k) + attribute("kv_num_heads", std::int64_t{1}) + attribute("causal", std::int64_t{0});
    node += attribute("skip_padded_queries", std::int64_t{0}) + attribute("gate_mode", std::string("softmax_topk"));
    node += attribute("attention_mode", std::string("softmax"));
    node += attribute("scale", 1.0F / std::sqrt(static_cast<float>(head))) + attribute("output_count", std::int64_t{is_routed ? 4 : 1});
    node += attribute("plugin_version", version) + attribute("plugin_namespace", std::string("ai.moa"));
    graph += field(1, node);
    if (is_copied) {
        graph += field(1, field(1, copied) + field(2, std::string("copy")) + field(3, std::string("copied")) +
                              field(4, copied_by) + attribute("to", std::int64_t{1}));
    }
    for (const Constant &constant : constants) graph += field(5, tensor(constant, is_half && constant.name != "router"));
    const std::int64_t batch = is_fixed ? 1 : -1, tokens = is_fixed ? 7 : -2;
    graph += field(11, value("hidden", element, {batch, tokens, width})) + field(11, value("mask", 6, {batch, tokens}));
    graph += field(12, value("output", element, {batch, tokens, width}));
    if (is_routed) graph += field(12, value("indices", 7, {batch, tokens, top_k}));
    return field(1, std::uint64_t{9}) + field(7, graph);
}

std::string PlanOf::bytes() const {
    return raw(api().plan_data(handle), static_cast<std::size_t>(api().plan_bytes(handle)));
}

Asked::Asked(const LayerModel &layer) : model(layer.bytes()) {
    if (!layer.is_fixed) {
        ranges = {range("hidden", {1, 1, layer.width}, {1, 7, layer.width}, {3, 16, layer.width}),
                  range("mask", {1, 1}, {1, 7}, {3, 16})};
        profiles = {{ranges.data(), ranges.size()}};
    }
    options.struct_size = sizeof options;
    options.model = model.data();
    options.model_bytes = model.size();
    options.profiles = profiles.data();
    options.profile_count = profiles.size();
}

Answer Asked::build(const LibraryOf &library, PlanOf &plan) {
    return call(api().build, library.handle, &options, &plan.handle);
}

}  // namespace host
