// One context of an engine, with its stream and the memory of its tensors.
#pragma once

#include <memory>
#include <vector>

#include "loaded.h"

namespace moa::engine {

class Running {
public:
    Running(std::shared_ptr<Loaded> loaded, std::uint32_t profile);
    ~Running();
    Running(const Running &) = delete;
    Running &operator=(const Running &) = delete;

    void set_shape(const char *input, const moa_trt_shape &shape);
    moa_trt_shape shape(const char *name);
    void upload(const char *input, const void *values, std::uint64_t bytes);
    void run();
    float run_timed();
    void download(const char *output, void *values, std::uint64_t bytes);
    void time(const moa_trt_timing &timing, float *milliseconds);
    void profile_layers(std::uint32_t runs, moa_trt_on_layer layer, void *user);

private:
    // Where a tensor lies.
    struct Place {
        moa_trt_shape shape{};
        bool is_shaped = false, is_filled = false;
        std::uint64_t bytes = 0;
        Buffer device;
        std::vector<unsigned char> host;
    };

    // What lives while the device is current.
    struct Parts {
        Stream stream;
        // Made by the first run that is timed.
        std::unique_ptr<Event> start, end;
        std::vector<Place> places;
        std::unique_ptr<nvinfer1::IExecutionContext> context;
    };

    const Tensor &tensor(std::size_t index) const { return loaded_->tensors()[index]; }
    std::size_t input(const char *name) const;
    void set_address(std::size_t index);
    moa_trt_shape known_shape(std::size_t index);
    void prepare();
    void enqueue();
    void run_once();
    std::unique_ptr<Graph> captured();

    std::shared_ptr<Loaded> loaded_;
    std::uint32_t profile_;
    bool is_prepared_ = false, has_run_ = false;
    std::unique_ptr<Parts> parts_;
};

}  // namespace moa::engine
