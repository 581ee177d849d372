// One tile of a matrix product by warpgroups (wgmma), for 16-bit elements. Copies put rows of both factors into the
// 128-byte pattern that the products read; a stage is refilled while others are multiplied.
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

// Arrives for a warp.
DEVICE void signal_of_warp(Signal &signal) {
    sync_warp();
    if (lane_index() == 0) {
        signal_arrive(signal);
    }
}

// The four lanes of a row exchange pairs of columns, so that each has a run of it. `values` is, of run `first + j`, the
// columns 2 * own and the next; then, of run `first + own`, the columns 2 * j and the next.
template <class Sum>
DEVICE void exchange_runs(Sum &sum, int row, int first, float (&values)[8]) {
    const int own = lane_index() % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        values[j] = sum.at(row, 2 * first + j);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j / 2 % (2 * step) < step) {
                float &low = values[j], &high = values[j + 2 * step];
                const float other = shuffle_xor((own & step) ? low : high, step);
                ((own & step) ? low : high) = other;
            }
        }
    }
}

// A tile whose warpgroups have 64 rows each, and all columns. With four stages the products of one begin before those of
// the stage in front have ended (`BEHIND`).
template <class T, int ROWS_, int COLUMNS_, int STAGES_>
struct WarpgroupTile {
    typedef T Element;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = 64, WARPS_DEPTH = 1, STAGES = STAGES_;
    static constexpr int THREADS = ROWS / 64 * 128, BEHIND = STAGES > 3 ? 1 : 0;
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
    static constexpr bool READS_AHEAD = false, HANDS_OVER = true;

    static_assert(DEPTH == LINE && COLUMNS % (2 * LINE) == 0, "rows of the left factor, and halves, are whole lines");
    static_assert(STAGE_ELEMENTS * sizeof(T) % PATTERN_BYTES == 0, "stages begin where the pattern does");
    static_assert(STAGES >= 3 + BEHIND, "one stage is computed while another is loaded and a third one waited for");

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

    // Begins the products of one stage, of warpgroup `team`.
    DEVICE static void multiply(Sum &sum, const T *stage, int team) {
        const unsigned long long left =
            matrix_descriptor(SWIZZLE_128, stage + team * 64 * LINE, 0, PATTERN_BYTES);
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

    // Adds up `chunks` stages.
    template <class Source>
    DEVICE static void add_up(Sum &sum, unsigned char *shared, int chunks, Source &source, bool vectors) {
        T *stages = (T *)shared;
        Filler<WarpgroupTile, Source, false> filler(source, chunks, vectors);
        const int team = warpgroup_index();
        sum.clear();
#pragma unroll 1
        for (int next = 0; next < STAGES - 1 - BEHIND; next++) {
            filler.begin(stages + next * STAGE_ELEMENTS, next);
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            copy_wait<STAGES - 2 - BEHIND>();
            fence_products();
            sync_block();
            multiply(sum, stages + chunk % STAGES * STAGE_ELEMENTS, team);
            // All warps have waited for the products that read the stage which this one fills.
            const int next = chunk + STAGES - 1 - BEHIND;
            filler.begin(stages + next % STAGES * STAGE_ELEMENTS, next);
            warpgroup_wait<BEHIND>(sum.block[0]);
        }
        warpgroup_wait<0>(sum.block[0]);
        copy_wait<0>();
        sync_block();
    }

    // Hands sums from registers to `rows`, whatever their warps do: `rows.begin(row)` says whether a row is wanted, and
    // `rows.end(column, low, high)` gets runs of it, the columns from `column` on and those half a tile behind.
    template <class Rows>
    DEVICE static void hand_over(Sum &sum, Rows &rows) {
        const int HALF = RIGHT_RUNS / 2;
#pragma unroll
        for (int i = 0; i < Sum::ROWS; i++) {
            const bool wanted = rows.begin(warp() * 16 + sum.row(i));
#pragma unroll
            for (int first = 0; first < HALF; first += 4) {
                float low[LENGTH], high[LENGTH];
                exchange_runs(sum, i, first, low);
                exchange_runs(sum, i, first + HALF, high);
                if (wanted) {
                    rows.end((first + lane_index() % 4) * LENGTH, low, high);
                }
            }
        }
    }

    // Writes the sums to shared memory, as `compute_tile`.
    DEVICE static void spread(Sum &sum, unsigned char *shared) {
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
