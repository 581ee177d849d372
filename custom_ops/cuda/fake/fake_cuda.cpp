// A CUDA driver without a GPU: it writes down what it is asked for, and fails where it is told to.
//
// Device memory is host memory, so that copies work. Kernels are launched into the log, and into `emulated.cpp` where a
// test connects the two. Every copy of this file that is loaded under another name has a log of its own.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

std::recursive_mutex door;
std::string text;                                  // The log, one line a call.
std::vector<std::vector<unsigned char>> launched;  // First bytes of the parameter of each launch.
std::map<std::string, int> calls;                  // Calls so far, by name.
std::map<std::string, std::pair<int, int>> failures;  // Name -> (number of the call that fails, its code).
std::vector<std::string> functions;                // Names of resolved functions; a handle is an index + 1.
std::vector<std::string> owners;                   // The module of each: `f16` of an image `f16-sm_90a`.
std::map<std::uintptr_t, std::string> images;      // Modules and their images.
int capability = 90;
int version = 13000;
int capturing = 0;
int modules = 0;
int (*emulate)(const char *, unsigned, unsigned, std::size_t, const void *) = nullptr;
thread_local std::vector<std::uintptr_t> contexts;

constexpr std::size_t kept_bytes = 1024;

int note(const char *name, const std::string &details = "") {
    std::lock_guard<std::recursive_mutex> lock(door);
    text += name + (details.empty() ? "" : " " + details) + "\n";
    const auto planned = failures.find(name);
    const bool fails = ++calls[name] && planned != failures.end() && planned->second.first == calls[name];
    return fails ? planned->second.second : 0;
}

std::string number(std::uint64_t value) { return std::to_string(value); }

struct LaunchAttribute {
    int identity;
    int pad;
    int value[16];
};

struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
};

}  // namespace

