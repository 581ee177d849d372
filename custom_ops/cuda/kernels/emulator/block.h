// Running grids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

// An asynchronous copy of 16 bytes.
struct Copy {
    void *to;
    const void *from;
    bool keep;
    unsigned number;
    bool happened;
};

// Makes a copy happen that has not happened.
void perform(Copy &copy);
// The copies that this thread has begun and announced to no signal; now they are.
std::vector<Copy *> copies_to_announce();
// From now on the bytes of a copy belong to event `event`, where no later copy goes to the same place.
void hand_to_event(const Copy &copy, unsigned event);
// Whether copies happen when they are begun.
bool copies_are_eager();

// Another thread's turn, until somebody resumes this one.
void suspend();
void resume(int thread);
// The turn of all others, as far as they get.
void linger();

// signal.cpp: forgets the signals of the block before; `fence_events` is this thread's part of `hand_over`.
void begin_signals(int threads);
void fence_events();
bool is_fenced(unsigned event, int warpgroup);

}  // namespace emulator
