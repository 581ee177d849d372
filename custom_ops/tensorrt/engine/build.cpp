#include "build.h"

#include <atomic>
#include <map>

#include "shapes.h"

namespace moa::engine {

namespace {

using nvinfer1::IBuilderConfig;
using nvinfer1::INetworkDefinition;

// The parsers of 8.6.0 and of 8.6.1 have their destructors at different places, and `destroy` at the same.
struct EndParser {
    void operator()(nvonnxparser::IParser *parser) const {
#if NV_TENSORRT_MAJOR >= 10
        delete parser;
#else
        parser->destroy();
#endif
    }
};
using Parser = std::unique_ptr<nvonnxparser::IParser, EndParser>;

#if NV_TENSORRT_MAJOR >= 10
// Hands TensorRT's phases to the caller, and the caller's wish to stop to TensorRT.
class Progress final : public nvinfer1::IProgressMonitor {
public:
    explicit Progress(const moa_trt_build_options &options) : options_(options) {}

    void phaseStart(const char *phase, const char *parent, std::int32_t steps) noexcept override {
        guarded([&] {
            const std::lock_guard<std::mutex> lock(door_);
            const std::string above = parent == nullptr ? "" : parent;
            phases_[phase] = {above, steps};
            tell(phase, above, -1, steps);
        });
    }
    bool stepComplete(const char *phase, std::int32_t step) noexcept override {
        guarded([&] {
            const std::lock_guard<std::mutex> lock(door_);
            const Phase &known = phases_[phase];
            tell(phase, known.parent, step, known.steps);
        });
        return !is_cancelled;
    }
    void phaseFinish(const char *phase) noexcept override {
        guarded([&] {
            const std::lock_guard<std::mutex> lock(door_);
            const Phase known = phases_[phase];
            phases_.erase(phase);
            tell(phase, known.parent, known.steps, known.steps);
        });
    }

    std::atomic<bool> is_cancelled{false};

private:
    struct Phase {
        std::string parent;
        std::int32_t steps = 0;
    };

    // Without memory for a name, a step goes untold.
    template <class Body>
    static void guarded(Body &&body) noexcept {
        try {
            body();
        } catch (...) {
        }
    }
    void tell(const char *phase, const std::string &parent, std::int32_t step, std::int32_t steps) {
        if (options_.progress(options_.user, phase, parent.c_str(), step, steps) != 0) is_cancelled = true;
    }

    const moa_trt_build_options &options_;
    std::mutex door_;
    std::map<std::string, Phase> phases_;
};
#endif

nvinfer1::NetworkDefinitionCreationFlags network_flags() {
#if NV_TENSORRT_MAJOR >= 10
    // In 11 every network is, and the flag stays without effect.
    return 1U << static_cast<std::uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
#else
    return 1U << static_cast<std::uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);
#endif
}

const char *or_empty(const char *text) { return text == nullptr ? "" : text; }

moa_trt_parser_error described(const nvonnxparser::IParserError &error) {
    moa_trt_parser_error told{};
    told.struct_size = sizeof told;
    told.code = static_cast<std::int32_t>(error.code());
    told.node = error.node();
    told.line = error.line();
    told.description = or_empty(error.desc());
    told.file = or_empty(error.file());
    told.function = or_empty(error.func());
#if NV_TENSORRT_MAJOR >= 10
    told.node_name = or_empty(error.nodeName());
    told.node_operator = or_empty(error.nodeOperator());
#else
    told.node_name = told.node_operator = "";
#endif
    return told;
}

std::string line_of(const moa_trt_parser_error &error) {
    std::string line;
    if (error.node >= 0) line += "node " + std::to_string(error.node);
    if (*error.node_name != '\0') line += std::string(" `") + error.node_name + "`";
    if (*error.node_operator != '\0') line += std::string(" (") + error.node_operator + ")";
    return (line.empty() ? "" : line + ": ") + error.description;
}

// Hands every error to the caller, and throws them all as one.
[[noreturn]] void refuse(const nvonnxparser::IParser &parser, const moa_trt_build_options &options,
                         const Errors &logged) {
    std::string all;
    const std::int32_t count = parser.getNbErrors();
    for (std::int32_t index = 0; index < count; ++index) {
        const auto *const error = parser.getError(index);
        if (error == nullptr) continue;
        const moa_trt_parser_error told = described(*error);
        if (options.parser_error != nullptr) options.parser_error(options.user, &told);
        all += (all.empty() ? "" : "\n") + line_of(told);
    }
    const std::string headline = "the ONNX parser refuses the model: " + (all.empty() ? "it gives no reason" : all);
    // The plugins say in the log alone what they do not take.
    throw Error(MOA_TRT_MODEL, logged.added_to(headline));
}

void parse(nvonnxparser::IParser &parser, const moa_trt_build_options &options) {
    const Errors errors;
    constexpr int verbosity = static_cast<int>(nvinfer1::ILogger::Severity::kWARNING);
    const bool is_parsed = options.model == nullptr
                               ? parser.parseFromFile(options.model_path, verbosity)
                               : parser.parse(options.model, options.model_bytes, options.model_path);
    if (!is_parsed) refuse(parser, options, errors);
}

// Whether a layer is a plugin, whose kernels are needed then.
bool has_plugins(const INetworkDefinition &network) {
    for (std::int32_t index = 0; index < network.getNbLayers(); ++index) {
        const auto type = network.getLayer(index)->getType();
        if (type == nvinfer1::LayerType::kPLUGIN_V2) return true;
#if NV_TENSORRT_MAJOR >= 10
        if (type == nvinfer1::LayerType::kPLUGIN_V3) return true;
#endif
    }
    return false;
}

void configure(IBuilderConfig &config, const moa_trt_build_options &options) {
    using nvinfer1::BuilderFlag;
    config.clearFlag(BuilderFlag::kREFIT);
    config.clearFlag(BuilderFlag::kVERSION_COMPATIBLE);
    if ((options.flags & MOA_TRT_TF32) == 0) config.clearFlag(BuilderFlag::kTF32);
    if (options.workspace_bytes != 0) {
        config.setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, options.workspace_bytes);
    }
    config.setProfilingVerbosity(options.is_detailed != 0 ? nvinfer1::ProfilingVerbosity::kDETAILED
                                                          : nvinfer1::ProfilingVerbosity::kLAYER_NAMES_ONLY);
#if NV_TENSORRT_MAJOR < 11
    // Since 8.6 TensorRT itself computes without cuBLAS and cuDNN, and would load them to hand them to plugins.
    using nvinfer1::TacticSource;
    std::uint32_t sources = config.getTacticSources();
    for (const auto source : {TacticSource::kCUBLAS, TacticSource::kCUBLAS_LT, TacticSource::kCUDNN}) {
        sources &= ~(1U << static_cast<std::uint32_t>(source));
    }
    config.setTacticSources(sources);
#endif
    if (options.optimization_level != 0) config.setBuilderOptimizationLevel(options.optimization_level);
#if NV_TENSORRT_MAJOR < 10
    // Contexts of one engine may work in one profile; later releases always let them.
    config.setPreviewFeature(nvinfer1::PreviewFeature::kPROFILE_SHARING_0806, true);
#endif
}

