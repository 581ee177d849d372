#include "host.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

FakeControl fake_control;

namespace host {

namespace {

std::string logged;
std::vector<std::string> noted;
std::int32_t library_version = NV_TENSORRT_VERSION;
void *opened = nullptr;
std::string paths[2];

// Where stderr goes while the plugin is a build for another release, which may not call the logger of this one.
std::FILE *errors = nullptr;

struct Logger final : nvinfer1::ILogger {
    void log(Severity severity, const char *text) noexcept override {
        if (errors != nullptr) logged += "called by another release: ";
        logged += (severity == Severity::kERROR ? "" : "not an error: ") + std::string(text) + "\n";
    }
} logger;

struct Finder final : nvinfer1::ILoggerFinder {
    nvinfer1::ILogger *findLogger() override { return &logger; }
} finder;

std::uint64_t workspace(const moa_cuda_shape *shapes) {
    return static_cast<std::uint64_t>(shapes[0].dims[0] * shapes[0].dims[1]) * 1000;
}

}  // namespace

std::string taken_log() {
    if (errors != nullptr) {
        char part[1024];
        std::rewind(errors);
        while (std::fgets(part, sizeof part, errors) != nullptr) logged += part;
        std::rewind(errors);
        CHECK(ftruncate(fileno(errors), 0) == 0);
    }
    return std::exchange(logged, "");
}
void logged_again(const std::string &text) { logged += text; }
std::vector<std::string> taken_notes() { return std::exchange(noted, {}); }
void *library() { return opened; }
std::string program() { return paths[0]; }
std::string library_path() { return paths[1]; }

void reset() {
    static int context;
    fake_control = {MOA_CUDA_ABI_VERSION, &context, nullptr, workspace};
    taken_log();
    noted.clear();
    library_version = NV_TENSORRT_VERSION;
}

Fields &Fields::raw(const std::string &name, nvinfer1::PluginFieldType type, const void *data, std::size_t bytes,
                    std::int32_t length) {
    without(name);
    const auto *start = static_cast<const unsigned char *>(data);
    all.push_back({name, type, std::vector<unsigned char>(start, start + bytes), length});
    return *this;
}

Fields &Fields::integer(const std::string &name, std::int32_t value) {
    return raw(name, nvinfer1::PluginFieldType::kINT32, &value, sizeof value, 1);
}

Fields &Fields::real(const std::string &name, float value) {
    return raw(name, nvinfer1::PluginFieldType::kFLOAT32, &value, sizeof value, 1);
}

// Without a zero, as parsers do.
Fields &Fields::text(const std::string &name, const std::string &value) {
    return raw(name, nvinfer1::PluginFieldType::kCHAR, value.data(), value.size(),
               static_cast<std::int32_t>(value.size()));
}

Fields &Fields::without(const std::string &name) {
    for (auto field = all.begin(); field != all.end();) field = field->name == name ? all.erase(field) : field + 1;
    return *this;
}

Fields legal_fields(std::size_t index) {
    Fields fields;
    for (const auto &attribute : moa::contract::operators[index].attributes) {
        const std::string name = attribute.name;
        if (attribute.kind == moa::contract::Kind::real) fields.real(name, 0.5F);
        if (attribute.kind == moa::contract::Kind::text) {
            fields.text(name, name == "gate_mode" ? "softmax_topk" : name == "activation" ? "gelu" : "softmax");
        }
        if (attribute.kind == moa::contract::Kind::integer) {
            fields.integer(name, name == "top_k" ? 3 : name == "kv_num_heads" ? 2 : name == "gated" ? 0 : 1);
        }
    }
    return fields;
}

Dims dims(const Sizes &sizes) {
    Dims made{};
    made.nbDims = static_cast<std::int32_t>(sizes.size());
    for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
        made.d[axis] = static_cast<std::remove_reference_t<decltype(made.d[0])>>(sizes[axis]);
    }
    return made;
}

