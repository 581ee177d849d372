// Products of small matrices in shared memory, one warp each, on tensor cores or on plain arithmetic units.
//
// An engine has:
// * `Element`: what shared memory holds;
// * `STEP`: inner length of one product; `UNROLL`: how many of them to write out in a row, and `TALL_UNROLL` where the sums
//   are half of a lane's registers;
// * `ROW_LANES`, `ROW_STEP`: lanes that hold one row of a `Sum`, and how far apart they are, so that `shuffle_xor` with
//   ROW_STEP, 2 * ROW_STEP .. ROW_STEP * ROW_LANES / 2 reduces it;
// * `HELD`: whether what is loaded next waits in registers, as hardware without asynchronous copies needs it;
// * `PAD`, `PAD_INNER_FIRST`: elements that keep rows of shared memory in different banks, where a row is a row of the
//   left factor or of a transposed right factor, and where it is an inner index of the right factor;
// * `Sum<M, N>`: a matrix over the lanes of a warp, in f32: element `(i, j)` of a lane is element `(row(i), column(j))`;
// * `multiply(sum, a, b)`: sum += a [M, STEP] * b [STEP, N];
// * `multiply_transposed(sum, a, b)`: the same with b given as [N, STEP];
// * `multiply_sum(sum, weights, scratch, b)`: sum [16, N] += weights [16, K] * b [K, N], with weights in registers.
#pragma once

#include "hardware.cuh"

// Accumulators of mma.m16n8.
template <int M, int N>
struct FragmentSum {
    static constexpr int ROWS = M / 8;
    static constexpr int COLUMNS = N / 4;
    float block[M / 16][N / 8][4];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                at(i, j) = 0;
            }
        }
    }

    DEVICE float &at(int i, int j) { return block[i / 2][j / 2][i % 2 * 2 + j % 2]; }
    DEVICE static int row(int i) { return i * 8 + lane_index() / 4; }
    DEVICE static int column(int j) { return columns_apart(j) + lane_index() % 4 * 2; }
    // From a lane's first column.
    DEVICE static constexpr int columns_apart(int j) { return j / 2 * 8 + j % 2; }
};

// 16-bit elements on tensor cores, fragments by ldmatrix: mma.m16n8k16, or two of mma.m16n8k8 where `HALF_DEPTH` is set.
template <class T, bool HALF_DEPTH = false>
struct TensorCores {
    typedef T Element;
    template <int M, int N>
    using Sum = FragmentSum<M, N>;
    static constexpr int STEP = 16;
    static constexpr int UNROLL = 16;
    static constexpr int TALL_UNROLL = UNROLL;
    static constexpr int ROW_LANES = 4;
    static constexpr int ROW_STEP = 1;
    static constexpr bool HELD = HALF_DEPTH;
    static constexpr int PAD = 8;
    static constexpr int PAD_INNER_FIRST = 8;
    static constexpr int SCRATCH = 0;

    // Address of this lane's row in a 16 x 16 matrix of four 8 x 8 ones, the left two first.
    DEVICE static const T *left(const T *matrix, int stride) {
        return matrix + lane_index() % 16 * stride + lane_index() / 16 * 8;
    }

    // The same, the upper two first.
    DEVICE static const T *upper(const T *matrix, int stride) {
        return matrix + (lane_index() % 8 + lane_index() / 16 * 8) * stride + lane_index() / 8 % 2 * 8;
    }

    DEVICE static void add_product(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        if constexpr (HALF_DEPTH) {
            multiply_add_half_depth(sum, a[0], a[1], b0);
            multiply_add_half_depth(sum, a[2], a[3], b1);
        } else {
            multiply_add(T(), sum, a, b0, b1);
        }
    }

    template <int M>
    DEVICE static void load_left(unsigned (&a)[M / 16][4], const T *from, int stride) {
#pragma unroll
        for (int i = 0; i < M / 16; i++) {
            load_matrices(a[i], left(from + i * 16 * stride, stride));
        }
    }

