// The launch that reads the hidden states: routing, keys and values of the new tokens, queries or the hidden rows of a
// feed-forward layer, and what is copied into the caches; each block does one of them.
#pragma once

#include "caches.cuh"
#include "constants.cuh"
#include "product.cuh"

// Whether slot `e` of every token of an attention layer is expert `e`, so that nobody need look. A token that is routed
// nowhere has rows too; the output leaves them out.
DEVICE bool slots_are_experts(const Parameters &p) { return p.top_k == p.experts && p.activation < 0; }

DEVICE float activate(int activation, float x) {
    if (activation == RELU) {
        return x < 0 ? 0 : x;
    }
    if (activation == GELU) {
        return x * (0.5f * complementary_error(-x * 0.70710678118654752f));
    }
    if (activation == GELU_TANH) {
        // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
        return x / (1 + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    }
    return activation == SILU ? x / (1 + exponential(-x)) : x;
}

// Expert and first row of a tile of listed rows; the expert is `p.experts` behind the last tile.
template <class TileType>
DEVICE int listed_expert(const Parameters &p, int tile, int &first_row, int &rows) {
    for (int expert = 0; expert < p.experts; expert++) {
        rows = p.expert_counts[expert];
        int tiles = ceil_div(rows, TileType::ROWS);
        if (tile < tiles) {
            first_row = tile * TileType::ROWS;
            return expert;
        }
        tile -= tiles;
    }
    return p.experts;
}

enum Part { KEYS = 0, VALUES = 1, EXPERTS = 2 };

// What one block multiplies.
template <class TileType>
struct Job {
    typedef typename TileType::Element T;
    Part part;
    int expert;
    int column_tile;
    int first_row, rows;         // of the expert's list, or tokens
    const int *pairs;            // of the rows, or null: then rows are tokens
    const unsigned char *slots;  // of the expert, where rows that did not choose it are left out; or null
    int first_column;            // of the head, where columns are paired by rotation
    Columns<T> columns;

    // The token of a row of the tile, negative where there is none.
    DEVICE int token(const Parameters &p, int row) const {
        if (first_row + row >= rows) {
            return -1;
        }
        if (pairs) {
            return pairs[row] / p.top_k;
        }
        return slots && slots[first_row + row] == NO_SLOT ? -1 : first_row + row;
    }

    // Cuts the columns of the matrix into tiles; where they are paired, a tile lies in one head.
    DEVICE void choose_columns(const Parameters &p) {
        const bool rotary = p.rotary_positions > 0 && part != VALUES;
        const bool gated = p.gated && part == EXPERTS;
        const int pair_offset = rotary ? p.head / 2 : gated ? p.columns : 0;
        const int HALF = TileType::COLUMNS / 2, units = pair_offset ? pair_offset : p.columns;
        const int head = rotary ? column_tile / ceil_div(units, HALF) : 0;
        const int unit_tile = column_tile - (rotary ? head * ceil_div(units, HALF) : 0);
        const T *weight = part == EXPERTS ? (const T *)p.input_weight + (size_t)expert * p.width * p.input_columns
                                          : (const T *)p.kv_weight + (part == VALUES ? p.columns : 0);
        first_column = head * p.head;
        const size_t stride = part == EXPERTS ? p.input_columns : 2 * (size_t)p.columns;
        columns = {weight + first_column, stride, p.width, unit_tile * (pair_offset ? HALF : TileType::COLUMNS), units, pair_offset};
    }

    // Where a value belongs.
    DEVICE T *place(const Parameters &p, int row, int token, int column) const {
        if (part == EXPERTS) {
            size_t at = pairs   ? (size_t)pairs[row]
                        : slots ? (size_t)token * p.top_k + slots[token]
                                : (size_t)token * p.experts + expert;
            return (T *)p.rows + at * p.columns + column;
        }
        const int cache_rows = part == KEYS ? p.key_rows : p.value_rows;
        const size_t pair = (size_t)(token / p.tokens) * p.kv_heads + column / p.head;
        const size_t at = pair * cache_rows + cache_rows - p.rows_behind + token % p.tokens;
        return (T *)(part == KEYS ? p.key : p.value) + at * p.head + column % p.head;
    }
};

// The rows of hidden states that a tile takes.
template <class TileType>
struct HiddenSource {
    typedef typename TileType::Element T;
    static constexpr int PASSES = TileType::LEFT_PASSES;
    const Parameters &p;
    const Job<TileType> &job;
    int tokens[PASSES];  // of this thread's runs

    static_assert(PASSES <= 4, "the passes of `stage_runs` are written out, and the tokens are in registers");

    DEVICE HiddenSource(const Parameters &parameters, const Job<TileType> &of) : p(parameters), job(of) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            int row = (pass * TileType::THREADS + thread_index()) / TileType::LEFT_RUNS;
            tokens[pass] = row < TileType::ROWS ? job.token(p, row) : -1;
        }
    }

    // One segment: the whole width of one matrix.
    static constexpr bool HAS_SEGMENTS = false, WAITS = false;

    DEVICE void locate(int chunk, int &segment, int &inner) const {
        segment = 0;
        inner = chunk * TileType::DEPTH;
    }

    DEVICE const T *row(int, int row) const {
        const int token = job.token(p, row);
        return token < 0 ? nullptr : (const T *)p.hidden_states + (size_t)token * p.width;
    }

    DEVICE Columns<T> columns(int) const { return job.columns; }

    template <class Mover>
    DEVICE void stage(Mover &mover, T *left, T *right, int chunk) const {
        const int first = chunk * TileType::DEPTH;
        mover.template runs<0, TileType::ROWS * TileType::LEFT_RUNS, TileType::THREADS, T>(
            p.vectors != 0, [&](int pass, int i, T *&target, const T *&from) {
                int row = i / TileType::LEFT_RUNS, k = i % TileType::LEFT_RUNS * TileType::LENGTH;
                int token = pass < 0 ? job.token(p, row) : tokens[pass];
                int valid = token < 0 ? 0 : p.width - (first + k);
                target = left + TileType::left_place(row, k);
                from = (const T *)p.hidden_states + (valid > 0 ? (size_t)token * p.width + first + k : 0);
                return valid;
            });
        job.columns.template stage<TileType>(mover, right, first, p.vectors != 0);
    }
};

