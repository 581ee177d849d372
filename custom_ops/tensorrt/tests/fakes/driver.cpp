// A CUDA driver with the functions that the plugin may call, and no other.

#include <cstring>
#include <string>

#include "control.h"

namespace {

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

bool fails(const char *name) {
    return fake_control.failing != nullptr && std::strcmp(fake_control.failing, name) == 0;
}

}  // namespace

extern "C" {

int cuCtxGetCurrent(void **context) {
    *context = fake_control.context;
    return 0;
}

int cuMemsetD8Async(std::uint64_t target, unsigned char value, std::size_t bytes, void *stream) {
    fake_note(("memset stream " + std::to_string(reinterpret_cast<std::uintptr_t>(stream))).c_str());
    if (fails("memset")) return 1;
    std::memset(reinterpret_cast<void *>(target), value, bytes);
    return 0;
}

int cuMemcpy2DAsync_v2(const Copy *copy, void *stream) {
    fake_note(("copy stream " + std::to_string(reinterpret_cast<std::uintptr_t>(stream))).c_str());
    if (fails("copy")) return 1;
    if (copy->source_kind != 2 || copy->target_kind != 2) return 1;
    const auto *source = reinterpret_cast<const unsigned char *>(copy->source_device);
    auto *target = reinterpret_cast<unsigned char *>(copy->target_device);
    for (std::size_t row = 0; row < copy->height; ++row) {
        std::memcpy(target + row * copy->target_pitch, source + row * copy->source_pitch, copy->width_bytes);
    }
    return 0;
}

}  // extern "C"