std::vector<Sizes> legal_shapes(std::size_t index, std::size_t count, std::int64_t tokens, std::int64_t others) {
    std::vector<Sizes> all;
    if (index == 0) {
        const std::int64_t keys = tokens + (count > 7 ? others : 0);
        all = {{2, tokens, 16}, {2, keys}, {16, 6}, {6, 16, 8}, {16, 16}, {6, 8, 16}, {16}, {2, 2, others, 4},
               {2, 2, others, 4}, {512, 2}, {512, 2}, {2, tokens}, {2, tokens, 16}};
    } else if (index == 1) {
        all = {{2, tokens, 16}, {2, 2, others, 4}, {2, 2, others, 4}, {2, others}, {2, tokens}, {16, 6}, {6, 16, 8},
               {6, 8, 16}, {16}};
    } else {
        all = {{2, tokens, 16}, {16, 6}, {6, 16, 5}, {6, 5, 16}, {16}, {2, tokens, 16}};
    }
    all.resize(count);
    return all;
}

std::vector<DataType> legal_types(std::size_t index, std::size_t count, DataType activation) {
    std::vector<DataType> types;
    for (std::size_t input = 0; input < count; ++input) {
        switch (moa::contract::operators[index].inputs[input].element) {
            case moa::contract::Element::activation:
            case moa::contract::Element::weight: types.push_back(activation); break;
            case moa::contract::Element::float32: types.push_back(DataType::kFLOAT); break;
            default: types.push_back(DataType::kINT32);
        }
    }
    return types;
}

nvinfer1::PluginTensorDesc tensor(DataType type, const Sizes &shape) {
    nvinfer1::PluginTensorDesc made{};
    made.dims = dims(shape);
    made.type = type;
    made.format = nvinfer1::TensorFormat::kLINEAR;
    made.scale = 1.0F;
    return made;
}

// Loggers of another release are laid out in another way, so the plugin must not call this one.
TEST(another_release_is_not_logged_to) {
    library_version = NV_TENSORRT_VERSION + 100;
    CHECK(create(0, Fields{}) == nullptr);
    EQUAL(logged, std::string());
    library_version = NV_TENSORRT_VERSION;
    CHECK(create(0, Fields{}) == nullptr);
    CHECK(taken_log().find("attribute `top_k` of type INT is missing") != std::string::npos);
}

TEST(nothing_but_what_tensorrt_asks_for_is_exported) {
    for (const char *name : {"moa_cuda_create", "_ZN3moa8creatorsERi", "_ZN3moa9log_errorEPKc"}) {
        CHECK(dlsym(library(), name) == nullptr || std::string(name).rfind("moa_cuda", 0) == 0);
    }
    CHECK(dlsym(library(), "setLoggerFinder") != nullptr);
    CHECK((dlsym(library(), "getCreators") != nullptr) != (dlsym(library(), "getPluginCreators") != nullptr));
}

}  // namespace host

void fake_note(const char *line) { host::noted.emplace_back(line); }

MOA_SHARED std::int32_t getInferLibVersion() noexcept { return host::library_version; }

// main PLUGIN [ABI of the kernels]; MOA_TEST_OTHER_RELEASE says that the plugin was built for another release.
int main(int count, char **arguments) {
    if (count < 2 || count > 3) return 2;
    if (std::getenv("MOA_TEST_OTHER_RELEASE") != nullptr) {
        host::errors = std::tmpfile();
        if (host::errors == nullptr || dup2(fileno(host::errors), STDERR_FILENO) < 0) return 2;
    }
    host::paths[0] = arguments[0];
    host::paths[1] = arguments[1];
    host::opened = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (host::opened == nullptr) {
        std::printf("%s\n", dlerror());
        return 1;
    }
    auto *set = reinterpret_cast<void (*)(nvinfer1::ILoggerFinder *)>(dlsym(host::opened, "setLoggerFinder"));
    if (set == nullptr) {
        std::printf("%s does not export setLoggerFinder\n", arguments[1]);
        return 1;
    }
    set(&host::finder);
    if (count == 2) return host::run_tests(host::reset, host::taken_log);
    host::reset();
    fake_control.abi_version = static_cast<std::uint32_t>(std::atoi(arguments[2]));
    return host::configure_alone();
}
