// The engine (engine.cuh) of compute capability 7.0.
#pragma once

#include "hardware.cuh"

// Accumulators of mma.m8n8k4. The quad pairs of a warp are 2 x 2: pair q has the rows `q / 2 * 8 ..` of 16, and of 16
// columns the four from `q % 2 * 4` and the four from `8 + q % 2 * 4`, so that neighbours read neighbouring memory.
template <int M, int N>
struct QuadPairSum {
    static constexpr int ROWS = M / 8;
    static constexpr int COLUMNS = N / 4;
    float block[M / 16][N / 16][8];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                at(i, j) = 0;
            }
        }
    }

    DEVICE float &at(int i, int j) { return block[i / 2][j / 4][j / 2 % 2 * 4 + i % 2 * 2 + j % 2]; }

    DEVICE static int row(int i) {
        return i / 2 * 16 + lane_index() / 8 % 2 * 8 + lane_index() / 16 * 4 + i % 2 * 2 + lane_index() % 2;
    }

    DEVICE static int column(int j) {
        return j / 4 * 16 + j / 2 % 2 * 8 + lane_index() / 4 % 2 * 4 + lane_index() / 2 % 2 * 2 + j % 2;
    }
};

// binary16 elements on the tensor cores of compute capability 7.0: mma.m8n8k4.
struct VoltaCores {
    typedef binary16 Element;
    template <int M, int N>
    using Sum = QuadPairSum<M, N>;
    static constexpr int STEP = 8;
    static constexpr int UNROLL = 4;
    static constexpr int TALL_UNROLL = UNROLL;
    static constexpr int ROW_LANES = 4;
    static constexpr int ROW_STEP = 2;
    static constexpr bool HELD = true;
    static constexpr int PAD = 8;
    static constexpr int PAD_INNER_FIRST = 8;
    static constexpr int SCRATCH = 0;

    struct alignas(8) Four {
        unsigned word[2];
    };

    // Of 16 rows, that of this lane in a left factor.
    DEVICE static int left_row() { return lane_index() / 8 % 2 * 8 + lane_index() / 16 * 4 + lane_index() % 4; }

    // Of 16 columns, the first of the four that this lane's half of its quad pair has.
    DEVICE static int first_column() { return lane_index() / 16 * 8 + lane_index() / 4 % 2 * 4; }

    // Two products of depth 4: rows of 8 elements.
    template <int M>
    DEVICE static void load_left(Vector16 (&a)[M / 16], const binary16 *from, int stride) {
#pragma unroll
        for (int i = 0; i < M / 16; i++) {
            a[i] = *(const Vector16 *)(from + (i * 16 + left_row()) * stride);
        }
    }

    template <int M, int N>
    DEVICE static void multiply(Sum<M, N> &sum, const binary16 *a, int a_stride, const binary16 *b, int b_stride) {
        Vector16 left[M / 16];
        load_left<M>(left, a, a_stride);
        const binary16 *own = b + lane_index() % 4 * b_stride + first_column();
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Four right = *(const Four *)(own + half * 4 * b_stride + j * 16);
#pragma unroll
                for (int i = 0; i < M / 16; i++) {
                    multiply_add_quad_pairs(sum.block[i][j], left[i].word + half * 2, right.word);
                }
            }
        }
    }

    template <int M, int N>
    DEVICE static void multiply_transposed(Sum<M, N> &sum, const binary16 *a, int a_stride, const binary16 *b,
                                           int b_stride) {
        Vector16 left[M / 16];
        load_left<M>(left, a, a_stride);
        const binary16 *own = b + (first_column() + lane_index() % 4) * b_stride;
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            Vector16 right = *(const Vector16 *)(own + j * 16 * b_stride);
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < M / 16; i++) {
                    multiply_add_quad_pairs_transposed(sum.block[i][j], left[i].word + half * 2, right.word + half * 2);
                }
            }
        }
    }

    // A lane's accumulators are two columns of two rows, and a left fragment is four columns of one row: it takes the
    // other two from the lane that has them. The quad pair beside has the keys of the other columns.
    template <int N, int K>
    DEVICE static void multiply_sum(Sum<16, N> &sum, Sum<16, K> &weights, float *, const binary16 *b, int b_stride) {
        const bool upper = (lane_index() & 2) != 0;
        const int pair = lane_index() / 4 % 2 * 4;
        const binary16 *own = b + lane_index() % 4 * b_stride + first_column();
#pragma unroll
        for (int k = 0; k < K / 8; k++) {
            const float *weight = weights.block[0][k / 2] + k % 2 * 4;
            unsigned first = pack(binary16(), weight[0], weight[1]), second = pack(binary16(), weight[2], weight[3]);
            unsigned received = (unsigned)shuffle_xor((int)(upper ? first : second), 2);
            unsigned left[2][2] = {{upper ? received : first, upper ? second : received}};
            left[1][0] = (unsigned)shuffle_xor((int)left[0][0], 4);
            left[1][1] = (unsigned)shuffle_xor((int)left[0][1], 4);
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const binary16 *rows = own + (k * 8 + (which == 0 ? pair : 4 - pair)) * b_stride;
#pragma unroll
                for (int j = 0; j < N / 16; j++) {
                    Four right = *(const Four *)(rows + j * 16);
                    multiply_add_quad_pairs(sum.block[0][j], left[which], right.word);
                }
            }
        }
    }
};
