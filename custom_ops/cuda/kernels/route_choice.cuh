// The choice of experts for many tokens of a block, from scores in shared memory: a lane has eight experts of a token.
#pragma once

#include "route.cuh"

const int ROUTE_THREADS = 256, ROUTE_WARPS = ROUTE_THREADS / 32;

// Tokens of a warp.
const int ROUTE_ROWS = 32;

// What shared memory holds beside scores, one after the other.
struct ManyRouteMemory {
    int tokens;       // of the block
    int stride;       // of a token's scores: whole blocks of 8 experts, and what keeps tokens in different banks
    float *scores;    // [tokens, stride]; what is not there is negative infinity
    Vector16 *parts;  // of weights: fragments of 32 inner indices, in the order of these, then of experts
    float *sums;      // [route_splits, tokens, columns]
    int *experts;     // [tokens, k], then as many gates, then the slots [E, tokens]

    DEVICE ManyRouteMemory(const Parameters &p, unsigned char *shared) {
        tokens = ROUTE_WARPS / p.route_splits * ROUTE_ROWS;
        stride = expert_blocks(p) * 8 + 4;
        scores = (float *)shared;
        parts = (Vector16 *)(scores + tokens * stride);
        sums = (float *)parts;
        experts = (int *)parts;
    }

    // Lanes that choose for one token, each for 8 experts: a power of 2.
    DEVICE static int expert_blocks(const Parameters &p) {
        return p.experts <= 8 ? 1 : p.experts <= 16 ? 2 : p.experts <= 32 ? 4 : 8;
    }

    DEVICE float *gates(const Parameters &p) const { return (float *)experts + tokens * p.top_k; }
    DEVICE unsigned char *slots(const Parameters &p) const { return (unsigned char *)(experts + 2 * tokens * p.top_k); }
};

// The largest number below a finite one that is no negative zero.
DEVICE float next_below(float x) {
    const int bits = to_bits(x);
    return from_bits(bits > 0 ? bits - 1 : bits == 0 ? (int)0x80000001 : bits + 1);
}

// Eight scores of a token; lanes side by side have those of all its experts.
struct EightScores {
    float score[8];

    DEVICE void load(const float *from) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const Floats4 four = *(const Floats4 *)(from + i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                score[i + j] = four.element[j];
            }
        }
    }

    DEVICE void store(float *to) const {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            *(Floats4 *)(to + i) = {{score[i], score[i + 1], score[i + 2], score[i + 3]}};
        }
    }

    // How many scores of the token are in front of each of these: larger ones, and equal ones of a lower index. All of
    // them begin at `from`, and these are block `own` of `blocks`. As floats, which take two instructions to count.
    DEVICE void rank(const float *from, int own, int blocks, float (&ranks)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ranks[i] = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                ranks[i] += (j < i ? score[j] >= score[i] : score[j] > score[i]) ? 1.0f : 0.0f;
            }
        }
#pragma unroll 1
        for (int turn = 1; turn < blocks; turn++) {
            // Lanes begin at different blocks, which are in different banks.
            const int other = (own + turn) & (blocks - 1);
            EightScores theirs;
            theirs.load(from + other * 8);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                // Equal ones count where they come first.
                const float bound = other < own ? next_below(score[i]) : score[i];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    ranks[i] += theirs.score[j] > bound ? 1.0f : 0.0f;
                }
            }
        }
    }

    // Whether all of the first `count` are finite; makes powers of them, over the largest of the token.
    DEVICE bool raise(int count, int blocks, float (&powers)[8]) const {
        bool finite = true;
        float largest = -infinity();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            powers[i] = score[i];
            finite = finite && (i >= count || is_finite(powers[i]));
            largest = maximum(largest, powers[i]);
        }
        int strange = !finite;
#pragma unroll 1
        for (int mask = 1; mask < blocks; mask *= 2) {
            largest = maximum(largest, shuffle_xor(largest, mask));
            strange |= shuffle_xor(strange, mask);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            powers[i] = exponential(powers[i] - largest);
        }
        return strange == 0;
    }
};

// What a lane chooses among eight experts of a token.
struct EightChoices {
    bool exists, routed;
    int chosen;      // a bit for each
    int below;       // chosen experts in front of the eight
    float ranks[8];  // among all experts of the token
    float gates[8];

