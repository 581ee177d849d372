// libnvinfer and the ONNX parser, opened once a process, with the plugins registered.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "driver.h"
#include "headers.h"
#include "log.h"

namespace moa::engine {

struct Version {
    std::uint32_t major, minor, patch;
};

// What getInferLibVersion and NV_TENSORRT_VERSION number in two ways: 8601 is 8.6.1, and 100400 is 10.4.0.
Version decoded(std::int32_t number);
std::string text(const Version &version);

class TensorRt {
public:
    // The one of the process, opened where nobody did so yet; throws Error where there is none, or another than `folder`'s.
    static const TensorRt &opened(const std::string &folder);

    const Version &version() const { return version_; }
    std::uint32_t build_number() const;
    const std::string &path() const { return path_; }

    std::unique_ptr<nvinfer1::IBuilder> builder() const;
    std::unique_ptr<nvinfer1::IRuntime> runtime() const;

    // The parser's library; throws Error where there is none.
    struct Parser {
        void *(*create)(void *network, void *logger, int version);
        std::uint32_t version;
        std::string path;
    };
    const Parser &parser() const;

    // Builds and loads follow one another.
    std::mutex &door() const { return door_; }

private:
    explicit TensorRt(const std::string &folder);
    void open();
    void register_plugins() const;

    std::string folder_, path_;
    void *library_ = nullptr;
    Version version_{};
    void *(*create_builder_)(void *, std::int32_t) = nullptr;
    void *(*create_runtime_)(void *, std::int32_t) = nullptr;
    mutable std::mutex door_, parser_door_;
    mutable std::unique_ptr<Parser> parser_;
};

// What moa_trt_open hands out.
struct Library {
    Library(const std::string &folder, std::int32_t ordinal, const Sink &sink);

    // The device, taken when first asked for.
    std::shared_ptr<Device> device();

private:
    LogTo log_;

public:
    const TensorRt &tensorrt;

private:
    std::int32_t ordinal_;
    std::mutex door_;
    std::shared_ptr<Device> device_;
};

// An error that holds while the plugins' kernels cannot be had; the device is current.
void need_kernels();

}  // namespace moa::engine
