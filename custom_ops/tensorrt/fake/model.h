// As much of ONNX as the fake parser reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fake {

struct Value {
    std::string name;
    std::int32_t element = 0;
    // -1: dynamic.
    std::vector<std::int64_t> dims;
    // Of a constant.
    std::string bytes;
};

struct Attribute {
    std::string name;
    std::int32_t type = 0;
    std::int64_t integer = 0;
    float real = 0.0F;
    std::string text;
};

struct Node {
    std::string name, op;
    std::vector<std::string> inputs, outputs;
    std::vector<Attribute> attributes;
};

struct Model {
    std::vector<Value> inputs, outputs, constants;
    std::vector<Node> nodes;
};

// False where the bytes are no ModelProto; `folder` holds external data.
bool read_model(const std::string &bytes, const std::string &folder, Model &model);

}  // namespace fake
