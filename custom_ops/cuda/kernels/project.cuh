// The launch that reads the hidden states: routing, keys and values of the new tokens, queries or the hidden rows of a
// feed-forward layer, and the copy of the past; each block does one of them.
#pragma once

#include "product.cuh"
#include "route.cuh"

enum RowMode {
    ALL_ROWS = 0,     // every expert takes every token; rows [N, E, w]
    LISTED_ROWS = 1,  // an expert takes the pairs of its list; rows [N, k, w]
    CHOSEN_ROWS = 2,  // an expert takes every token and keeps those that chose it; rows [N, k, w]
    ROUTED_ROWS = 3,  // as ALL_ROWS, for the experts that some token chose; every block routes the tokens itself
};

enum Activation { NO_ACTIVATION = -1, RELU = 0, GELU = 1, SILU = 2 };

DEVICE float activate(int activation, float x) {
    if (activation == RELU) {
        return x < 0 ? 0 : x;
    }
    if (activation == GELU) {
        return x * (0.5f * complementary_error(-x * 0.70710678118654752f));
    }
    return activation == SILU ? x / (1 + exponential(-x)) : x;
}

// The rows of hidden states that a tile takes.
template <class TileType, class TokenOf>
struct HiddenSource {
    typedef typename TileType::Element T;
    const Parameters &p;
    const Columns<T> &columns;
    const TokenOf &token_of;  // negative where there is no row

    DEVICE void stage(T *left, T *right, int chunk) const {
        const int first = chunk * TileType::DEPTH;
        stage_runs<TileType::ROWS * TileType::LEFT_RUNS, TileType::THREADS, T>(
            p.vectors != 0, [&](int i, T *&target, const T *&from) {
                int row = i / TileType::LEFT_RUNS, k = i % TileType::LEFT_RUNS * TileType::LENGTH;
                int token = token_of(row);
                int valid = token < 0 ? 0 : p.width - (first + k);
                target = left + row * TileType::LEFT_STRIDE + k;
                from = (const T *)p.hidden_states + (valid > 0 ? (size_t)token * p.width + first + k : 0);
                return valid;
            });
        columns.template stage<TileType>(right, first, p.vectors != 0);
    }
};

// Turns a pair of runs, `units` first columns and their partners, by the angles of a position.
template <class T>
DEVICE void rotate(const Parameters &p, int token, int first_unit, int valid, float (&a)[Run<T>::LENGTH],
                   float (&b)[Run<T>::LENGTH]) {
    const long long position = p.position_ids[token];
    const bool exists = position >= 0 && position < p.rotary_positions;
    if (!exists && p.status) {
        atomic_or(p.status, FAULT_POSITION);
    }
    const size_t start = (size_t)(exists ? position : 0) * (p.head / 2) + first_unit;
#pragma unroll
    for (int i = 0; i < Run<T>::LENGTH; i++) {
        if (i < valid) {
            float cosine = exists ? p.cos_cache[start + i] : not_a_number();
            float sine = exists ? p.sin_cache[start + i] : not_a_number();
            float first = a[i], second = b[i];
            a[i] = first * cosine - second * sine;
            b[i] = second * cosine + first * sine;
        }
    }
}

// Columns of a block of `paired` or plain columns that tile `tile` takes; `blocks` heads where they are paired.
template <class TileType>
DEVICE Columns<typename TileType::Element> columns_of(const typename TileType::Element *weight, size_t stride, int inner,
                                                      int tile, int block_columns, int pair_offset, int &block) {
    int units = pair_offset ? pair_offset : block_columns;
    int tile_units = pair_offset ? TileType::COLUMNS / 2 : TileType::COLUMNS;
    int tiles = ceil_div(units, tile_units);
    block = tile / tiles;
    return {weight + (size_t)block * block_columns, stride, inner, tile % tiles * tile_units, units, pair_offset};
}

