// The router: logits, gate, the chosen experts of each token. In f32 whatever the elements are.
//
// Groups of 4 tokens; the warps of a group share the width, and their sums are added in the order of the warps.
#pragma once

#include "constants.cuh"
#include "route_products.cuh"

const unsigned char NO_SLOT = 255;
const unsigned FAULT_ROUTER_LOGITS = 1;
const unsigned FAULT_POSITION = 2;

// Floats of shared memory, in this order: sums of warps (where warps share tokens), scores, gates, experts.
struct RouteMemory {
    float *sums;    // [warps, GROUP_TOKENS, E]
    float *scores;  // [tokens, E]
    float *gates;   // [tokens, k]
    int *experts;   // [tokens, k], by falling score

    DEVICE RouteMemory(const Parameters &p, unsigned char *shared, int warps) {
        int tokens = warps / p.route_splits * GROUP_TOKENS;
        sums = (float *)shared;
        scores = sums + (p.route_splits > 1 ? warps * GROUP_TOKENS * p.experts : 0);
        gates = scores + tokens * p.experts;
        experts = (int *)(gates + tokens * p.top_k);
    }
};

// Adds up `2 * HALF` values over groups of `2 * HALF` lanes; lane `i` of a group gets the sum of `value[i]`.
template <int HALF>
DEVICE void add_over_lanes(float *value) {
    const bool upper = (lane_index() & HALF) != 0;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float kept = upper ? value[i + HALF] : value[i];
        float sent = upper ? value[i] : value[i + HALF];
        value[i] = kept + shuffle_xor(sent, HALF);
    }
    if constexpr (HALF > 1) {
        add_over_lanes<HALF / 2>(value);
    }
}

// Adds the products of a group's tokens, from `hidden` on, with the weights of 8 experts, from `weights` on, over the part
// of the width that belongs to `split`. A lane takes two inner indices at a time: width and experts are multiples of 8.
// Behind the last of `tokens` it is taken again, for sums that nobody asks for.
template <class T>
DEVICE void add_pairs(const Parameters &p, const T *hidden, const float *weights, int tokens, int split, float (&sum)[32]) {
    struct alignas(2 * sizeof(T)) Pair {
        T element[2];
    };
#pragma unroll 1
    for (int c = 2 * (split * 32 + lane_index()); c < p.width; c += p.route_splits * 64) {
        Pair x[GROUP_TOKENS];
        Floats4 weight[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight[i] = *(const Floats4 *)(weights + (size_t)(c + i / 2) * p.experts + i % 2 * 4);
        }
#pragma unroll
        for (int token = 0; token < GROUP_TOKENS; token++) {
            x[token] = *(const Pair *)(hidden + (size_t)smaller(token, tokens - 1) * p.width + c);
        }
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const int token = i / 16, expert = i % 8, second = i / 8 % 2;
            const float factor = weight[second * 2 + expert / 4].element[expert % 4];
            sum[token * 8 + expert] = fused_multiply_add(to_float(x[token].element[second]), factor, sum[token * 8 + expert]);
        }
    }
}

// The same for any sizes.
template <class T>
DEVICE void add_singles(const Parameters &p, const T *hidden, const float *weights, int tokens, int experts, int split,
                        float (&sum)[32]) {
#pragma unroll 1
    for (int c = split * 32 + lane_index(); c < p.width; c += p.route_splits * 32) {
        float factor[8];
#pragma unroll
        for (int expert = 0; expert < 8; expert++) {
            factor[expert] = expert < experts ? weights[(size_t)c * p.experts + expert] : 0;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int token = i / 8;
            const float x = token < tokens ? to_float(hidden[(size_t)token * p.width + c]) : 0;
            sum[i] = fused_multiply_add(x, factor[i % 8], sum[i]);
        }
    }
}

