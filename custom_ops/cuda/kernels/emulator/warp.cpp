// Collective operations of a warp, with the fragment layouts of the PTX ISA.
#include "../hardware.cuh"

#include <cstring>

float to_float(binary16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16;
    uint32_t exponent = x.bits >> 10 & 0x1f;
    uint32_t mantissa = x.bits & 0x3ff;
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t wide = exponent == 0x1f ? 0xff : exponent + 112;
    return emulator::float_of(sign | wide << 23 | mantissa << 13);
}

void from_float(binary16 &to, float x) {
    uint32_t bits = emulator::bits_of(x);
    unsigned short sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {
        to.bits = 0x7fff;
    } else if (bits >= 0x477ff000) {
        to.bits = sign | 0x7c00;
    } else if (bits >= 0x38800000) {
        uint32_t rounded = bits + 0xfff + (bits >> 13 & 1) - 0x38000000;
        to.bits = sign | (unsigned short)(rounded >> 13);
    } else {
        to.bits = sign | (unsigned short)lrintf(ldexpf(emulator::float_of(bits), 24));
    }
}

void from_float(bfloat16 &to, float x) {
    uint32_t bits = emulator::bits_of(x);
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = is_nan ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace {

void nothing(void *const (&)[32]) {}

template <class T>
struct Exchange {
    T value;
    int argument;
    T result;
};

template <class T>
void do_shuffle_xor(void *const (&operands)[32]) {
    for (int lane = 0; lane < 32; lane++) {
        Exchange<T> &own = *(Exchange<T> *)operands[lane];
        own.result = ((Exchange<T> *)operands[lane ^ own.argument])->value;
    }
}

void do_shuffle_from(void *const (&operands)[32]) {
    for (int lane = 0; lane < 32; lane++) {
        Exchange<long long> &own = *(Exchange<long long> *)operands[lane];
        own.result = ((Exchange<long long> *)operands[own.argument % 32])->value;
    }
}

void do_shuffle_up(void *const (&operands)[32]) {
    for (int lane = 0; lane < 32; lane++) {
        Exchange<int> &own = *(Exchange<int> *)operands[lane];
        int source = lane - own.argument;
        own.result = ((Exchange<int> *)operands[source < 0 ? lane : source])->value;
    }
}

void do_ballot(void *const (&operands)[32]) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) {
        bits |= (unsigned)(((Exchange<int> *)operands[lane])->value != 0) << lane;
    }
    for (int lane = 0; lane < 32; lane++) {
        ((Exchange<int> *)operands[lane])->result = (int)bits;
    }
}

void do_alike(void *const (&operands)[32]) {
    for (int lane = 1; lane < 32; lane++) {
        if (((Exchange<int> *)operands[lane])->value != ((Exchange<int> *)operands[0])->value) {
            emulator::fail("lanes of a warp differ in what they are said to have alike");
        }
    }
}

struct MatrixLoad {
    const unsigned char *row;
    unsigned (*to)[4];
};

uint16_t element(void *const (&operands)[32], int matrix, int row, int column) {
    const unsigned char *address = ((MatrixLoad *)operands[matrix * 8 + row])->row + 2 * column;
    uint16_t bits;
    memcpy(&bits, address, 2);
    return bits;
}

