// The functions of ../hopper.cuh on the host.
//
// What is checked on the way: all threads of a warpgroup meet at every product; descriptors are well formed and what
// they describe lies in this block's shared memory; what copies wrote there was waited for, handed over and
// behind a barrier before a product reads it; sums are fenced before the first product that uses them, hold nothing
// until the product is waited for, and are not written meanwhile, nor are left factors in registers, which are kept as
// long; every product is waited for. A product happens when it is issued in those schedules in which copies happen
// late, and when it is waited for in the others.
#pragma once

namespace emulator {

// What a thread brings to a product of its warpgroup: sum [64, columns] += a [64, 16] * b [16, columns], or = where
// nothing is added.
struct WarpgroupProduct {
    float *sum;  // columns / 2 registers
    int columns;
    float (*value)(uint16_t bits);
    const unsigned *fragment;  // of `a`, four registers; null where it is in shared memory
    uint64_t a, b;
    bool b_outer;  // whether the outer index of `b` runs along its rows
    bool adds;
};

void warpgroup_product(const WarpgroupProduct &own);
void warpgroup_fence(const float *sum);
void warpgroup_commit();
void warpgroup_wait(int pending);

// Forgets the products of the block before.
void begin_products(int threads);
// Fails where this thread ends with a product under way.
void end_products();

template <class T>
float value_of(uint16_t bits) {
    T x;
    x.bits = bits;
    return to_float(x);
}

}  // namespace emulator

inline unsigned shared_address(const void *address) { return emulator::shared_offset(address); }
inline void fence_products() { emulator::hand_over(); }
inline void keep_before_fence(unsigned (&)[4]) {}
inline void warpgroup_commit() { emulator::warpgroup_commit(); }

template <int BLOCKS>
inline void warpgroup_fence(float (&sum)[BLOCKS][4]) {
    emulator::warpgroup_fence(sum[0]);
}

template <int PENDING, int BLOCKS>
inline void warpgroup_wait(float (&)[BLOCKS][4]) {
    emulator::warpgroup_wait(PENDING);
}

template <bool B_OUTER, bool ADD, class T, int BLOCKS>
inline void warpgroup_multiply_add(T, float (&sum)[BLOCKS][4], unsigned long long a, unsigned long long b) {
    emulator::warpgroup_product({sum[0], BLOCKS * 8, emulator::value_of<T>, nullptr, a, b, B_OUTER, ADD});
}

template <bool B_OUTER, bool ADD, class T, int BLOCKS>
inline void warpgroup_multiply_add(T, float (&sum)[BLOCKS][4], const unsigned (&a)[4], unsigned long long b) {
    emulator::warpgroup_product({sum[0], BLOCKS * 8, emulator::value_of<T>, a, 0, b, B_OUTER, ADD});
}
