// ONNX models of one layer, and the numbers that a trained one gives.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "api.h"

namespace host {

// Tensors of a file of tests/data/layers.
struct Stored {
    std::vector<std::int64_t> sizes;
    std::vector<float> values;
};
std::map<std::string, Stored> read_layer(const std::string &name);

struct Constant {
    std::string name;
    std::vector<std::int64_t> sizes;
    std::vector<float> values;
};

// One MoASelfAttention as `moa-export build` hands it to TensorRT, with `top_k` of the experts and dynamic batch and length.
struct LayerModel {
    std::int64_t width = 0, experts = 0, head = 0;
    std::int64_t top_k = 2;
    std::string op = "MoASelfAttention", node_name = "layers.0", version = "1";
    // `is_routed`: the chosen experts are an output of the model too.
    // `is_copied`: a Cast of the router's weight follows, which is f32 whatever the others are.
    bool is_fixed = false, is_half = false, is_routed = false, is_copied = false;
    // What the copy is of, and what it is.
    std::string copied = "router", copied_by = "Cast";
    std::vector<Constant> constants;

    // The layer `self_small`, whose output is stored.
    static LayerModel golden();
    std::string bytes() const;
};

struct PlanOf : Held<moa_trt_plan> {
    PlanOf() : Held(api().plan_destroy) {}
    std::string bytes() const;
};
struct EngineOf : Held<moa_trt_engine> {
    EngineOf() : Held(api().engine_destroy) {}
};
struct ContextOf : Held<moa_trt_context> {
    ContextOf() : Held(api().context_destroy) {}
};

// Options for a model with batch 1 to 3 and 1 to 16 tokens; they point into this.
struct Asked {
    explicit Asked(const LayerModel &model);

    std::string model;
    std::vector<moa_trt_range> ranges;
    std::vector<moa_trt_profile> profiles;
    moa_trt_build_options options{};

    Answer build(const LibraryOf &library, PlanOf &plan);
};

}  // namespace host