// The sums of every row and run of a finished tile, rotated where columns are paired by rotation:
// `keep(row, first column within the block, valid, values)`.
template <class TileType, class TokenOf, class Keep>
DEVICE void finish_rows(const Parameters &p, const unsigned char *shared, const Columns<typename TileType::Element> &columns,
                        bool rotary, TokenOf token_of, Keep keep) {
    typedef typename TileType::Element T;
    const int LENGTH = TileType::LENGTH, HALF = TileType::COLUMNS / 2;
    const bool paired = columns.pair_offset != 0;
    const int runs = (paired ? HALF : TileType::COLUMNS) / LENGTH;
    for (int i = thread_index(); i < TileType::ROWS * runs; i += TileType::THREADS) {
        int row = i / runs, column = i % runs * LENGTH;
        int token = token_of(row), unit = columns.first + column, valid = columns.units - unit;
        if (token < 0 || valid <= 0) {
            continue;
        }
        float values[TileType::LENGTH], partners[TileType::LENGTH];
        sum_run<TileType>(shared, row, column, values);
        if (!paired) {
            keep(row, token, unit, valid, values);
            continue;
        }
        sum_run<TileType>(shared, row, column + HALF, partners);
        if (rotary) {
            rotate<T>(p, token, unit, valid, values, partners);
            keep(row, token, unit, valid, values);
            keep(row, token, unit + columns.pair_offset, valid, partners);
        } else {
#pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                values[j] = activate(p.activation, values[j]) * partners[j];
            }
            keep(row, token, unit, valid, values);
        }
    }
}

