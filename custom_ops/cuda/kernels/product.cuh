// One tile of a matrix product: a pipeline of stages in shared memory, then the sums in shared memory.
#pragma once

#include "engine.cuh"
#include "memory.cuh"

template <class TileType, class Source>
DEVICE void compute_tile(unsigned char *shared, int chunks, Source &source, bool vectors);

// A tile of ROWS x COLUMNS, DEPTH inner indices a stage. Warps cut it along all three: those along the depth keep sums
// of their own, which are added in their order.
template <class EngineType, int ROWS_, int COLUMNS_, int DEPTH_, int WARPS_ROWS, int WARPS_COLUMNS, int WARPS_DEPTH_, int STAGES_>
struct Tile {
    typedef EngineType Engine;
    typedef typename Engine::Element Element;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = DEPTH_, WARPS_DEPTH = WARPS_DEPTH_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WARPS_ROWS * WARPS_COLUMNS * WARPS_DEPTH;
    static constexpr int WARP_ROWS = ROWS / WARPS_ROWS, WARP_COLUMNS = COLUMNS / WARPS_COLUMNS;
    static constexpr int WARP_DEPTH = DEPTH / WARPS_DEPTH;
    static constexpr int UNROLL = WARP_ROWS * WARP_COLUMNS < 64 * 32 ? Engine::UNROLL : Engine::TALL_UNROLL;
    static constexpr int LEFT_STRIDE = DEPTH + Engine::PAD;
    static constexpr int RIGHT_STRIDE = COLUMNS + Engine::PAD_INNER_FIRST;
    static constexpr int LEFT_ELEMENTS = ROWS * LEFT_STRIDE;
    static constexpr int STAGE_ELEMENTS = LEFT_ELEMENTS + DEPTH * RIGHT_STRIDE;
    static constexpr int SUM_STRIDE = COLUMNS + 4;
    static constexpr int STAGE_BYTES = STAGES * STAGE_ELEMENTS * (int)sizeof(Element);
    static constexpr int SUM_BYTES = WARPS_DEPTH * ROWS * SUM_STRIDE * 4;
    static constexpr int SHARED_BYTES = STAGE_BYTES > SUM_BYTES ? STAGE_BYTES : SUM_BYTES;
    static constexpr int LENGTH = Run<Element>::LENGTH;
    static constexpr int LEFT_RUNS = DEPTH / LENGTH, RIGHT_RUNS = COLUMNS / LENGTH;
    static constexpr int LEFT_PASSES = passes_of(ROWS * LEFT_RUNS, THREADS);
    static constexpr int PASSES = LEFT_PASSES + passes_of(DEPTH * RIGHT_RUNS, THREADS);
    typedef typename Engine::template Sum<WARP_ROWS, WARP_COLUMNS> Sum;
    // Whether sums go from registers to where they belong.
    static constexpr bool HANDS_OVER = false;
    // Whether weights are worth reading before the rows are there: calls of many rows have other blocks in front.
    static constexpr bool READS_AHEAD = GRIDS_MAY_OVERLAP && !Engine::HELD && ROWS <= 64;

    static_assert(WARP_DEPTH % Engine::STEP == 0, "a warp's depth is whole steps");
    static_assert(STAGES >= 2, "one stage is computed while another is loaded");
    static_assert(COLUMNS % (2 * LENGTH) == 0, "half a tile of columns is whole runs");

    // Where an element of a factor lies in its part of a stage.
    DEVICE static int left_place(int row, int inner) { return row * LEFT_STRIDE + inner; }
    DEVICE static int right_place(int inner, int column) { return inner * RIGHT_STRIDE + column; }

    // Elements from one row, or one inner index of the right factor, to that so many behind it.
    DEVICE static constexpr int left_apart(int rows) { return rows * LEFT_STRIDE; }
    DEVICE static constexpr int right_apart(int inners) { return inners * RIGHT_STRIDE; }

    DEVICE static int warp() { return thread_index() / 32; }
    DEVICE static int warp_row() { return warp() / (WARPS_COLUMNS * WARPS_DEPTH) * WARP_ROWS; }
    DEVICE static int warp_column() { return warp() / WARPS_DEPTH % WARPS_COLUMNS * WARP_COLUMNS; }
    DEVICE static int warp_part() { return warp() % WARPS_DEPTH; }

