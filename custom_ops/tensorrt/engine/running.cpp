#include "running.h"

#include <cstring>

namespace moa::engine {

namespace {

// What is put on a stream goes into a graph while this is there; the stream leaves the capture with it in any case.
class Capture {
public:
    explicit Capture(const Stream &stream) : stream_(stream) { stream_.begin_capture(); }
    ~Capture() {
        if (!is_open_) return;
        try {
            const Graph unused(stream_.end_capture());
        } catch (...) {
        }
    }
    Capture(const Capture &) = delete;
    Capture &operator=(const Capture &) = delete;

    std::unique_ptr<Graph> end() {
        is_open_ = false;
        return std::make_unique<Graph>(stream_.end_capture());
    }

private:
    const Stream &stream_;
    bool is_open_ = true;
};

// Whether every size is within the range of the profile, and which is not.
void check_range(const Tensor &tensor, const moa_trt_shape &shape, std::uint32_t profile, const moa_trt_range &range) {
    bool fits = shape.rank == tensor.shape.rank;
    for (std::int32_t axis = 0; fits && axis < shape.rank; ++axis) {
        fits = shape.dims[axis] >= range.min.dims[axis] && shape.dims[axis] <= range.max.dims[axis];
    }
    if (fits) return;
    const std::string limits = text(range.min) == text(range.max)
                                   ? text(range.min)
                                   : text(range.min) + " to " + text(range.max);
    throw Error(MOA_TRT_PROFILE, "`" + tensor.name + "` has the shape " + text(shape) + ", and profile " +
                                     std::to_string(profile) + " of the engine takes " + limits);
}

}  // namespace

Running::Running(std::shared_ptr<Loaded> loaded, std::uint32_t profile) : loaded_(std::move(loaded)), profile_(profile) {
    if (profile >= static_cast<std::uint32_t>(loaded_->profiles())) {
        throw Error(MOA_TRT_ARGUMENT, "the engine has " + std::to_string(loaded_->profiles()) +
                                          " profiles, and no profile " + std::to_string(profile));
    }
    const Current current(loaded_->device());
    auto parts = std::make_unique<Parts>();
    parts->places = std::vector<Place>(loaded_->tensors().size());
    parts->context = loaded_->context();
    const Errors errors;
    // The first context of an engine begins in profile 0; another may begin in none.
    const auto place = static_cast<std::int32_t>(profile);
    if (parts->context->getOptimizationProfile() != place) {
        if (!parts->context->setOptimizationProfileAsync(place, static_cast<cudaStream_t>(parts->stream.handle()))) {
            throw errors.as(MOA_TRT_RUNTIME, "TensorRT does not take profile " + std::to_string(profile));
        }
        parts->stream.synchronize();
    }
    for (std::size_t index = 0; index < parts->places.size(); ++index) {
        const Tensor &one = tensor(index);
        bool is_fixed = one.shape.rank >= 0;
        for (std::int32_t axis = 0; axis < one.shape.rank; ++axis) is_fixed = is_fixed && one.shape.dims[axis] >= 0;
        if (!one.is_input || !is_fixed) continue;
        Place &place = parts->places[index];
        place.shape = one.shape;
        place.is_shaped = true;
        place.bytes = bytes_of(one.shape, one.element, one.name);
    }
    parts_ = std::move(parts);
}

Running::~Running() {
    try {
        const Current current(loaded_->device());
        parts_.reset();
    } catch (const Error &) {
        // As in ~Loaded.
        static_cast<void>(parts_.release());
    }
}

std::size_t Running::input(const char *name) const {
    const std::size_t index = loaded_->index_of(name);
    if (!tensor(index).is_input) throw Error(MOA_TRT_ARGUMENT, "`" + tensor(index).name + "` is an output");
    return index;
}

void Running::set_shape(const char *name, const moa_trt_shape &shape) {
    const std::size_t index = input(name);
    const Tensor &one = tensor(index);
    const nvinfer1::Dims dims = to_dims(shape, "`" + one.name + "`", MOA_TRT_PROFILE);
    moa_trt_range range{};
    loaded_->range(profile_, index, range);
    check_range(one, shape, profile_, range);
    const std::uint64_t bytes = bytes_of(shape, one.element, one.name);
    const Current current(loaded_->device());
    const Errors errors;
    if (!parts_->context->setInputShape(one.name.c_str(), dims)) {
        throw errors.as(MOA_TRT_PROFILE, "TensorRT does not take the shape " + text(shape) + " for `" + one.name + "`");
    }
    Place &place = parts_->places[index];
    place.is_filled = place.is_filled && place.bytes == bytes;
    place.shape = shape;
    place.is_shaped = true;
    place.bytes = bytes;
    is_prepared_ = has_run_ = false;
}

// Tells TensorRT where a tensor lies, once there is room for it.
void Running::set_address(std::size_t index) {
    const Tensor &one = tensor(index);
    Place &place = parts_->places[index];
    void *address = nullptr;
    if (one.is_on_host) {
        place.host.resize(place.bytes == 0 ? 1 : place.bytes);
        address = place.host.data();
    } else {
        place.device.reserve(place.bytes);
        address = place.device.address();
    }
    const Errors errors;
    if (!parts_->context->setTensorAddress(one.name.c_str(), address)) {
        throw errors.as(MOA_TRT_RUNTIME, "TensorRT does not take an address for `" + one.name + "`");
    }
}

void Running::upload(const char *name, const void *values, std::uint64_t bytes) {
    const std::size_t index = input(name);
    Place &place = parts_->places[index];
    if (!place.is_shaped) throw Error(MOA_TRT_ARGUMENT, "`" + tensor(index).name + "` has no shape yet: set it first");
    if (bytes != place.bytes || (values == nullptr && bytes != 0)) {
        throw Error(MOA_TRT_ARGUMENT, "`" + tensor(index).name + "` of shape " + text(place.shape) + " has " +
                                          std::to_string(place.bytes) + " bytes, and " +
                                          (values == nullptr ? "none" : std::to_string(bytes)) + " are given");
    }
    const Current current(loaded_->device());
    set_address(index);
    if (tensor(index).is_on_host) {
        if (bytes != 0) std::memcpy(place.host.data(), values, bytes);
    } else {
        place.device.upload(values, bytes, parts_->stream);
        parts_->stream.synchronize();
    }
    place.is_filled = true;
    is_prepared_ = has_run_ = false;
}

moa_trt_shape Running::known_shape(std::size_t index) {
    const Tensor &one = tensor(index);
    for (std::size_t other = 0; other < parts_->places.size(); ++other) {
        const Place &place = parts_->places[other];
        const bool is_known = place.is_shaped && (place.is_filled || !tensor(other).is_on_host);
        if (tensor(other).is_input && !is_known) {
            throw Error(MOA_TRT_ARGUMENT, "`" + tensor(other).name + "` has no " +
                                              (place.is_shaped ? "values" : "shape") + " yet, on which others depend");
        }
    }
    const moa_trt_shape shape = from_dims(parts_->context->getTensorShape(one.name.c_str()));
    for (std::int32_t axis = 0; axis < shape.rank; ++axis) {
        if (shape.dims[axis] < 0) {
            throw Error(MOA_TRT_UNSUPPORTED, "`" + one.name + "` has the shape " + text(shape) +
                                                 ", which depends on values that are computed on the device");
        }
    }
    if (shape.rank < 0) throw Error(MOA_TRT_RUNTIME, "TensorRT does not know the shape of `" + one.name + "`");
    return shape;
}

moa_trt_shape Running::shape(const char *name) {
    const std::size_t index = loaded_->index_of(name);
    if (tensor(index).is_input && parts_->places[index].is_shaped) return parts_->places[index].shape;
    const Current current(loaded_->device());
    return known_shape(index);
}

// Gives every tensor its room.
void Running::prepare() {
    if (is_prepared_) return;
    for (std::size_t index = 0; index < parts_->places.size(); ++index) {
        Place &place = parts_->places[index];
        if (tensor(index).is_input) {
            const bool is_empty = place.is_shaped && place.bytes == 0;
            if (!place.is_filled && !is_empty) {
                throw Error(MOA_TRT_ARGUMENT, "`" + tensor(index).name + "` has no " +
                                                  (place.is_shaped ? "values" : "shape") + " yet");
            }
            if (is_empty) set_address(index);
        } else {
            place.shape = known_shape(index);
            place.bytes = bytes_of(place.shape, tensor(index).element, tensor(index).name);
            set_address(index);
        }
    }
    is_prepared_ = true;
}

void Running::enqueue() {
    const Errors errors;
    if (!parts_->context->enqueueV3(static_cast<cudaStream_t>(parts_->stream.handle()))) {
        throw errors.as(MOA_TRT_RUNTIME, "TensorRT does not run the engine");
    }
}

// What the outputs hold is that of no whole run until it has ended.
void Running::run_once() {
    has_run_ = false;
    enqueue();
    parts_->stream.synchronize();
    has_run_ = true;
}

void Running::run() {
    const Current current(loaded_->device());
    prepare();
    run_once();
}

float Running::run_timed() {
    const Current current(loaded_->device());
    prepare();
    if (parts_->start == nullptr) parts_->start = std::make_unique<Event>();
    if (parts_->end == nullptr) parts_->end = std::make_unique<Event>();
    parts_->start->record(parts_->stream);
    has_run_ = false;
    enqueue();
    parts_->end->record(parts_->stream);
    const float taken = parts_->end->since(*parts_->start);
    has_run_ = true;
    return taken;
}

void Running::download(const char *name, void *values, std::uint64_t bytes) {
    const std::size_t index = loaded_->index_of(name);
    const Place &place = parts_->places[index];
    if (tensor(index).is_input) throw Error(MOA_TRT_ARGUMENT, "`" + tensor(index).name + "` is an input");
    if (!has_run_) throw Error(MOA_TRT_ARGUMENT, "the context has not run with these inputs yet");
    if (bytes != place.bytes || (values == nullptr && bytes != 0)) {
        throw Error(MOA_TRT_ARGUMENT, "`" + tensor(index).name + "` of shape " + text(place.shape) + " has " +
                                          std::to_string(place.bytes) + " bytes, and there is room for " +
                                          (values == nullptr ? "none" : std::to_string(bytes)));
    }
    const Current current(loaded_->device());
    if (tensor(index).is_on_host) {
        if (bytes != 0) std::memcpy(values, place.host.data(), bytes);
        return;
    }
    place.device.download(values, bytes, parts_->stream);
    parts_->stream.synchronize();
}

std::unique_ptr<Graph> Running::captured() {
    Capture capture(parts_->stream);
    try {
        enqueue();
        return capture.end();
    } catch (const Error &error) {
        throw Error(MOA_TRT_UNSUPPORTED, std::string("the engine cannot be captured into a CUDA graph: ") + error.what());
    }
}

void Running::time(const moa_trt_timing &timing, float *milliseconds) {
    const Current current(loaded_->device());
    prepare();
    // The first run with new shapes may allocate, which a graph cannot hold.
    run_once();
    const std::unique_ptr<Graph> graph = timing.use_graph != 0 ? captured() : nullptr;
    Buffer cold;
    if (timing.flush_bytes != 0) cold.reserve(timing.flush_bytes);
    const Event start, end;
    const std::uint64_t warmup = timing.warmup;
    for (std::uint64_t turn = 0; turn < warmup + timing.runs; ++turn) {
        if (timing.is_cancelled != nullptr && timing.is_cancelled(timing.user) != 0) {
            throw Error(MOA_TRT_CANCELLED, "the timing is cancelled");
        }
        cold.fill(static_cast<unsigned char>(turn), timing.flush_bytes, parts_->stream);
        start.record(parts_->stream);
        has_run_ = false;
        if (graph != nullptr) {
            graph->launch(parts_->stream);
        } else {
            enqueue();
        }
        end.record(parts_->stream);
        const float taken = end.since(start);
        has_run_ = true;
        if (turn >= warmup) milliseconds[turn - warmup] = taken;
    }
}

void Running::profile_layers(std::uint32_t runs, moa_trt_on_layer layer, void *user) {
    class Profiler final : public nvinfer1::IProfiler {
    public:
        Profiler(moa_trt_on_layer layer, void *user) : layer_(layer), user_(user) {}
        void reportLayerTime(const char *name, float milliseconds) noexcept override {
            layer_(user_, run, name == nullptr ? "" : name, milliseconds);
        }

        std::uint32_t run = 0;

    private:
        moa_trt_on_layer layer_;
        void *user_;
    };
    const Current current(loaded_->device());
    prepare();
    run_once();
    Profiler profiler(layer, user);
    // Whatever happens, the context must not keep it.
    struct Detach {
        nvinfer1::IExecutionContext &context;
        ~Detach() { context.setProfiler(nullptr); }
    } const detach{*parts_->context};
    parts_->context->setProfiler(&profiler);
    for (; profiler.run < runs; ++profiler.run) run_once();
}

}  // namespace moa::engine
