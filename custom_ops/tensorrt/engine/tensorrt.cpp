#include "tensorrt.h"

#include <dlfcn.h>

#include <vector>

#include "contract.h"
#include "failure.h"
#include "kernels.h"
#include "library.h"

namespace moa::engine {

namespace {

constexpr int own_major = NV_TENSORRT_MAJOR;

// Majors whose libnvinfer is looked for, so that the error can name what is there.
constexpr int oldest_major = 7, newest_major = 19;

#if NV_TENSORRT_MAJOR < 10
// The newest CUDA that 8.6 was built with; older drivers may be too old.
constexpr int newest_cuda = 12000;
#endif

// Beside another file where `folder` is not empty.
std::string file_name(const std::string &folder, const std::string &stem, int major) {
    const std::string name = stem + ".so." + std::to_string(major);
    return folder.empty() ? name : folder + "/" + name;
}

void *open_library(const std::string &name, std::string &why) {
    void *const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char *const said = dlerror();
        why = said == nullptr ? name : said;
    }
    return library;
}

// The file that holds an address.
std::string file_of(const void *address) {
    Dl_info info{};
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

template <class Function>
Function *symbol(void *library, const std::string &path, const char *name) {
    void *const address = dlsym(library, name);
    if (address == nullptr) throw Error(MOA_TRT_MISSING, path + " lacks " + name);
    return reinterpret_cast<Function *>(address);
}

[[noreturn]] void refuse(const std::string &path, const Version &found) {
    const std::string wanted = std::to_string(own_major) + (own_major < 10 ? ".6" : "");
    throw Error(MOA_TRT_INCOMPATIBLE, "libmoa_tensorrt.so was built for TensorRT " + wanted + ", and " + path + " is " +
                                          text(found) +
                                          ": build it against the headers of that release (TENSORRT_ROOT=FOLDER cargo "
                                          "xtask tensorrt), or install TensorRT " + wanted);
}

Version version_of(void *library, const std::string &path) {
    return decoded(symbol<std::int32_t()>(library, path, "getInferLibVersion")());
}

}  // namespace

Version decoded(std::int32_t number) {
    const auto plain = static_cast<std::uint32_t>(number < 0 ? 0 : number);
    const std::uint32_t major = plain >= 100000 ? 10000 : 1000;
    return {plain / major, plain % major / 100, plain % 100};
}

std::string text(const Version &version) {
    return std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.patch);
}

const TensorRt &TensorRt::opened(const std::string &folder) {
    static std::mutex door;
    static const TensorRt *one = nullptr;
    const std::lock_guard<std::mutex> lock(door);
    if (one == nullptr) one = new TensorRt(folder);
    if (!folder.empty() && folder != one->folder_ && one->path_.rfind(folder + "/", 0) != 0) {
        throw Error(MOA_TRT_ARGUMENT, "this process works with " + one->path_ + " already, and cannot open that of " +
                                          folder + " too");
    }
    return *one;
}

TensorRt::TensorRt(const std::string &folder) : folder_(folder) {
    open();
    // A build for 10.0 works with all of 10; 8.6 is the only 8 that this library knows.
    const bool fits = version_.major == own_major && (own_major >= 10 || version_.minor == NV_TENSORRT_MINOR);
    if (!fits) refuse(path_, version_);
    create_builder_ = symbol<void *(void *, std::int32_t)>(library_, path_, "createInferBuilder_INTERNAL");
    create_runtime_ = symbol<void *(void *, std::int32_t)>(library_, path_, "createInferRuntime_INTERNAL");
    // Where an ONNX operator is one of TensorRT's own plugins; nothing of ours is, so that it may be absent.
    std::string why;
    void *const plugins = open_library(file_name(folder_, "libnvinfer_plugin", own_major), why);
    if (plugins != nullptr) {
        auto *const start = reinterpret_cast<bool (*)(void *, const char *)>(dlsym(plugins, "initLibNvInferPlugins"));
        if (start != nullptr) start(&logger(), "");
    }
    register_plugins();
}

