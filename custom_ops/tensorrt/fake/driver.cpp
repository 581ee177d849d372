// The fake CUDA driver with what running an engine needs besides, and with the kernels' emulator where one lies beside it.

#include "../../cuda/fake/fake_cuda.cpp"

#include <dlfcn.h>

namespace {

// Milliseconds since the process began, as far as events go: each recorded event is half of one later.
float clock_now = 0.0F;

struct Event {
    float when = 0.0F;
};

std::string own_folder() {
    Dl_info info{};
    dladdr(reinterpret_cast<const void *>(&own_folder), &info);
    const std::string path = info.dli_fname == nullptr ? "" : info.dli_fname;
    return path.substr(0, path.rfind('/') + 1);
}

const bool is_emulating = [] {
    void *const library = dlopen((own_folder() + "libemulated.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    fake_emulate(reinterpret_cast<int (*)(const char *, unsigned, unsigned, std::size_t, const void *)>(dlsym(library, "emulated_launch")));
    return true;
}();

// CUDA_MEMCPY2D.
struct Copy {
    std::size_t source_x, source_y;
    int source_kind;
    const void *source_host;
    std::uint64_t source_device;
    void *source_array;
    std::size_t source_pitch, target_x, target_y;
    int target_kind;
    void *target_host;
    std::uint64_t target_device;
    void *target_array;
    std::size_t target_pitch, width_bytes, height;
};

}  // namespace

extern "C" {

int cuDeviceGetCount(int *count) { *count = std::getenv("MOA_FAKE_NO_DEVICE") == nullptr ? 1 : 0; return note("cuDeviceGetCount"); }
int cuDeviceGetName(char *name, int bytes, int) { std::snprintf(name, static_cast<std::size_t>(bytes), "Fake GPU"); return note("cuDeviceGetName"); }
int cuDeviceGetUuid(unsigned char *uuid, int) { for (unsigned char index = 0; index < 16; ++index) uuid[index] = index; return note("cuDeviceGetUuid"); }
int cuDeviceTotalMem_v2(std::size_t *bytes, int) { *bytes = std::size_t{8} << 30; return note("cuDeviceTotalMem"); }
int cuMemcpyHtoDAsync_v2(std::uint64_t address, const void *host, std::size_t bytes, void *) { return cuMemcpyHtoD_v2(address, host, bytes); }
int cuMemcpyDtoHAsync_v2(void *host, std::uint64_t address, std::size_t bytes, void *) { return cuMemcpyDtoH_v2(host, address, bytes); }
int cuMemsetD8Async(std::uint64_t address, unsigned char value, std::size_t bytes, void *) { return cuMemsetD8_v2(address, value, bytes); }
int cuMemcpy2DAsync_v2(const Copy *copy, void *) {
    for (std::size_t row = 0; row < copy->height; ++row) {
        std::memcpy(reinterpret_cast<char *>(copy->target_device) + row * copy->target_pitch,
                    reinterpret_cast<const char *>(copy->source_device) + row * copy->source_pitch, copy->width_bytes);
    }
    return note("cuMemcpy2DAsync");
}
int cuStreamDestroy_v2(void *) { return note("cuStreamDestroy"); }
int cuStreamSynchronize(void *) { return note("cuStreamSynchronize"); }
int cuStreamBeginCapture_v2(void *, int) { return note("cuStreamBeginCapture"); }
int cuStreamEndCapture(void *, void **graph) { *graph = new char('g'); return note("cuStreamEndCapture"); }
int cuGraphInstantiateWithFlags(void **ready, void *, unsigned long long) {
    const int code = note("cuGraphInstantiate");
    *ready = code == 0 ? new char('r') : nullptr;
    return code;
}
int cuGraphLaunch(void *, void *) { return note("cuGraphLaunch"); }
int cuGraphExecDestroy(void *ready) { delete static_cast<char *>(ready); return note("cuGraphExecDestroy"); }
int cuGraphDestroy(void *graph) { delete static_cast<char *>(graph); return note("cuGraphDestroy"); }
int cuEventCreate(void **event, unsigned) { *event = new Event; return note("cuEventCreate"); }
int cuEventDestroy_v2(void *event) { delete static_cast<Event *>(event); return note("cuEventDestroy"); }
int cuEventRecord(void *event, void *) { static_cast<Event *>(event)->when = clock_now += 0.5F; return note("cuEventRecord"); }
int cuEventSynchronize(void *) { return note("cuEventSynchronize"); }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    *milliseconds = static_cast<Event *>(end)->when - static_cast<Event *>(start)->when;
    return note("cuEventElapsedTime");
}

}  // extern "C"