// Logits of one group over the part of the width that belongs to `split`, into `to [GROUP_TOKENS, E]`.
template <class T>
DEVICE void partial_logits(const Parameters &p, int first_token, int split, float *to) {
    const T *hidden = (const T *)p.hidden_states + (size_t)first_token * p.width;
    const int tokens = p.batch * p.tokens - first_token;
    const bool in_pairs = p.experts % 8 == 0 && p.vectors && tokens > 0;
#pragma unroll 1
    for (int first_expert = 0; first_expert < p.experts; first_expert += 8) {
        float sum[32];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            sum[i] = 0;
        }
        if (in_pairs) {
            add_pairs(p, hidden, p.router_weight + first_expert, tokens, split, sum);
        } else {
            add_singles(p, hidden, p.router_weight + first_expert, tokens, p.experts - first_expert, split, sum);
        }
        add_over_lanes<16>(sum);
        int expert = first_expert + lane_index() % 8;
        if (expert < p.experts) {
            to[lane_index() / 8 * p.experts + expert] = sum[0];
        }
    }
}

DEVICE float warp_maximum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        x = maximum(x, shuffle_xor(x, mask));
    }
    return x;
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        x += shuffle_xor(x, mask);
    }
    return x;
}

// Replaces finite values by their softmax; one warp.
DEVICE void softmax(float *values, int count) {
    float largest = -infinity();
    for (int i = lane_index(); i < count; i += 32) {
        largest = maximum(largest, values[i]);
    }
    largest = warp_maximum(largest);
    float sum = 0;
    for (int i = lane_index(); i < count; i += 32) {
        float power = exponential(values[i] - largest);
        values[i] = power;
        sum += power;
    }
    sum = warp_sum(sum);
    for (int i = lane_index(); i < count; i += 32) {
        values[i] = values[i] / sum;
    }
    sync_warp();
}

// The `k` largest of up to 64 finite scores, falling; of equal ones the lower index comes first: each goes to the place
// that is the number of those in front of it. One warp.
DEVICE void rank_largest(const float *scores, int count, int k, float *gates, int *experts) {
    for (int expert = lane_index(); expert < count; expert += 32) {
        const float own = scores[expert];
        int rank = 0;
#pragma unroll 4
        for (int other = 0; other < count; other++) {
            rank += scores[other] > own || (scores[other] == own && other < expert);
        }
        if (rank < k) {
            gates[rank] = own;
            experts[rank] = expert;
        }
    }
    sync_warp();
}

// As `rank_largest`, of any number of scores, one after the other.
DEVICE void select_largest(const float *scores, int count, int k, float *gates, int *experts) {
    float last = infinity();
    int last_expert = -1;
    for (int slot = 0; slot < k; slot++) {
        float best = -infinity();
        int best_expert = count;
        for (int expert = lane_index(); expert < count; expert += 32) {
            float score = scores[expert];
            bool is_behind = score < last || (score == last && expert > last_expert);
            if (is_behind && score > best) {
                best = score;
                best_expert = expert;
            }
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            float other = shuffle_xor(best, mask);
            int other_expert = shuffle_xor(best_expert, mask);
            if (other > best || (other == best && other_expert < best_expert)) {
                best = other;
                best_expert = other_expert;
            }
        }
        if (lane_index() == 0) {
            gates[slot] = best;
            experts[slot] = best_expert;
        }
        last = best;
        last_expert = best_expert;
    }
    sync_warp();
}

// Turns the logits of one routed token into experts and gates; false where a logit is not finite. One warp.
DEVICE bool gate(const Parameters &p, float *scores, float *gates, int *experts) {
    bool finite = true;
    for (int expert = lane_index(); expert < p.experts; expert += 32) {
        finite = finite && is_finite(scores[expert]);
    }
    if (ballot(finite) != 0xffffffffu) {
        for (int slot = lane_index(); slot < p.top_k; slot += 32) {
            experts[slot] = slot;
            gates[slot] = not_a_number();
        }
        sync_warp();
        return false;
    }
    if (p.gate_mode != TOPK_SOFTMAX) {
        softmax(scores, p.experts);
    }
    if (p.experts <= 64) {
        rank_largest(scores, p.experts, p.top_k, gates, experts);
    } else {
        select_largest(scores, p.experts, p.top_k, gates, experts);
    }
    if (p.gate_mode == TOPK_SOFTMAX) {
        softmax(gates, p.top_k);
    } else if (p.gate_mode == SOFTMAX_TOPK_RENORM) {
        float sum = 0;
        for (int slot = lane_index(); slot < p.top_k; slot += 32) {
            sum += gates[slot];
        }
        sum = warp_sum(sum);
        for (int slot = lane_index(); slot < p.top_k; slot += 32) {
            gates[slot] = gates[slot] / sum;
        }
        sync_warp();
    }
    return true;
}

