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

// What one thread copies of every stage: its run of some rows of the left factor, and of some inner indices of the right
// one. A source cuts the inner dimension into segments, in which rows and matrix stay the same; `HAS_SEGMENTS` says
// whether there are several.
// * `locate(chunk, segment, inner)`: where a chunk begins;
// * `row(segment, row)`: inner index 0 of a row, null where the row is zeros;
// * `columns(segment)`: the right factor.
template <class TileType, class Source>
struct Copier {
    typedef typename TileType::Element T;
    static constexpr int DEPTH = TileType::DEPTH;
    static constexpr int ROW_STEP = TileType::THREADS / TileType::LEFT_RUNS, ROWS = TileType::ROWS / ROW_STEP;
    static constexpr int INNER_STEP = TileType::THREADS / TileType::RIGHT_RUNS, INNERS = DEPTH / INNER_STEP;
    static_assert(ROW_STEP % 8 == 0 && INNER_STEP % 8 == 0, "a thread's runs lie alike in their lines");

    const Source &source;
    int segment;
    int left;            // inner indices of the segment that are not copied yet
    unsigned present;    // bit `i`: row `i` is not zeros
    const T *rows[ROWS]; // next run
    const T *column;     // next run
    bool has_column;
    size_t stride;       // from one inner index to the next

    DEVICE static int first_row() { return thread_index() / TileType::LEFT_RUNS; }
    DEVICE static int run_in_row() { return thread_index() % TileType::LEFT_RUNS * TileType::LENGTH; }
    DEVICE static int first_inner() { return thread_index() / TileType::RIGHT_RUNS; }
    DEVICE static int run_in_line() { return thread_index() % TileType::RIGHT_RUNS * TileType::LENGTH; }

    DEVICE Copier(const Source &from) : source(from) {
        int inner;
        source.locate(0, segment, inner);
        enter(inner);
    }

    // Begins at an inner index of the segment.
    DEVICE void enter(int inner) {
        const Columns<T> columns = source.columns(segment);
        int valid;
        stride = columns.stride;
        column = columns.template top<TileType>(run_in_line(), valid) + (inner + first_inner()) * stride;
        has_column = valid > 0;
        left = columns.inner - inner;
        present = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const T *row = source.row(segment, first_row() + i * ROW_STEP);
            present |= (row ? 1u : 0u) << i;
            rows[i] = (row ? row : columns.weight) + inner + run_in_row();
        }
    }

    // Copies the next chunk.
    DEVICE void stage(T *left_factor, T *right_factor) {
        if (Source::HAS_SEGMENTS && left <= 0) {
            segment++;
            enter(0);
        }
        const bool has_run = run_in_row() < left;
        T *to = left_factor + TileType::left_place(first_row(), run_in_row());
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            copy_async(to, rows[i], has_run && (present >> i & 1), i * ROW_STEP * TileType::LINE_BYTES);
            rows[i] += DEPTH;
        }
        to = right_factor + TileType::right_place(first_inner(), run_in_line());
#pragma unroll
        for (int i = 0; i < INNERS; i++) {
            copy_async(to, column, has_column && first_inner() + i * INNER_STEP < left,
                       i * INNER_STEP * TileType::LINE_BYTES);
            column += INNER_STEP * stride;
        }
        left -= DEPTH;
    }
};

// Fills a stage where addresses allow no vectors.
struct Elementwise {
    template <int FIRST, int COUNT, int THREADS, class T, class Place>
    DEVICE void runs(bool, Place place) {
        stage_runs<COUNT, THREADS, T>(false, place);
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

    static_assert(DEPTH == LINE && COLUMNS % (2 * LINE) == 0, "rows of the left factor, and halves, are whole lines");
    static_assert(STAGE_ELEMENTS * sizeof(T) % PATTERN_BYTES == 0, "stages begin where the pattern does");
    static_assert(STAGES >= 3, "one stage is computed while another is loaded and a third one waited for");

    // Lines of the left factor are its rows.
    DEVICE static int left_place(int row, int inner) { return Pattern<T>::place(row, inner); }

    // Those of the right one are its inner indices, for every `LINE` columns.
    DEVICE static int right_place(int inner, int column) {
        return column / LINE * (DEPTH * LINE) + Pattern<T>::place(inner, column % LINE);
    }

    DEVICE static int warp() { return thread_index() / 32; }

    // Begins the products of one stage.
    DEVICE static void multiply(Sum &sum, const T *stage) {
        const unsigned long long left =
            matrix_descriptor(SWIZZLE_128, stage + thread_index() / 128 * 64 * LINE, 0, PATTERN_BYTES);
        const unsigned long long right =
            matrix_descriptor(SWIZZLE_128, stage + LEFT_ELEMENTS, DEPTH * LINE_BYTES, PATTERN_BYTES);
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < DEPTH; k += STEP) {
            warpgroup_multiply_add<true>(T(), sum.block[0], advanced(left, k * (int)sizeof(T)),
                                         advanced(right, k * LINE_BYTES));
        }
        warpgroup_commit();
    }

    // The loop of `compute`; `fill(left, right, chunk)` fills a stage.
    template <class Fill>
    DEVICE static void add_up(Sum &sum, T *stages, int chunks, Fill fill) {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < chunks) {
                T *stage = stages + i * STAGE_ELEMENTS;
                fill(stage, stage + LEFT_ELEMENTS, i);
            }
            copy_commit();
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            copy_wait<STAGES - 2>();
            fence_products();
            sync_block();
            multiply(sum, stages + chunk % STAGES * STAGE_ELEMENTS);
            // The products of the chunk before have read the stage that this one fills.
            int next = chunk + STAGES - 1;
            if (next < chunks) {
                T *stage = stages + next % STAGES * STAGE_ELEMENTS;
                fill(stage, stage + LEFT_ELEMENTS, next);
            }
            copy_commit();
            warpgroup_wait<0>(sum.block[0]);
        }
        copy_wait<0>();
    }

    // As `compute_tile`.
    template <class Source>
    DEVICE static void compute(unsigned char *shared, int chunks, Source &source, bool vectors) {
        Sum sum;
        sum.clear();
        if (vectors && chunks > 0) {
            Copier<WarpgroupTile, Source> copier(source);
            add_up(sum, (T *)shared, chunks, [&](T *left, T *right, int) { copier.stage(left, right); });
        } else {
            Elementwise elementwise;
            add_up(sum, (T *)shared, chunks,
                   [&](T *left, T *right, int chunk) { source.stage(elementwise, left, right, chunk); });
        }
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
