// The shape of the tables that `cargo xtask tensorrt` writes from custom_ops/schema.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moa::contract {

// Element type of a parameter; `activation` is that of hidden_states, and that of matrices for the CUDA kernels too.
enum class Element : std::uint8_t { activation, weight, float32, int32, int64 };

// What a dimension of a parameter is: fixed by the model, or of a size that varies from call to call. `others` are the
// tokens of a past or of a source.
enum class Extent : std::uint8_t { fixed, batch, tokens, others, tokens_and_others };

// Dimensions that a parameter has at most.
inline constexpr std::size_t max_rank = 4;

enum class Kind : std::uint8_t { integer, real, text };

struct Parameter {
    const char *name;
    Element element;
    bool optional;
    Extent extents[max_rank];
};

struct Attribute {
    const char *name;
    Kind kind;
};

template <class T>
struct List {
    const T *start;
    std::size_t count;

    constexpr const T *begin() const { return start; }
    constexpr const T *end() const { return start + count; }
    constexpr const T &operator[](std::size_t index) const { return start[index]; }
};

struct Operator {
    const char *name;
    List<Parameter> inputs;
    List<Parameter> outputs;
    List<Attribute> attributes;
};

}  // namespace moa::contract
