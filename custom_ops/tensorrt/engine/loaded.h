// A plan that TensorRT has loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "shapes.h"
#include "tensorrt.h"

namespace moa::engine {

struct Tensor {
    std::string name;
    std::int32_t element;
    bool is_input, is_on_host;
    moa_trt_shape shape;
};

class Loaded {
public:
    // Throws Error where the bytes are no plan, or none of this release and device.
    Loaded(std::shared_ptr<Library> library, const void *plan, std::uint64_t bytes);
    ~Loaded();
    Loaded(const Loaded &) = delete;
    Loaded &operator=(const Loaded &) = delete;

    const std::vector<Tensor> &tensors() const { return tensors_; }
    // The tensor of that name; throws Error where there is none.
    std::size_t index_of(const char *name) const;
    std::int32_t profiles() const { return engine_->getNbOptimizationProfiles(); }
    void describe(moa_trt_engine_info &info) const;

    // The shapes, or values, that a profile gives to an input; throws Error.
    void range(std::uint32_t profile, std::size_t input, moa_trt_range &range) const;

    // All layers as JSON.
    const char *layers();

    // The device is current.
    std::unique_ptr<nvinfer1::IExecutionContext> context() const;
    const Device &device() const { return *device_; }

private:
    void read_tensors();

    std::shared_ptr<Library> library_;
    std::shared_ptr<Device> device_;
    std::unique_ptr<nvinfer1::IRuntime> runtime_;
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
    std::vector<Tensor> tensors_;
    std::mutex layers_door_;
    std::string layers_;
};

}  // namespace moa::engine
