// Logits of many tokens on tensor cores, as exact as in f32: a weight is the sum of three bfloat16 numbers, an element of
// binary16 that of two, and their products are exact.
#pragma once

#include "memory.cuh"

// Experts that one pass takes, and how many the passes may come to.
const int PASS_EXPERTS = 32, MOST_MULTIPLIED_EXPERTS = 64;

// Takes from two numbers the bfloat16 ones that are nearest to them.
DEVICE unsigned take_nearest(float &low, float &high) {
    const unsigned both = pack(bfloat16(), low, high);
    low -= to_float(bfloat16{(unsigned short)both});
    high -= to_float(bfloat16{(unsigned short)(both >> 16)});
    return both;
}

// How many bfloat16 numbers an element is.
template <class T>
struct Limbs;

template <>
struct Limbs<bfloat16> {
    static constexpr int COUNT = 1;
    DEVICE static void split(unsigned both, unsigned (&to)[1]) { to[0] = both; }
};

template <>
struct Limbs<binary16> {
    static constexpr int COUNT = 2;
    DEVICE static void split(unsigned both, unsigned (&to)[2]) {
        float low = to_float(binary16{(unsigned short)both}), high = to_float(binary16{(unsigned short)(both >> 16)});
        to[0] = take_nearest(low, high);
        to[1] = take_nearest(low, high);
    }
};

// Products of 16 tokens and 8 experts over 16 inner indices: `x` has the left factor of a fragment, `weight` the three
// parts of the right one. Small products come first; those below f32 are left out.
template <class T>
DEVICE void add_split_product(float (&sum)[4], const unsigned (&x)[4], const unsigned (&low)[3], const unsigned (&high)[3]) {
    unsigned limbs[4][Limbs<T>::COUNT];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Limbs<T>::split(x[i], limbs[i]);
    }
#pragma unroll
    for (int limb = Limbs<T>::COUNT - 1; limb >= 0; limb--) {
        const unsigned left[4] = {limbs[0][limb], limbs[1][limb], limbs[2][limb], limbs[3][limb]};
#pragma unroll
        for (int part = 2 - limb; part >= 0; part--) {
            multiply_add(bfloat16(), sum, left, low[part], high[part]);
        }
    }
}

// Logits of `4 * WARPS` tokens from `first_token` on and of up to 32 experts from `first_expert` on, into `parts`
// [WARPS, tokens, 32]: each warp has its part of the width. Inner indices of a fragment are permuted, so that lanes read
// 16 bytes of a row; width is a multiple of 8.
template <class T, int WARPS>
DEVICE void multiply_logits(const Parameters &p, int first_token, int first_expert, float *parts) {
    constexpr int TOKENS = 4 * WARPS, TILES = TOKENS / 16, COLUMN_TILES = PASS_EXPERTS / 8, DEPTH = 32;
    const int warp = thread_index() / 32, quarter = lane_index() % 4, group = lane_index() / 4;
    const int last_token = p.batch * p.tokens - 1;
    float sum[TILES][COLUMN_TILES][4] = {};
#pragma unroll 1
    for (int first = warp * DEPTH; first < p.width; first += WARPS * DEPTH) {
        const int inner = first + quarter * 8;
        const bool exists = inner < p.width;
        Vector16 x[TILES][2] = {};
#pragma unroll
        for (int i = 0; exists && i < 2 * TILES; i++) {
            const size_t token = smaller(first_token + i * 8 + group, last_token);
            x[i / 2][i % 2] = *(const Vector16 *)((const T *)p.hidden_states + token * p.width + inner);
        }
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; column++) {
            const int expert = first_expert + column * 8 + group;
            if (first_expert + column * 8 >= p.experts) {
                break;
            }
#pragma unroll
            for (int step = 0; step < 4; step += 2) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const size_t row = inner + step * 2 + i;
                    weight[i] = exists && expert < p.experts ? p.router_weight[row * p.experts + expert] : 0;
                }
                unsigned low[3], high[3];
#pragma unroll
                for (int part = 0; part < 3; part++) {
                    low[part] = take_nearest(weight[0], weight[1]);
                    high[part] = take_nearest(weight[2], weight[3]);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const Vector16 &upper = x[tile][0], &lower = x[tile][1];
                    const unsigned left[4] = {upper.word[step], lower.word[step], upper.word[step + 1], lower.word[step + 1]};
                    add_split_product<T>(sum[tile][column], left, low, high);
                }
            }
        }
    }
    float *to = parts + (warp * TOKENS + group) * PASS_EXPERTS + quarter * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES * 4; i++) {
            to[(tile * 16 + i % 4 / 2 * 8) * PASS_EXPERTS + i / 4 * 8 + i % 2] = sum[tile][i / 4][i % 4];
        }
    }
}

// Logits of `4 * WARPS` tokens from `first_token` on, into `scores` [tokens, E]; `parts` [WARPS, tokens, 32].
template <class T, int WARPS>
DEVICE void route_by_products(const Parameters &p, int first_token, float *scores, float *parts) {
    constexpr int TOKENS = 4 * WARPS;
#pragma unroll 1
    for (int first = 0; first < p.experts; first += PASS_EXPERTS) {
        multiply_logits<T, WARPS>(p, first_token, first, parts);
        sync_block();
        for (int i = thread_index(); i < TOKENS * PASS_EXPERTS; i += 32 * WARPS) {
            const int expert = first + i % PASS_EXPERTS;
            float sum = 0;
#pragma unroll
            for (int part = 0; part < WARPS; part++) {
                sum += parts[part * TOKENS * PASS_EXPERTS + i];
            }
            if (expert < p.experts) {
                scores[i / PASS_EXPERTS * p.experts + expert] = sum;
            }
        }
        sync_block();
    }
}

// Bytes of shared memory that the largest such router takes: scores, gates and experts, then parts.
template <int WARPS>
struct ProductRouteMemory {
    static constexpr int TOKENS = 4 * WARPS;
    static constexpr int BYTES = 4 * TOKENS * (3 * MOST_MULTIPLIED_EXPERTS + WARPS * PASS_EXPERTS);
};