// A cache of another device or release is left aside, as TensorRT's log says.
std::unique_ptr<nvinfer1::ITimingCache> with_timing_cache(IBuilderConfig &config, const moa_trt_build_options &options) {
    for (const bool is_given : {true, false}) {
        if (is_given && options.timing_cache_bytes == 0) continue;
        const void *const bytes = is_given ? options.timing_cache : nullptr;
        std::unique_ptr<nvinfer1::ITimingCache> cache(
            config.createTimingCache(bytes, is_given ? options.timing_cache_bytes : 0));
        if (cache != nullptr && config.setTimingCache(*cache, false)) return cache;
    }
    return nullptr;
}

std::unique_ptr<nvinfer1::IHostMemory> built(nvinfer1::IBuilder &builder, INetworkDefinition &network,
                                             IBuilderConfig &config,
                                             [[maybe_unused]] const moa_trt_build_options &options) {
    const Errors errors;
#if NV_TENSORRT_MAJOR >= 10
    Progress progress(options);
    if (options.progress != nullptr) config.setProgressMonitor(&progress);
#endif
    std::unique_ptr<nvinfer1::IHostMemory> plan(builder.buildSerializedNetwork(network, config));
#if NV_TENSORRT_MAJOR >= 10
    config.setProgressMonitor(nullptr);
    if (plan == nullptr && progress.is_cancelled) throw Error(MOA_TRT_CANCELLED, "the build is cancelled");
#endif
    if (plan == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT builds no engine");
    return plan;
}

template <class Made>
std::unique_ptr<Made> needed(Made *made, const Errors &errors, const char *what) {
    if (made == nullptr) throw errors.as(MOA_TRT_RUNTIME, std::string("TensorRT makes no ") + what);
    return std::unique_ptr<Made>(made);
}

void check(const moa_trt_build_options &options) {
    const bool has_model = options.model != nullptr ? options.model_bytes != 0 : options.model_path != nullptr;
    if (!has_model) throw Error(MOA_TRT_ARGUMENT, "there is no model: neither bytes nor a path");
    if (options.optimization_level < 0 || options.optimization_level > 5) {
        throw Error(MOA_TRT_ARGUMENT, "an optimisation level of " + std::to_string(options.optimization_level) +
                                          " is not between 0 and 5");
    }
    if ((options.flags & ~(MOA_TRT_TF32 | MOA_TRT_PREFER_TYPES)) != 0) {
        throw Error(MOA_TRT_ARGUMENT, "the flags " + std::to_string(options.flags) + " are unknown");
    }
    const bool is_whole = (options.profiles != nullptr || options.profile_count == 0) &&
                          (options.timing_cache != nullptr || options.timing_cache_bytes == 0);
    if (!is_whole) throw Error(MOA_TRT_ARGUMENT, "profiles or timing cache are NULL, and their count is not 0");
}

}  // namespace

Built build(Library &library, const moa_trt_build_options &options) {
    check(options);
    const TensorRt &tensorrt = library.tensorrt;
    const auto &parser_library = tensorrt.parser();
    const std::shared_ptr<Device> device = library.device();
    const std::lock_guard<std::mutex> lock(tensorrt.door());
    const Current current(*device);
    const Errors errors;
    const auto builder = tensorrt.builder();
    const auto network = needed(builder->createNetworkV2(network_flags()), errors, "network");
    const auto config = needed(builder->createBuilderConfig(), errors, "builder configuration");
    const Parser parser(static_cast<nvonnxparser::IParser *>(
        parser_library.create(network.get(), &logger(), NV_ONNX_PARSER_VERSION)));
    if (parser == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT makes no ONNX parser");
    parse(*parser, options);
    if (has_plugins(*network)) need_kernels();
    configure(*config, options);
    hold_types(*network, *config, (options.flags & MOA_TRT_PREFER_TYPES) != 0);
    add_profiles(*builder, *network, *config, options);
    const auto cache = with_timing_cache(*config, options);
    Built made;
    made.plan = built(*builder, *network, *config, options);
    const auto *const used = config->getTimingCache();
    if (used != nullptr) made.timing_cache.reset(used->serialize());
    return made;
}

}  // namespace moa::engine
