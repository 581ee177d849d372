// Running grids.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../hardware.cuh"

namespace emulator {

enum class Order { rising, falling, random };

// In which order blocks, warps and lanes run, and when asynchronous copies happen: at once or as late as may be. Products
// of warpgroups do the opposite, so that each comes early where what it waits for comes late.
struct Schedule {
    Order order = Order::rising;
    bool eager_copies = false;
    uint64_t seed = 0;
};

struct Kernel {
    const char *name;
    void (*function)(const Parameters &);
    int threads;
};

struct Grid {
    int blocks;
    int block;
    size_t shared_bytes;
};

// Memory with a guard page on either side; returns its end.
unsigned char *guarded(size_t bytes);

void describe_place(const char *what);

void run_grid(const Kernel &kernel, const Grid &grid, const Parameters &parameters, const Schedule &schedule);

}  // namespace emulator