    // As `choose`; `own` is the token in the block, and lanes that have the scores of one token are neighbours.
    DEVICE EightChoices(const Parameters &p, const ManyRouteMemory &memory, int first_token, int own) {
        const int blocks = memory.expert_blocks(p), block = lane_index() & (blocks - 1), token = first_token + own;
        const int here = p.experts - block * 8;
        const float *from = memory.scores + own * memory.stride;
        exists = token < p.batch * p.tokens;
        routed = exists && routing_mask(p, token) != 0;
        EightScores scores;
        scores.load(from + block * 8);
        const bool finite = scores.raise(here, blocks, gates);
        if (p.gate_mode != TOPK_SOFTMAX) {
            // Those of the softmax, of which more are equal.
#pragma unroll
            for (int i = 0; i < 8; i++) {
                scores.score[i] = i < here ? gates[i] : -infinity();
            }
            scores.store(memory.scores + own * memory.stride + block * 8);
            sync_warp();
        }
        scores.rank(from, block, blocks, ranks);
        float sum = 0;
        chosen = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ranks[i] = finite && routed ? ranks[i] : (float)(block * 8 + i);
            const bool is_chosen = i < here && ranks[i] < (float)p.top_k;
            chosen |= (int)is_chosen << i;
            sum += is_chosen || (p.gate_mode == SOFTMAX_TOPK && i < here) ? gates[i] : 0;
        }
        int count = count_bits(chosen);
        below = 0;
#pragma unroll 1
        for (int mask = 1; mask < blocks; mask *= 2) {
            const int others = shuffle_xor(count, mask);
            below += block & mask ? others : 0;
            count += others;
            sum += shuffle_xor(sum, mask);
        }
        const float factor = finite ? 1 / sum : not_a_number();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            gates[i] = routed ? gates[i] * factor : 0;
        }
        if (block == 0 && routed && !finite && p.status) {
            atomic_or(p.status, FAULT_ROUTER_LOGITS);
        }
    }

    // Into shared memory, what everybody wants.
    DEVICE void keep(const Parameters &p, const ManyRouteMemory &memory, int own) const {
        const int first = (lane_index() & (memory.expert_blocks(p) - 1)) * 8;
        int *experts = memory.experts + own * p.top_k;
        float *to_gates = memory.gates(p) + own * p.top_k;
        unsigned char *slots = memory.slots(p) + first * memory.tokens + own;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int slot = below + count_bits(chosen & ((1 << i) - 1));
            const bool is_chosen = (chosen >> i & 1) != 0;
            if (is_chosen) {
                experts[slot] = routed ? first + i : -1;
                to_gates[slot] = gates[i];
            }
            if (first + i < p.experts) {
                slots[i * memory.tokens] = is_chosen && routed ? (unsigned char)slot : NO_SLOT;
            }
        }
    }

    // Into the optional outputs, by falling score.
    DEVICE void publish(const Parameters &p, const ManyRouteMemory &memory, int token) const {
        const int first = (lane_index() & (memory.expert_blocks(p) - 1)) * 8;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const size_t to = (size_t)token * p.top_k + (int)ranks[i];
            const bool is_chosen = exists && (chosen >> i & 1) != 0;
            if (is_chosen && p.topk_indices) {
                p.topk_indices[to] = first + i;
            }
            if (is_chosen && p.topk_weights) {
                p.topk_weights[to] = gates[i];
            }
        }
    }
};

// Chooses for the tokens of the block, and leaves the choice in shared memory.
DEVICE void choose_many(const Parameters &p, const ManyRouteMemory &memory, int first_token) {
    const int at_once = 32 / memory.expert_blocks(p), lane = lane_index() / memory.expert_blocks(p);
#pragma unroll 1
    for (int first = thread_index() / 32 * at_once; first < memory.tokens; first += ROUTE_WARPS * at_once) {
        const EightChoices choices(p, memory, first_token, first + lane);
        choices.keep(p, memory, first + lane);
        if (p.topk_indices || p.topk_weights) {
            choices.publish(p, memory, first_token + first + lane);
        }
    }
}

// Copies words from shared memory, by all threads; both places are multiples of 16 bytes.
DEVICE void copy_words(void *to, const void *from, int count) {
#pragma unroll 2
    for (int i = thread_index(); i < count / 4; i += ROUTE_THREADS) {
        ((Vector16 *)to)[i] = ((const Vector16 *)from)[i];
    }
    const int rest = count / 4 * 4 + thread_index();
    if (rest < count) {
        ((int *)to)[rest] = ((const int *)from)[rest];
    }
}

// Writes the choice of the `count` tokens of the block, runs of them at a time.
DEVICE void write_choice(const Parameters &p, const ManyRouteMemory &memory, int first_token, int count) {
    const size_t tokens = (size_t)p.batch * p.tokens, first_pair = (size_t)first_token * p.top_k;
    copy_words(p.pair_experts + first_pair, memory.experts, count * p.top_k);
    copy_words(p.pair_gates + first_pair, memory.gates(p), count * p.top_k);
    const unsigned char *slots = memory.slots(p);
    const bool in_runs = tokens % 16 == 0;
    const int length = in_runs ? 16 : 1, runs = memory.tokens / length;
#pragma unroll 1
    for (int i = thread_index(); i < p.experts * runs; i += ROUTE_THREADS) {
        const int expert = i / runs, own = i % runs * length;
        unsigned char *to = p.slots + expert * tokens + first_token + own;
        if (own < count && in_runs) {
            *(Vector16 *)to = *(const Vector16 *)(slots + i * 16);
        } else if (own < count) {
            *to = slots[i];
        }
    }
}