    template <int M, int N>
    DEVICE static void multiply(Sum<M, N> &sum, const T *a, int a_stride, const T *b, int b_stride) {
        unsigned left_factor[M / 16][4];
        load_left<M>(left_factor, a, a_stride);
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            unsigned right[4];
            load_matrices_transposed(right, left(b + j * 16, b_stride));
#pragma unroll
            for (int i = 0; i < M / 16; i++) {
                add_product(sum.block[i][2 * j], left_factor[i], right[0], right[1]);
                add_product(sum.block[i][2 * j + 1], left_factor[i], right[2], right[3]);
            }
        }
    }

    template <int M, int N>
    DEVICE static void multiply_transposed(Sum<M, N> &sum, const T *a, int a_stride, const T *b, int b_stride) {
        unsigned left_factor[M / 16][4];
        load_left<M>(left_factor, a, a_stride);
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            unsigned right[4];
            load_matrices(right, upper(b + j * 16 * b_stride, b_stride));
#pragma unroll
            for (int i = 0; i < M / 16; i++) {
                add_product(sum.block[i][2 * j], left_factor[i], right[0], right[1]);
                add_product(sum.block[i][2 * j + 1], left_factor[i], right[2], right[3]);
            }
        }
    }

    // Two neighbouring accumulators are one left fragment.
    template <int N, int K>
    DEVICE static void multiply_sum(Sum<16, N> &sum, Sum<16, K> &weights, float *, const T *b, int b_stride) {
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            const float(&low)[4] = weights.block[0][2 * k];
            const float(&high)[4] = weights.block[0][2 * k + 1];
            unsigned left_factor[4] = {pack(T(), low[0], low[1]), pack(T(), low[2], low[3]), pack(T(), high[0], high[1]),
                                       pack(T(), high[2], high[3])};
#pragma unroll
            for (int j = 0; j < N / 16; j++) {
                unsigned right[4];
                load_matrices_transposed(right, left(b + k * 16 * b_stride + j * 16, b_stride));
                add_product(sum.block[0][2 * j], left_factor, right[0], right[1]);
                add_product(sum.block[0][2 * j + 1], left_factor, right[2], right[3]);
            }
        }
    }
};

// f32 elements rounded to TF32 on tensor cores: mma.m16n8k8.
struct Tf32Cores {
    typedef float Element;
    template <int M, int N>
    using Sum = FragmentSum<M, N>;
    static constexpr int STEP = 8;
    static constexpr int UNROLL = 4;
    static constexpr int TALL_UNROLL = SPARES_REGISTERS ? UNROLL : 1;
    static constexpr int ROW_LANES = 4;
    static constexpr int ROW_STEP = 1;
    static constexpr bool HELD = false;
    static constexpr int PAD = 4;
    static constexpr int PAD_INNER_FIRST = 8;
    static constexpr int SCRATCH = 0;

    template <int M>
    DEVICE static void load_left(unsigned (&a)[M / 16][4], const float *from, int stride) {
        const float *own = from + lane_index() / 4 * stride + lane_index() % 4;
#pragma unroll
        for (int i = 0; i < M / 16; i++) {
            a[i][0] = to_tf32(own[i * 16 * stride]);
            a[i][1] = to_tf32(own[(i * 16 + 8) * stride]);
            a[i][2] = to_tf32(own[i * 16 * stride + 4]);
            a[i][3] = to_tf32(own[(i * 16 + 8) * stride + 4]);
        }
    }

    // `b[inner * inner_stride + column * column_stride]`.
    template <int M, int N>
    DEVICE static void multiply_strided(Sum<M, N> &sum, const float *a, int a_stride, const float *b, int inner_stride,
                                        int column_stride) {
        unsigned left_factor[M / 16][4];
        load_left<M>(left_factor, a, a_stride);
        const float *own = b + lane_index() % 4 * inner_stride + lane_index() / 4 * column_stride;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            unsigned first = to_tf32(own[j * 8 * column_stride]);
            unsigned second = to_tf32(own[j * 8 * column_stride + 4 * inner_stride]);
#pragma unroll
            for (int i = 0; i < M / 16; i++) {
                multiply_add_tf32(sum.block[i][j], left_factor[i], first, second);
            }
        }
    }

    template <int M, int N>
    DEVICE static void multiply(Sum<M, N> &sum, const float *a, int a_stride, const float *b, int b_stride) {
        multiply_strided(sum, a, a_stride, b, b_stride, 1);
    }

    template <int M, int N>
    DEVICE static void multiply_transposed(Sum<M, N> &sum, const float *a, int a_stride, const float *b, int b_stride) {
        multiply_strided(sum, a, a_stride, b, 1, b_stride);
    }

    // The inner index may be permuted: fragment columns `t` and `t + 4` take the keys `2 * t` and `2 * t + 1`, which is
    // where the accumulators are.
    template <int N, int K>
    DEVICE static void multiply_sum(Sum<16, N> &sum, Sum<16, K> &weights, float *, const float *b, int b_stride) {
        const float *own = b + lane_index() % 4 * 2 * b_stride + lane_index() / 4;
#pragma unroll
        for (int k = 0; k < K / 8; k++) {
            const float(&weight)[4] = weights.block[0][k];
            unsigned left_factor[4] = {to_tf32(weight[0]), to_tf32(weight[2]), to_tf32(weight[1]), to_tf32(weight[3])};
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                unsigned first = to_tf32(own[k * 8 * b_stride + j * 8]);
                unsigned second = to_tf32(own[(k * 8 + 1) * b_stride + j * 8]);
                multiply_add_tf32(sum.block[0][j], left_factor, first, second);
            }
        }
    }
};