template <class T, int LENGTH>
DEVICE void store_piece(T *to, const float (&values)[LENGTH]) {
    struct alignas(LENGTH * sizeof(T)) Piece {
        T element[LENGTH];
    } piece;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        from_float(piece.element[i], values[i]);
    }
    *(Piece *)to = piece;
}

// Writes the values of a row from `column` of the tile on: rotated with their partners, or activated and times the gate.
template <class TileType, int LENGTH>
DEVICE void finish_run(const Parameters &p, const Job<TileType> &job, int row, int token, int column, float (&values)[LENGTH],
                       float (&partners)[LENGTH]) {
    const bool paired = job.columns.pair_offset != 0, gated = p.gated && job.part == EXPERTS;
    const int unit = job.columns.first + column;
    if (unit >= job.columns.units) {
        return;
    }
    if (paired && !gated) {
        rotate(p, rotary_row(p, token), unit, values, partners);
        store_piece(job.place(p, row, token, job.first_column + unit + job.columns.pair_offset), partners);
    }
    if (job.part == EXPERTS && p.activation != NO_ACTIVATION) {
        size_t pair = job.pairs ? job.pairs[row] : (size_t)token * p.top_k + job.slots[token];
        float factor = p.pair_gates[pair];
#pragma unroll
        for (int j = 0; j < LENGTH; j++) {
            values[j] = activate(p.activation, values[j]) * (gated ? partners[j] : 1) * factor;
        }
    }
    store_piece(job.place(p, row, token, job.first_column + unit), values);
}

// Writes the finished tile out of shared memory, `LENGTH` values at a time.
template <class TileType, int LENGTH>
DEVICE void finish_tile(const Parameters &p, const unsigned char *shared, const Job<TileType> &job) {
    const int HALF = TileType::COLUMNS / 2;
    const bool paired = job.columns.pair_offset != 0;
    const int runs = (paired ? HALF : TileType::COLUMNS) / LENGTH;
#pragma unroll 1
    for (int i = thread_index(); i < TileType::ROWS * runs; i += TileType::THREADS) {
        int row = i / runs, column = i % runs * LENGTH;
        int token = job.token(p, row);
        if (token < 0) {
            continue;
        }
        float values[LENGTH], partners[LENGTH] = {};
        sum_run<TileType, LENGTH>(shared, row, column, values);
        if (paired) {
            sum_run<TileType, LENGTH>(shared, row, column + HALF, partners);
        }
        finish_run<TileType, LENGTH>(p, job, row, token, column, values, partners);
    }
}