// Keys (`part` 0) or values (`part` 1) of a tile of tokens, appended behind the past.
template <class TileType>
DEVICE void append_tile(const Parameters &p, unsigned char *shared, int tile, int part) {
    typedef typename TileType::Element T;
    const int tokens = p.batch * p.tokens;
    const int first_token = tile % p.kv_row_tiles * TileType::ROWS;
    const bool rotary = p.rotary_positions > 0 && part == 0;
    int block = 0;
    const T *weight = (const T *)p.kv_weight + (size_t)part * p.columns;
    Columns<T> columns = columns_of<TileType>(weight, 2 * (size_t)p.columns, p.width, tile / p.kv_row_tiles,
                                              rotary ? p.head : p.columns, rotary ? p.head / 2 : 0, block);
    auto token_of = [&](int row) { return first_token + row < tokens ? first_token + row : -1; };
    HiddenSource<TileType, decltype(token_of)> source = {p, columns, token_of};
    compute_tile<TileType>(shared, ceil_div(p.width, TileType::DEPTH), source);
    T *cache = (T *)(part == 0 ? p.key : p.value);
    const int first_column = rotary ? block * p.head : 0;
    auto keep = [&](int, int token, int unit, int valid, const float(&values)[TileType::LENGTH]) {
        int column = first_column + unit;
        const int cache_rows = part == 0 ? p.key_rows : p.value_rows;
        size_t row = (size_t)(token / p.tokens) * p.kv_heads;
        size_t place = cache_rows - p.tokens + token % p.tokens;
        if (p.vectors) {
            size_t at = ((row + column / p.head) * cache_rows + place) * p.head + column % p.head;
            store_run(cache + at, values, valid, true);
            return;
        }
#pragma unroll
        for (int i = 0; i < TileType::LENGTH; i++) {
            if (i < valid) {
                size_t at = ((row + (column + i) / p.head) * cache_rows + place) * p.head + (column + i) % p.head;
                from_float(cache[at], values[i]);
            }
        }
    };
    finish_rows<TileType>(p, shared, columns, rotary, token_of, keep);
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

// Whether some row of a tile of tokens chose an expert.
DEVICE bool is_chosen(const Parameters &p, const RouteMemory &memory, int tokens, int expert, int first_token, int rows) {
    bool chosen = false;
    const int all = p.batch * p.tokens;
    if (p.row_mode == ROUTED_ROWS) {
        for (int i = lane_index(); i < tokens * p.top_k; i += 32) {
            chosen = chosen || memory.experts[i] == expert;
        }
    } else {
        for (int i = lane_index(); i < rows; i += 32) {
            int token = first_token + i;
            chosen = chosen || (token < all && p.slots[(size_t)expert * all + token] != NO_SLOT);
        }
    }
    return ballot(chosen) != 0;
}

// Rows of one expert: queries, or hidden rows of a feed-forward layer times their gates.
template <class TileType>
DEVICE void expert_tile(const Parameters &p, unsigned char *shared, int tile) {
    typedef typename TileType::Element T;
    const int tokens = p.batch * p.tokens;
    const bool listed = p.row_mode == LISTED_ROWS;
    int column_tile, expert, first_row, rows = tokens;
    if (listed) {
        expert = listed_expert<TileType>(p, tile % p.row_tiles, first_row, rows);
        column_tile = tile / p.row_tiles;
        if (expert == p.experts) {
            return;
        }
    } else {
        first_row = tile % p.row_tiles * TileType::ROWS;
        column_tile = tile / p.row_tiles % p.input_tiles;
        expert = tile / p.row_tiles / p.input_tiles;
    }
    if (p.row_mode == CHOSEN_ROWS || p.row_mode == ROUTED_ROWS) {
        RouteMemory memory(p, shared, TileType::THREADS / 32);
        int routed = 0;
        if (p.row_mode == ROUTED_ROWS) {
            routed = route_tokens<T, TileType::THREADS>(p, memory, 0, false);
        }
        if (!is_chosen(p, memory, routed, expert, first_row, TileType::ROWS)) {
            return;
        }
        sync_block();
    }
    const bool rotary = p.rotary_positions > 0, attention = p.activation == NO_ACTIVATION;
    int block = 0;
    const T *weight = (const T *)p.input_weight + (size_t)expert * p.width * p.input_columns;
    const int pair_offset = rotary ? p.head / 2 : p.gated ? p.columns : 0;
    Columns<T> columns = columns_of<TileType>(weight, p.input_columns, p.width, column_tile,
                                              rotary ? p.head : p.input_columns, pair_offset, block);
    const int *pairs = p.expert_pairs + (size_t)expert * tokens + first_row;
    const unsigned char *slots = p.slots + (size_t)expert * tokens;
    auto token_of = [&](int row) {
        if (first_row + row >= rows) {
            return -1;
        }
        if (listed) {
            return pairs[row] / p.top_k;
        }
        int token = first_row + row;
        return p.row_mode == CHOSEN_ROWS && slots[token] == NO_SLOT ? -1 : token;
    };
    HiddenSource<TileType, decltype(token_of)> source = {p, columns, token_of};
    compute_tile<TileType>(shared, ceil_div(p.width, TileType::DEPTH), source);
    auto keep = [&](int row, int token, int unit, int valid, float(&values)[TileType::LENGTH]) {
        size_t place;
        if (listed) {
            place = pairs[row];
        } else if (p.row_mode == CHOSEN_ROWS) {
            place = (size_t)token * p.top_k + slots[token];
        } else {
            place = (size_t)token * p.experts + expert;
        }
        if (!attention) {
            float factor = p.pair_gates[place] * p.gate_scale;
#pragma unroll
            for (int i = 0; i < TileType::LENGTH; i++) {
                values[i] = (p.gated ? values[i] : activate(p.activation, values[i])) * factor;
            }
        }
        T *to = (T *)p.rows + place * p.columns + block * p.head + unit;
        store_run(to, values, valid, p.vectors != 0);
    };
    finish_rows<TileType>(p, shared, columns, rotary, token_of, keep);
}

// Copies the past in front of the new rows.
template <class T, int THREADS>
DEVICE void copy_past(const Parameters &p, const void *past, void *cache, int block) {
    const size_t past_row = (size_t)p.past * p.head, row = (size_t)p.keys * p.head;
    const int length = p.vectors ? Run<T>::LENGTH : 1;
    const size_t runs = past_row / length, all = (size_t)p.batch * p.kv_heads * runs;
    for (size_t i = (size_t)block * THREADS + thread_index(); i < all; i += (size_t)p.copy_blocks * THREADS) {
        const T *from = (const T *)past + i / runs * past_row + i % runs * length;
        T *to = (T *)cache + i / runs * row + i % runs * length;
        if (p.vectors) {
            *(Vector16 *)to = *(const Vector16 *)from;
        } else {
            *to = *from;
        }
    }
}

template <class TileType>
DEVICE void project(const Parameters &p) {
    typedef typename TileType::Element T;
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    int block = block_index();
    if (block < p.route_blocks) {
        route_block<T, TileType::THREADS>(p, shared, block);
        return;
    }
    block -= p.route_blocks;
    int count = p.row_tiles * p.input_tiles * (p.row_mode == LISTED_ROWS ? 1 : p.experts);
    if (block < count) {
        expert_tile<TileType>(p, shared, block);
        return;
    }
    block -= count;
    count = p.kv_row_tiles * p.key_tiles;
    if (block < count) {
        append_tile<TileType>(p, shared, block, 0);
        return;
    }
    block -= count;
    count = p.kv_row_tiles * p.value_tiles;
    if (block < count) {
        append_tile<TileType>(p, shared, block, 1);
        return;
    }
    if (p.key_rows == p.keys) {
        copy_past<T, TileType::THREADS>(p, p.past_key, p.key, block - count);
    }
    if (p.value_rows == p.keys) {
        copy_past<T, TileType::THREADS>(p, p.past_value, p.value, block - count);
    }
}
