#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

namespace moa::engine {

namespace {

constexpr const char *place = "libcuda.so.1";

// Numbers of cuda.h.
constexpr int out_of_memory = 2;
constexpr int multiprocessor_count = 16, compute_major = 75, compute_minor = 76;
constexpr unsigned stream_non_blocking = 1;
constexpr int capture_thread_local = 1;

// The functions of the driver that the shim calls, by their names there.
#define MOA_DRIVER_FUNCTIONS(one)                                                                          \
    one(init, "cuInit", unsigned)                                                                          \
    one(driver_version, "cuDriverGetVersion", int *)                                                       \
    one(error_name, "cuGetErrorName", int, const char **)                                                  \
    one(device_count, "cuDeviceGetCount", int *)                                                           \
    one(device, "cuDeviceGet", int *, int)                                                                 \
    one(device_name, "cuDeviceGetName", char *, int, int)                                                  \
    one(device_uuid, "cuDeviceGetUuid", void *, int)                                                       \
    one(device_bytes, "cuDeviceTotalMem_v2", std::size_t *, int)                                           \
    one(device_attribute, "cuDeviceGetAttribute", int *, int, int)                                         \
    one(retain, "cuDevicePrimaryCtxRetain", void **, int)                                                  \
    one(release, "cuDevicePrimaryCtxRelease_v2", int)                                                      \
    one(push, "cuCtxPushCurrent_v2", void *)                                                               \
    one(pop, "cuCtxPopCurrent_v2", void **)                                                                \
    one(allocate, "cuMemAlloc_v2", std::uint64_t *, std::size_t)                                           \
    one(free, "cuMemFree_v2", std::uint64_t)                                                               \
    one(to_device, "cuMemcpyHtoDAsync_v2", std::uint64_t, const void *, std::size_t, void *)               \
    one(to_host, "cuMemcpyDtoHAsync_v2", void *, std::uint64_t, std::size_t, void *)                       \
    one(set_bytes, "cuMemsetD8Async", std::uint64_t, unsigned char, std::size_t, void *)                   \
    one(stream_create, "cuStreamCreate", void **, unsigned)                                                \
    one(stream_destroy, "cuStreamDestroy_v2", void *)                                                      \
    one(stream_synchronize, "cuStreamSynchronize", void *)                                                 \
    one(begin_capture, "cuStreamBeginCapture_v2", void *, int)                                             \
    one(end_capture, "cuStreamEndCapture", void *, void **)                                                \
    one(event_create, "cuEventCreate", void **, unsigned)                                                  \
    one(event_destroy, "cuEventDestroy_v2", void *)                                                        \
    one(event_record, "cuEventRecord", void *, void *)                                                     \
    one(event_synchronize, "cuEventSynchronize", void *)                                                   \
    one(event_elapsed, "cuEventElapsedTime", float *, void *, void *)                                      \
    one(graph_instantiate, "cuGraphInstantiateWithFlags", void **, void *, unsigned long long)             \
    one(graph_launch, "cuGraphLaunch", void *, void *)                                                     \
    one(graph_ready_destroy, "cuGraphExecDestroy", void *)                                                 \
    one(graph_destroy, "cuGraphDestroy", void *)

struct Driver {
#define MOA_MEMBER(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
    MOA_DRIVER_FUNCTIONS(MOA_MEMBER)
#undef MOA_MEMBER

    Driver() {
        void *const library = dlopen(place, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            const char *const why = dlerror();
            throw Error(MOA_TRT_MISSING, std::string("there is no CUDA driver: ") + (why == nullptr ? place : why));
        }
#define MOA_FIND(name, symbol, ...) find(library, symbol, name);
        MOA_DRIVER_FUNCTIONS(MOA_FIND)
#undef MOA_FIND
        const int code = init(0);
        if (code != 0) throw Error(MOA_TRT_MISSING, "the CUDA driver does not start: " + told("cuInit", code));
    }

    std::string told(const char *call, int code) const {
        const char *name = nullptr;
        const bool is_named = error_name(code, &name) == 0 && name != nullptr;
        return std::string(call) + " returns " + (is_named ? name : std::to_string(code).c_str());
    }

private:
    template <class Function>
    static void find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr) {
            throw Error(MOA_TRT_MISSING, std::string(place) + " lacks " + name + "; install a newer CUDA driver");
        }
    }
};

// Tried again after a failure: a driver may be installed while the process runs.
const Driver &driver() {
    static const Driver one;
    return one;
}

void check(const char *call, int code) {
    if (code == 0) return;
    throw Error(code == out_of_memory ? MOA_TRT_MEMORY : MOA_TRT_DRIVER, driver().told(call, code));
}

int device_handle(std::int32_t ordinal) {
    int count = 0, device = 0;
    check("cuDeviceGetCount", driver().device_count(&count));
    if (ordinal < 0 || ordinal >= count) {
        throw Error(MOA_TRT_MISSING, "there is no CUDA device " + std::to_string(ordinal) + ": the driver has " +
                                         std::to_string(count));
    }
    check("cuDeviceGet", driver().device(&device, ordinal));
    return device;
}

