// One tile of a matrix product: a pipeline of stages in shared memory, then the sums in shared memory.
#pragma once

#include "engine.cuh"
#include "memory.cuh"

template <class TileType, class Source>
DEVICE void compute_tile(unsigned char *shared, int chunks, Source &source);

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

    static_assert(WARP_DEPTH % Engine::STEP == 0, "a warp's depth is whole steps");
    static_assert(STAGES >= 2, "one stage is computed while another is loaded");
    static_assert(COLUMNS % (2 * LENGTH) == 0, "half a tile of columns is whole runs");

    // Where an element of a factor lies in its part of a stage.
    DEVICE static int left_place(int row, int inner) { return row * LEFT_STRIDE + inner; }
    DEVICE static int right_place(int inner, int column) { return inner * RIGHT_STRIDE + column; }

    DEVICE static int warp() { return thread_index() / 32; }
    DEVICE static int warp_row() { return warp() / (WARPS_COLUMNS * WARPS_DEPTH) * WARP_ROWS; }
    DEVICE static int warp_column() { return warp() / WARPS_DEPTH % WARPS_COLUMNS * WARP_COLUMNS; }
    DEVICE static int warp_part() { return warp() % WARPS_DEPTH; }

    template <class Source>
    DEVICE static void compute(unsigned char *shared, int chunks, Source &source, bool) {
        compute_tile<Tile>(shared, chunks, source);
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
#pragma unroll Engine::UNROLL
    for (int k = 0; k < TileType::WARP_DEPTH; k += Engine::STEP) {
        Engine::multiply(sum, left + k, TileType::LEFT_STRIDE, right + k * TileType::RIGHT_STRIDE, TileType::RIGHT_STRIDE);
    }
}

// Fills one stage of a tile.
template <class TileType, class Source>
struct StageFill {
    const Source &source;
    typename TileType::Element *stage;
    int chunk;

    template <class Mover>
    DEVICE void operator()(Mover &mover) const {
        source.stage(mover, stage, stage + TileType::LEFT_ELEMENTS, chunk);
    }
};

// Adds up `chunks` stages; `source.stage(mover, left, right, chunk)` fills one. Then writes the sums to shared memory,
// where `sum_run` reads them.
template <class TileType, class Source>
DEVICE void compute_tile(unsigned char *shared, int chunks, Source &source) {
    typedef typename TileType::Element T;
    const int STAGES = TileType::STAGES;
    T *stages = (T *)shared;
    Transfer<TileType::Engine::HELD, TileType::PASSES> transfer;
    auto fill = [&](int chunk) {
        return StageFill<TileType, Source>{source, stages + chunk % STAGES * TileType::STAGE_ELEMENTS, chunk};
    };
    typename TileType::Sum sum;
    sum.clear();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < chunks) {
            transfer.begin(fill(i));
            transfer.end(fill(i));
        } else {
            copy_commit();
        }
    }
    for (int chunk = 0; chunk < chunks; chunk++) {
        copy_wait<STAGES - 2>();
        sync_block();
        const int next = chunk + STAGES - 1;
        if (next < chunks) {
            transfer.begin(fill(next));
        } else {
            copy_commit();
        }
        add_stage<TileType>(sum, stages + chunk % STAGES * TileType::STAGE_ELEMENTS);
        if (next < chunks) {
            transfer.end(fill(next));
        }
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
