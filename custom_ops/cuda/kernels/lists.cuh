// Small launches of the grouped regimes: the list of each expert, and the sum over slots.
#pragma once

#include "route.cuh"

const int LIST_THREADS = 256;

// Tokens that a warp has on their way at a time, in groups of 32.
const int LIST_GROUPS = 16;

// Gives `take` the slots of the tokens from `first` to `end`, one a lane, by rising token.
template <class Take>
DEVICE void each_slot(const unsigned char *slots, int first, int end, Take take) {
    for (int token = first; token < end; token += 32 * LIST_GROUPS) {
        int slot[LIST_GROUPS];
#pragma unroll
        for (int i = 0; i < LIST_GROUPS; i++) {
            const int own = token + 32 * i + lane_index();
            slot[i] = own < end ? slots[own] : NO_SLOT;
        }
#pragma unroll
        for (int i = 0; i < LIST_GROUPS; i++) {
            take(token + 32 * i + lane_index(), slot[i]);
        }
    }
}

// One block an expert: its pairs, by rising token.
DEVICE void list_pairs(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    const int WARPS = LIST_THREADS / 32;
    int *warp_counts = (int *)shared;
    const int expert = block_index(), warp = thread_index() / 32, lane = lane_index();
    const int tokens = p.batch * p.tokens;
    const unsigned char *slots = p.slots + (size_t)expert * tokens;
    const int span = ceil_div(ceil_div(tokens, WARPS), 32) * 32;
    const int first = warp * span, end = smaller(tokens, first + span);
    int count = 0;
    each_slot(slots, first, end, [&](int, int slot) { count += count_bits(ballot(slot != NO_SLOT)); });
    if (lane == 0) {
        warp_counts[warp] = count;
    }
    sync_block();
    int place = 0, all = 0;
    for (int i = 0; i < WARPS; i++) {
        place += i < warp ? warp_counts[i] : 0;
        all += warp_counts[i];
    }
    if (thread_index() == 0) {
        p.expert_counts[expert] = all;
    }
    int *pairs = p.expert_pairs + (size_t)expert * tokens;
    each_slot(slots, first, end, [&](int token, int slot) {
        const unsigned chosen = ballot(slot != NO_SLOT);
        if (slot != NO_SLOT) {
            pairs[place + count_bits(chosen & ((1u << lane) - 1))] = token * p.top_k + slot;
        }
        place += count_bits(chosen);
    });
}

// output [N, C] = bias + the sum of the slots of `partial_rows [N, k, C]`, by rising expert.
template <class T>
DEVICE void sum_slots(const Parameters &p) {
    release_next_grid();
    wait_for_previous_grid();
    const int LENGTH = Run<T>::LENGTH;
    const int runs = ceil_div(p.width, LENGTH);
    const size_t i = (size_t)block_index() * LIST_THREADS + thread_index();
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
