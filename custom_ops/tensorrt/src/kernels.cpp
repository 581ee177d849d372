#include "kernels.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "failure.h"

namespace moa {

namespace {

using contract::cuda_library;
using contract::cuda_variable;

template <class Function>
Function *symbol(void *library, const char *name, const std::string &place) {
    void *address = dlsym(library, name);
    if (address == nullptr) throw Refusal(place + " lacks " + name);
    return reinterpret_cast<Function *>(address);
}

std::string last_loader_error() {
    const char *text = dlerror();
    return text == nullptr ? "unknown error" : text;
}

// Where this library lies, with the last `/`; empty where the loader does not say.
std::string own_folder() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void *>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return "";
    const std::string path = info.dli_fname;
    const auto slash = path.rfind('/');
    return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

void *open_kernels(std::string &place) {
    const char *named = std::getenv(cuda_variable);
    if (named != nullptr && *named != '\0') {
        place = named;
        if (void *library = dlopen(named, RTLD_NOW | RTLD_LOCAL)) return library;
        throw Refusal(std::string(cuda_variable) + "=" + named + " cannot be loaded: " + last_loader_error());
    }
    // Nowhere else: whoever locks an engine to its libraries looks at these two places.
    place = own_folder() + cuda_library;
    if (void *library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    throw Refusal(std::string(cuda_library) + ", which holds the kernels, cannot be loaded from beside " +
                  "libmoa_tensorrt.so; set " + cuda_variable + " to it (" + last_loader_error() + ")");
}

// The functions of moa_cuda.h. Loaded libraries stay: their kernels may still run when the last plugin goes.
struct Library {
    decltype(moa_cuda_abi_version) *abi_version;
    decltype(moa_cuda_create) *create;
    decltype(moa_cuda_destroy) *destroy;
    decltype(moa_cuda_load) *load;
    decltype(moa_cuda_output_shapes) *output_shapes;
    decltype(moa_cuda_plan_create) *plan_create;
    decltype(moa_cuda_plan_destroy) *plan_destroy;
    decltype(moa_cuda_plan_workspace_bytes) *plan_workspace_bytes;
    decltype(moa_cuda_enqueue) *enqueue;

    Library() {
        std::string place;
        void *library = open_kernels(place);
        abi_version = symbol<decltype(moa_cuda_abi_version)>(library, "moa_cuda_abi_version", place);
        if (abi_version() != MOA_CUDA_ABI_VERSION) {
            throw Refusal(place + " has version " + std::to_string(abi_version()) + " of its interface, and version " +
                          std::to_string(MOA_CUDA_ABI_VERSION) + " is needed; take both libraries from one build");
        }
        create = symbol<decltype(moa_cuda_create)>(library, "moa_cuda_create", place);
        destroy = symbol<decltype(moa_cuda_destroy)>(library, "moa_cuda_destroy", place);
        load = symbol<decltype(moa_cuda_load)>(library, "moa_cuda_load", place);
        output_shapes = symbol<decltype(moa_cuda_output_shapes)>(library, "moa_cuda_output_shapes", place);
        plan_create = symbol<decltype(moa_cuda_plan_create)>(library, "moa_cuda_plan_create", place);
        plan_destroy = symbol<decltype(moa_cuda_plan_destroy)>(library, "moa_cuda_plan_destroy", place);
        plan_workspace_bytes =
            symbol<decltype(moa_cuda_plan_workspace_bytes)>(library, "moa_cuda_plan_workspace_bytes", place);
        enqueue = symbol<decltype(moa_cuda_enqueue)>(library, "moa_cuda_enqueue", place);
    }
};

const Library &library() {
    static const Library *const loaded = new Library;
    return *loaded;
}

// CUDA_MEMCPY2D of the driver.
struct Copy2d {
    std::size_t source_x, source_y;
    std::int32_t source_kind;
    const void *source_host;
    std::uint64_t source_device;
    void *source_array;
    std::size_t source_pitch;
    std::size_t target_x, target_y;
    std::int32_t target_kind;
    void *target_host;
    std::uint64_t target_device;
    void *target_array;
    std::size_t target_pitch;
    std::size_t width_bytes, height;
};

constexpr std::int32_t device_memory = 2;  // CU_MEMORYTYPE_DEVICE

struct Driver {
    int (*current_context)(void **);
    int (*set_bytes)(std::uint64_t, unsigned char, std::size_t, void *);
    int (*copy_2d)(const Copy2d *, void *);

    Driver() {
        const std::string place = "libcuda.so.1";
        void *driver = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (driver == nullptr) throw Refusal("there is no CUDA driver: " + last_loader_error());
        current_context = symbol<int(void **)>(driver, "cuCtxGetCurrent", place);
        set_bytes = symbol<int(std::uint64_t, unsigned char, std::size_t, void *)>(driver, "cuMemsetD8Async", place);
        copy_2d = symbol<int(const Copy2d *, void *)>(driver, "cuMemcpy2DAsync_v2", place);
    }
};

const Driver &driver() {
    static const Driver *const loaded = new Driver;
    return *loaded;
}

std::uint64_t address(const void *pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// Copies `count` words of 32 bits that lie `source_pitch` bytes apart to places `target_pitch` bytes apart: the device is
// little-endian, so these are the low halves of int64.
int copy_words(const void *source, std::size_t source_pitch, void *target, std::size_t target_pitch, std::size_t count,
               void *stream) {
    Copy2d copy{};
    copy.source_kind = copy.target_kind = device_memory;
    copy.source_device = address(source);
    copy.target_device = address(target);
    copy.source_pitch = source_pitch;
    copy.target_pitch = target_pitch;
    copy.width_bytes = sizeof(std::int32_t);
    copy.height = count;
    return driver().copy_2d(&copy, stream);
}

void check(std::int32_t code, const moa_cuda_error &error) {
    if (code == MOA_CUDA_OK) return;
    const std::string text(error.text, strnlen(error.text, sizeof error.text));
    throw Refusal(text.empty() ? "libmoa_cuda failed with code " + std::to_string(code) : text);
}

struct Pool {
    std::mutex door;
    std::map<void *, std::weak_ptr<Kernels>> by_context;
};

Pool &pool() {
    static Pool *const one = new Pool;
    return *one;
}

}  // namespace

std::shared_ptr<Kernels> Kernels::of_current_context() {
    void *context = nullptr;
    if (driver().current_context(&context) != 0 || context == nullptr) {
        throw Refusal("no CUDA context is current on this thread");
    }
    auto &shared = pool();
    const std::lock_guard<std::mutex> lock(shared.door);
    auto &place = shared.by_context[context];
    if (auto found = place.lock()) return found;
    moa_cuda_kernels *handle = nullptr;
    moa_cuda_error error{};
    check(library().create(nullptr, &handle, &error), error);
    auto made = std::shared_ptr<Kernels>(new Kernels(handle));
    place = made;
    return made;
}

Kernels::~Kernels() { library().destroy(handle_); }

void Kernels::load(std::uint32_t element) {
    moa_cuda_error error{};
    check(library().load(handle_, element, &error), error);
}

Plan::Plan(std::shared_ptr<Kernels> kernels, const Node &node, const moa_cuda_node &described, const Shapes &shapes)
    : kernels_(std::move(kernels)) {
    std::uint8_t wanted[max_outputs];
    const auto outputs = static_cast<std::size_t>(node.output_count());
    for (std::size_t index = 0; index < outputs; ++index) wanted[index] = 1;
    moa_cuda_error error{};
    check(library().plan_create(kernels_->handle(), &described, shapes.data(), node.contract().inputs.count, wanted,
                                outputs, &handle_, &error),
          error);
}

Plan::~Plan() { library().plan_destroy(handle_); }

std::uint64_t Plan::workspace_bytes() const { return library().plan_workspace_bytes(handle_); }

void Plan::enqueue(const void *const *inputs, std::size_t input_count, void *const *outputs, std::size_t output_count,
                   void *workspace, std::uint64_t workspace_bytes, void *stream) const {
    moa_cuda_error error{};
    check(library().enqueue(handle_, inputs, input_count, outputs, output_count, workspace, workspace_bytes, stream,
                            &error),
          error);
}

void prove_shapes(const Node &node, const moa_cuda_node &described, const Shapes &shapes) {
    moa_cuda_shape outputs[max_outputs];
    moa_cuda_error error{};
    check(library().output_shapes(&described, shapes.data(), node.contract().inputs.count, outputs,
                                  node.contract().outputs.count, &error),
          error);
}

void widen(const void *narrow, void *wide, std::size_t count, void *stream) {
    if (count == 0) return;
    int code = driver().set_bytes(address(wide), 0, count * sizeof(std::int64_t), stream);
    if (code == 0) code = copy_words(narrow, sizeof(std::int32_t), wide, sizeof(std::int64_t), count, stream);
    if (code != 0) throw Refusal("the CUDA driver refused to widen `position_ids` (code " + std::to_string(code) + ")");
}

void narrow(const void *wide, void *narrow, std::size_t count, void *stream) {
    if (count == 0) return;
    const int code = copy_words(wide, sizeof(std::int64_t), narrow, sizeof(std::int32_t), count, stream);
    if (code != 0) throw Refusal("the CUDA driver refused to narrow `topk_indices` (code " + std::to_string(code) + ")");
}

}  // namespace moa