extern "C" {

// How a test looks in and steers.
const char *fake_log() { return text.c_str(); }
void fake_clear() { text.clear(); launched.clear(); calls.clear(); failures.clear(); }
void fake_fail(const char *name, int call, int code) { failures[name] = {call, code}; }
void fake_capability(int value) { capability = value; }
void fake_version(int value) { version = value; }
void fake_capturing(int value) { capturing = value; }
void fake_emulate(int (*launch)(const char *, unsigned, unsigned, std::size_t, const void *)) { emulate = launch; }
const unsigned char *fake_parameters(std::size_t launch) { return launched.at(launch).data(); }
void fake_make_current(std::uintptr_t context) { contexts.assign(context ? 1 : 0, context); }

int cuInit(unsigned) { return note("cuInit"); }
int cuDriverGetVersion(int *found) { *found = version; return note("cuDriverGetVersion"); }
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
    return *name ? 0 : 1;
}
int cuGetErrorString(int code, const char **name) {
    *name = code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : nullptr;
    return *name ? 0 : 1;
}
int cuCtxGetCurrent(std::uintptr_t *context) {
    *context = contexts.empty() ? 0 : contexts.back();
    return note("cuCtxGetCurrent");
}
int cuCtxPushCurrent_v2(std::uintptr_t context) {
    const int code = note("cuCtxPushCurrent", number(context));
    if (!code) contexts.push_back(context);
    return code;
}
int cuCtxPopCurrent_v2(std::uintptr_t *context) {
    *context = contexts.empty() ? 0 : contexts.back();
    if (!contexts.empty()) contexts.pop_back();
    return note("cuCtxPopCurrent");
}
int cuCtxGetDevice(int *device) { *device = 0; return note("cuCtxGetDevice"); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return note("cuDeviceGet", number(ordinal)); }
int cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
        case 16: *value = 132; break;
        case 38: *value = 60 << 20; break;
        case 75: *value = capability / 10; break;
        case 76: *value = capability % 10; break;
        case 97: *value = 227 << 10; break;
        default: return 1;
    }
    return note("cuDeviceGetAttribute", number(attribute));
}
int cuDevicePrimaryCtxRetain(std::uintptr_t *context, int device) {
    *context = 1000 + device;
    return note("cuDevicePrimaryCtxRetain", number(device));
}
int cuDevicePrimaryCtxRelease_v2(int device) { return note("cuDevicePrimaryCtxRelease", number(device)); }
int cuModuleLoadDataEx(std::uintptr_t *module, const char *image, unsigned count, int *options, void **values) {
    *module = 5000 + ++modules;
    images[*module] = image;
    const int code = note("cuModuleLoadDataEx", image);
    // The log of errors, and its size.
    if (code && count == 2 && options[0] == 5 && options[1] == 6) {
        std::strncpy(static_cast<char *>(values[0]), "\nptxas: line 7: syntax error\nmore", reinterpret_cast<std::size_t>(values[1]) - 1);
    }
    return code;
}
int cuModuleUnload(std::uintptr_t module) { return note("cuModuleUnload", number(module)); }
int cuModuleGetFunction(std::uintptr_t *function, std::uintptr_t module, const char *name) {
    std::lock_guard<std::recursive_mutex> lock(door);
    functions.emplace_back(name);
    owners.push_back(images[module].substr(0, images[module].find('-')));
    *function = functions.size();
    return note("cuModuleGetFunction", name);
}
int cuFuncGetAttribute(int *value, int attribute, std::uintptr_t function) {
    *value = attribute == 1 ? 1024 : 40;
    return note("cuFuncGetAttribute", functions.at(function - 1) + " " + number(attribute));
}
int cuFuncSetAttribute(std::uintptr_t function, int attribute, int value) {
    return note("cuFuncSetAttribute", functions.at(function - 1) + " " + number(attribute) + " " + number(value));
}
int cuStreamIsCapturing(void *, int *status) { *status = capturing; return note("cuStreamIsCapturing"); }
int cuMemAlloc_v2(std::uint64_t *address, std::size_t bytes) {
    const int code = note("cuMemAlloc", number(bytes));
    if (!code) *address = reinterpret_cast<std::uint64_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    return code;
}
int cuMemFree_v2(std::uint64_t address) {
    const int code = note("cuMemFree");
    if (!code) std::free(reinterpret_cast<void *>(address));
    return code;
}
int cuMemsetD8_v2(std::uint64_t address, unsigned char value, std::size_t bytes) {
    const int code = note("cuMemsetD8", number(value) + " " + number(bytes));
    if (!code) std::memset(reinterpret_cast<void *>(address), value, bytes);
    return code;
}
int cuMemcpyDtoH_v2(void *host, std::uint64_t address, std::size_t bytes) {
    std::memcpy(host, reinterpret_cast<const void *>(address), bytes);
    return note("cuMemcpyDtoH", number(bytes));
}
int cuMemcpyHtoD_v2(std::uint64_t address, const void *host, std::size_t bytes) {
    std::memcpy(reinterpret_cast<void *>(address), host, bytes);
    return note("cuMemcpyHtoD", number(bytes));
}
int cuStreamCreate(std::uintptr_t *stream, unsigned) { *stream = 3; return note("cuStreamCreate"); }
int cuCtxSynchronize() { return note("cuCtxSynchronize"); }
int cuLaunchKernelEx(const LaunchConfig *config, std::uintptr_t function, void **parameters, void **extra) {
    std::string line = functions.at(function - 1) + " grid";
    for (unsigned size : config->grid) line += " " + number(size);
    line += " block";
    for (unsigned size : config->block) line += " " + number(size);
    line += " shared " + number(config->shared_bytes);
    line += " stream " + number(reinterpret_cast<std::uintptr_t>(config->stream));
    for (unsigned index = 0; index < config->attribute_count; ++index) {
        const LaunchAttribute &attribute = config->attributes[index];
        line += " attribute " + number(attribute.identity) + "=" + number(attribute.value[0]);
    }
    line += " context " + number(contexts.empty() ? 0 : contexts.back());
    if (extra) line += " extra";
    std::lock_guard<std::recursive_mutex> lock(door);
    const int code = note("cuLaunchKernelEx", line);
    if (code) return code;
    const auto *bytes = static_cast<const unsigned char *>(parameters[0]);
    launched.emplace_back(bytes, bytes + kept_bytes);
    if (!emulate) return 0;
    // CUDA_ERROR_LAUNCH_FAILED where there is no such kernel.
    const std::string name = owners.at(function - 1) + ":" + functions.at(function - 1);
    return emulate(name.c_str(), config->grid[0], config->block[0], config->shared_bytes, bytes) ? 719 : 0;
}

}  // extern "C"