std::uint32_t attribute(int device, int which) {
    int value = 0;
    check("cuDeviceGetAttribute", driver().device_attribute(&value, which, device));
    return static_cast<std::uint32_t>(value);
}

}  // namespace

std::shared_ptr<Device> Device::open(std::int32_t ordinal) {
    const int handle = device_handle(ordinal);
    void *context = nullptr;
    check("cuDevicePrimaryCtxRetain", driver().retain(&context, handle));
    return std::shared_ptr<Device>(new Device(handle, context));
}

Device::~Device() { driver().release(handle_); }

int Device::driver_version() {
    int version = 0;
    check("cuDriverGetVersion", driver().driver_version(&version));
    return version;
}

void Device::describe(std::int32_t ordinal, moa_trt_device &device) {
    const int handle = device_handle(ordinal);
    std::size_t bytes = 0;
    unsigned char uuid[16] = {};
    check("cuDeviceTotalMem", driver().device_bytes(&bytes, handle));
    check("cuDeviceGetName", driver().device_name(device.name, sizeof device.name - 1, handle));
    device.ordinal = ordinal;
    device.compute_major = attribute(handle, compute_major);
    device.compute_minor = attribute(handle, compute_minor);
    device.driver_version = static_cast<std::uint32_t>(driver_version());
    device.multiprocessors = attribute(handle, multiprocessor_count);
    device.total_bytes = bytes;
    if (driver().device_uuid(uuid, handle) != 0) return;
    static_assert(sizeof device.uuid > 36);
    char *text = device.uuid;
    for (int index = 0; index < 16; ++index) {
        const bool is_apart = index == 4 || index == 6 || index == 8 || index == 10;
        text += std::snprintf(text, 4, is_apart ? "-%02x" : "%02x", uuid[index]);
    }
}

Current::Current(const Device &device) { check("cuCtxPushCurrent", driver().push(device.context_)); }

Current::~Current() {
    void *former = nullptr;
    driver().pop(&former);
}

Stream::Stream() { check("cuStreamCreate", driver().stream_create(&handle_, stream_non_blocking)); }
Stream::~Stream() { driver().stream_destroy(handle_); }
void Stream::synchronize() const { check("cuStreamSynchronize", driver().stream_synchronize(handle_)); }
void Stream::begin_capture() const {
    check("cuStreamBeginCapture", driver().begin_capture(handle_, capture_thread_local));
}
void *Stream::end_capture() const {
    void *captured = nullptr;
    check("cuStreamEndCapture", driver().end_capture(handle_, &captured));
    return captured;
}

Event::Event() { check("cuEventCreate", driver().event_create(&handle_, 0)); }
Event::~Event() { driver().event_destroy(handle_); }
void Event::record(const Stream &stream) const { check("cuEventRecord", driver().event_record(handle_, stream.handle())); }
float Event::since(const Event &start) const {
    float milliseconds = 0.0F;
    check("cuEventSynchronize", driver().event_synchronize(handle_));
    check("cuEventElapsedTime", driver().event_elapsed(&milliseconds, start.handle_, handle_));
    return milliseconds;
}

Graph::Graph(void *captured) : captured_(captured) {
    const int code = driver().graph_instantiate(&ready_, captured_, 0);
    if (code == 0) return;
    driver().graph_destroy(captured_);
    check("cuGraphInstantiateWithFlags", code);
}
Graph::~Graph() {
    driver().graph_ready_destroy(ready_);
    driver().graph_destroy(captured_);
}
void Graph::launch(const Stream &stream) const { check("cuGraphLaunch", driver().graph_launch(ready_, stream.handle())); }

Buffer::~Buffer() {
    if (address_ != 0) driver().free(address_);
}

void Buffer::reserve(std::uint64_t bytes) {
    if (address_ != 0 && bytes <= bytes_) return;
    if (address_ != 0) driver().free(address_);
    address_ = bytes_ = 0;
    const std::uint64_t wanted = bytes == 0 ? 1 : bytes;
    std::uint64_t address = 0;
    const int code = driver().allocate(&address, wanted);
    if (code != 0) {
        throw Error(code == out_of_memory ? MOA_TRT_MEMORY : MOA_TRT_DRIVER,
                    "no " + std::to_string(wanted) + " bytes of device memory: " + driver().told("cuMemAlloc", code));
    }
    address_ = address;
    bytes_ = wanted;
}

void Buffer::upload(const void *values, std::uint64_t bytes, const Stream &stream) const {
    if (bytes == 0) return;
    check("cuMemcpyHtoDAsync", driver().to_device(address_, values, bytes, stream.handle()));
}

void Buffer::download(void *values, std::uint64_t bytes, const Stream &stream) const {
    if (bytes == 0) return;
    check("cuMemcpyDtoHAsync", driver().to_host(values, address_, bytes, stream.handle()));
}

void Buffer::fill(unsigned char value, std::uint64_t bytes, const Stream &stream) const {
    if (bytes == 0) return;
    check("cuMemsetD8Async", driver().set_bytes(address_, value, bytes, stream.handle()));
}

}  // namespace moa::engine
