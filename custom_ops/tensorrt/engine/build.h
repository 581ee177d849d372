// From an ONNX model to a plan.
#pragma once

#include <memory>

#include "tensorrt.h"

namespace moa::engine {

struct Built {
    std::unique_ptr<nvinfer1::IHostMemory> plan, timing_cache;
};

// The device is not current yet. Throws Error.
Built build(Library &library, const moa_trt_build_options &options);

// Adds the profiles of `options` after having held them against the network's inputs; throws Error.
void add_profiles(nvinfer1::IBuilder &builder, const nvinfer1::INetworkDefinition &network,
                  nvinfer1::IBuilderConfig &config, const moa_trt_build_options &options);

// Gives the layers of a network that is not strongly typed the types of the model; nothing to do from 10 on.
void hold_types(nvinfer1::INetworkDefinition &network, nvinfer1::IBuilderConfig &config, bool is_preferred_only);

}  // namespace moa::engine
