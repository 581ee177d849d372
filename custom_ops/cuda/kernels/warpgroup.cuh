// One tile of a matrix product by two warpgroups (wgmma), for 16-bit elements. Copies put rows of both factors into the
// 128-byte pattern that the products read; a stage is refilled while the next one is multiplied.
#pragma once

#include "product.cuh"

#if HAS_WARPGROUP_PRODUCTS

// The pattern of 128-byte lines that products read: the runs of a line are moved by its number, and eight lines repeat.
template <class T>
struct Pattern {
    static constexpr int LINE_BYTES = 128, LINE = LINE_BYTES / (int)sizeof(T), BYTES = 8 * LINE_BYTES;

    DEVICE static int place(int line, int element) {
        const int LENGTH = Run<T>::LENGTH;
        return line * LINE + ((element / LENGTH) ^ (line % 8)) * LENGTH + element % LENGTH;
    }
};

// A tile of 128 rows: each warpgroup has 64 of them, and all columns.
template <class T, int COLUMNS_, int STAGES_>
struct WarpgroupTile {
    typedef T Element;
    static constexpr int ROWS = 128, COLUMNS = COLUMNS_, DEPTH = 64, WARPS_DEPTH = 1, STAGES = STAGES_, THREADS = 256;
    static constexpr int LINE_BYTES = Pattern<T>::LINE_BYTES, LINE = Pattern<T>::LINE;
    static constexpr int PATTERN_BYTES = Pattern<T>::BYTES;
    static constexpr int LEFT_ELEMENTS = ROWS * DEPTH, STAGE_ELEMENTS = LEFT_ELEMENTS + DEPTH * COLUMNS;
    static constexpr int SUM_STRIDE = COLUMNS + 4;
    static constexpr int STAGE_BYTES = STAGES * STAGE_ELEMENTS * (int)sizeof(T);
    static constexpr int SUM_BYTES = ROWS * SUM_STRIDE * 4;
    static constexpr int SHARED_BYTES = STAGE_BYTES > SUM_BYTES ? STAGE_BYTES : SUM_BYTES;
    static constexpr int LENGTH = Run<T>::LENGTH;
    static constexpr int LEFT_RUNS = DEPTH / LENGTH, RIGHT_RUNS = COLUMNS / LENGTH;
    static constexpr int LEFT_PASSES = passes_of(ROWS * LEFT_RUNS, THREADS);
    // Inner indices of one product.
    static constexpr int STEP = 16;
    // The fragments of one warp: 16 rows.
    typedef FragmentSum<16, COLUMNS> Sum;
    static constexpr bool READS_AHEAD = false;

    static_assert(DEPTH == LINE && COLUMNS % (2 * LINE) == 0, "rows of the left factor, and halves, are whole lines");
    static_assert(STAGE_ELEMENTS * sizeof(T) % PATTERN_BYTES == 0, "stages begin where the pattern does");
    static_assert(STAGES >= 3, "one stage is computed while another is loaded and a third one waited for");

    // Lines of the left factor are its rows.
    DEVICE static int left_place(int row, int inner) { return Pattern<T>::place(row, inner); }

    // Those of the right one are its inner indices, for every `LINE` columns.
    DEVICE static int right_place(int inner, int column) {
        return column / LINE * (DEPTH * LINE) + Pattern<T>::place(inner, column % LINE);
    }

    // Of whole patterns of lines.
    DEVICE static constexpr int left_apart(int rows) { return rows * LINE; }
    DEVICE static constexpr int right_apart(int inners) { return inners * LINE; }
    static_assert(THREADS / LEFT_RUNS % 8 == 0 && THREADS / RIGHT_RUNS % 8 == 0, "a thread's runs lie alike in lines");

    DEVICE static int warp() { return thread_index() / 32; }

    // Begins the products of one stage.
    DEVICE static void multiply(Sum &sum, const T *stage) {
        const unsigned long long left =
            matrix_descriptor(SWIZZLE_128, stage + thread_index() / 128 * 64 * LINE, 0, PATTERN_BYTES);
        const unsigned long long right =
            matrix_descriptor(SWIZZLE_128, stage + LEFT_ELEMENTS, DEPTH * LINE_BYTES, PATTERN_BYTES);
        warpgroup_fence(sum.block[0]);
#pragma unroll
        for (int k = 0; k < DEPTH; k += STEP) {
            warpgroup_multiply_add<true, true>(T(), sum.block[0], advanced(left, k * (int)sizeof(T)),
                                               advanced(right, k * LINE_BYTES));
        }
        warpgroup_commit();
    }

    // As `compute_tile`.
    template <class Source>
    DEVICE static void compute(unsigned char *shared, int chunks, Source &source, bool vectors) {
        T *stages = (T *)shared;
        Filler<WarpgroupTile, Source, false> filler(source, chunks, vectors);
        Sum sum;
        sum.clear();
        filler.template begin_first<STAGES - 1>(stages);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            copy_wait<STAGES - 2>();
            fence_products();
            sync_block();
            multiply(sum, stages + chunk % STAGES * STAGE_ELEMENTS);
            // The products of the chunk before have read the stage that this one fills.
            const int next = chunk + STAGES - 1;
            filler.begin(stages + next % STAGES * STAGE_ELEMENTS, next);
            warpgroup_wait<0>(sum.block[0]);
        }
        copy_wait<0>();
        sync_block();
        float *sums = (float *)shared + warp() * 16 * SUM_STRIDE;
#pragma unroll
        for (int i = 0; i < Sum::ROWS; i++) {
#pragma unroll
            for (int j = 0; j < Sum::COLUMNS; j++) {
                sums[sum.row(i) * SUM_STRIDE + sum.column(j)] = sum.at(i, j);
            }
        }
        sync_block();
    }
};

#endif
