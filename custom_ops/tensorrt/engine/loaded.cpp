#include "loaded.h"

namespace moa::engine {

namespace {

using nvinfer1::OptProfileSelector;

// TensorRT tells apart in words alone why it does not take a plan.
Error refusal(const Errors &errors, const Version &version) {
    const std::string release = "TensorRT " + text(version);
    for (const char *words : {"not compatible with this version", "Version tag does not match",
                              "serializationVersion", "version compatible", "different version"}) {
        if (errors.has(words)) {
            return errors.as(MOA_TRT_INCOMPATIBLE, "the plan was built by another release than " + release);
        }
    }
    for (const char *words : {"incompatible device", "compute capability", "different compute", "different device"}) {
        if (errors.has(words)) return errors.as(MOA_TRT_INCOMPATIBLE, "the plan was built for another GPU");
    }
    for (const char *words : {"getPluginCreator", "could not find plugin", "Cannot find plugin", "Plugin not found"}) {
        if (errors.has(words)) return errors.as(MOA_TRT_MISSING, "the plan needs a plugin that is not there");
    }
    return errors.as(MOA_TRT_PLAN, release + " cannot load the plan");
}

}  // namespace

Loaded::Loaded(std::shared_ptr<Library> library, const void *plan, std::uint64_t bytes)
    : library_(std::move(library)), device_(library_->device()) {
    if (plan == nullptr || bytes == 0) throw Error(MOA_TRT_PLAN, "the plan is empty");
    const TensorRt &tensorrt = library_->tensorrt;
    const std::lock_guard<std::mutex> lock(tensorrt.door());
    const Current current(*device_);
    const Errors errors;
    // While the device is current whatever was made ends here too.
    std::unique_ptr<nvinfer1::IRuntime> runtime = tensorrt.runtime();
    std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime->deserializeCudaEngine(plan, bytes));
    if (engine == nullptr) {
        if (errors.has("ai.moa")) need_kernels();
        throw refusal(errors, tensorrt.version());
    }
    engine->setErrorRecorder(&recorder());
    engine_ = std::move(engine);
    try {
        read_tensors();
    } catch (...) {
        engine_.reset();
        throw;
    }
    runtime_ = std::move(runtime);
}

Loaded::~Loaded() {
    try {
        const Current current(*device_);
        engine_.reset();
        runtime_.reset();
    } catch (const Error &) {
        // Without its context the driver has freed everything, and TensorRT must not touch it again.
        static_cast<void>(engine_.release());
        static_cast<void>(runtime_.release());
    }
}

void Loaded::read_tensors() {
    for (std::int32_t index = 0; index < engine_->getNbIOTensors(); ++index) {
        const char *const name = engine_->getIOTensorName(index);
        if (name == nullptr) throw Error(MOA_TRT_RUNTIME, "TensorRT does not name tensor " + std::to_string(index));
        if (engine_->getTensorFormat(name) != nvinfer1::TensorFormat::kLINEAR) {
            throw Error(MOA_TRT_UNSUPPORTED, std::string("`") + name + "` is not in the linear format: " +
                                                 engine_->getTensorFormatDesc(name));
        }
        const bool is_input = engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
        const bool is_on_host = engine_->getTensorLocation(name) == nvinfer1::TensorLocation::kHOST;
        tensors_.push_back({name, element_of(engine_->getTensorDataType(name)), is_input, is_on_host,
                            from_dims(engine_->getTensorShape(name))});
    }
}

std::size_t Loaded::index_of(const char *name) const {
    std::string names;
    for (std::size_t index = 0; index < tensors_.size(); ++index) {
        if (tensors_[index].name == name) return index;
        names += (index == 0 ? "`" : ", `") + tensors_[index].name + "`";
    }
    throw Error(MOA_TRT_ARGUMENT, std::string("the engine has no tensor `") + name + "`, it has " + names);
}

void Loaded::describe(moa_trt_engine_info &info) const {
    info.tensor_count = static_cast<std::uint32_t>(tensors_.size());
    info.profile_count = static_cast<std::uint32_t>(engine_->getNbOptimizationProfiles());
    info.layer_count = static_cast<std::uint32_t>(engine_->getNbLayers());
#if NV_TENSORRT_MAJOR >= 11
    info.device_bytes = static_cast<std::uint64_t>(engine_->getDeviceMemorySizeV2());
#else
    info.device_bytes = engine_->getDeviceMemorySize();
#endif
}

void Loaded::range(std::uint32_t profile, std::size_t input, moa_trt_range &range) const {
    const Tensor &tensor = tensors_.at(input);
    if (!tensor.is_input) throw Error(MOA_TRT_ARGUMENT, "`" + tensor.name + "` is an output");
    if (profile >= static_cast<std::uint32_t>(profiles())) {
        throw Error(MOA_TRT_ARGUMENT, "the engine has " + std::to_string(profiles()) + " profiles, and no profile " +
                                          std::to_string(profile));
    }
    range.input = tensor.name.c_str();
    const auto place = static_cast<std::int32_t>(profile);
    const std::pair<OptProfileSelector, moa_trt_shape *> all[] = {
        {OptProfileSelector::kMIN, &range.min}, {OptProfileSelector::kOPT, &range.opt}, {OptProfileSelector::kMAX, &range.max}};
    for (const auto &[which, shape] : all) {
        *shape = from_dims(engine_->getProfileShape(range.input, place, which));
    }
}

const char *Loaded::layers() {
    const std::lock_guard<std::mutex> lock(layers_door_);
    if (!layers_.empty()) return layers_.c_str();
    const Current current(*device_);
    const Errors errors;
    const std::unique_ptr<nvinfer1::IEngineInspector> inspector(engine_->createEngineInspector());
    if (inspector == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT makes no inspector");
    const char *const told = inspector->getEngineInformation(nvinfer1::LayerInformationFormat::kJSON);
    if (told == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT does not describe the engine");
    layers_ = told;
    return layers_.c_str();
}

std::unique_ptr<nvinfer1::IExecutionContext> Loaded::context() const {
    const Errors errors;
    std::unique_ptr<nvinfer1::IExecutionContext> made(engine_->createExecutionContext());
    if (made == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT makes no execution context");
    made->setErrorRecorder(&recorder());
    return made;
}

}  // namespace moa::engine