// Get finished rows out of registers. Of a tile that is stored as it is, in one piece a row.
template <class TileType>
struct PlainRows {
    typedef typename TileType::Element T;
    static constexpr int LENGTH = TileType::LENGTH, HALF = TileType::COLUMNS / 2;
    const Parameters &p;
    const Job<TileType> &job;
    T *to;

    DEVICE static bool suits(const Parameters &p, const Job<TileType> &job) {
        return job.columns.pair_offset == 0 && (job.part == EXPERTS ? p.activation < 0 : p.head % TileType::COLUMNS == 0);
    }

    DEVICE bool begin(int row) {
        const int token = job.token(p, row);
        to = token < 0 ? nullptr : job.place(p, row, token, job.columns.first);
        return token >= 0;
    }

    DEVICE void end(int column, float (&low)[LENGTH], float (&high)[LENGTH]) const {
        const int left = job.columns.units - job.columns.first - column;
        if (left > 0) {
            store_piece(to + column, low);
        }
        if (left > HALF) {
            store_piece(to + column + HALF, high);
        }
    }
};

// Of a tile whose halves are rotated.
template <class TileType>
struct RotatedRows {
    typedef typename TileType::Element T;
    static constexpr int LENGTH = TileType::LENGTH;
    const Parameters &p;
    const Job<TileType> &job;
    T *to;
    int angles;

    DEVICE bool begin(int row) {
        const int token = job.token(p, row);
        if (token >= 0) {
            to = job.place(p, row, token, job.first_column);
            angles = rotary_row(p, token);
        }
        return token >= 0;
    }

    DEVICE void end(int column, float (&low)[LENGTH], float (&high)[LENGTH]) const {
        const int unit = job.columns.first + column;
        if (unit < job.columns.units) {
            rotate(p, angles, unit, low, high);
            store_piece(to + unit, low);
            store_piece(to + unit + job.columns.pair_offset, high);
        }
    }
};

// Of any tile.
template <class TileType>
struct ProjectedRows {
    static constexpr int LENGTH = TileType::LENGTH;
    const Parameters &p;
    const Job<TileType> &job;
    int row, token;

    DEVICE bool begin(int which) {
        row = which;
        token = job.token(p, row);
        return token >= 0;
    }

    DEVICE void end(int column, float (&low)[LENGTH], float (&high)[LENGTH]) {
        finish_run<TileType, LENGTH>(p, job, row, token, column, low, high);
        if (job.columns.pair_offset == 0) {
            finish_run<TileType, LENGTH>(p, job, row, token, column + TileType::COLUMNS / 2, high, low);
        }
    }
};

// Multiplies, and writes what comes of it.
template <class TileType>
DEVICE void project_tile(const Parameters &p, unsigned char *shared, const Job<TileType> &job) {
    const HiddenSource<TileType> source(p, job);
    const int chunks = ceil_div(p.width, TileType::DEPTH);
    if constexpr (TileType::HANDS_OVER) {
        typename TileType::Sum sum;
        TileType::add_up(sum, shared, chunks, source, p.vectors != 0);
        if (p.vectors && PlainRows<TileType>::suits(p, job)) {
            PlainRows<TileType> rows = {p, job, nullptr};
            TileType::hand_over(sum, rows);
            return;
        }
        if (p.vectors && job.columns.pair_offset != 0 && !(p.gated && job.part == EXPERTS)) {
            RotatedRows<TileType> rows = {p, job, nullptr, 0};
            TileType::hand_over(sum, rows);
            return;
        }
        if (p.vectors) {
            ProjectedRows<TileType> rows = {p, job, 0, 0};
            TileType::hand_over(sum, rows);
            return;
        }
        TileType::spread(sum, shared);
    } else {
        TileType::compute(shared, chunks, source, p.vectors != 0);
    }
    if (p.vectors) {
        finish_tile<TileType, TileType::LENGTH>(p, shared, job);
    } else {
        finish_tile<TileType, 1>(p, shared, job);
    }
}