// Not 0 where a token is routed.
DEVICE int routing_mask(const Parameters &p, int token) {
    int batch = token / p.tokens, place = token % p.tokens;
    return p.skip_padded ? p.query_mask[(size_t)batch * p.query_mask_stride + p.query_mask_offset + place] : 1;
}

// Writes the choice of one token; slots are numbered by rising expert. One warp.
DEVICE void publish(const Parameters &p, int token, bool routed, const float *gates, const int *experts) {
    const size_t first = (size_t)token * p.top_k;
    const size_t tokens = (size_t)p.batch * p.tokens;
    for (int place = lane_index(); place < p.top_k; place += 32) {
        int expert = routed ? experts[place] : place;
        float weight = routed ? gates[place] : 0;
        if (p.topk_indices) {
            p.topk_indices[first + place] = expert;
        }
        if (p.topk_weights) {
            p.topk_weights[first + place] = weight;
        }
        int slot = 0;
        for (int other = 0; routed && other < p.top_k; other++) {
            slot += experts[other] < expert;
        }
        slot = routed ? slot : place;
        p.pair_experts[first + slot] = routed ? expert : -1;
        p.pair_gates[first + slot] = weight;
    }
    for (int expert = lane_index(); expert < p.experts; expert += 32) {
        int below = 0;
        bool chosen = false;
        for (int place = 0; routed && place < p.top_k; place++) {
            below += experts[place] < expert;
            chosen = chosen || experts[place] == expert;
        }
        p.slots[expert * tokens + token] = chosen ? (unsigned char)below : NO_SLOT;
    }
}

// Of up to 32 experts, `SPAN` lanes choose for one token, lane `e` of them for expert `e`. Adds up over these lanes.
template <int SPAN>
DEVICE float span_sum(float x) {
#pragma unroll
    for (int mask = SPAN / 2; mask > 0; mask /= 2) {
        x += shuffle_xor(x, mask);
    }
    return x;
}

template <int SPAN>
DEVICE float span_maximum(float x) {
#pragma unroll
    for (int mask = SPAN / 2; mask > 0; mask /= 2) {
        x = maximum(x, shuffle_xor(x, mask));
    }
    return x;
}

// As `gate` and `publish`, for `32 / SPAN` tokens of `memory` from `first` on, `token` being the first one of the block;
// at most `SPAN` experts. One warp.
template <int SPAN>
DEVICE void choose(const Parameters &p, const RouteMemory &memory, int token, int first, int count, bool publishes) {
    const int expert = lane_index() % SPAN, own = first + lane_index() / SPAN;
    const int shift = lane_index() / SPAN * SPAN;
    const bool exists = own < count, here = exists && expert < p.experts;
    const bool routed = exists && routing_mask(p, token + own) != 0;
    float score = here ? memory.scores[own * p.experts + expert] : -infinity();
    const unsigned SPAN_BITS = SPAN == 32 ? 0xffffffffu : (1u << SPAN % 32) - 1;
    const bool finite = (ballot(here && !is_finite(score)) >> shift & SPAN_BITS) == 0;
    float power = exponential(score - span_maximum<SPAN>(score));
    if (p.gate_mode != TOPK_SOFTMAX) {
        power = power / span_sum<SPAN>(power);
        score = here ? power : score;
    }
    int rank = 0;
    for (int other = 0; other < p.experts; other++) {
        const float theirs = shuffle_from(score, shift + other);
        rank += theirs > score || (theirs == score && other < expert);
    }
    rank = finite && routed ? rank : expert;
    const bool chosen = here && rank < p.top_k;
    if (p.gate_mode != SOFTMAX_TOPK) {
        power = power / span_sum<SPAN>(chosen ? power : 0);
    }
    const unsigned all = ballot(chosen) >> shift & SPAN_BITS;
    const int slot = count_bits(all & ((1u << expert) - 1));
    const float weight = !routed ? 0 : finite ? power : not_a_number();
    if (chosen) {
        memory.experts[own * p.top_k + rank] = routed ? expert : -1;
    }
    if (!publishes) {
        return;
    }
    const size_t pairs = (size_t)(token + own) * p.top_k;
    if (chosen) {
        if (p.topk_indices) {
            p.topk_indices[pairs + rank] = expert;
        }
        if (p.topk_weights) {
            p.topk_weights[pairs + rank] = weight;
        }
        p.pair_experts[pairs + slot] = routed ? expert : -1;
        p.pair_gates[pairs + slot] = weight;
    }
    if (here) {
        p.slots[expert * (size_t)p.batch * p.tokens + token + own] = chosen && routed ? (unsigned char)slot : NO_SLOT;
    }
    if (here && expert == 0 && routed && !finite && p.status) {
        atomic_or(p.status, FAULT_ROUTER_LOGITS);
    }
}