    template <class Source>
    DEVICE static void compute(unsigned char *shared, int chunks, Source &source, bool vectors) {
        compute_tile<Tile>(shared, chunks, source, vectors);
    }
};

// The columns of the right factor that a tile takes. Where `pair_offset` is not 0, the first half of the tile are the
// units `first ..`, and the second half the columns `pair_offset` behind those.
template <class T>
struct Columns {
    const T *weight;  // row 0, column 0 of the block
    size_t stride;    // from one inner index to the next
    int inner;
    int first;
    int units;  // units of the block
    int pair_offset;

    // Inner index 0 of a column of the tile; `valid` of the elements from there on exist.
    template <class TileType>
    DEVICE const T *top(int column, int &valid) const {
        const int HALF = TileType::COLUMNS / 2;
        const bool second = pair_offset != 0 && column >= HALF;
        const int unit = first + column - (second ? HALF : 0);
        valid = units - unit;
        return weight + unit + (second ? pair_offset : 0);
    }

    template <class TileType, class Mover>
    DEVICE void stage(Mover &mover, T *to, int first_inner, bool vectors) const {
        mover.template runs<TileType::LEFT_PASSES, TileType::DEPTH * TileType::RIGHT_RUNS, TileType::THREADS, T>(
            vectors, [&](int, int i, T *&target, const T *&from) {
                int inner_index = i / TileType::RIGHT_RUNS, column = i % TileType::RIGHT_RUNS * TileType::LENGTH;
                int k = first_inner + inner_index, valid;
                const T *inside = top<TileType>(column, valid) + (size_t)k * stride;
                valid = k < inner ? valid : 0;
                target = to + TileType::right_place(inner_index, column);
                from = valid > 0 ? inside : weight;
                return valid;
            });
    }
};

// Adds one stage to the sums of a warp.
template <class TileType>
DEVICE void add_stage(typename TileType::Sum &sum, const typename TileType::Element *stage) {
    typedef typename TileType::Element T;
    typedef typename TileType::Engine Engine;
    const int part = TileType::warp_part() * TileType::WARP_DEPTH;
    const T *left = stage + TileType::warp_row() * TileType::LEFT_STRIDE + part;
    const T *right = stage + TileType::LEFT_ELEMENTS + part * TileType::RIGHT_STRIDE + TileType::warp_column();
#pragma unroll TileType::UNROLL
    for (int k = 0; k < TileType::WARP_DEPTH; k += Engine::STEP) {
        Engine::multiply(sum, left + k, TileType::LEFT_STRIDE, right + k * TileType::RIGHT_STRIDE, TileType::RIGHT_STRIDE);
    }
}

// What one thread copies of every stage: its run of some rows of the left factor, and of some inner indices of the right
// one. A source cuts the inner dimension into segments, in which rows and matrix stay the same; `HAS_SEGMENTS` says
// whether there are several.
// * `locate(chunk, segment, inner)`: where a chunk begins;
// * `row(segment, row)`: inner index 0 of a row, null where the row is zeros;
// * `columns(segment)`: the right factor;
// * `WAITS`: whether the left factor may be the work of the grid in front, for which `waits` says that nobody has waited.
template <class TileType, class Source>
struct Copier {
    typedef typename TileType::Element T;
    static constexpr int DEPTH = TileType::DEPTH, THREADS = TileType::THREADS;
    static constexpr int ROW_STEP = THREADS / TileType::LEFT_RUNS, ROWS = passes_of(TileType::ROWS, ROW_STEP);
    static constexpr int INNER_STEP = THREADS / TileType::RIGHT_RUNS, INNERS = passes_of(DEPTH, INNER_STEP);
    static_assert(THREADS % TileType::LEFT_RUNS == 0 && THREADS % TileType::RIGHT_RUNS == 0, "a thread has one run of a row");

