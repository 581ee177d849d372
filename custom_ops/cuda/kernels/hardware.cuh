// Everything that the kernels ask of the hardware, and nothing else may. The emulator gives the same functions on the
// host (emulator/emulator.h), so that the kernels above this file run, unchanged, without a GPU.
#pragma once

struct binary16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

struct alignas(16) Vector16 {
    unsigned word[4];
};

struct alignas(8) Floats2 {
    float element[2];
};

struct alignas(16) Floats4 {
    float element[4];
};

#ifndef __CUDACC__

#define HAS_TENSOR_CORES_16 1
#define HAS_TENSOR_CORES_TF32 1
#define HAS_WARPGROUP_PRODUCTS 1
#define HAS_TURING_CORES 1
#define HAS_VOLTA_CORES 1
#define GRIDS_MAY_OVERLAP 1
#define NEEDS_PLAIN_UNITS_BF16 1
#define SPARES_REGISTERS 1

#include "emulator/emulator.h"

#else

#define HAS_TENSOR_CORES_16 (__CUDA_ARCH__ >= 800)
#define HAS_TENSOR_CORES_TF32 (__CUDA_ARCH__ >= 800)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUP_PRODUCTS 1
#else
#define HAS_WARPGROUP_PRODUCTS 0
#endif
#define HAS_TURING_CORES (__CUDA_ARCH__ >= 750 && __CUDA_ARCH__ < 800)
#define HAS_VOLTA_CORES (__CUDA_ARCH__ < 750)
#define GRIDS_MAY_OVERLAP (__CUDA_ARCH__ >= 900)
#define NEEDS_PLAIN_UNITS_BF16 (__CUDA_ARCH__ < 800)

// Whether a second turn of TF32 products fits into 128 registers beside 64 sums.
#define SPARES_REGISTERS (__CUDA_ARCH__ == 900)

#define DEVICE __device__ __forceinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// Bytes of shared memory of a multiprocessor, of which each block takes 1 KiB more than it asks for.
#if __CUDA_ARCH__ < 750
#define MULTIPROCESSOR_SHARED (96 << 10)
#elif __CUDA_ARCH__ < 800
#define MULTIPROCESSOR_SHARED (64 << 10)
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define MULTIPROCESSOR_SHARED (100 << 10)
#elif __CUDA_ARCH__ < 900
#define MULTIPROCESSOR_SHARED (164 << 10)
#else
#define MULTIPROCESSOR_SHARED (228 << 10)
#endif

// Blocks of `bytes` bytes of shared memory that a multiprocessor holds, and as many of them, at most `blocks`, as registers
// must allow.
#define FITTING(bytes) (MULTIPROCESSOR_SHARED / ((bytes) + 1024))
#define BLOCKS(blocks, bytes) (FITTING(bytes) >= (blocks) ? (blocks) : FITTING(bytes) > 0 ? FITTING(bytes) : 1)

// An entry point: at most `threads` threads a block, at least `blocks` blocks on a multiprocessor.
#define KERNEL(name, threads, blocks, ...) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Parameters p) { \
        __VA_ARGS__; \
    }

