// The router of many tokens as a launch of its own: blocks take so many tokens that about one of them is on each
// multiprocessor, and split every weight once.
//
// Of the 8 warps of a block, `route_splits` share 32 tokens: each has its part of the width, chunk by chunk, and their
// sums are added in the order of the parts.
#pragma once

#include "route_choice.cuh"

// Inner indices that a warp takes at a time.
const int ROUTE_DEPTH = 64;

// Chunks of hidden states that a lane has on their way: the more of them, the fewer sums, and parts of elements, are in
// registers beside them.
template <class T>
DEVICE constexpr int route_stages(int columns) {
    return columns == 1 ? 4 : columns == 4 && Limbs<T>::COUNT > 1 ? 1 : 2;
}

// Bytes of the weights that shared memory holds at a time.
const int ROUTE_SLICE_BYTES = 96 << 10;

// 32 tokens by 64 inner indices: of each half of these, a lane has 8 of every eighth token.
struct RouteChunk {
    Vector16 x[2][ROUTE_ROWS / 8];
};

// The hidden states of a warp.
template <class T>
struct RouteSource {
    const T *row[ROUTE_ROWS / 8];
    int width, step, chunk;

    // From its part of the width on.
    DEVICE RouteSource(const Parameters &p, int first_token) {
        const int first = first_token + thread_index() / 32 / p.route_splits * ROUTE_ROWS + lane_index() / 4;
#pragma unroll
        for (int i = 0; i < ROUTE_ROWS / 8; i++) {
            const size_t token = smaller(first + i * 8, p.batch * p.tokens - 1);
            row[i] = (const T *)p.hidden_states + token * p.width + lane_index() % 4 * 8;
        }
        width = p.width;
        step = p.route_splits;
        chunk = thread_index() / 32 % step;
    }

    // The next chunk of this warp, zeros behind the width.
    DEVICE void load(RouteChunk &to) {
        const int first = chunk * ROUTE_DEPTH;
        chunk += step;
        if (first + ROUTE_DEPTH <= width) {
#pragma unroll
            for (int i = 0; i < 2 * ROUTE_ROWS / 8; i++) {
                to.x[i % 2][i / 2] = *(const Vector16 *)(row[i / 2] + first + i % 2 * 32);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 2 * ROUTE_ROWS / 8; i++) {
            const int inner = first + i % 2 * 32;
            const Vector16 zero = {{0, 0, 0, 0}};
            const bool exists = inner + lane_index() % 4 * 8 < width;
            to.x[i % 2][i / 2] = exists ? *(const Vector16 *)(row[i / 2] + inner) : zero;
        }
    }
};

// The weights of `COLUMNS` times 8 experts in shared memory, as fragments of the left factor: each part of 16 experts.
// Those of 8 experts are the first two parts together, and the third one, of which lanes make a fragment.
template <int COLUMNS>
struct RouteWeights {
    static constexpr int EXPERTS = COLUMNS == 1 ? 1 : 2;        // of a lane
    static constexpr int TILES = COLUMNS / EXPERTS;             // of rows
    static constexpr int VECTORS = 3 * EXPERTS;                 // of a lane, for 32 inner indices of a tile
    static constexpr int AT_ONCE = COLUMNS == 1 ? 4 : COLUMNS;  // of these that a lane loads before it splits them
    static_assert(COLUMNS == 1 || COLUMNS % 2 == 0, "one tile of 8 experts, or tiles of 16");

    // 8 inner indices of each of the experts of a lane.
    DEVICE static void load(const Parameters &p, int expert, int inner, bool exists, float (&weight)[EXPERTS][8]) {
#pragma unroll
        for (int i = 0; i < EXPERTS * 8; i++) {
            const bool here = exists && inner < p.width && expert + i / 8 * 8 < p.experts;
            const float *from = p.router_weight + (here ? (size_t)inner * p.experts + expert + i / 8 * 8 : 0);
            weight[i / 8][i % 8] = here ? from[i % 8 * p.experts] : 0;
        }
    }

    DEVICE static void store(float (&weight)[EXPERTS][8], Vector16 *to) {
        unsigned words[EXPERTS][3][4];
#pragma unroll
        for (int i = 0; i < EXPERTS * 12; i++) {
            const int pair = i % 4 * 2;
            words[i / 12][i / 4 % 3][i % 4] = take_nearest(weight[i / 12][pair], weight[i / 12][pair + 1]);
        }
#pragma unroll
        for (int i = 0; i < 2 * (VECTORS / 2); i++) {
            const int step = i % 2 * 2;
            const unsigned(&upper)[4] = words[0][EXPERTS == 1 ? 0 : i / 2];
            const unsigned(&lower)[4] = words[EXPERTS - 1][EXPERTS == 1 ? 1 : i / 2];
            to[i * 32] = {{upper[step], lower[step], upper[step + 1], lower[step + 1]}};
        }
        if constexpr (EXPERTS == 1) {
            to[2 * 32] = {{words[0][2][0], words[0][2][1], words[0][2][2], words[0][2][3]}};
        }
    }