template <bool TRANSPOSED>
void do_load_matrices(void *const (&operands)[32]) {
    for (int lane = 0; lane < 32; lane++) {
        const unsigned char *row = ((MatrixLoad *)operands[lane])->row;
        emulator::check_shared(row, 16);
    }
    unsigned loaded[32][4];
    for (int lane = 0; lane < 32; lane++) {
        for (int matrix = 0; matrix < 4; matrix++) {
            int outer = lane / 4, inner = lane % 4 * 2;
            uint16_t low = TRANSPOSED ? element(operands, matrix, inner, outer) : element(operands, matrix, outer, inner);
            uint16_t high = TRANSPOSED ? element(operands, matrix, inner + 1, outer)
                                       : element(operands, matrix, outer, inner + 1);
            loaded[lane][matrix] = (unsigned)low | (unsigned)high << 16;
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        memcpy(((MatrixLoad *)operands[lane])->to, loaded[lane], sizeof loaded[lane]);
    }
}

struct MatrixProduct {
    float (*sum)[4];
    const unsigned (*a)[4];
    unsigned b[2];
};

// sum += a * b for matrices laid out over the lanes as accumulators of m16n8 are. The products of one element are
// added exactly enough (f64) and rounded once, as tensor cores do not round after every product.
template <int DEPTH>
void add_product(void *const (&operands)[32], const float (&a)[16][DEPTH], const float (&b)[DEPTH][8]) {
    for (int lane = 0; lane < 32; lane++) {
        float (&sum)[4] = *((MatrixProduct *)operands[lane])->sum;
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            double total = sum[i];
            for (int k = 0; k < DEPTH; k++) {
                total += (double)a[row][k] * (double)b[k][column];
            }
            sum[i] = (float)total;
        }
    }
}

template <class T>
float half_of(unsigned word, int which) {
    T x;
    x.bits = (unsigned short)(word >> 16 * which);
    return to_float(x);
}

template <class T>
void do_multiply_add(void *const (&operands)[32]) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const MatrixProduct &own = *(MatrixProduct *)operands[lane];
        int group = lane / 4, place = lane % 4;
        for (int i = 0; i < 8; i++) {
            int row = group + (i / 2 % 2 ? 8 : 0), column = place * 2 + i % 2 + (i >= 4 ? 8 : 0);
            a[row][column] = half_of<T>((*own.a)[i / 2], i % 2);
        }
        for (int i = 0; i < 4; i++) {
            b[place * 2 + i % 2 + (i >= 2 ? 8 : 0)][group] = half_of<T>(own.b[i / 2], i % 2);
        }
    }
    add_product(operands, a, b);
}

void do_multiply_add_half_depth(void *const (&operands)[32]) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
        const MatrixProduct &own = *(MatrixProduct *)operands[lane];
        int group = lane / 4, place = lane % 4;
        for (int i = 0; i < 4; i++) {
            a[group + i / 2 * 8][place * 2 + i % 2] = half_of<binary16>((*own.a)[i / 2], i % 2);
        }
        for (int i = 0; i < 2; i++) {
            b[place * 2 + i][group] = half_of<binary16>(own.b[0], i);
        }
    }
    add_product(operands, a, b);
}

struct QuadPairProduct {
    float (*sum)[8];
    const unsigned *a, *b;
};

// mma.m8n8k4: four products, each by lanes `4 * pair ..` and those 16 behind them. Element `i` of a lane's factors and
// accumulators is, in the words of the PTX ISA, that of:
// * a, by rows: row `lane % 4`, 4 more in the upper lanes, column `i`;
// * b, by rows: row `lane % 4`, column `i`, 4 more in the upper lanes; by columns: row `i`, column `lane % 4`, 4 more in
//   the upper lanes;
// * f32 sum: row `(lane & 1) + (i & 2)`, 4 more in the upper lanes, column `(i & 4) + (lane & 2) + (i & 1)`.
template <bool TRANSPOSED>
void do_multiply_add_quad_pairs(void *const (&operands)[32]) {
    for (int pair = 0; pair < 4; pair++) {
        float a[8][4], b[4][8];
        for (int place = 0; place < 8; place++) {
            int lane = pair * 4 + place % 4 + place / 4 * 16, upper = place / 4 * 4;
            const QuadPairProduct &own = *(QuadPairProduct *)operands[lane];
            for (int i = 0; i < 4; i++) {
                a[lane % 4 + upper][i] = half_of<binary16>(own.a[i / 2], i % 2);
                float right = half_of<binary16>(own.b[i / 2], i % 2);
                (TRANSPOSED ? b[i][lane % 4 + upper] : b[lane % 4][i + upper]) = right;
            }
        }
        for (int place = 0; place < 8; place++) {
            int lane = pair * 4 + place % 4 + place / 4 * 16;
            float (&sum)[8] = *((QuadPairProduct *)operands[lane])->sum;
            for (int i = 0; i < 8; i++) {
                int row = (lane & 1) + (i & 2) + place / 4 * 4, column = (i & 4) + (lane & 2) + (i & 1);
                double total = sum[i];
                for (int k = 0; k < 4; k++) {
                    total += (double)a[row][k] * (double)b[k][column];
                }
                sum[i] = (float)total;
            }
        }
    }
}