// The same for any number of experts, token by token.
template <int WARPS>
DEVICE void choose_one_by_one(const Parameters &p, const RouteMemory &memory, int token, int count, bool publishes) {
    for (int i = thread_index() / 32; i < count; i += WARPS) {
        float *gates = memory.gates + i * p.top_k;
        int *experts = memory.experts + i * p.top_k;
        const bool routed = routing_mask(p, token + i) != 0;
        if (routed && !gate(p, memory.scores + i * p.experts, gates, experts) && publishes && lane_index() == 0 && p.status) {
            atomic_or(p.status, FAULT_ROUTER_LOGITS);
        }
        if (publishes) {
            publish(p, token + i, routed, gates, experts);
        }
        for (int slot = lane_index(); !routed && slot < p.top_k; slot += 32) {
            experts[slot] = -1;
        }
    }
}

// Routes the tokens from `first_token` on, as many as the warps of the block take. Leaves experts in `memory`, and
// writes the choice where `publishes` is set. Returns how many tokens it takes. `FOR_MANY`: whether tokens may be so many
// that tensor cores are worth their code.
template <class T, int THREADS, bool FOR_MANY>
DEVICE int route_tokens(const Parameters &p, const RouteMemory &memory, int first_token, bool publishes) {
    const int WARPS = THREADS / 32;
    const int groups = WARPS / p.route_splits;
    const int warp = thread_index() / 32;
    const int group = warp / p.route_splits, split = warp % p.route_splits;
    const bool shares = p.route_splits > 1;
    bool is_done = false;
    if constexpr (FOR_MANY && HAS_TENSOR_CORES_16 && sizeof(T) == 2) {
        is_done = !shares && p.vectors && p.experts <= MOST_MULTIPLIED_EXPERTS;
        if (is_done) {
            float *parts = (float *)(memory.experts + WARPS * GROUP_TOKENS * p.top_k);
            route_by_products<T, WARPS>(p, first_token, memory.scores, parts);
        }
    }
    if (!is_done) {
        float *to = shares ? memory.sums + warp * GROUP_TOKENS * p.experts
                           : memory.scores + group * GROUP_TOKENS * p.experts;
        partial_logits<T>(p, first_token + group * GROUP_TOKENS, split, to);
        sync_block();
    }
    if (shares) {
        const int count = GROUP_TOKENS * p.experts;
        for (int i = thread_index(); i < groups * count; i += THREADS) {
            float sum = 0;
            for (int part = 0; part < p.route_splits; part++) {
                sum += memory.sums[(i / count * p.route_splits + part) * count + i % count];
            }
            memory.scores[i] = sum;
        }
        sync_block();
    }
    const int tokens = smaller(groups * GROUP_TOKENS, p.batch * p.tokens - first_token);
    if (p.experts <= 8) {
        for (int i = warp * 4; i < tokens; i += WARPS * 4) {
            choose<8>(p, memory, first_token, i, tokens, publishes);
        }
    } else if (p.experts <= 32) {
        for (int i = warp; i < tokens; i += WARPS) {
            choose<32>(p, memory, first_token, i, tokens, publishes);
        }
    } else {
        choose_one_by_one<WARPS>(p, memory, first_token, tokens, publishes);
    }
    sync_block();
    return tokens;
}