    // Splits the weights of `count` times 32 inner indices. A warp takes those of a tile at a time, and blocks begin at
    // different ones, so that they do not all ask the same memory.
    DEVICE static void split(const Parameters &p, int first_expert, int first_inner, int count, Vector16 *parts) {
        const int units = count * TILES, lane = lane_index(), turn = block_index() % 16 * units / 16;
#pragma unroll 1
        for (int first = thread_index() / 32; first < units; first += ROUTE_WARPS * AT_ONCE) {
            float weight[AT_ONCE][EXPERTS][8];
            int unit[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int plain = first + i * ROUTE_WARPS + turn;
                unit[i] = plain < units ? plain : plain - units;
                const int inner = first_inner + unit[i] / TILES * 32 + lane % 4 * 8;
                const int expert = first_expert + unit[i] % TILES * 16 + lane / 4;
                load(p, expert, inner, first + i * ROUTE_WARPS < units, weight[i]);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (first + i * ROUTE_WARPS < units) {
                    store(weight[i], parts + unit[i] * VECTORS * 32 + lane);
                }
            }
        }
    }
};

// Sums of 32 tokens and `COLUMNS` times 8 experts: a lane has two tokens of each eight, and the experts of its rows.
template <int COLUMNS>
struct RouteSums {
    typedef RouteWeights<COLUMNS> Weights;
    static constexpr int TOKEN_TILES = ROUTE_ROWS / 8, VALUES = 2 * Weights::EXPERTS;
    // Lanes write to different banks.
    static constexpr int ROW = COLUMNS * 8 + 4;
    float value[TOKEN_TILES][Weights::TILES][VALUES];

    // Adds to `sum` and, of 8 experts, `third` the products of a part of the weights, the smallest one first.
    template <class T>
    DEVICE static void multiply_tile(const Vector16 &x, const Vector16 (&weights)[Weights::VECTORS], float (&sum)[4],
                                     float (&third)[4]) {
        constexpr int LIMBS = Limbs<T>::COUNT;
#pragma unroll
        for (int step = 0; step < 2; step++) {
            unsigned right[2][LIMBS];
            Limbs<T>::split(x.word[2 * step], right[0]);
            Limbs<T>::split(x.word[2 * step + 1], right[1]);
#pragma unroll
            for (int limb = LIMBS - 1; limb >= 0; limb--) {
                if constexpr (COLUMNS == 1) {
                    const unsigned left[4] = {weights[2].word[2 * step], 0, weights[2].word[2 * step + 1], 0};
                    if (limb == 0) {
                        multiply_add(bfloat16(), third, left, right[0][limb], right[1][limb]);
                    }
                    multiply_add(bfloat16(), sum, weights[step].word, right[0][limb], right[1][limb]);
                } else {
#pragma unroll
                    for (int part = 2 - limb; part >= 0; part--) {
                        const unsigned(&left)[4] = weights[part * 2 + step].word;
                        multiply_add(bfloat16(), sum, left, right[0][limb], right[1][limb]);
                    }
                }
            }
        }
    }

    // Adds the products of a chunk with the weights of as many inner indices, from `parts` on. A chunk has sums of its
    // own: those of tensor cores are cut off, not rounded.
    template <class T>
    DEVICE void multiply(const RouteChunk &chunk, const Vector16 *parts) {
        float own[TOKEN_TILES][Weights::TILES][4] = {}, third[TOKEN_TILES][4] = {};
#pragma unroll
        for (int i = 0; i < 2 * Weights::TILES; i++) {
            Vector16 weights[Weights::VECTORS];
#pragma unroll
            for (int j = 0; j < Weights::VECTORS; j++) {
                weights[j] = parts[(i * Weights::VECTORS + j) * 32 + lane_index()];
            }
#pragma unroll
            for (int tile = 0; tile < TOKEN_TILES; tile++) {
                const Vector16 &x = chunk.x[i / Weights::TILES][tile];
                multiply_tile<T>(x, weights, own[tile][i % Weights::TILES], third[tile]);
            }
        }
#pragma unroll
        for (int i = 0; i < TOKEN_TILES * Weights::TILES * VALUES; i++) {
            const int tile = i / VALUES / Weights::TILES, rows = i / VALUES % Weights::TILES;
            const float(&all)[4] = own[tile][rows];
            if constexpr (COLUMNS == 1) {
                value[tile][rows][i % VALUES] += all[i % VALUES] + (all[i % VALUES + 2] + third[tile][i % VALUES]);
            } else {
                value[tile][rows][i % VALUES] += all[i % VALUES];
            }
        }
    }

