// The fake's plans.
#pragma once

#include "network.h"

namespace fake {

struct Range {
    nvinfer1::Dims least, usual, most;
};
// By the name of the input.
using Profile = std::map<std::string, Range>;

struct Plan {
    Graph graph;
    std::vector<Profile> profiles;
    std::vector<std::size_t> workspaces;
    // What the builder was told, as JSON.
    std::string told;

    std::string to_bytes() const;
    // Throws Refused in the words of TensorRT.
    static Plan from_bytes(const std::string &bytes);
};

nvinfer1::IHostMemory *host_memory(std::string bytes);
nvinfer1::ICudaEngine *engine_of(Plan plan);

// Where errors go; of the latest builder or runtime.
void set_recorder(nvinfer1::IErrorRecorder *recorder);

}  // namespace fake
