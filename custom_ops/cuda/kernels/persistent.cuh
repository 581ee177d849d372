// Products of many rows by blocks that stay, for 16-bit elements: one warpgroup copies stages, two multiply, and the
// first stages of a block's next tile are copied while it ends the one before. Tiles are twice as wide as those of
// blocks that leave, so that a quarter less is read from the cache for each product.
//
// Rows and columns are whole runs; addresses may allow no vectors.
#pragma once

#include "output.cuh"
#include "project.cuh"
#include "warpgroup.cuh"

#if HAS_WARPGROUP_PRODUCTS

template <class T, int ROWS_, int COLUMNS_, int STAGES_>
struct PersistentTile : WarpgroupTile<T, ROWS_, COLUMNS_, STAGES_> {
    typedef WarpgroupTile<T, ROWS_, COLUMNS_, STAGES_> Base;
    // Threads that multiply are `Base::THREADS`; behind them are those that copy. The registers of each.
    static constexpr int COPIERS = 128, ALL_THREADS = Base::THREADS + COPIERS;
    static constexpr int MULTIPLIER_REGISTERS = 200, COPIER_REGISTERS = 104;
    static constexpr int ROW_WARPS = Base::THREADS / 32, LINES = Base::COLUMNS / Base::LINE;

    // What the parts of a block share, behind the stages: barriers, `full` where a stage was copied, `free` where
    // nobody needs it any more; the first tile of each expert's list, and the number of all.
    struct Shared {
        Signal full[Base::STAGES], free[Base::STAGES];
        int list_starts[MAX_EXPERTS + 1];
    };
    static constexpr int SHARED_BYTES = Base::STAGE_BYTES + (int)sizeof(Shared);

    // What a block is given when it begins is all that its threads may share.
    static constexpr int REGISTERS = (64 << 10) / ALL_THREADS / 8 * 8;
    static_assert(Base::THREADS * (MULTIPLIER_REGISTERS - REGISTERS) <= COPIERS * (REGISTERS - COPIER_REGISTERS),
                  "those that multiply claim what the others release");
    static_assert(COPIERS / Base::LEFT_RUNS % 8 == 0, "a thread's runs lie alike in lines");

    DEVICE static Shared &shared_of(unsigned char *shared) { return *(Shared *)(shared + Base::STAGE_BYTES); }
};

// Tiles of rows of an expert's list.
template <class TileType>
DEVICE int list_tiles(const Parameters &p, int expert) { return ceil_div(p.expert_counts[expert], TileType::ROWS); }

// By all threads, with a barrier behind it.
template <class TileType>
DEVICE void begin_tiles(const Parameters &p, typename TileType::Shared &shared) {
    if (thread_index() == 0) {
        for (int stage = 0; stage < TileType::STAGES; stage++) {
            signal_init(shared.full[stage], TileType::COPIERS);
            signal_init(shared.free[stage], TileType::ROW_WARPS);
        }
    }
    for (int expert = thread_index(); expert <= p.experts; expert += TileType::ALL_THREADS) {
        int tiles = 0;
        for (int before = 0; p.row_mode == LISTED_ROWS && before < expert; before++) {
            tiles += list_tiles<TileType>(p, before);
        }
        shared.list_starts[expert] = tiles;
    }
    sync_block();
}

// The expert of tile `tile` of all lists; asked by whole warps.
DEVICE int expert_of_tile(const int *list_starts, int experts, int tile) {
    int expert = 0;
    for (int first = 0; first < experts; first += 32) {
        const int own = first + lane_index();
        expert += count_bits(ballot(own < experts && list_starts[own + 1] <= tile));
    }
    return expert;
}

// The rows of tile `row_tile`: of an expert's list, which `pairs` are from the tile's first row on, or tokens. Returns the
// expert, 0 where none has a list; `row_count` is that of its list, or of tokens.
template <class TileType>
DEVICE int rows_of_tile(const Parameters &p, const int *list_starts, int row_tile, int &first_row, int &row_count,
                        const int *&pairs) {
    first_row = row_tile * TileType::ROWS;
    row_count = p.batch * p.tokens;
    if (p.row_mode != LISTED_ROWS) {
        return 0;
    }
    const int expert = expert_of_tile(list_starts, p.experts, row_tile);
    first_row -= list_starts[expert] * TileType::ROWS;
    pairs = p.expert_pairs + (size_t)expert * row_count + first_row;
    row_count = p.expert_counts[expert];
    return expert;
}

