// Small launches of the grouped regimes: the list of each expert, and the sum over slots.
#pragma once

#include "route.cuh"

// Groups of 32 tokens that a warp has on their way at a time.
const int LIST_GROUPS = 16;

// The pairs of one expert among the tokens from `first` to `end`, at most `32 * LIST_GROUPS` a warp: `place` is how many
// are listed in front of them, and becomes how many are behind them. A lane has a token of each group, so that a warp
// writes the pairs of a group side by side.
DEVICE void list_some(const Parameters &p, const unsigned char *slots, int *pairs, int first, int end, int *warp_counts,
                      int &place) {
    const int warp = thread_index() / 32, lane = lane_index();
    const int span = ceil_div(end - first, LIST_THREADS) * 32;
    const int own = first + warp * span + lane, own_end = smaller(end, first + (warp + 1) * span);
    int slot[LIST_GROUPS], count = 0;
#pragma unroll
    for (int i = 0; i < LIST_GROUPS; i++) {
        slot[i] = own + 32 * i < own_end ? slots[own + 32 * i] : NO_SLOT;
    }
#pragma unroll
    for (int i = 0; i < LIST_GROUPS; i++) {
        count += count_bits(ballot(slot[i] != NO_SLOT));
    }
    if (lane == 0) {
        warp_counts[warp] = count;
    }
    sync_block();
    // Lane `i` has the pairs of warp `i`, then those of the warps up to it.
    static_assert(LIST_THREADS == 32 * 32, "a lane for every warp");
    int behind = warp_counts[lane];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int others = shuffle_up(behind, distance);
        behind += lane >= distance ? others : 0;
    }
    int to = place + shuffle_from(behind, warp) - count;
    place += shuffle_from(behind, 31);
#pragma unroll
    for (int i = 0; i < LIST_GROUPS; i++) {
        const unsigned chosen = ballot(slot[i] != NO_SLOT);
        if (slot[i] != NO_SLOT) {
            pairs[to + count_bits(chosen & ((1u << lane) - 1))] = (own + 32 * i) * p.top_k + slot[i];
        }
        to += count_bits(chosen);
    }
}

// One block an expert: its pairs, by rising token.
DEVICE void list_pairs(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    const int STEP = LIST_THREADS * LIST_GROUPS;
    const int expert = block_index(), tokens = p.batch * p.tokens;
    const unsigned char *slots = p.slots + (size_t)expert * tokens;
    int *pairs = p.expert_pairs + (size_t)expert * tokens;
    int place = 0;
#pragma unroll 1
    for (int first = 0; first < tokens; first += STEP) {
        list_some(p, slots, pairs, first, smaller(tokens, first + STEP), (int *)shared, place);
        sync_block();
    }
    if (thread_index() == 0) {
        p.expert_counts[expert] = place;
    }
}

// output [N, C] = bias + the sum of the slots of `partial_rows [N, k, C]`, by rising expert.
template <class T>
DEVICE void sum_slots(const Parameters &p) {
    release_next_grid();
    wait_for_previous_grid();
    const int LENGTH = Run<T>::LENGTH;
    const int runs = ceil_div(p.width, LENGTH);
    const size_t i = (size_t)block_index() * SUM_THREADS + thread_index();
    const size_t token = i / runs;
    const int column = (int)(i % runs) * LENGTH;
    if (token >= (size_t)p.batch * p.tokens) {
        return;
    }
    struct alignas(16) Piece {
        T element[Run<T>::LENGTH];
    };
    const int valid = p.width - column;
    const T *bias = (const T *)p.output_bias;
    float sum[Run<T>::LENGTH];
    const bool routed = p.pair_experts[token * p.top_k] >= 0;
#pragma unroll
    for (int j = 0; j < LENGTH; j++) {
        sum[j] = routed && bias && j < valid ? to_float(bias[column + j]) : 0;
    }
    for (int slot = 0; routed && slot < p.top_k; slot++) {
        const T *from = (const T *)p.partial_rows + (token * p.top_k + slot) * p.width + column;
        if (p.vectors) {
            Piece piece = *(const Piece *)from;
#pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                sum[j] += to_float(piece.element[j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                sum[j] += j < valid ? to_float(from[j]) : 0;
            }
        }
    }
    store_run((T *)p.output + token * p.width + column, sum, valid, p.vectors != 0);
}