    const Source &source;
    int segment = 0;
    int left = 0;               // inner indices of the segment that are not copied yet
    unsigned present = 0;       // bit `i`: row `i` is not zeros
    const T *rows[ROWS] = {};   // next run
    const T *column = nullptr;  // next run
    bool has_column = false;
    size_t stride = 0;          // from one inner index to the next

    DEVICE static int first_row() { return thread_index() / TileType::LEFT_RUNS; }
    DEVICE static int run_in_row() { return thread_index() % TileType::LEFT_RUNS * TileType::LENGTH; }
    DEVICE static int first_inner() { return thread_index() / TileType::RIGHT_RUNS; }
    DEVICE static int run_in_line() { return thread_index() % TileType::RIGHT_RUNS * TileType::LENGTH; }

    DEVICE Copier(const Source &from) : source(from) {}

    // Begins at a chunk.
    DEVICE void enter_at(int chunk) {
        int inner;
        source.locate(chunk, segment, inner);
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

    DEVICE void enter_next() {
        if (Source::HAS_SEGMENTS && left <= 0) {
            segment++;
            enter(0);
        }
    }

    DEVICE void copy_left(T *factor) {
        const bool has_run = run_in_row() < left;
        T *to = factor + TileType::left_place(first_row(), run_in_row());
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (TileType::ROWS % ROW_STEP == 0 || first_row() + i * ROW_STEP < TileType::ROWS) {
                copy_async(to, rows[i], has_run && (present >> i & 1), TileType::left_apart(i * ROW_STEP) * (int)sizeof(T));
            }
            rows[i] += DEPTH;
        }
    }

    DEVICE void copy_right(T *factor) {
        T *to = factor + TileType::right_place(first_inner(), run_in_line());
#pragma unroll
        for (int i = 0; i < INNERS; i++) {
            const int inner = first_inner() + i * INNER_STEP;
            if (DEPTH % INNER_STEP == 0 || inner < DEPTH) {
                copy_async(to, column, has_column && inner < left,
                           TileType::right_apart(i * INNER_STEP) * (int)sizeof(T));
            }
            column += INNER_STEP * stride;
        }
        column -= (INNERS * INNER_STEP - DEPTH) * stride;
    }

    // Copies the next chunk.
    DEVICE void stage(T *left_factor, T *right_factor) {
        enter_next();
        copy_left(left_factor);
        copy_right(right_factor);
        left -= DEPTH;
    }

    // Copies one half of it.
    DEVICE void stage_left(T *left_factor) {
        enter_next();
        copy_left(left_factor);
        column += DEPTH * stride;
        left -= DEPTH;
    }

    DEVICE void stage_right(T *right_factor) {
        enter_next();
        copy_right(right_factor);
        left -= DEPTH;
    }
};

// Fills the stages of a tile, chunk after chunk of `chunks`; `source.stage(mover, left, right, chunk)` fills one where
// addresses allow no vectors. `begin` starts one, which `end`, of the same stage, completes behind the next `copy_wait`;
// behind the last chunk they do nothing.
template <class TileType, class Source, bool HELD>
struct Filler {
    typedef typename TileType::Element T;
    Copier<TileType, Source> copier;
    int chunks;
    bool vectors;

    DEVICE Filler(const Source &source, int count, bool in_vectors) : copier(source), chunks(count), vectors(in_vectors) {
        if (vectors && chunks > 0) {
            copier.enter_at(0);
        }
    }

    DEVICE void begin(T *stage, int chunk) {
        if (chunk < chunks && vectors) {
            copier.stage(stage, stage + TileType::LEFT_ELEMENTS);
        } else if (chunk < chunks) {
            Elementwise elementwise;
            copier.source.stage(elementwise, stage, stage + TileType::LEFT_ELEMENTS, chunk);
        }
        copy_commit();
    }

    DEVICE void end(T *, int) {}

    // Where the left factors are the work of the grid in front: begins the first `COUNT` stages, the right factors, which
    // nobody computes, in front of the wait. False where it does nothing.
    template <int COUNT>
    DEVICE bool begin_first(T *stages) {
        if constexpr (Source::WAITS) {
            if (copier.source.waits) {
                begin_behind_weights<COUNT>(stages);
                return true;
            }
        }
        return false;
    }

