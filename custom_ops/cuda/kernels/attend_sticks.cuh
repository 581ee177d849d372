// The weights of stick-breaking (Shen et al., "ModuleFormer", 2023) of a tile's scores, in the registers of the lanes that
// share its rows: with z = sigmoid(score), a key takes the share z of what the later ones that its row sees left of a
// stick. What a tile leaves scales earlier sums, as a new maximum does those of the softmax.
#pragma once

#include "attend_softmax.cuh"

// Shares of a stick of length 1, of the keys of this warp alone; `left` is what these leave, in all lanes of a row.
template <class A>
DEVICE void break_sticks(float factor, typename A::Scores &scores, float (&left)[RowState<A>::ROWS]) {
    // Eight neighbouring columns at a time: the lanes of a row hold as many of them each, in their order.
    const int LANES = A::Engine::ROW_LANES, OWN = 8 / LANES;
    const int place = lane_index() / A::Engine::ROW_STEP % LANES;
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        left[i] = 1;
    }
#pragma unroll
    for (int first = A::Scores::COLUMNS - OWN; first >= 0; first -= OWN) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            float all = 1, behind = left[i];
#pragma unroll
            for (int j = first + OWN - 1; j >= first; j--) {
                const float score = scores.at(i, j) * factor;
                const float power = exponential2(score < 0 ? score : -score), share = 1 / (1 + power);
                scores.at(i, j) = (score < 0 ? power * share : share) * all;
                all *= score < 0 ? share : power * share;
            }
#pragma unroll
            for (int mask = 1; mask < LANES; mask *= 2) {
                const float other = shuffle_xor(all, mask * A::Engine::ROW_STEP);
                behind *= (place & mask) != 0 ? 1 : other;
                all *= other;
            }
#pragma unroll
            for (int j = first; j < first + OWN; j++) {
                scores.at(i, j) *= behind;
            }
            left[i] *= all;
        }
    }
}

// Tells the warps that have other keys of a tile what this one's leave of each row; read behind a barrier, and written
// again behind another.
template <class A>
DEVICE void tell_left(float *warps, int warp, const float (&left)[RowState<A>::ROWS]) {
    if (lane_index() / A::Engine::ROW_STEP % A::Engine::ROW_LANES == 0) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            warps[warp * A::ROWS + A::Scores::row(i)] = left[i];
        }
    }
}

// Makes shares of what the warps with later keys leave, and `left` what all warps do.
template <class A>
DEVICE void join_sticks(const float *warps, int warp, typename A::Scores &scores, float (&left)[RowState<A>::ROWS]) {
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        float behind = 1, all = 1;
#pragma unroll
        for (int other = A::KEY_WARPS - 1; other >= 0; other--) {
            const float of_other = warps[other * A::ROWS + A::Scores::row(i)];
            behind *= other > warp ? of_other : 1;
            all *= of_other;
        }
#pragma unroll
        for (int j = 0; j < A::Scores::COLUMNS; j++) {
            scores.at(i, j) *= behind;
        }
        left[i] = all;
    }
}

// Sums of earlier tiles are shares of what this one leaves.
template <class A>
DEVICE void leave(typename A::Mixed &mixed, RowState<A> &state, const float (&left)[RowState<A>::ROWS]) {
    scale_rows<A>(mixed, left);
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        state.sum[i] *= left[i];
    }
}