// A matrix over 4 x 8 lanes.
template <int M, int N>
struct LaneSum {
    static constexpr int ROWS = M / 4;
    static constexpr int COLUMNS = N / 8;
    float value[ROWS][COLUMNS];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                value[i][j] = 0;
            }
        }
    }

    DEVICE float &at(int i, int j) { return value[i][j]; }
    DEVICE static int row(int i) { return i * 4 + lane_index() / 8; }
    DEVICE static int column(int j) { return j * 8 + lane_index() % 8; }
};

// Any element on plain units: fused multiply-add in f32.
template <class T>
struct PlainUnits {
    typedef T Element;
    template <int M, int N>
    using Sum = LaneSum<M, N>;
    static constexpr int STEP = 4;
    static constexpr int UNROLL = 2;
    static constexpr int TALL_UNROLL = UNROLL;
    static constexpr int ROW_LANES = 8;
    static constexpr int ROW_STEP = 1;
    static constexpr bool HELD = false;
    static constexpr int PAD = 16 / (int)sizeof(T);
    static constexpr int PAD_INNER_FIRST = 16 / (int)sizeof(T);
    // Floats of a warp's scratch memory beside every 16 rows of weights: padding of a row.
    static constexpr int SCRATCH = 4;

    struct alignas(4 * sizeof(T)) Four {
        T element[4];
    };

    template <class A, int M, int N>
    DEVICE static void multiply_strided(Sum<M, N> &sum, const A *a, int a_stride, const T *b, int inner_stride,
                                        int column_stride) {
        struct alignas(4 * sizeof(A)) FourLeft {
            A element[4];
        };
        const A *own_rows = a + lane_index() / 8 * a_stride;
        const T *own_columns = b + lane_index() % 8 * column_stride;
        float left[M / 4][4];
#pragma unroll
        for (int i = 0; i < M / 4; i++) {
            FourLeft four = *(const FourLeft *)(own_rows + i * 4 * a_stride);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                left[i][k] = to_float(four.element[k]);
            }
        }
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float right[4];
            if (inner_stride == 1) {
                Four four = *(const Four *)(own_columns + j * 8 * column_stride);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    right[k] = to_float(four.element[k]);
                }
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    right[k] = to_float(own_columns[k * inner_stride + j * 8 * column_stride]);
                }
            }
#pragma unroll
            for (int i = 0; i < M / 4; i++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    sum.value[i][j] = fused_multiply_add(left[i][k], right[k], sum.value[i][j]);
                }
            }
        }
    }

    template <int M, int N>
    DEVICE static void multiply(Sum<M, N> &sum, const T *a, int a_stride, const T *b, int b_stride) {
        multiply_strided(sum, a, a_stride, b, b_stride, 1);
    }

    template <int M, int N>
    DEVICE static void multiply_transposed(Sum<M, N> &sum, const T *a, int a_stride, const T *b, int b_stride) {
        multiply_strided(sum, a, a_stride, b, 1, b_stride);
    }

    // The weights go through `scratch` `[16, K + SCRATCH]`, which belongs to the warp.
    template <int N, int K>
    DEVICE static void multiply_sum(Sum<16, N> &sum, Sum<16, K> &weights, float *scratch, const T *b, int b_stride) {
        const int stride = K + SCRATCH;
#pragma unroll
        for (int i = 0; i < Sum<16, K>::ROWS; i++) {
#pragma unroll
            for (int j = 0; j < Sum<16, K>::COLUMNS; j++) {
                scratch[weights.row(i) * stride + weights.column(j)] = weights.at(i, j);
            }
        }
        sync_warp();
#pragma unroll 1
        for (int k = 0; k < K; k += 4) {
            multiply_strided(sum, scratch + k, stride, b + k * b_stride, b_stride, 1);
        }
        sync_warp();
    }
};
