// A product of one warpgroup in every layout that a descriptor knows, and the same with one mistake: what the emulator
// is expected to find. Not compiled for a device.
//
// Parameters: `hidden_states` a [64, 64], `input_weight` b [64, 128], `kv_weight` its transpose, `output` f32 [64, 128];
// `gate_mode` is the swizzle, `gated` whether b lies with its columns in a row, `activation` the mistake.
#define MODULE "f16"

#include "../engine.cuh"

namespace {

enum Mistake {
    NONE,
    NO_COPY_WAIT,
    NO_HAND_OVER,
    NO_BARRIER,
    NO_FENCE,
    NO_PRODUCT_WAIT,
    NO_COMMIT,
    EARLY_READ,
    EARLY_WRITE,
    EARLY_REFILL,
    OTHER_SWIZZLE,
    OTHER_STRIDE,
    OTHER_LEADING,
    BASE_OFFSET,
    HALF_A_WARPGROUP,
};

const int ROWS = 64, COLUMNS = 128, DEPTH = 64;

// A factor of `outer` rows in shared memory, 64 inner indices of it.
struct Factor {
    Swizzle swizzle;
    int outer;
    bool outer_in_line;
    binary16 *start;

    // Bytes of a line.
    int line() const { return swizzle == NO_SWIZZLE ? 16 : 16 << (4 - swizzle); }

    // The run of 8 elements from `(i, k)` on; 8 of the index that runs along the lines.
    binary16 *run(int i, int k) const {
        const int along = outer_in_line ? i : k, across = outer_in_line ? k : i;
        const int lines = outer_in_line ? DEPTH : outer, in_line = line() / 16;
        // The number of the line, in units of those that fill 128 bytes, moves the run.
        const int moved = along / 8 % in_line ^ across * line() / 128 % in_line;
        return start + ((along * 2 / line() * lines + across) * line() + moved * 16) / 2;
    }

    unsigned long long descriptor(int k, Mistake mistake) const {
        const int lines = (outer_in_line ? DEPTH : outer) * line();
        const binary16 *from = outer_in_line ? start + k * line() / 2
                                             : start + (k * 2 / line() * lines + k * 2 % line()) / 2;
        const bool no_swizzle = swizzle == NO_SWIZZLE;
        int leading = no_swizzle && outer_in_line ? 8 * line() : lines;
        int stride = no_swizzle && outer_in_line ? lines : 8 * line();
        leading += mistake == OTHER_LEADING ? 16 : 0;
        stride += mistake == OTHER_STRIDE ? 16 : 0;
        const Swizzle told = mistake == OTHER_SWIZZLE ? (Swizzle)(swizzle % 3 + 1) : swizzle;
        return matrix_descriptor(told, from, leading, stride) | (mistake == BASE_OFFSET ? 1ull << 49 : 0);
    }

    void fill(const binary16 *from) const {
        const int across = outer_in_line ? DEPTH : outer, along = outer_in_line ? outer : DEPTH;
        for (int i = thread_index(); i < across * along / 8; i += 128) {
            int row = i / (along / 8), column = i % (along / 8) * 8;
            copy_async(outer_in_line ? run(column, row) : run(row, column), from + i * 8, true);
        }
    }
};

template <bool B_OUTER>
void multiply(const Factor &left, const Factor &right, float (&sum)[16][4], Mistake mistake) {
    if (mistake != NO_FENCE) {
        warpgroup_fence(sum);
    }
    for (int k = 0; k < DEPTH; k += 16) {
        const bool last = k == DEPTH - 16;
        const unsigned long long b = right.descriptor(k, last ? mistake : NONE);
        if (mistake != HALF_A_WARPGROUP || !last || thread_index() < 64) {
            warpgroup_multiply_add<B_OUTER, true>(binary16(), sum, left.descriptor(k, NONE), b);
        }
    }
    if (mistake != NO_COMMIT) {
        warpgroup_commit();
    }
}

void probe(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    const Mistake mistake = (Mistake)p.activation;
    const Factor left = {(Swizzle)p.gate_mode, ROWS, false, (binary16 *)shared};
    const Factor right = {(Swizzle)p.gate_mode, COLUMNS, p.gated != 0, (binary16 *)shared + ROWS * DEPTH};
    left.fill((const binary16 *)p.hidden_states);
    right.fill((const binary16 *)(p.gated ? p.input_weight : p.kv_weight));
    copy_commit();
    if (mistake != NO_COPY_WAIT) {
        copy_wait<0>();
    }
    if (mistake != NO_HAND_OVER) {
        fence_products();
    }
    if (mistake != NO_BARRIER) {
        sync_block();
    }
    FragmentSum<16, COLUMNS> sum;
    sum.clear();
    p.gated ? multiply<true>(left, right, sum.block[0], mistake) : multiply<false>(left, right, sum.block[0], mistake);
    float early = 0;
    if (mistake == EARLY_READ) {
        early = sum.at(0, 0);
    }
    if (mistake == EARLY_WRITE) {
        sum.at(1, 2) = 1;
    }
    if (mistake == EARLY_REFILL) {
        copy_async(left.run(thread_index() / 2, 0), p.hidden_states, false);
        copy_commit();
        copy_wait<0>();
    }
    if (mistake != NO_PRODUCT_WAIT) {
        warpgroup_wait<0>(sum.block[0]);
    }
    for (int i = 0; i < sum.ROWS; i++) {
        for (int j = 0; j < sum.COLUMNS; j++) {
            int row = thread_index() / 32 * 16 + sum.row(i);
            ((float *)p.output)[row * COLUMNS + sum.column(j)] = sum.at(i, j) + early;
        }
    }
}

}  // namespace

KERNEL(moa_probe_warpgroup, 128, 1, probe(p))