// The columns of a tile, counted over matrices that lie `matrix_stride` elements apart, `units` in each of them. Where
// heads are rotated, a head is two lines, units are the columns of all first ones, the first half of a tile are units,
// and the second half their partners.
template <class T>
struct WideColumns {
    const T *weight;  // row 0, column 0 of the first matrix
    size_t stride;    // from one inner index to the next
    int inner;
    int first;      // of the tile
    int all_units;  // of all matrices
    int units;
    size_t matrix_stride;
    bool rotates;

    // The column of a unit, counted over its matrix or all of them.
    template <class TileType>
    DEVICE int column(int unit) const {
        return rotates ? unit + unit / TileType::LINE * TileType::LINE : unit;
    }

    // Elements from `weight` to a column of the tile; `valid` of the elements from there on exist.
    template <class TileType>
    DEVICE size_t offset(int tile_column, int &valid) const {
        const int HALF = TileType::COLUMNS / 2;
        const bool second = rotates && tile_column >= HALF;
        const int unit = first + tile_column - (second ? HALF : 0), matrix = units == all_units ? 0 : unit / units;
        valid = all_units - unit;
        return matrix * matrix_stride + column<TileType>(unit - matrix * units) + (second ? TileType::LINE : 0);
    }
};

// What one thread copies of every stage of a tile: a run of some rows of the left factor, and one of every line of
// some inner indices of the right one. `source` cuts the inner dimension into `source.segments()` segments, in which
// rows and matrix stay the same:
// * `look_up<COUNT, STEP>(segment, first, found)` reads what says where the rows `first`, `first + STEP` and so on
//   are, and `rows_of<COUNT, STEP>(first, found, to)` finds how many runs behind `rows()` they begin; bit `i` of the
//   result says whether row `i` is more than zeros, which are not read;
// * `columns(segment)`: the right factor.
template <class TileType, class Source>
struct StageCopier {
    typedef typename TileType::Element T;
    static constexpr int RUNS = TileType::LEFT_RUNS, STEP = TileType::COPIERS / RUNS, LINES = TileType::LINES;
    static constexpr int ROWS = TileType::ROWS / STEP, INNERS = TileType::DEPTH / STEP;

    const Source &source;
    bool vectors;
    int segment = -1;
    int left = 0;          // inner indices of the segment that are not copied yet
    unsigned present = 0;  // bit `i`: row `i` is not zeros
    unsigned lines = 0;    // bit `i`: the run of line `i` exists
    const T *outer = nullptr, *inner = nullptr;
    unsigned rows[ROWS] = {};  // runs from `outer`
    int line[LINES] = {};
    size_t stride = 0;
    int found[ROWS];  // of the next segment: there while this one is copied

    DEVICE StageCopier(const Source &from, bool in_vectors) : source(from), vectors(in_vectors) {
        source.template look_up<ROWS, STEP>(0, first(), found);
    }

    // This thread's first row, which is its first inner index too, and where its runs begin in their lines.
    DEVICE static int first() { return thread_index() % TileType::COPIERS / RUNS; }
    DEVICE static int run() { return thread_index() % RUNS * TileType::LENGTH; }

    DEVICE void enter_next() {
        segment++;
        const WideColumns<T> columns = source.columns(segment);
        stride = columns.stride;
        inner = columns.weight + first() * stride;
        left = columns.inner;
        lines = 0;
#pragma unroll
        for (int i = 0; i < LINES; i++) {
            int valid;
            line[i] = (int)columns.template offset<TileType>(i * TileType::LINE + run(), valid);
            lines |= (valid > 0 ? 1u : 0u) << i;
        }
        present = source.template rows_of<ROWS, STEP>(first(), found, rows);
        outer = source.rows() + run();
        if (segment + 1 < source.segments()) {
            source.template look_up<ROWS, STEP>(segment + 1, first(), found);
        }
    }

    // In front of the next stage.
    DEVICE void prepare() {
        if (left <= 0) {
            enter_next();
        }
    }

    // Copies it.
    DEVICE void stage(T *to) {
        if (vectors) {
            copy_rows(to + TileType::left_place(first(), run()));
            copy_lines(to + TileType::LEFT_ELEMENTS + TileType::right_place(first(), run()));
        } else {
            copy_elements(to);
        }
        left -= TileType::DEPTH;
    }

