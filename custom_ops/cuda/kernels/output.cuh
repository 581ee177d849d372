// The output projection: gates are in `attended` already, so the weighted sum over experts is the sum over the inner
// dimension `E * w`, of which a tile of tokens visits the experts that some of its tokens chose.
#pragma once

#include "product.cuh"
#include "project.cuh"

template <class TileType>
struct AttendedSource {
    typedef typename TileType::Element T;
    const Parameters &p;
    const unsigned short *visited;  // experts of the tile; or null: all, whose rows and weights follow each other as one
    int inner;                      // of an expert, or of all
    int first_chunk;
    int chunks_per_expert;
    int first_row, rows, first_column;
    const int *pairs;  // of the tile's rows, or null: then rows are tokens
    bool waits;

    // One segment an expert.
    static constexpr bool HAS_SEGMENTS = true, WAITS = TileType::READS_AHEAD;

    DEVICE void locate(int chunk, int &segment, int &inner) const {
        const int at = first_chunk + chunk;
        segment = at < chunks_per_expert ? 0 : at / chunks_per_expert;
        inner = (at - segment * chunks_per_expert) * TileType::DEPTH;
    }

    // Null where the row's token did not choose the segment's expert.
    DEVICE const T *row(int segment, int row) const {
        if (row >= rows) {
            return nullptr;
        }
        const size_t token = first_row + row;
        const int slot = pairs ? 0 : visited ? p.slots[(size_t)visited[segment] * (p.batch * p.tokens) + token] : 0;
        const size_t pair = pairs ? (size_t)pairs[row] : token * p.top_k + slot;
        return slot == NO_SLOT ? nullptr : (const T *)p.attended + pair * p.columns;
    }

    DEVICE Columns<T> columns(int segment) const {
        const size_t expert = visited ? visited[segment] : 0;
        const T *weight = (const T *)p.output_weight + expert * p.columns * p.width;
        return {weight, (size_t)p.width, inner, first_column, p.width, 0};
    }

    template <class Mover>
    DEVICE void stage(Mover &mover, T *left, T *right, int chunk) const {
        int segment, first;
        locate(chunk, segment, first);
        mover.template runs<0, TileType::ROWS * TileType::LEFT_RUNS, TileType::THREADS, T>(
            p.vectors != 0, [&](int, int i, T *&target, const T *&from) {
                int row = i / TileType::LEFT_RUNS, k = i % TileType::LEFT_RUNS * TileType::LENGTH;
                const T *start = this->row(segment, row);
                int valid = start ? inner - (first + k) : 0;
                target = left + TileType::left_place(row, k);
                from = valid > 0 ? start + first + k : (const T *)p.attended;
                return valid;
            });
        columns(segment).template stage<TileType>(mover, right, first, p.vectors != 0);
    }
};

// Lists the experts that some of `rows` tokens chose, rising; every thread gets their number.
template <class TileType>
DEVICE int list_visited(const Parameters &p, int first_row, int rows, unsigned short *visited, unsigned char *flags) {
    const int WARPS = TileType::THREADS / 32;
    const int tokens = p.batch * p.tokens;
    for (int expert = thread_index() / 32; expert < p.experts; expert += WARPS) {
        bool chosen = false;
        for (int row = lane_index(); row < rows; row += 32) {
            chosen = chosen || p.slots[(size_t)expert * tokens + first_row + row] != NO_SLOT;
        }
        chosen = ballot(chosen) != 0;
        if (lane_index() == 0) {
            flags[expert] = chosen;
        }
    }
    sync_block();
    int count = 0;
    for (int first = 0; first < p.experts; first += 32) {
        int expert = first + lane_index();
        bool chosen = expert < p.experts && flags[expert] != 0;
        unsigned bits = ballot(chosen);
        if (chosen && thread_index() < 32) {
            visited[count + count_bits(bits & ((1u << lane_index()) - 1))] = (unsigned short)expert;
        }
        count += count_bits(bits);
    }
    sync_block();
    return count;
}

// Bytes behind the tile that lists of experts take.
const int MAX_EXPERTS = 256;
const int VISITED_BYTES = MAX_EXPERTS * 3 + 16;

// Whether a token is routed anywhere.
DEVICE bool is_routed(const Parameters &p, size_t token) { return p.pair_experts[token * p.top_k] >= 0; }

// One run of the output, with bias; 0 for a token that is not `routed`.
template <class T>
DEVICE void store_output(const Parameters &p, size_t token, bool routed, int column, float (&values)[Run<T>::LENGTH]) {
    const T *bias = (const T *)p.output_bias;
    const int valid = p.width - column;
#pragma unroll
    for (int i = 0; i < Run<T>::LENGTH; i++) {
        float added = bias && i < valid ? to_float(bias[column + i]) : 0;
        values[i] = routed ? values[i] + added : 0;
    }
    store_run((T *)p.output + token * p.width + column, values, valid, p.vectors != 0);
}

