// libnvinfer without TensorRT: engines, and contexts that run the plugins.

#include <algorithm>

#include "plan.h"

namespace fake {

using namespace nvinfer1;

namespace {

struct Engine;

std::size_t bytes_of(DataType type) {
    switch (static_cast<std::int32_t>(type)) {
        case 8: return 8;
        case 1:
        case 7: return 2;
        default: return 4;
    }
}

std::size_t volume(const Dims &dims) {
    std::size_t count = 1;
    for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) count *= static_cast<std::size_t>(dims.d[axis]);
    return count;
}

struct Context final : IExecutionContext {
    explicit Context(Engine &engine);
    static const Table<apiv::VExecutionContext, Context> &table();

    bool set_shape(const std::string &name, const Dims &dims);
    Dims shape(const std::string &name);
    bool run(cudaStream_t stream);
    bool run_node(std::size_t index, const Known &known, std::map<std::string, void *> &places, cudaStream_t stream);

    Face<apiv::VExecutionContext, Context> face;
    Engine &engine;
    // As in 8.6: who comes second chooses.
    std::int32_t profile;
    IProfiler *profiler = nullptr;
    std::map<std::string, Dims> shapes;
    std::map<std::string, void *> addresses;
    std::vector<std::unique_ptr<Instance>> plugins;
    // Rounded up to what device memory is aligned to.
    std::map<std::string, std::vector<std::max_align_t>> between;
};

struct Inspector final : IEngineInspector {
    explicit Inspector(Engine &engine);
    Face<apiv::VEngineInspector, Engine> face;
};

struct Engine final : ICudaEngine {
    explicit Engine(Plan loaded) : face(table().face(this)), plan(std::move(loaded)) { mImpl = face.as_interface(); }
    static const Table<apiv::VCudaEngine, Engine> &table();

    const Value &tensor(std::size_t index) const {
        const auto &inputs = plan.graph.model.inputs;
        return index < inputs.size() ? inputs[index] : plan.graph.model.outputs.at(index - inputs.size());
    }
    const Value &tensor(const std::string &name) const {
        for (std::size_t index = 0; index < count(); ++index) {
            if (tensor(index).name == name) return tensor(index);
        }
        throw Refused("no tensor " + name);
    }
    bool is_input(const std::string &name) const { return find(name) < plan.graph.model.inputs.size(); }
    std::size_t find(const std::string &name) const {
        std::size_t index = 0;
        while (index < count() && tensor(index).name != name) ++index;
        return index;
    }
    std::size_t count() const { return plan.graph.model.inputs.size() + plan.graph.model.outputs.size(); }

