// Products of whole warpgroups on matrices in shared memory, and barriers at which some threads arrive and others wait,
// compute capability 9.0 alone; from the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "mbarrier".
// Included by hardware.cuh on both sides: what follows the descriptor is the device's; the emulator's is
// emulator/warpgroup.h and emulator/signal.h.
//
// 128 threads, four whole warps from a multiple of 128 on, multiply together. A product is asynchronous: its sums, and
// the shared memory that it reads, belong to it until `warpgroup_wait`.
#pragma once

// Which warpgroup of its block this thread is of.
DEVICE int warpgroup_index() { return alike(thread_index() / 128); }

// How the 16-byte pieces of shared memory are permuted: bits 4 and up of an address are xored with the bits from 7 on.
enum Swizzle { NO_SWIZZLE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 };

// A factor in shared memory. Its pattern repeats from a multiple of 1024, 512 or 256 bytes on; `start` may lie a whole
// number of steps inside. Where the compiler knows that all lanes of a warp have it alike, units that count for the whole
// warp move on from product to product, and products follow each other closely. With a swizzle of `s` bytes:
// * the inner index runs along a row of `s` bytes, rows follow each other: `stride_bytes` from 8 rows to the next 8;
// * or the outer index runs along it: `stride_bytes` from 8 inner indices to the next 8, `leading_bytes` from `s` bytes
//   of outer indices to the next.
DEVICE unsigned long long matrix_descriptor(Swizzle swizzle, const void *start, int leading_bytes, int stride_bytes) {
    const unsigned long long address = (shared_address(start) & 0x3ffff) >> 4;
    const unsigned long long leading = (leading_bytes & 0x3ffff) >> 4, stride = (stride_bytes & 0x3ffff) >> 4;
    return address | leading << 16 | stride << 32 | (unsigned long long)swizzle << 62;
}

// The same factor, `bytes` further on.
DEVICE unsigned long long advanced(unsigned long long descriptor, int bytes) { return descriptor + (bytes >> 4); }

// A barrier in shared memory (mbarrier). Its phases, numbered from 0, end one after the other, each when as many have
// arrived as `signal_init` said.
struct Signal {
    unsigned long long state;
};

#ifdef __CUDACC__

#if HAS_WARPGROUP_PRODUCTS

// By one thread, with a barrier of the block behind it.
DEVICE void signal_init(Signal &signal, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&signal)), "r"(count) : "memory");
}

// What this thread read and wrote happened before what those do who wait for the phase.
DEVICE void signal_arrive(Signal &signal) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&signal)) : "memory");
}

// Arrives once all copies are there that this thread has begun.
DEVICE void signal_when_copied(Signal &signal) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&signal)) : "memory");
}

// Waits for the end of phase `number`, while the phase in front of it, or this one, is under way.
DEVICE void signal_wait(Signal &signal, int number) {
    unsigned ended;
    do {
        asm volatile("{\n.reg .pred ended;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\nselp.u32 %0, 1, 0, ended;\n}"
                     : "=r"(ended)
                     : "r"(shared_address(&signal)), "r"(number & 1)
                     : "memory");
    } while (!ended);
}

// Gives back, or asks for, registers of every thread of this warpgroup, down or up to `COUNT`.
template <int COUNT>
DEVICE void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Hands what this thread wrote to shared memory, or waited for, over to the products that follow a barrier, and what it
// waited for at a signal to those of its warpgroup, all of whose threads do the same.
DEVICE void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Closes a group of products.
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define SUMS_8(j) "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
#define SUMS_32(j) SUMS_8(j), SUMS_8(j + 1), SUMS_8(j + 2), SUMS_8(j + 3)
#define SUMS_64(j) SUMS_32(j), SUMS_32(j + 4)
#define SUMS_128(j) SUMS_64(j), SUMS_64(j + 8)
#define SUMS_256(j) SUMS_128(j), SUMS_128(j + 16)

// Numbers of the operands of a sum of so many columns.
#define NAMES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_128 \
    NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_256 \
    NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
              "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
              "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
              "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Orders the registers of this warpgroup before the products that follow, behind every change of `sum` or of left