    DEVICE void copy_rows(T *to) {
        const bool has_run = run() < left;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const T *from = outer + (size_t)rows[i] * TileType::LENGTH;
            copy_async(to, from, has_run && (present >> i & 1), TileType::left_apart(i * STEP) * (int)sizeof(T));
        }
        outer += TileType::DEPTH;
    }

    DEVICE void copy_lines(T *to) {
#pragma unroll
        for (int i = 0; i < LINES; i++) {
            const T *from = inner + line[i];
#pragma unroll
            for (int j = 0; j < INNERS; j++) {
                const bool exists = (lines >> i & 1) && first() + j * STEP < left;
                const int apart = i * TileType::DEPTH * TileType::LINE + TileType::right_apart(j * STEP);
                copy_async(to, from + j * STEP * stride, exists, apart * (int)sizeof(T));
            }
        }
        inner += TileType::DEPTH * stride;
    }

    // The same where addresses allow no vectors.
    DEVICE void copy_elements(T *to) {
        const WideColumns<T> columns = source.columns(segment);
        const int done = columns.inner - left;
        stage_runs<TileType::ROWS * RUNS, TileType::COPIERS, T>(false, [&](int, int i, T *&target, const T *&from) {
            const int row = i / RUNS, k = i % RUNS * TileType::LENGTH;
            unsigned start[1];
            int at[1];
            source.template look_up<1, 1>(segment, row, at);
            const bool exists = source.template rows_of<1, 1>(row, at, start) != 0;
            target = to + TileType::left_place(row, k);
            from = source.rows() + (size_t)start[0] * TileType::LENGTH + done + k;
            return exists ? left - k : 0;
        });
        const int WIDE = TileType::RIGHT_RUNS;
        stage_runs<TileType::DEPTH * WIDE, TileType::COPIERS, T>(false, [&](int, int i, T *&target, const T *&from) {
            const int k = i / WIDE, column = i % WIDE * TileType::LENGTH;
            int valid;
            const size_t offset = columns.template offset<TileType>(column, valid);
            target = to + TileType::LEFT_ELEMENTS + TileType::right_place(k, column);
            from = columns.weight + offset + (done + k) * columns.stride;
            return k < left ? valid : 0;
        });
    }
};

// Copies `chunks` stages, of which the first is number `filled` of the block.
template <class TileType, class Source>
DEVICE void copy_stages(unsigned char *memory, int filled, int chunks, const Source &source, bool vectors) {
    typedef typename TileType::Element T;
    typename TileType::Shared &shared = TileType::shared_of(memory);
    StageCopier<TileType, Source> copier(source, vectors);
#pragma unroll 1
    for (int next = filled; next < filled + chunks; next++) {
        const int stage = next % TileType::STAGES;
        copier.prepare();
        signal_wait(shared.free[stage], next / TileType::STAGES - 1);
        copier.stage((T *)memory + stage * TileType::STAGE_ELEMENTS);
        copy_commit();
        if (vectors) {
            signal_when_copied(shared.full[stage]);
        } else {
            signal_arrive(shared.full[stage]);
        }
    }
}

// Adds up these stages, by the warpgroups that multiply.
template <class TileType>
DEVICE void add_stages(typename TileType::Sum &sum, unsigned char *memory, int filled, int chunks) {
    typedef typename TileType::Element T;
    typename TileType::Shared &shared = TileType::shared_of(memory);
    const int team = warpgroup_index();
    sum.clear();
#pragma unroll 1
    for (int next = filled; next < filled + chunks; next++) {
        const int stage = alike(next % TileType::STAGES);
        signal_wait(shared.full[stage], next / TileType::STAGES);
        fence_products();
        TileType::multiply(sum, (const T *)memory + stage * TileType::STAGE_ELEMENTS, team);
        warpgroup_wait<1>(sum.block[0]);
        if (next > filled) {
            signal_of_warp(shared.free[(next - 1) % TileType::STAGES]);
        }
    }
    warpgroup_wait<0>(sum.block[0]);
    if (chunks > 0) {
        signal_of_warp(shared.free[(filled + chunks - 1) % TileType::STAGES]);
    }
}

// The four lanes of a row exchange pairs of elements, so that each has a run of it. `pairs` is, of run `j`, the
// elements 2 * own and the next; then, of run `own`, the elements 2 * j and the next.
DEVICE void exchange_pairs(unsigned (&pairs)[4]) {
    const int own = lane_index() % 4;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j % (2 * step) < step) {
                unsigned &low = pairs[j], &high = pairs[j + step];
                const unsigned other = (unsigned)shuffle_xor((int)((own & step) ? low : high), step);
                ((own & step) ? low : high) = other;
            }
        }
    }
}

