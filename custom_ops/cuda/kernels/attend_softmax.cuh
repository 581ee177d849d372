// The online softmax of a tile's scores, in the registers of the lanes that share its rows.
#pragma once

#include "attend_rows.cuh"

// Maximum and sum of the rows of a warp, and how far each may look. Where sticks are broken, the sum is what is left of one,
// and there is no maximum.
template <class A>
struct RowState {
    static constexpr int ROWS = A::Scores::ROWS;
    float largest[ROWS], sum[ROWS];
    int last_key[ROWS];
};

// The mask of `KEYS` keys, of which a lane reads up to two: read early, asked late.
template <int KEYS, bool IS_WIDE = (KEYS > 64)>
struct KeyMask {
    typedef unsigned long long Bits;
    int low, high;

    // Of the keys from `first` on; those from `end` on are as if masked, and are not read.
    DEVICE KeyMask(const QueryRows &rows, int first, int end) {
        const int *mask = rows.p.key_mask + (size_t)rows.batch * rows.p.keys;
        const int key = first + lane_index();
        low = key < end ? mask[key] : 0;
        high = KEYS > 32 && key + 32 < end ? mask[key + 32] : 0;
    }

    // Bit `i`: key `first + i` is not masked.
    DEVICE Bits bits() const {
        const unsigned long long upper = KEYS > 32 ? ballot(high != 0) : 0;
        const unsigned lower = ballot(low != 0);
        return upper << 32 | (KEYS < 32 ? lower & ((1u << KEYS % 32) - 1) : lower);
    }
};

// The same of 128 keys.
template <int KEYS>
struct KeyMask<KEYS, true> {
    static_assert(KEYS == 128, "two words");
    typedef WideBits Bits;
    KeyMask<64> lower, upper;

    DEVICE KeyMask(const QueryRows &rows, int first, int end)
        : lower(rows, first, end), upper(rows, first + 64, end) {}

    DEVICE Bits bits() const { return {lower.bits(), upper.bits()}; }
};

// Hides the scores of keys that are masked, or that a row does not see.
template <class A, class Bits>
DEVICE void hide_unseen(int first_key, const Bits &visible, typename A::Scores &scores, const RowState<A> &state) {
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
#pragma unroll
        for (int j = 0; j < A::Scores::COLUMNS; j++) {
            int column = scores.column(j);
            bool seen = has_bit(visible, column, j * 2 >= A::Scores::COLUMNS) && first_key + column <= state.last_key[i];
            scores.at(i, j) = seen ? scores.at(i, j) : -infinity();
        }
    }
}

// The same where no key is masked: each score is held against a constant.
template <class A>
DEVICE void hide_later(int first_key, typename A::Scores &scores, const RowState<A> &state) {
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        const int last = state.last_key[i] - first_key - A::Scores::column(0);
#pragma unroll
        for (int j = 0; j < A::Scores::COLUMNS; j++) {
            scores.at(i, j) = A::Scores::columns_apart(j) <= last ? scores.at(i, j) : -infinity();
        }
    }
}

template <class A, class Bits>
DEVICE void hide(int first_key, const Bits &visible, bool all_visible, typename A::Scores &scores, const RowState<A> &state) {
    if constexpr (A::HIDES_BY_LIMIT) {
        if (all_visible) {
            hide_later<A>(first_key, scores, state);
            return;
        }
    }
    hide_unseen<A>(first_key, visible, scores, state);
}

// Of each row the largest of this lane's scores.
template <class A>
DEVICE void find_largest(typename A::Scores &scores, float (&largest)[RowState<A>::ROWS]) {
    float chain[RowState<A>::ROWS][A::CHAINS];
#pragma unroll
    for (int j = 0; j < A::Scores::COLUMNS; j++) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            float &of = chain[i][j % A::CHAINS];
            of = j < A::CHAINS ? scores.at(i, j) : maximum(of, scores.at(i, j));
        }
    }
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        largest[i] = chain[i][0];
#pragma unroll
        for (int j = 1; j < A::CHAINS; j++) {
            largest[i] = maximum(largest[i], chain[i][j]);
        }
    }
}

// Hides scores, and returns what they are to be multiplied by, above 0. Bit `i` of `visible` says whether key
// `first_key + i` is one that some row of the tile sees.
template <class A, class Bits>
DEVICE float prepare_scores(const Parameters &p, int first_key, const Bits &visible, typename A::Scores &scores,
                            const RowState<A> &state) {
    float factor = p.scale * 1.44269504088896341f;
    // The largest score is that of the largest product, and stays finite beside masked ones, by a factor above 0 alone.
    if (!(factor > 0)) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
#pragma unroll
            for (int j = 0; j < A::Scores::COLUMNS; j++) {
                scores.at(i, j) *= factor;
            }
        }
        factor = 1;
    }
    const bool all_visible = has_all<A::WARP_KEYS>(visible);
    bool sees_all = all_visible;
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        sees_all = sees_all && first_key + A::WARP_KEYS - 1 <= state.last_key[i];
    }
    if (!sees_all) {
        hide<A>(first_key, visible, all_visible, scores, state);
    }
    return factor;
}

// Scores become weights; `shrink` is what scales earlier sums of each row to the new maximum, 1 for a row that `keeps` the
// one before.
template <class A>
DEVICE void weigh(float factor, typename A::Scores &scores, const bool (&keeps)[RowState<A>::ROWS], RowState<A> &state,
                  float (&shrink)[RowState<A>::ROWS]) {
    // Rows side by side: each is a chain of operations that wait for each other.
    float largest[RowState<A>::ROWS], base[RowState<A>::ROWS], sum[RowState<A>::ROWS];
    find_largest<A>(scores, largest);
#pragma unroll
    for (int mask = 1; mask < A::Engine::ROW_LANES; mask *= 2) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            largest[i] = maximum(largest[i], shuffle_xor(largest[i], mask * A::Engine::ROW_STEP));
        }
    }
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        largest[i] = maximum(state.largest[i], largest[i] * factor);
        if (A::KEEPS_MAXIMA && keeps[i]) {
            largest[i] = state.largest[i];
        }
        base[i] = largest[i] == -infinity() ? 0 : largest[i];
        shrink[i] = exponential2(state.largest[i] - base[i]);
        sum[i] = 0;
    }
#pragma unroll
    for (int j = 0; j < A::Scores::COLUMNS; j++) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            float weight = exponential2(fused_multiply_add(scores.at(i, j), factor, -base[i]));
            scores.at(i, j) = weight;
            sum[i] += weight;
        }
    }
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        state.largest[i] = largest[i];
        state.sum[i] = state.sum[i] * shrink[i] + sum[i];
    }
}

// Scales the rows of a sum.
template <class A>
DEVICE void scale_rows(typename A::Mixed &mixed, const float (&factors)[RowState<A>::ROWS]) {
    if (A::KEEPS_MAXIMA) {
        bool keeps = true;
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            keeps = keeps && factors[i] == 1;
        }
        if (ballot(keeps) == 0xffffffffu) {
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
#pragma unroll
        for (int j = 0; j < A::Mixed::COLUMNS; j++) {
            mixed.at(i, j) *= factors[i];
        }
    }
}