// Whether some row of the tile chose its expert; all threads get the same answer.
template <class TileType>
DEVICE bool is_chosen(const Parameters &p, const Job<TileType> &job, const int *routed, int routed_pairs) {
    bool chosen = false;
    for (int i = lane_index(); i < routed_pairs; i += 32) {
        chosen = chosen || routed[i] == job.expert;
    }
    for (int row = lane_index(); job.slots && row < TileType::ROWS; row += 32) {
        chosen = chosen || job.token(p, row) >= 0;
    }
    return ballot(chosen) != 0;
}

// The job of a block behind the router's; `expert` is `p.experts` where there is none.
template <class TileType>
DEVICE Job<TileType> job_of(const Parameters &p, int block) {
    Job<TileType> job;
    const int tokens = p.batch * p.tokens;
    const bool listed = p.row_mode == LISTED_ROWS;
    const int column_tiles = p.input_tiles * (listed ? 1 : p.experts), experts = p.row_tiles * column_tiles;
    int row_tile;
    job.expert = 0;
    job.rows = tokens;
    job.pairs = nullptr;
    job.slots = nullptr;
    if (block >= experts) {
        block -= experts;
        tile_of_block(block, p.kv_row_tiles, p.key_tiles + p.value_tiles, row_tile, job.column_tile);
        job.part = job.column_tile < p.key_tiles ? KEYS : VALUES;
        job.column_tile -= job.part == KEYS ? 0 : p.key_tiles;
        job.first_row = row_tile * TileType::ROWS;
        return job;
    }
    job.part = EXPERTS;
    tile_of_block(block, p.row_tiles, column_tiles, row_tile, job.column_tile);
    if (listed) {
        job.expert = listed_expert<TileType>(p, row_tile, job.first_row, job.rows);
        job.pairs = p.expert_pairs + (size_t)job.expert * tokens + job.first_row;
        return job;
    }
    job.expert = divided(job.column_tile, p.input_tiles);
    job.column_tile -= job.expert * p.input_tiles;
    job.first_row = row_tile * TileType::ROWS;
    job.slots = p.row_mode == CHOSEN_ROWS ? p.slots + (size_t)job.expert * tokens : nullptr;
    return job;
}

template <class TileType>
DEVICE void project(const Parameters &p) {
    typedef typename TileType::Element T;
    constexpr bool IS_LARGE = TileType::ROWS * TileType::COLUMNS > 64 * 64;
    static_assert(!IS_LARGE || sizeof(T) != 2 || TileType::SHARED_BYTES >= ProductRouteMemory<TileType::THREADS / 32>::BYTES,
                  "a large tile has room for the router of many tokens");
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    const int block = block_index() - p.route_blocks;
    const int expert_blocks = p.row_tiles * p.input_tiles * (p.row_mode == LISTED_ROWS ? 1 : p.experts);
    const int tiles = expert_blocks + p.kv_row_tiles * (p.key_tiles + p.value_tiles);
    if (block >= tiles) {
        fill_cache<T, TileType::THREADS, true>(p, p.past_key, p.key, p.key_rows, block - tiles);
        fill_cache<T, TileType::THREADS, false>(p, p.past_value, p.value, p.value_rows, block - tiles);
        return;
    }
    const bool routes = block < 0, routes_itself = !routes && p.row_mode == ROUTED_ROWS && block < expert_blocks;
    const int *routed = nullptr;
    int routed_pairs = 0;
    if (routes || routes_itself) {
        const RouteMemory memory(p, shared, TileType::THREADS / 32);
        routed = memory.experts;
        if (block == -p.route_blocks) {
            for (int i = thread_index(); i < p.tickets_count; i += TileType::THREADS) {
                p.tickets[i] = 0;
            }
        }
        const int tokens = TileType::THREADS / 32 / p.route_splits * GROUP_TOKENS;
        const int first = routes ? block_index() * tokens : 0;
        routed_pairs = route_tokens<T, TileType::THREADS, IS_LARGE>(p, memory, first, routes) * p.top_k;
    }
    if (routes) {
        return;
    }
    Job<TileType> job = job_of<TileType>(p, block);
    if (job.expert == p.experts) {
        return;
    }
    if (routes_itself || job.slots) {
        if (!is_chosen(p, job, routed, routed_pairs)) {
            return;
        }
        sync_block();
    }
    job.choose_columns(p);
    project_tile<TileType>(p, shared, job);
}
