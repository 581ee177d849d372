// The functions of hardware.cuh on the host: each CUDA thread is a fiber, a block at a time.
//
// What is checked on the way: every lane of a warp meets at the same collective operation; addresses of asynchronous
// copies and of matrix loads lie in this block's shared memory and are aligned; every asynchronous copy is waited for;
// no thread waits for ever, and each waits for the grid in front; and what warpgroup.h and signal.h say. Shared memory begins as 0xff and ends at a guard page,
// as do all buffers. The order in which warps and lanes run between two barriers, and whether an asynchronous copy happens
// when it is issued or when it is waited for, are parameters: a missing barrier changes the result in one of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../parameters.cuh"

#define DEVICE inline
#define DYNAMIC_SHARED(name) unsigned char *name = emulator::shared_memory()
#define KERNEL(name, threads, blocks, ...) \
    static void name(const Parameters &p) { __VA_ARGS__; } \
    static const emulator::Registration registration_##name(MODULE ":" #name, name, threads);

namespace emulator {

struct Registration {
    Registration(const char *name, void (*kernel)(const Parameters &), int threads);
};

[[noreturn]] void fail(const char *what);
unsigned char *shared_memory();
int thread();
int block();
int blocks();
void block_barrier();

// Meets the other lanes of the warp; the last one to come runs `work` on the operands of all 32.
typedef void (*WarpWork)(void *const (&operands)[32]);
void collective(WarpWork work, void *operand);

// The same with the other threads of the warpgroup.
const int WARPGROUP = 128;
typedef void (*WarpgroupWork)(void *const (&operands)[WARPGROUP]);
void warpgroup_collective(WarpgroupWork work, void *operand);

// That a thread never does is refused.
void wait_for_grid();

void copy(void *to, const void *from, bool keep);
void ask(const void *from, unsigned bytes);
void commit();
void wait(int pending);
void check_shared(const void *address, int bytes);

// Addresses in the window of shared memory, in which a block's own begins behind what the system keeps.
unsigned shared_offset(const void *address);
unsigned char *shared_at(unsigned offset);

// Hands the copies that this thread has waited for over to products that are issued behind the next barrier, and what it
// has waited for at signals to those of its warpgroup, once all threads of it have.
void hand_over();
unsigned barriers_passed();
bool is_handed_over(const void *address, unsigned barriers, int warpgroup);
bool products_happen_at_once();

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

}  // namespace emulator

inline int thread_index() { return emulator::thread(); }
inline int lane_index() { return emulator::thread() % 32; }
inline int block_index() { return emulator::block(); }
inline int block_count() { return emulator::blocks(); }
inline void sync_block() { emulator::block_barrier(); }
void sync_warp();
float shuffle_xor(float value, int mask);
int shuffle_xor(int value, int mask);
long long shuffle_from(long long value, int lane);
int shuffle_from(int value, int lane);
float shuffle_from(float value, int lane);
int shuffle_up(int value, int delta);
int alike(int value);
unsigned ballot(bool predicate);
inline int count_bits(unsigned bits) { return __builtin_popcount(bits); }

inline void wait_for_previous_grid() { emulator::wait_for_grid(); }
inline void release_next_grid() {}
inline void fence_device() {}

inline unsigned atomic_add(unsigned *address, unsigned value) {
    unsigned old = *address;
    *address = old + value;
    return old;
}

inline void atomic_or(unsigned *address, unsigned value) { *address |= value; }
inline float load_coherent(const float *address) { return *address; }
inline Floats4 load_coherent(const Floats4 *address) { return *address; }

inline void copy_async(void *to, const void *from, bool keep, int offset = 0) {
    emulator::copy((char *)to + offset, from, keep);
}
inline void ask_ahead(const void *from, unsigned bytes) { emulator::ask(from, bytes); }
inline void copy_commit() { emulator::commit(); }

template <int PENDING>
inline void copy_wait() {
    emulator::wait(PENDING);
}

inline float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float maximum(float a, float b) { return fmaxf(a, b); }
inline float not_a_number() { return emulator::float_of(0x7fffffff); }
inline float infinity() { return emulator::float_of(0x7f800000); }
inline int to_bits(float x) { return (int)emulator::bits_of(x); }
inline float from_bits(int bits) { return emulator::float_of((uint32_t)bits); }
inline bool is_finite(float x) { return (emulator::bits_of(x) & 0x7f800000) != 0x7f800000; }
inline float exponential(float x) { return expf(x); }
inline float complementary_error(float x) { return erfcf(x); }
inline float exponential2(float x) { return exp2f(x); }

inline float to_float(float x) { return x; }
float to_float(binary16 x);
inline float to_float(bfloat16 x) { return emulator::float_of((uint32_t)x.bits << 16); }
inline void from_float(float &to, float x) { to = x; }
void from_float(binary16 &to, float x);
void from_float(bfloat16 &to, float x);

template <class T>
inline unsigned pack(T, float low, float high) {
    T a, b;
    from_float(a, low);
    from_float(b, high);
    return (unsigned)a.bits | (unsigned)b.bits << 16;
}

// Round to nearest, halves away from zero, at bit 13.
inline unsigned to_tf32(float x) {
    uint32_t bits = emulator::bits_of(x);
    bool is_finite = (bits & 0x7f800000) != 0x7f800000;
    return (is_finite ? bits + 0x1000 : bits) & 0xffffe000;
}

void load_matrices(unsigned (&to)[4], const void *row);
void load_matrices_transposed(unsigned (&to)[4], const void *row);
void multiply_add(binary16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void multiply_add(bfloat16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void multiply_add_half_depth(float (&sum)[4], unsigned a0, unsigned a1, unsigned b);
void multiply_add_quad_pairs(float (&sum)[8], const unsigned *a, const unsigned *b);
void multiply_add_quad_pairs_transposed(float (&sum)[8], const unsigned *a, const unsigned *b);
void multiply_add_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#include "signal.h"
#include "warpgroup.h"