// factors; the compiler changes `sum` no later.
#define WARPGROUP_FENCE(COLUMNS) \
    DEVICE void warpgroup_fence(float (&sum)[COLUMNS / 8][4]) { \
        asm volatile("wgmma.fence.sync.aligned;" : SUMS_##COLUMNS(0) : : "memory"); \
    }

WARPGROUP_FENCE(64)
WARPGROUP_FENCE(128)
WARPGROUP_FENCE(256)

// The compiler has made left factors in registers where this stands, and no later.
DEVICE void keep_before_fence(unsigned (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) : : "memory");
}

// Waits until at most the last `PENDING` groups are under way. `sum` is one that they write: the compiler reads it no
// earlier.
#define WARPGROUP_WAIT(COLUMNS, OPERAND) \
    template <int PENDING> \
    DEVICE void warpgroup_wait(float (&sum)[COLUMNS / 8][4]) { \
        asm volatile("wgmma.wait_group.sync.aligned %" OPERAND ";" : SUMS_##COLUMNS(0) : "n"(PENDING) : "memory"); \
    }

WARPGROUP_WAIT(64, "32")
WARPGROUP_WAIT(128, "64")
WARPGROUP_WAIT(256, "128")

#define WARPGROUP_BEGIN(COLUMNS, NAME, ADD) \
    "{\n.reg .pred adds;\nsetp.ne.u32 adds, %" ADD ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME " {" NAMES_##COLUMNS "}, "

// sum [64, COLUMNS] += a [64, 16] * b [16, COLUMNS], in fragments as `FragmentSum` has them: the rows of warp `i` of the
// warpgroup are `16 * i` and the 15 behind. The inner index of `a` runs along its rows; `B_OUTER` says whether the outer
// one of `b` does, that is its column. Without `ADD` the product replaces the sum, which need not hold anything.
#define WARPGROUP_PRODUCT(TYPE, NAME, COLUMNS, A, B, MAJOR, ADDS) \
    template <bool B_OUTER, bool ADD> \
    DEVICE void warpgroup_multiply_add(TYPE, float (&sum)[COLUMNS / 8][4], unsigned long long a, unsigned long long b) { \
        asm volatile(WARPGROUP_BEGIN(COLUMNS, NAME, ADDS) "%" A ", %" B ", adds, 1, 1, 0, %" MAJOR ";\n}" \
                     : SUMS_##COLUMNS(0) \
                     : "l"(a), "l"(b), "n"(B_OUTER ? 1 : 0), "n"(ADD ? 1 : 0) \
                     : "memory"); \
    }

// The same with `a` in registers, in the fragments of mma.m16n8k16.
#define WARPGROUP_SUM_PRODUCT(TYPE, NAME, COLUMNS, A0, A1, A2, A3, B, MAJOR, ADDS) \
    template <bool B_OUTER, bool ADD> \
    DEVICE void warpgroup_multiply_add(TYPE, float (&sum)[COLUMNS / 8][4], const unsigned (&a)[4], unsigned long long b) { \
        asm volatile(WARPGROUP_BEGIN(COLUMNS, NAME, ADDS) "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", adds, 1, 1, %" MAJOR ";\n}" \
                     : SUMS_##COLUMNS(0) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_OUTER ? 1 : 0), "n"(ADD ? 1 : 0) \
                     : "memory"); \
    }

#define WARPGROUP_PRODUCTS(TYPE, NAME) \
    WARPGROUP_PRODUCT(TYPE, NAME, 64, "32", "33", "34", "35") \
    WARPGROUP_PRODUCT(TYPE, NAME, 128, "64", "65", "66", "67") \
    WARPGROUP_PRODUCT(TYPE, NAME, 256, "128", "129", "130", "131") \
    WARPGROUP_SUM_PRODUCT(TYPE, NAME, 64, "32", "33", "34", "35", "36", "37", "38") \
    WARPGROUP_SUM_PRODUCT(TYPE, NAME, 128, "64", "65", "66", "67", "68", "69", "70") \
    WARPGROUP_SUM_PRODUCT(TYPE, NAME, 256, "128", "129", "130", "131", "132", "133", "134")

WARPGROUP_PRODUCTS(binary16, "f16")
WARPGROUP_PRODUCTS(bfloat16, "bf16")

#endif

#endif