// The last block of a tile to arrive adds the parts, in their order.
template <class TileType>
DEVICE void add_parts(const Parameters &p, unsigned char *shared, int tile, int first_row, int rows, int first_column) {
    typedef typename TileType::Element T;
    const size_t all = (size_t)p.batch * p.tokens * p.width;
    float *parts = (float *)p.partial_rows;
    fence_device();
    sync_block();
    unsigned *arrived = (unsigned *)(shared + TileType::SHARED_BYTES);
    if (thread_index() == 0) {
        *arrived = atomic_add(p.tickets + tile, 1);
    }
    sync_block();
    if (*arrived + 1 != (unsigned)p.output_splits) {
        return;
    }
    fence_device();
    for (int i = thread_index(); i < TileType::ROWS * TileType::RIGHT_RUNS; i += TileType::THREADS) {
        int row = i / TileType::RIGHT_RUNS, column = first_column + i % TileType::RIGHT_RUNS * TileType::LENGTH;
        if (row >= rows || column >= p.width) {
            continue;
        }
        float values[TileType::LENGTH];
#pragma unroll
        for (int j = 0; j < TileType::LENGTH; j++) {
            values[j] = 0;
        }
#pragma unroll 4
        for (int split = 0; split < p.output_splits; split++) {
            const float *from = parts + split * all + (size_t)(first_row + row) * p.width + column;
            float own[TileType::LENGTH];
            load_floats<true>(own, from, p.width - column, p.vectors != 0);
#pragma unroll
            for (int j = 0; j < TileType::LENGTH; j++) {
                values[j] += own[j];
            }
        }
        store_output<T>(p, first_row + row, is_routed(p, first_row + row), column, values);
    }
}

// Where the sums of a tile belong.
template <class TileType>
struct OutputRows {
    typedef typename TileType::Element T;
    static constexpr int LENGTH = TileType::LENGTH;
    const Parameters &p;
    const int *pairs;  // of the rows, or null: then rows are tokens
    int split, first_row, rows, first_column;
    int row;
    bool routed;

    DEVICE bool begin(int which) {
        row = which;
        routed = row < rows && !pairs && is_routed(p, first_row + row);
        return row < rows;
    }

    // The run of the row from `column` of the tile on.
    DEVICE void store(int column, float (&values)[LENGTH]) const {
        const int first = first_column + column, valid = p.width - first;
        if (valid <= 0) {
            return;
        }
        if (pairs) {
            store_run((T *)p.partial_rows + (size_t)pairs[row] * p.width + first, values, valid, p.vectors != 0);
        } else if (p.output_splits == 1) {
            store_output<T>(p, first_row + row, routed, first, values);
        } else {
            const size_t at = (size_t)split * p.batch * p.tokens + first_row + row;
            store_floats((float *)p.partial_rows + at * p.width + first, values, valid, p.vectors != 0);
        }
    }

    DEVICE void end(int column, float (&low)[LENGTH], float (&high)[LENGTH]) const {
        store(column, low);
        store(column + TileType::COLUMNS / 2, high);
    }
};

// Multiplies, and writes what comes of it.
template <class TileType>
DEVICE void output_tile(unsigned char *shared, int chunks, AttendedSource<TileType> &source, OutputRows<TileType> &rows) {
    const bool vectors = source.p.vectors != 0;
    if constexpr (TileType::HANDS_OVER) {
        typename TileType::Sum sum;
        TileType::add_up(sum, shared, chunks, source, vectors);
        if (vectors) {
            TileType::hand_over(sum, rows);
            return;
        }
        TileType::spread(sum, shared);
    } else {
        TileType::compute(shared, chunks, source, vectors);
    }
    for (int i = thread_index(); i < TileType::ROWS * TileType::RIGHT_RUNS; i += TileType::THREADS) {
        const int column = i % TileType::RIGHT_RUNS * TileType::LENGTH;
        if (rows.begin(i / TileType::RIGHT_RUNS)) {
            float values[TileType::LENGTH];
            sum_run<TileType, TileType::LENGTH>(shared, rows.row, column, values);
            rows.store(column, values);
        }
    }
}

template <class TileType>
DEVICE void output(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    release_next_grid();
    const bool listed = p.row_mode == LISTED_ROWS, all = !listed && slots_are_experts(p);
    // Where nobody looks for experts, weights are read in front of the wait.
    const bool waits = TileType::READS_AHEAD && all && p.vectors != 0;
    if (!waits) {
        wait_for_previous_grid();
    }
    unsigned short *visited = (unsigned short *)(shared + TileType::SHARED_BYTES + 16);
    unsigned char *flags = (unsigned char *)(visited + MAX_EXPERTS);
    const int tile = divided(block_index(), p.output_splits), split = block_index() - tile * p.output_splits;
    int row_tile, column_tile;
    tile_of_block(tile, p.row_tiles, p.output_tiles, row_tile, column_tile);
    const int first_column = column_tile * TileType::COLUMNS;
    int first_row = row_tile * TileType::ROWS, rows = p.batch * p.tokens, count = 1;
    const int *pairs = nullptr;
    if (listed) {
        int expert = listed_expert<TileType>(p, row_tile, first_row, rows);
        if (expert == p.experts) {
            return;
        }
        pairs = p.expert_pairs + (size_t)expert * p.batch * p.tokens + first_row;
        if (thread_index() == 0) {
            visited[0] = (unsigned short)expert;
        }
        sync_block();
    }
    rows = smaller(TileType::ROWS, rows - first_row);
    if (!all && !listed) {
        count = list_visited<TileType>(p, first_row, rows, visited, flags);
    }
    const int inner = all ? p.experts * p.columns : p.columns;
    const int per_expert = ceil_div(inner, TileType::DEPTH);
    const int chunks = count * per_expert;
    const int begin = divided(chunks * split, p.output_splits), end = divided(chunks * (split + 1), p.output_splits);
    AttendedSource<TileType> source = {p, all ? nullptr : visited, inner, begin, per_expert, first_row, rows, first_column, pairs, waits};
    OutputRows<TileType> targets = {p, pairs, split, first_row, rows, first_column, 0, false};
    output_tile<TileType>(shared, end - begin, source, targets);
    if (p.output_splits > 1) {
        add_parts<TileType>(p, shared, tile, first_row, rows, first_column);
    }
}
