// libnvinfer without TensorRT: builders, and what else makes objects.

#include <algorithm>
#include <mutex>

#include "plan.h"

namespace fake {

using namespace nvinfer1;

namespace {

// As profiles take dimensions.
using DimsArgument = std::conditional_t<(NV_TENSORRT_MAJOR >= 10), const Dims &, Dims>;

ILogger *the_logger = nullptr;
IErrorRecorder *the_recorder = nullptr;

// An object whose functions are those of a table.
template <class Base, class Interface, class Owner>
struct Object : Base {
    Object(const Table<Interface, Owner> &table, Owner *owner) : face(table.face(owner)) {
        this->mImpl = face.as_interface();
    }
    Face<Interface, Owner> face;
};

struct HostMemory final : Object<IHostMemory, apiv::VHostMemory, HostMemory> {
    explicit HostMemory(std::string held) : Object(table(), this), bytes(std::move(held)) {}
    static const Table<apiv::VHostMemory, HostMemory> &table() {
        static const auto one = Table<apiv::VHostMemory, HostMemory>()
            .on(&apiv::VHostMemory::data, [](auto *face) -> void * { return face->owner->bytes.data(); })
            .on(&apiv::VHostMemory::size, [](auto *face) { return face->owner->bytes.size(); });
        return one;
    }
    std::string bytes;
};

struct TimingCache final : Object<ITimingCache, apiv::VTimingCache, TimingCache> {
    explicit TimingCache(std::string held) : Object(table(), this), bytes(std::move(held)) {}
    static const Table<apiv::VTimingCache, TimingCache> &table() {
        static const auto one = Table<apiv::VTimingCache, TimingCache>().on(
            &apiv::VTimingCache::serialize, [](auto *face) { return host_memory(face->owner->bytes); });
        return one;
    }
    // "fake cache" and one letter for each build that used it.
    mutable std::string bytes;
};

struct OptimizationProfile final : Object<IOptimizationProfile, apiv::VOptimizationProfile, OptimizationProfile> {
    OptimizationProfile() : Object(table(), this) {}
    static const Table<apiv::VOptimizationProfile, OptimizationProfile> &table() {
        static const auto one = Table<apiv::VOptimizationProfile, OptimizationProfile>()
            .on(&apiv::VOptimizationProfile::setDimensions, [](auto *face, const char *name, OptProfileSelector which, DimsArgument dims) {
                Range &range = face->owner->ranges[name];
                (which == OptProfileSelector::kMIN ? range.least : which == OptProfileSelector::kOPT ? range.usual : range.most) = dims;
                return true;
            })
            .on(&apiv::VOptimizationProfile::isValid, [](auto *) { return !is_told("bad_profile"); });
        return one;
    }
    Profile ranges;
};

struct BuilderConfig final : Object<IBuilderConfig, apiv::VBuilderConfig, BuilderConfig> {
    BuilderConfig() : Object(table(), this) {}
    static const Table<apiv::VBuilderConfig, BuilderConfig> &table() {
        using V = apiv::VBuilderConfig;
        static const auto one = [] {
            Table<V, BuilderConfig> made;
            made.on(&V::clearFlag, [](auto *face, BuilderFlag flag) { face->owner->flags &= ~(1U << static_cast<unsigned>(flag)); })
                .on(&V::setFlag, [](auto *face, BuilderFlag flag) { face->owner->flags |= 1U << static_cast<unsigned>(flag); })
                .on(&V::setMemoryPoolLimit, [](auto *face, MemoryPoolType, std::size_t bytes) { face->owner->workspace = bytes; })
                .on(&V::setProfilingVerbosity, [](auto *face, ProfilingVerbosity how) { face->owner->verbosity = static_cast<int>(how); })
                .on(&V::setBuilderOptimizationLevel, [](auto *face, std::int32_t level) { face->owner->level = level; })
                .on(&V::createTimingCache, [](auto *, const void *bytes, std::size_t count) -> ITimingCache * {
                    const std::string held(static_cast<const char *>(bytes), bytes == nullptr ? 0 : count);
                    if (held.empty()) return new TimingCache("fake cache");
                    return held.rfind("fake cache", 0) == 0 ? new TimingCache(held) : nullptr;
                })
                .on(&V::setTimingCache, [](auto *face, const ITimingCache &cache, bool) {
                    face->owner->cache = static_cast<const TimingCache *>(&cache);
                    return face->owner->cache->bytes.find("other device") == std::string::npos;
                })
                .on(&V::getTimingCache, [](auto *face) -> const ITimingCache * { return face->owner->cache; })
                .on(&V::setTacticSources, [](auto *face, TacticSources sources) { face->owner->sources = sources; return true; })
                .on(&V::getTacticSources, [](auto *face) { return face->owner->sources; })
                .on(&V::addOptimizationProfile, [](auto *face, const IOptimizationProfile *profile) {
                    face->owner->profiles.push_back(static_cast<const OptimizationProfile *>(profile)->ranges);
                    return static_cast<std::int32_t>(face->owner->profiles.size()) - 1;
                });
#if NV_TENSORRT_MAJOR >= 10
            made.on(&V::setProgressMonitor, [](auto *face, IProgressMonitor *monitor) { face->owner->monitor = monitor; });
#else
            made.on(&V::setPreviewFeature, [](auto *face, PreviewFeature feature, bool on) {
                face->owner->shares_profiles = on && feature == PreviewFeature::kPROFILE_SHARING_0806;
            });
#endif
            return made;
        }();
        return one;
    }
    // As TensorRT begins: TF32 is on.
    std::uint32_t flags = 1U << static_cast<unsigned>(BuilderFlag::kTF32);
    std::size_t workspace = 0;
    int verbosity = -1, level = -1;
    std::uint32_t sources = 0xFF;
    bool shares_profiles = false;
    const TimingCache *cache = nullptr;
    std::vector<Profile> profiles;
#if NV_TENSORRT_MAJOR >= 10
    IProgressMonitor *monitor = nullptr;
#endif
};

std::string told(const Network &network, const BuilderConfig &config) {
    std::string layers;
    for (std::size_t index = 0; index < network.layers.size(); ++index) {
        const Layer &layer = network.layers[index];
        layers += std::string(index == 0 ? "" : ",") + "{\"Name\":\"" + network.graph.model.nodes[index].name + "\",\"precision\":" +
                  std::to_string(layer.precision) + ",\"output\":" + std::to_string(layer.output_types.at(0)) + "}";
    }
    return "{\"Layers\":[" + layers + "],\"flags\":" + std::to_string(config.flags) + ",\"network\":" +
           std::to_string(network.flags) + ",\"workspace\":" + std::to_string(config.workspace) + ",\"verbosity\":" +
           std::to_string(config.verbosity) + ",\"level\":" + std::to_string(config.level) + ",\"sources\":" +
           std::to_string(config.sources) + ",\"shares\":" + std::to_string(config.shares_profiles) + "}";
}

// Each step of a build for the caller's monitor; false where it wants to stop.
class Steps {
public:
#if NV_TENSORRT_MAJOR >= 10
    Steps(BuilderConfig &config, std::size_t count) : monitor_(config.monitor) {
        if (monitor_ != nullptr) monitor_->phaseStart("Building", nullptr, static_cast<std::int32_t>(count));
        if (monitor_ != nullptr) monitor_->phaseStart("Timing", "Building", 1);
    }
    ~Steps() {
        if (monitor_ != nullptr) monitor_->phaseFinish("Timing");
        if (monitor_ != nullptr) monitor_->phaseFinish("Building");
    }
    bool next() { return monitor_ == nullptr || monitor_->stepComplete("Building", step_++); }

private:
    IProgressMonitor *monitor_;
    std::int32_t step_ = 0;
#else
    Steps(BuilderConfig &, std::size_t) {}
    bool next() { return true; }
#endif
};

std::vector<Described> described(const std::vector<std::string> &names, const Known &least, const Known &usual, const Known &most) {
    std::vector<Described> all;
    for (const std::string &name : names) {
        all.push_back({most.at(name).first, least.at(name).second, usual.at(name).second, most.at(name).second});
    }
    return all;
}

// Plugins that a network of 8.6 holds to a type must have a format in which their output has it.
void check_held(const Network &network, const Known &known) {
    for (const Layer &layer : network.layers) {
        for (std::size_t output = 0; layer.is_plugin && output < layer.outputs.size(); ++output) {
            const std::int32_t held = layer.output_types[output];
            if (held < 0 || held == static_cast<std::int32_t>(known.at(layer.outputs[output]->name).first)) continue;
            throw Refused("Assertion !n->candidateRequirements.empty() failed. No supported formats for " + layer.outputs[output]->name);
        }
    }
}

// Configures every plugin for one profile.
void configure(const Network &network, const Profile &profile, std::vector<std::size_t> &workspaces) {
    const Graph &graph = network.graph;
    std::map<std::string, Dims> shapes[3];
    for (const Value &input : graph.model.inputs) {
        const auto found = profile.find(input.name);
        const Dims fixed = dims_of(input.dims);
        const Range range = found == profile.end() ? Range{fixed, fixed, fixed} : found->second;
        shapes[0][input.name] = range.least;
        shapes[1][input.name] = range.usual;
        shapes[2][input.name] = range.most;
    }
    const Known least = graph.known(shapes[0]), usual = graph.known(shapes[1]), most = graph.known(shapes[2]);
    check_held(network, most);
    for (std::size_t index = 0; index < graph.plugins.size(); ++index) {
        const Node &node = graph.model.nodes[index];
        const std::size_t bytes = graph.plugins[index]->build(described(node.inputs, least, usual, most),
                                                              described(node.outputs, least, usual, most));
        workspaces[index] = std::max(workspaces[index], bytes);
    }
}

IHostMemory *build(Network &network, BuilderConfig &config) {
    if (is_told("build_fails")) return report(ErrorCode::kINTERNAL_ERROR, "Could not find any implementation for node {layers.0}."), nullptr;
    if (is_told("build_silent")) return nullptr;
    if (is_told("build_memory")) return report(ErrorCode::kFAILED_ALLOCATION, "Requested amount of GPU memory could not be allocated."), nullptr;
    try {
        Plan plan;
        plan.profiles = config.profiles.empty() ? std::vector<Profile>(1) : config.profiles;
        plan.workspaces.resize(network.graph.plugins.size());
        Steps steps(config, plan.profiles.size());
        for (const Profile &profile : plan.profiles) {
            configure(network, profile, plan.workspaces);
            if (!steps.next()) return report(ErrorCode::kUNSPECIFIED_ERROR, "Build was cancelled"), nullptr;
        }
        plan.told = told(network, config);
        plan.graph = std::move(network.graph);
        const std::string bytes = plan.to_bytes();
        network.graph = std::move(plan.graph);
        if (config.cache != nullptr) config.cache->bytes += "+";
        return host_memory(bytes);
    } catch (const std::exception &error) {
        report(ErrorCode::kINTERNAL_ERROR, error.what());
        return nullptr;
    }
}

struct Builder final : Object<IBuilder, apiv::VBuilder, Builder> {
    Builder() : Object(table(), this) {}
    ~Builder() override { set_recorder(nullptr); }
    static const Table<apiv::VBuilder, Builder> &table() {
        using V = apiv::VBuilder;
        static const auto one = Table<V, Builder>()
            .on(&V::setErrorRecorder, [](auto *, IErrorRecorder *recorder) { set_recorder(recorder); })
            .on(&V::createNetworkV2, [](auto *, NetworkDefinitionCreationFlags flags) -> INetworkDefinition * {
                return is_told("no_network") ? nullptr : new Network(flags);
            })
            .on(&V::createBuilderConfig, [](auto *) -> IBuilderConfig * { return is_told("no_config") ? nullptr : new BuilderConfig; })
            .on(&V::createOptimizationProfile, [](auto *face) -> IOptimizationProfile * { return &face->owner->profiles.emplace_back(); })
            .on(&V::buildSerializedNetwork, [](auto *, INetworkDefinition &network, IBuilderConfig &config) {
                return build(static_cast<Network &>(network), static_cast<BuilderConfig &>(config));
            });
        return one;
    }
    std::deque<OptimizationProfile> profiles;
};

struct Runtime final : Object<IRuntime, apiv::VRuntime, Runtime> {
    Runtime() : Object(table(), this) {}
    ~Runtime() override { set_recorder(nullptr); }
    static ICudaEngine *load(const void *bytes, std::size_t count) {
        if (is_told("load_memory")) return report(ErrorCode::kFAILED_ALLOCATION, "out of memory"), nullptr;
        try {
            return engine_of(Plan::from_bytes(std::string(static_cast<const char *>(bytes), count)));
        } catch (const std::exception &error) {
            report(ErrorCode::kINTERNAL_ERROR, error.what());
            return nullptr;
        }
    }
    static const Table<apiv::VRuntime, Runtime> &table() {
        using V = apiv::VRuntime;
        static const auto one = [] {
            Table<V, Runtime> made;
            made.on(&V::setErrorRecorder, [](auto *, IErrorRecorder *recorder) { set_recorder(recorder); });
#if NV_TENSORRT_MAJOR >= 10
            made.on(static_cast<ICudaEngine *(V::*)(const void *, std::size_t) noexcept>(&V::deserializeCudaEngine),
                    [](auto *, const void *bytes, std::size_t count) { return load(bytes, count); });
#else
            made.on(&V::deserializeCudaEngine, [](auto *, const void *bytes, std::size_t count, IPluginFactory *) { return load(bytes, count); });
#endif
            return made;
        }();
        return one;
    }
};

#if MOA_PLUGIN_V2
using AnyCreator = IPluginCreator;
#else
using AnyCreator = IPluginCreatorInterface;
#endif

struct Registry {
    struct Entry {
        std::string name, version, space;
        AnyCreator *creator;
    };
    std::vector<Entry> entries;