    // Into rows of `ROW`, the tokens' from `to` on.
    DEVICE void store(float *to) const {
#pragma unroll
        for (int i = 0; i < TOKEN_TILES * Weights::TILES * VALUES; i++) {
            const int tile = i / VALUES / Weights::TILES, rows = i / VALUES % Weights::TILES;
            const int token = tile * 8 + lane_index() % 4 * 2 + i % 2;
            to[token * ROW + rows * 16 + i % VALUES / 2 * 8 + lane_index() / 4] = value[tile][rows][i % VALUES];
        }
    }
};

// Sums of 32 tokens over a warp's part of the width, for `COLUMNS` times 8 experts from `first_expert` on, into
// `memory.sums [route_splits, tokens, row]`; returns `row`.
template <class T, int COLUMNS>
DEVICE int multiply_many(const Parameters &p, const ManyRouteMemory &memory, int first_token, int first_expert) {
    constexpr int STAGES = route_stages<T>(COLUMNS), PARTS = 2 * COLUMNS * 3 * 32;
    constexpr int SLICE = ROUTE_SLICE_BYTES / (PARTS * (int)sizeof(Vector16));
    static_assert(SLICE % (4 * STAGES) == 0, "a slice is whole rounds of up to four warps");
    const int warp = thread_index() / 32, split = warp % p.route_splits, chunks = ceil_div(p.width, ROUTE_DEPTH);
    RouteSource<T> source(p, first_token);
    RouteChunk chunk[STAGES];
    RouteSums<COLUMNS> sums = {};
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        source.load(chunk[stage]);
    }
#pragma unroll 1
    for (int first = 0; first < chunks; first += SLICE) {
        const int count = smaller(SLICE, chunks - first);
        sync_block();
        RouteWeights<COLUMNS>::split(p, first_expert, first * ROUTE_DEPTH, 2 * count, memory.parts);
        sync_block();
#pragma unroll 1
        for (int own = split; own < count; own += STAGES * p.route_splits) {
#pragma unroll
            for (int stage = 0; stage < STAGES; stage++) {
                const int at = own + stage * p.route_splits;
                if (at < count) {
                    sums.template multiply<T>(chunk[stage], memory.parts + at * PARTS);
                }
                source.load(chunk[stage]);
            }
        }
    }
    sync_block();
    const int row = split * memory.tokens + warp / p.route_splits * ROUTE_ROWS;
    sums.store(memory.sums + row * RouteSums<COLUMNS>::ROW);
    return RouteSums<COLUMNS>::ROW;
}

// The same for all experts, where addresses allow no vectors.
template <class T>
DEVICE int add_up_many(const Parameters &p, const ManyRouteMemory &memory, int first_token) {
    const int warp = thread_index() / 32, split = warp % p.route_splits, row = warp / p.route_splits * ROUTE_ROWS;
    sync_block();
#pragma unroll 1
    for (int i = row; i < row + ROUTE_ROWS; i += GROUP_TOKENS) {
        partial_logits<T>(p, first_token + i, split, memory.sums + (split * memory.tokens + i) * p.experts);
    }
    return p.experts;
}

// Adds the parts of the sums, two or four, of rows of `row`, for up to `count` experts from `first_expert` on.
DEVICE void take_scores(const Parameters &p, const ManyRouteMemory &memory, int row, int first_expert, int count) {
    sync_block();
    const int end = smaller(count, p.experts - first_expert), apart = memory.tokens * row;
#pragma unroll 1
    for (int i = thread_index() % 8; i < end; i += 8) {
#pragma unroll 2
        for (int token = thread_index() / 8; token < memory.tokens; token += ROUTE_THREADS / 8) {
            const float *part = memory.sums + token * row + i;
            // From 0 on: no score is a zero that is negative.
            float score = 0 + part[0];
            score += part[apart];
            if (p.route_splits == 4) {
                score += part[2 * apart];
                score += part[3 * apart];
            }
            memory.scores[token * memory.stride + first_expert + i] = score;
        }
    }
}

// Scores of the tokens of the block.
template <class T>
DEVICE void score_many(const Parameters &p, const ManyRouteMemory &memory, int first_token) {
    if (!p.vectors) {
        take_scores(p, memory, add_up_many<T>(p, memory, first_token), 0, p.experts);
        return;
    }
    // In front of the hidden states, since everybody waits for them.
    if (thread_index() == 0) {
        ask_share(p.router_weight, (size_t)p.width * p.experts * sizeof(float));
    }
    int first = 0;
#pragma unroll 1
    for (; p.experts - first > 16; first += 32) {
        take_scores(p, memory, multiply_many<T, 4>(p, memory, first_token, first), first, 32);
    }
    if (p.experts - first > 8) {
        take_scores(p, memory, multiply_many<T, 2>(p, memory, first_token, first), first, 16);
    } else if (p.experts > first) {
        take_scores(p, memory, multiply_many<T, 1>(p, memory, first_token, first), first, 8);
    }
}

template <class T>
DEVICE void route_many(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    const ManyRouteMemory memory(p, shared);
    const int first_token = block_index() * memory.tokens;
    for (int i = thread_index(); block_index() == 0 && i < p.tickets_count; i += ROUTE_THREADS) {
        p.tickets[i] = 0;
    }
    for (int i = thread_index(); i < memory.tokens * memory.stride; i += ROUTE_THREADS) {
        memory.scores[i] = -infinity();
    }
    score_many<T>(p, memory, first_token);
    sync_block();
    choose_many(p, memory, first_token);
    sync_block();
    write_choice(p, memory, first_token, smaller(memory.tokens, p.batch * p.tokens - first_token));
}
