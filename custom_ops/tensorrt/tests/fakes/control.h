// What the host sets for the fakes, and what they tell it; the host defines all of it.
#pragma once

#include <cstdint>

#include "moa_cuda.h"

#define MOA_SHARED extern "C" __attribute__((visibility("default")))

// One line of the log.
MOA_SHARED void fake_note(const char *line);

struct FakeControl {
    std::uint32_t abi_version;
    // The current CUDA context; null where the thread has none.
    void *context;
    // The function that fails, by its name, with its text; null for none.
    const char *failing;
    // Bytes that a plan over these shapes needs.
    std::uint64_t (*workspace)(const moa_cuda_shape *shapes);
};

MOA_SHARED FakeControl fake_control;