    bool add(AnyCreator &creator, const char *space) {
#if MOA_PLUGIN_V2
        auto &known = creator;
#else
        auto &known = static_cast<IPluginCreatorV3One &>(creator);
#endif
        if (is_told("no_register") || find(known.getPluginName(), known.getPluginVersion(), space) != nullptr) return false;
        entries.push_back({known.getPluginName(), known.getPluginVersion(), space, &creator});
        return true;
    }
    AnyCreator *find(const std::string &name, const std::string &version, const std::string &space) const {
        for (const Entry &entry : entries) {
            if (entry.name == name && entry.version == version && entry.space == space) return entry.creator;
        }
        return nullptr;
    }
};

}  // namespace

IPluginRegistry &registry() {
    using V = IPluginRegistry;
    using Adding = bool (V::*)(AnyCreator &, const char *) noexcept;
    static Registry owner;
    static const auto table = [] {
        Table<V, Registry> made;
        made.on(static_cast<Adding>(&V::registerCreator), [](auto *face, AnyCreator &creator, const char *space) {
            return face->owner->add(creator, space);
        });
#if MOA_PLUGIN_V2
        made.on(&V::getPluginCreator, [](auto *face, const char *name, const char *version, const char *space) {
            return face->owner->find(name, version, space);
        });
#else
        made.on(&V::getCreator, [](auto *face, const char *name, const char *version, const char *space) {
            return face->owner->find(name, version, space);
        });
#endif
        return made;
    }();
    static auto face = table.face(&owner);
    return *face.as_interface();
}

int version() { return number_told("version", NV_TENSORRT_VERSION); }
int capability() { return number_told("capability", 90); }

void report(ErrorCode code, const std::string &text) {
    if (the_recorder != nullptr) the_recorder->reportError(code, is_told("no_text") ? "" : text.c_str());
    if (the_logger != nullptr) the_logger->log(ILogger::Severity::kERROR, ("2: [fake] Error Code 2: " + text).c_str());
}

void set_recorder(IErrorRecorder *recorder) { the_recorder = recorder; }
IHostMemory *host_memory(std::string bytes) { return new HostMemory(std::move(bytes)); }

}  // namespace fake

extern "C" {

std::int32_t getInferLibVersion() noexcept { return fake::version(); }
nvinfer1::IPluginRegistry *getPluginRegistry() noexcept { return &fake::registry(); }

void *createInferBuilder_INTERNAL(void *logger, std::int32_t) noexcept {
    fake::the_logger = static_cast<nvinfer1::ILogger *>(logger);
    if (fake::is_told("no_builder")) return fake::report(nvinfer1::ErrorCode::kINTERNAL_ERROR, "CUDA initialization failure with error: 35"), nullptr;
    if (fake::is_told("warned")) {
        fake::the_logger->log(nvinfer1::ILogger::Severity::kWARNING, "CUDA initialization failure with error: 36");
        return nullptr;
    }
    fake::the_logger->log(nvinfer1::ILogger::Severity::kINFO, "[fake] a builder is made");
    return static_cast<nvinfer1::IBuilder *>(new fake::Builder);
}

void *createInferRuntime_INTERNAL(void *logger, std::int32_t) noexcept {
    fake::the_logger = static_cast<nvinfer1::ILogger *>(logger);
    return fake::is_told("no_runtime") ? nullptr : static_cast<nvinfer1::IRuntime *>(new fake::Runtime);
}

}  // extern "C"