void TensorRt::open() {
    std::string first, why;
    library_ = open_library(file_name(folder_, "libnvinfer", own_major), first);
    for (int major = newest_major; library_ == nullptr && major >= oldest_major; --major) {
        if (major != own_major) library_ = open_library(file_name(folder_, "libnvinfer", major), why);
    }
    if (library_ == nullptr) throw Error(MOA_TRT_MISSING, "there is no TensorRT: " + first);
    path_ = file_name(folder_, "libnvinfer", own_major);
    path_ = file_of(reinterpret_cast<void *>(symbol<std::int32_t()>(library_, path_, "getInferLibVersion")));
    version_ = version_of(library_, path_);
}

std::uint32_t TensorRt::build_number() const {
    auto *const number = reinterpret_cast<std::int32_t (*)()>(dlsym(library_, "getInferLibBuildVersion"));
    return number == nullptr ? 0 : static_cast<std::uint32_t>(number());
}

void TensorRt::register_plugins() const {
    auto *const registry = symbol<nvinfer1::IPluginRegistry *()>(library_, path_, "getPluginRegistry")();
    if (registry == nullptr) throw Error(MOA_TRT_RUNTIME, path_ + " has no plugin registry");
    const Errors errors;
    std::int32_t count = 0;
    auto *const *const all = creators(count);
    for (std::int32_t index = 0; index < count; ++index) {
        if (registry->registerCreator(*all[index], contract::domain)) continue;
        // Somebody loaded this library, or one like it, as a plugin library before.
        const char *const name = contract::operators[static_cast<std::size_t>(index)].name;
#if NV_TENSORRT_MAJOR >= 10
        const bool is_there = registry->getCreator(name, contract::opset_version, contract::domain) != nullptr;
#else
        const bool is_there = registry->getPluginCreator(name, contract::opset_version, contract::domain) != nullptr;
#endif
        if (!is_there) throw errors.as(MOA_TRT_RUNTIME, std::string("TensorRT does not take the plugin ") + name);
    }
}

std::unique_ptr<nvinfer1::IBuilder> TensorRt::builder() const {
    const Errors errors;
    auto *const made = static_cast<nvinfer1::IBuilder *>(create_builder_(&logger(), NV_TENSORRT_VERSION));
    if (made == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT " + text(version_) + " makes no builder");
    made->setErrorRecorder(&recorder());
    return std::unique_ptr<nvinfer1::IBuilder>(made);
}

std::unique_ptr<nvinfer1::IRuntime> TensorRt::runtime() const {
#if NV_TENSORRT_MAJOR < 10
    // Where CUDA does not start, as under a driver that is too old, 8.6 crashes here, and its builder says so.
    if (Device::driver_version() < newest_cuda) builder();
#endif
    const Errors errors;
    auto *const made = static_cast<nvinfer1::IRuntime *>(create_runtime_(&logger(), NV_TENSORRT_VERSION));
    if (made == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT " + text(version_) + " makes no runtime");
    made->setErrorRecorder(&recorder());
    return std::unique_ptr<nvinfer1::IRuntime>(made);
}

const TensorRt::Parser &TensorRt::parser() const {
    const std::lock_guard<std::mutex> lock(parser_door_);
    if (parser_ != nullptr) return *parser_;
    std::string why;
    const std::string name = file_name(folder_, "libnvonnxparser", own_major);
    void *const library = open_library(name, why);
    if (library == nullptr) throw Error(MOA_TRT_MISSING, "there is no ONNX parser of TensorRT: " + why);
    auto *const create = symbol<void *(void *, void *, int)>(library, name, "createNvOnnxParser_INTERNAL");
    const int version = symbol<int()>(library, name, "getNvOnnxParserVersion")();
    const std::string path = file_of(reinterpret_cast<void *>(create));
    parser_ = std::make_unique<Parser>(Parser{create, static_cast<std::uint32_t>(version), path});
    return *parser_;
}

Library::Library(const std::string &folder, std::int32_t ordinal, const Sink &sink)
    : log_(sink), tensorrt(TensorRt::opened(folder)), ordinal_(ordinal) {}

std::shared_ptr<Device> Library::device() {
    const std::lock_guard<std::mutex> lock(door_);
    if (device_ == nullptr) device_ = Device::open(ordinal_);
    return device_;
}

void need_kernels() {
    try {
        Kernels::of_current_context();
    } catch (const Refusal &refusal) {
        throw Error(MOA_TRT_MISSING, refusal.what());
    }
}

}  // namespace moa::engine