    template <int COUNT>
    DEVICE void begin_behind_weights(T *stages) {
        Copier<TileType, Source> ahead = copier;
#pragma unroll 1
        for (int i = 0; i < COUNT; i++) {
            if (i < chunks) {
                ahead.stage_right(stages + i * TileType::STAGE_ELEMENTS + TileType::LEFT_ELEMENTS);
            }
        }
        wait_for_previous_grid();
#pragma unroll 1
        for (int i = 0; i < COUNT; i++) {
            if (i < chunks) {
                copier.stage_left(stages + i * TileType::STAGE_ELEMENTS);
            }
            copy_commit();
        }
    }
};

// The same through registers.
template <class TileType, class Source>
struct Filler<TileType, Source, true> {
    typedef typename TileType::Element T;
    const Source &source;
    int chunks;
    HeldRuns<TileType::PASSES> held;

    DEVICE Filler(const Source &from, int count, bool) : source(from), chunks(count) {}

    DEVICE void begin(T *stage, int chunk) {
        if (chunk < chunks) {
            HeldReader<TileType::PASSES> reader = {held};
            source.stage(reader, stage, stage + TileType::LEFT_ELEMENTS, chunk);
        }
    }

    DEVICE void end(T *stage, int chunk) {
        if (chunk < chunks) {
            HeldWriter<TileType::PASSES> writer = {held};
            source.stage(writer, stage, stage + TileType::LEFT_ELEMENTS, chunk);
        }
    }

    template <int COUNT>
    DEVICE bool begin_first(T *) {
        static_assert(COUNT == 1, "one stage is on its way");
        return false;
    }
};

// Adds up `chunks` stages. Then writes the sums to shared memory, where `sum_run` reads them.
template <class TileType, class Source>
DEVICE void compute_tile(unsigned char *shared, int chunks, Source &source, bool vectors) {
    typedef typename TileType::Element T;
    const int STAGES = TileType::STAGES;
    T *stages = (T *)shared;
    Filler<TileType, Source, TileType::Engine::HELD> filler(source, chunks, vectors);
    auto stage_of = [&](int chunk) { return stages + chunk % STAGES * TileType::STAGE_ELEMENTS; };
    typename TileType::Sum sum;
    sum.clear();
    // Not unrolled, and the other loop neither: blocks are short, and read their code from far.
    const bool begun = filler.template begin_first<STAGES - 1>(stages);
#pragma unroll 1
    for (int next = begun ? STAGES - 1 : 0; next < STAGES - 1; next++) {
        filler.begin(stages + next * TileType::STAGE_ELEMENTS, next);
        filler.end(stages + next * TileType::STAGE_ELEMENTS, next);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int next = chunk + STAGES - 1;
        copy_wait<STAGES - 2>();
        sync_block();
        filler.begin(stage_of(next), next);
        add_stage<TileType>(sum, stage_of(chunk));
        filler.end(stage_of(next), next);
    }
    copy_wait<0>();
    sync_block();
    float *sums = (float *)shared + TileType::warp_part() * TileType::ROWS * TileType::SUM_STRIDE +
                  TileType::warp_row() * TileType::SUM_STRIDE + TileType::warp_column();
#pragma unroll
    for (int i = 0; i < TileType::Sum::ROWS; i++) {
#pragma unroll
        for (int j = 0; j < TileType::Sum::COLUMNS; j++) {
            sums[sum.row(i) * TileType::SUM_STRIDE + sum.column(j)] = sum.at(i, j);
        }
    }
    sync_block();
}

// `LENGTH` sums of one row of the tile.
template <class TileType, int LENGTH>
DEVICE void sum_run(const unsigned char *shared, int row, int column, float (&values)[LENGTH]) {
    const float *sums = (const float *)shared + row * TileType::SUM_STRIDE + column;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        float value = sums[i];
#pragma unroll
        for (int part = 1; part < TileType::WARPS_DEPTH; part++) {
            value += sums[part * TileType::ROWS * TileType::SUM_STRIDE + i];
        }
        values[i] = value;
    }
}