static_assert(sizeof(void *) == 8, "64-bit addresses");

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int lane_index() { return threadIdx.x % 32; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_count() { return gridDim.x; }

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE int shuffle_xor(int value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE long long shuffle_from(long long value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE int shuffle_from(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// What all lanes of a warp have alike, in a form of which the compiler knows that.
DEVICE int alike(int value) { return __shfl_sync(0xffffffffu, value, 0); }
DEVICE int shuffle_up(int value, int delta) { return __shfl_up_sync(0xffffffffu, value, delta); }
DEVICE unsigned ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
DEVICE int count_bits(unsigned bits) { return __popc(bits); }

// Waits until the grids that this one may overlap have ended and their writes are visible.
DEVICE void wait_for_previous_grid() {
#if GRIDS_MAY_OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid begin as far as it does not wait for this one.
DEVICE void release_next_grid() {
#if GRIDS_MAY_OVERLAP
    asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

// Orders the writes of this thread before those that follow, for all blocks.
DEVICE void fence_device() { __threadfence(); }
DEVICE unsigned atomic_add(unsigned *address, unsigned value) { return atomicAdd(address, value); }
DEVICE void atomic_or(unsigned *address, unsigned value) { atomicOr(address, value); }

// A read that does not come from a cache which other multiprocessors' writes do not reach.
DEVICE float load_coherent(const float *address) { return __ldcg(address); }
DEVICE Floats4 load_coherent(const Floats4 *address) {
    const float4 four = __ldcg((const float4 *)address);
    return {{four.x, four.y, four.z, four.w}};
}

DEVICE unsigned shared_address(const void *address) { return (unsigned)__cvta_generic_to_shared(address); }

// Copies 16 bytes to shared memory, or writes zeros where `keep` is false; then `from` is not read. The bytes are there
// for this thread after `copy_wait`, for others after a barrier behind that. They go `offset` bytes behind `to`: where
// that is a constant, it is part of the instruction.
DEVICE void copy_async(void *to, const void *from, bool keep, int offset = 0) {
#if __CUDA_ARCH__ >= 800
    asm volatile("{\n.reg .pred zeros;\nsetp.eq.u32 zeros, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, zeros;\n}" ::"r"(shared_address(to) + offset),
                 "l"(from), "r"((unsigned)keep)
                 : "memory");
#else
    Vector16 zero = {{0, 0, 0, 0}};
    *(Vector16 *)((char *)to + offset) = keep ? *(const Vector16 *)from : zero;
#endif
}

// Asks for bytes, a multiple of 16 from a multiple of 16 on, to be in the cache of the second level; nobody waits for them.
DEVICE void ask_ahead(const void *from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// Closes a group of copies.
DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last `PENDING` groups are under way.
template <int PENDING>
DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE int to_bits(float x) { return __float_as_int(x); }
DEVICE float from_bits(int bits) { return __int_as_float(bits); }
DEVICE bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }
DEVICE float exponential(float x) { return expf(x); }
DEVICE float complementary_error(float x) { return erfcf(x); }

DEVICE float exponential2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float to_float(float x) { return x; }

DEVICE float to_float(binary16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE float to_float(bfloat16 x) { return __int_as_float((int)x.bits << 16); }

DEVICE void from_float(float &to, float x) { to = x; }

DEVICE void from_float(binary16 &to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

DEVICE void from_float(bfloat16 &to, float x) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x);
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = is_nan ? 0x7fff : (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}

// Two numbers in one register, the first in the lower half.
DEVICE unsigned pack(binary16, float low, float high) {
    binary16 a, b;
    from_float(a, low);
    from_float(b, high);
    return (unsigned)a.bits | (unsigned)b.bits << 16;
}

DEVICE unsigned pack(bfloat16, float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    bfloat16 a, b;
    from_float(a, low);
    from_float(b, high);
    return (unsigned)a.bits | (unsigned)b.bits << 16;
#endif
}

// Rounds to TF32: 8 bits of exponent, 10 of mantissa.
DEVICE unsigned to_tf32(float x) {
    unsigned y = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
    return y;
}

// Loads four 8x8 matrices of 16-bit elements; lane `i` gives the address of row `i % 8` of matrix `i / 8`. Each lane
// gets elements `2 * (lane % 4)` and the next of row `lane / 4` of each matrix.
DEVICE void load_matrices(unsigned (&to)[4], const void *row) {
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
#endif
}

// The same, of the transposes of the matrices.
DEVICE void load_matrices_transposed(unsigned (&to)[4], const void *row) {
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
#endif
}

// sum [16, 8] += a [16, 16] * b [16, 8], in fragments of mma.m16n8k16.
DEVICE void multiply_add(binary16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

DEVICE void multiply_add(bfloat16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// sum [16, 8] += a [16, 8] * b [8, 8], in fragments of mma.m16n8k8 of binary16 numbers.
DEVICE void multiply_add_half_depth(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
#if __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
#endif
}

// Each quad pair (lanes 4 q .. 4 q + 3 and those 16 behind them): sum [8, 8] += a [8, 4] * b [4, 8], in fragments of
// mma.m8n8k4; `a` holds a row of a lane, and `b` four columns of a row.
DEVICE void multiply_add_quad_pairs(float (&sum)[8], const unsigned *a, const unsigned *b) {
    asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}

// The same with `b` given as a column of a lane.
DEVICE void multiply_add_quad_pairs_transposed(float (&sum)[8], const unsigned *a, const unsigned *b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}

// sum [16, 8] += a [16, 8] * b [8, 8], in fragments of mma.m16n8k8 of TF32 numbers.
DEVICE void multiply_add_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

#endif

#include "hopper.cuh"