    Face<apiv::VCudaEngine, Engine> face;
    Plan plan;
    bool has_context = false;
};

IExecutionContext *context_of(Engine &engine) {
    if (is_told("no_context")) return report(ErrorCode::kFAILED_ALLOCATION, "Cannot create a context: out of memory"), nullptr;
    try {
        return new Context(engine);
    } catch (const std::exception &error) {
        report(ErrorCode::kFAILED_INITIALIZATION, error.what());
        return nullptr;
    }
}

const Table<apiv::VCudaEngine, Engine> &Engine::table() {
    using V = apiv::VCudaEngine;
    static const auto one = [] {
        Table<V, Engine> made;
        made.on(&V::setErrorRecorder, [](auto *, IErrorRecorder *recorder) { set_recorder(recorder); })
            .on(&V::getNbOptimizationProfiles, [](auto *face) { return static_cast<std::int32_t>(face->owner->plan.profiles.size()); })
            .on(&V::getNbLayers, [](auto *face) { return static_cast<std::int32_t>(face->owner->plan.graph.model.nodes.size()); })
            .on(&V::getNbIOTensors, [](auto *face) { return static_cast<std::int32_t>(face->owner->count()); })
            .on(&V::getIOTensorName, [](auto *face, std::int32_t index) -> const char * {
                return face->owner->tensor(static_cast<std::size_t>(index)).name.c_str();
            })
            .on(&V::getTensorFormat, [](auto *, const char *) { return is_told("odd_format") ? TensorFormat::kCHW32 : TensorFormat::kLINEAR; })
            .on(&V::getTensorFormatDesc, [](auto *, const char *) -> const char * { return "a format of the fake"; })
            .on(&V::getTensorLocation, [](auto *, const char *) { return TensorLocation::kDEVICE; })
            .on(&V::getTensorIOMode, [](auto *face, const char *name) {
                return face->owner->is_input(name) ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
            })
            .on(&V::getTensorDataType, [](auto *face, const char *name) { return type_of(face->owner->tensor(name).element); })
            .on(&V::getTensorShape, [](auto *face, const char *name) { return dims_of(face->owner->tensor(name).dims); })
            .on(&V::getProfileShape, [](auto *face, const char *name, std::int32_t profile, OptProfileSelector which) {
                const auto &ranges = face->owner->plan.profiles.at(static_cast<std::size_t>(profile));
                const auto found = ranges.find(name);
                if (found == ranges.end()) return dims_of(face->owner->tensor(name).dims);
                const Range &range = found->second;
                return which == OptProfileSelector::kMIN ? range.least : which == OptProfileSelector::kOPT ? range.usual : range.most;
            })
            .on(&V::createEngineInspector, [](auto *face) -> IEngineInspector * { return new Inspector(*face->owner); });
#if NV_TENSORRT_MAJOR >= 10
        made.on(&V::createExecutionContext, [](auto *face, ExecutionContextAllocationStrategy) { return context_of(*face->owner); });
#else
        made.on(&V::createExecutionContext, [](auto *face) { return context_of(*face->owner); });
#endif
#if NV_TENSORRT_MAJOR >= 11
        made.on(&V::getDeviceMemorySizeV2, [](auto *) -> std::int64_t { return 4096; });
#else
        made.on(&V::getDeviceMemorySize, [](auto *) -> std::size_t { return 4096; });
#endif
        return made;
    }();
    return one;
}

Inspector::Inspector(Engine &engine) : face([&] {
    static const auto table = Table<apiv::VEngineInspector, Engine>().on(
        &apiv::VEngineInspector::getEngineInformation,
        [](auto *asked, LayerInformationFormat) -> const char * { return asked->owner->plan.told.c_str(); });
    return table.face(&engine);
}()) { mImpl = face.as_interface(); }

const Table<apiv::VExecutionContext, Context> &Context::table() {
    using V = apiv::VExecutionContext;
    static const auto one = Table<V, Context>()
        .on(&V::setErrorRecorder, [](auto *, IErrorRecorder *recorder) { set_recorder(recorder); })
        .on(&V::setOptimizationProfileAsync, [](auto *face, std::int32_t profile, cudaStream_t) {
            face->owner->profile = profile;
            return !is_told("no_profile");
        })
        .on(&V::getOptimizationProfile, [](auto *face) { return face->owner->profile; })
        .on(&V::setInputShape, [](auto *face, const char *name, const Dims &dims) { return face->owner->set_shape(name, dims); })
        .on(&V::setTensorAddress, [](auto *face, const char *name, void *address) {
            face->owner->addresses[name] = address;
            return address != nullptr && !is_told("no_address");
        })
        .on(&V::getTensorShape, [](auto *face, const char *name) { return face->owner->shape(name); })
        .on(&V::setProfiler, [](auto *face, IProfiler *profiler) { face->owner->profiler = profiler; })
        .on(&V::enqueueV3, [](auto *face, cudaStream_t stream) { return face->owner->run(stream); });
    return one;
}

Context::Context(Engine &engine) : face(table().face(this)), engine(engine), profile(engine.has_context ? -1 : 0) {
    mImpl = face.as_interface();
    engine.has_context = true;
    for (const auto &plugin : engine.plan.graph.plugins) plugins.push_back(plugin->attached());
    for (const Value &input : engine.plan.graph.model.inputs) {
        const bool is_fixed = std::all_of(input.dims.begin(), input.dims.end(), [](auto size) { return size >= 0; });
        if (is_fixed) shapes[input.name] = dims_of(input.dims);
    }
}

bool Context::set_shape(const std::string &name, const Dims &dims) {
    if (profile < 0) return report(ErrorCode::kINVALID_STATE, "no optimization profile is selected"), false;
    if (is_told("no_shape")) return report(ErrorCode::kINVALID_ARGUMENT, "the shape is not supported"), false;
    shapes[name] = dims;
    return true;
}

Dims Context::shape(const std::string &name) {
    const auto unknown = [&] {
        Dims none = dims_of(engine.tensor(name).dims);
        if (none.nbDims > 0) none.d[0] = -1;
        return none;
    };
    if (shapes.size() < engine.plan.graph.model.inputs.size() || is_told("data_shapes")) return unknown();
    try {
        return engine.plan.graph.known(shapes).at(name).second;
    } catch (const std::exception &error) {
        report(ErrorCode::kINVALID_STATE, error.what());
        Dims none{};
        none.nbDims = -1;
        return none;
    }
}

bool Context::run_node(std::size_t index, const Known &known, std::map<std::string, void *> &places, cudaStream_t stream) {
    const Node &node = engine.plan.graph.model.nodes[index];
    std::vector<PluginTensorDesc> inputs, outputs;
    std::vector<const void *> from;
    std::vector<void *> to;
    for (const std::string &name : node.inputs) {
        inputs.push_back(plain(known.at(name).first, known.at(name).second));
        from.push_back(places.at(name));
    }
    for (const std::string &name : node.outputs) {
        const auto &[type, dims] = known.at(name);
        auto &own = between[name];
        own.resize(bytes_of(type) * volume(dims) / sizeof(std::max_align_t) + 1);
        if (places.count(name) == 0) places[name] = own.data();
        outputs.push_back(plain(type, dims));
        to.push_back(places.at(name));
    }
    const std::size_t bytes = engine.plan.workspaces[index];
    const std::unique_ptr<void, void (*)(void *)> workspace(std::aligned_alloc(256, (bytes / 256 + 1) * 256), std::free);
    const bool is_done = plugins[index]->enqueue(inputs, outputs, from, to, workspace.get(), stream);
    if (is_done && profiler != nullptr) profiler->reportLayerTime(node.name.c_str(), 0.25F);
    return is_done;
}

bool Context::run(cudaStream_t stream) {
    if (is_told("run_fails")) return report(ErrorCode::kFAILED_EXECUTION, "Cuda failure (an illegal memory access was encountered)"), false;
    try {
        const Known known = engine.plan.graph.known(shapes);
        std::map<std::string, void *> places;
        for (Value &constant : engine.plan.graph.model.constants) places[constant.name] = constant.bytes.data();
        for (const auto &[name, address] : addresses) places[name] = address;
        for (std::size_t index = 0; index < engine.plan.graph.model.nodes.size(); ++index) {
            if (!run_node(index, known, places, stream)) throw Refused("the plugin does not run");
        }
        return true;
    } catch (const std::exception &error) {
        report(ErrorCode::kFAILED_EXECUTION, error.what());
        return false;
    }
}

}  // namespace

ICudaEngine *engine_of(Plan plan) { return new Engine(std::move(plan)); }

}  // namespace fake