// Writes the first `valid` elements of a run; with `vectors`, all or none, in one piece.
template <class T>
DEVICE void store_pairs(T *to, const unsigned (&pairs)[4], int valid, bool vectors) {
    if (vectors) {
        if (valid > 0) {
            *(Vector16 *)to = {{pairs[0], pairs[1], pairs[2], pairs[3]}};
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < Run<T>::LENGTH; i++) {
        if (i < valid) {
            to[i].bits = (unsigned short)(pairs[i / 2] >> i % 2 * 16);
        }
    }
}

// Hands sums from registers to `rows`. `look_up(row, column)` is what rows need of a column of any line, and its next, a
// part of a line ahead, of which `rows.first` are those of the first part; `change(row, column, found, low, high)` gets
// two neighbours of a row, and those half a tile behind; `end(row, column, low, high)` gets what became of them as runs.
// `row` is one of those of this lane.
template <class TileType, class Rows>
DEVICE void hand_over_pairs(typename TileType::Sum &sum, const Rows &rows) {
    typedef typename TileType::Element T;
    const int RUNS = TileType::RIGHT_RUNS / 2, PARTS = TileType::LEFT_RUNS / 4, LENGTH = TileType::LENGTH;
    const int own = lane_index() % 4, ALL_PARTS = TileType::Sum::ROWS * PARTS;
    typename Rows::Found found[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        found[j] = rows.first(j);
    }
#pragma unroll
    for (int part = 0; part < ALL_PARTS; part++) {
        const int i = part / PARTS;
        typename Rows::Found next[4] = {};
#pragma unroll
        for (int j = 0; part + 1 < ALL_PARTS && j < 4; j++) {
            next[j] = rows.look_up((part + 1) / PARTS, ((part + 1) % PARTS * 4 + j) * LENGTH + 2 * own);
        }
#pragma unroll
        for (int first = part % PARTS * 4; first < RUNS; first += 4 * PARTS) {
            unsigned low[4], high[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = 2 * (first + j);
                float a[2] = {sum.at(i, at), sum.at(i, at + 1)};
                float b[2] = {sum.at(i, at + 2 * RUNS), sum.at(i, at + 2 * RUNS + 1)};
                rows.change(i, (first + j) * LENGTH + 2 * own, found[j], a, b);
                low[j] = pack(T(), a[0], a[1]);
                high[j] = pack(T(), b[0], b[1]);
            }
            exchange_pairs(low);
            exchange_pairs(high);
            rows.end(i, (first + own) * LENGTH, low, high);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            found[j] = next[j];
        }
    }
}

// The same, in whose copy for addresses that allow vectors nothing else is left.
template <class TileType, class Rows>
DEVICE void hand_over_wide(const Parameters &p, typename TileType::Sum &sum, const Rows &rows) {
    if (p.vectors) {
        hand_over_pairs<TileType>(sum, rows);
    } else {
        hand_over_pairs<TileType>(sum, rows);
    }
}

// Runs `work.begin(index)` for every tile of a block, whether it exists; then its warps copy `work.chunks()` stages of
// `work`, or look for the places of their rows, add the stages up and `work.end(sum, rows)`.
template <class TileType, class Work>
DEVICE void run_tiles(const Parameters &p, unsigned char *memory, Work &work) {
    const bool vectors = p.vectors != 0;
    int filled = 0;
    if (warpgroup_index() * 128 >= TileType::THREADS) {
        release_registers<TileType::COPIER_REGISTERS>();
#pragma unroll 1
        for (int tile = block_index(); work.begin(tile); tile += block_count()) {
            copy_stages<TileType>(memory, filled, work.chunks(), work, vectors);
            filled += work.chunks();
        }
        copy_wait<0>();
        return;
    }
    claim_registers<TileType::MULTIPLIER_REGISTERS>();
#pragma unroll 1
    for (int tile = block_index(); work.begin(tile); tile += block_count()) {
        typename Work::Rows rows(work);
#pragma unroll
        for (int i = 0; i < TileType::Sum::ROWS; i++) {
            rows.begin(i, TileType::warp() * 16 + TileType::Sum::row(i));
        }
        typename TileType::Sum sum;
        add_stages<TileType>(sum, memory, filled, work.chunks());
        filled += work.chunks();
        work.end(sum, rows);
    }
}

#endif