void do_multiply_add_tf32(void *const (&operands)[32]) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
        const MatrixProduct &own = *(MatrixProduct *)operands[lane];
        int group = lane / 4, place = lane % 4;
        for (int i = 0; i < 4; i++) {
            a[group + i % 2 * 8][place + i / 2 * 4] = emulator::float_of((*own.a)[i]);
        }
        b[place][group] = emulator::float_of(own.b[0]);
        b[place + 4][group] = emulator::float_of(own.b[1]);
    }
    add_product(operands, a, b);
}

}  // namespace

void sync_warp() {
    int unused;
    emulator::collective(nothing, &unused);
}

float shuffle_xor(float value, int mask) {
    Exchange<float> exchange = {value, mask, 0};
    emulator::collective(do_shuffle_xor<float>, &exchange);
    return exchange.result;
}

int shuffle_xor(int value, int mask) {
    Exchange<int> exchange = {value, mask, 0};
    emulator::collective(do_shuffle_xor<int>, &exchange);
    return exchange.result;
}

long long shuffle_from(long long value, int lane) {
    Exchange<long long> exchange = {value, lane, 0};
    emulator::collective(do_shuffle_from, &exchange);
    return exchange.result;
}

int shuffle_from(int value, int lane) { return (int)shuffle_from((long long)value, lane); }

float shuffle_from(float value, int lane) {
    int bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = (int)shuffle_from((long long)bits, lane);
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
}

int shuffle_up(int value, int delta) {
    Exchange<int> exchange = {value, delta, 0};
    emulator::collective(do_shuffle_up, &exchange);
    return exchange.result;
}

unsigned ballot(bool predicate) {
    Exchange<int> exchange = {predicate, 0, 0};
    emulator::collective(do_ballot, &exchange);
    return (unsigned)exchange.result;
}

int alike(int value) {
    Exchange<int> exchange = {value, 0, 0};
    emulator::collective(do_alike, &exchange);
    return value;
}

void load_matrices(unsigned (&to)[4], const void *row) {
    MatrixLoad load = {(const unsigned char *)row, &to};
    emulator::collective(do_load_matrices<false>, &load);
}

void load_matrices_transposed(unsigned (&to)[4], const void *row) {
    MatrixLoad load = {(const unsigned char *)row, &to};
    emulator::collective(do_load_matrices<true>, &load);
}

void multiply_add(binary16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MatrixProduct product = {&sum, &a, {b0, b1}};
    emulator::collective(do_multiply_add<binary16>, &product);
}

void multiply_add(bfloat16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MatrixProduct product = {&sum, &a, {b0, b1}};
    emulator::collective(do_multiply_add<bfloat16>, &product);
}

void multiply_add_half_depth(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    unsigned a[4] = {a0, a1, 0, 0};
    MatrixProduct product = {&sum, &a, {b, 0}};
    emulator::collective(do_multiply_add_half_depth, &product);
}

void multiply_add_quad_pairs(float (&sum)[8], const unsigned *a, const unsigned *b) {
    QuadPairProduct product = {&sum, a, b};
    emulator::collective(do_multiply_add_quad_pairs<false>, &product);
}

void multiply_add_quad_pairs_transposed(float (&sum)[8], const unsigned *a, const unsigned *b) {
    QuadPairProduct product = {&sum, a, b};
    emulator::collective(do_multiply_add_quad_pairs<true>, &product);
}

void multiply_add_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MatrixProduct product = {&sum, &a, {b0, b1}};
    emulator::collective(do_multiply_add_tf32, &product);
}
