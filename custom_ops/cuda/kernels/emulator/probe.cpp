// A product of one warpgroup in every layout that a descriptor knows, one of two warpgroups that takes what a third one
// copies, and the same with one mistake: what the emulator is expected to find. Not compiled for a device.
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
    NOT_BEGUN,
    BEGUN_LATE,
    WRITTEN_OVER,
    NO_SIGNAL_WAIT,
    HALF_WAITS,
    ONE_TEAM_WAITS,
    NO_SIGNAL_HAND_OVER,
    OTHER_PHASE,
    TOO_FEW_ARRIVE,
    EARLY_ARRIVAL,
    NO_FREE_WAIT,
    NO_GRID_WAIT,
    TOO_MANY_REGISTERS,
    FREED_EARLY,
    NOT_ALIKE,
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
        for (int i = thread_index() % 128; i < across * along / 8; i += 128) {
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
    if (mistake != NO_GRID_WAIT) {
        wait_for_previous_grid();
    }
    alike(mistake == NOT_ALIKE ? thread_index() / 16 : thread_index() / 128);
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

// Two teams multiply what a third warpgroup copies, twice through the same memory: `hidden_states` is [128, 64], its upper
// half comes first. The first team keeps the first product, the second one the second: `output` is [128, 128].
void probe_signals(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    const Mistake mistake = (Mistake)p.activation;
    if (mistake != NO_GRID_WAIT) {
        wait_for_previous_grid();
    }
    const Factor left = {SWIZZLE_128, ROWS, false, (binary16 *)shared};
    const Factor right = {SWIZZLE_128, COLUMNS, true, (binary16 *)shared + ROWS * DEPTH};
    Signal *signals = (Signal *)(right.start + DEPTH * COLUMNS), &full = signals[0], &free = signals[1];
    const bool early = mistake != BEGUN_LATE;
    for (int turn = 0; turn < 2; turn++) {
        if (thread_index() == 0 && turn == (early ? 0 : 1) && mistake != NOT_BEGUN) {
            signal_init(full, mistake == TOO_FEW_ARRIVE ? 129 : 128);
            signal_init(free, 256);
        }
        if (turn == 0) {
            sync_block();
        }
    }
    if (mistake == WRITTEN_OVER && thread_index() == 256) {
        full.state = 0;
    }
    if (thread_index() >= 256) {
        release_registers<40>();
    } else if (mistake == TOO_MANY_REGISTERS) {
        claim_registers<240>();
    } else {
        claim_registers<232>();
    }
    FragmentSum<16, COLUMNS> sum;
    for (int turn = 0; turn < 2; turn++) {
        if (thread_index() >= 256) {
            if (mistake != NO_FREE_WAIT) {
                signal_wait(free, turn - 1);
            }
            left.fill((const binary16 *)p.hidden_states + turn * ROWS * DEPTH);
            right.fill((const binary16 *)p.input_weight);
            if (mistake == EARLY_ARRIVAL) {
                signal_arrive(full);
            } else {
                signal_when_copied(full);
            }
            copy_commit();
            continue;
        }
        const bool waits = mistake == NO_SIGNAL_WAIT   ? false
                           : mistake == HALF_WAITS     ? thread_index() % 64 < 32
                           : mistake == ONE_TEAM_WAITS ? thread_index() < 128
                                                       : true;
        if (waits) {
            signal_wait(full, mistake == OTHER_PHASE ? 1 - turn : turn);
        }
        if (mistake != NO_SIGNAL_HAND_OVER) {
            fence_products();
        }
        sum.clear();
        multiply<true>(left, right, sum.block[0], NONE);
        if (mistake == FREED_EARLY) {
            signal_arrive(free);
        }
        warpgroup_wait<0>(sum.block[0]);
        if (mistake != FREED_EARLY) {
            signal_arrive(free);
        }
        const int team = thread_index() / 128;
        for (int i = 0; team == turn && i < sum.ROWS; i++) {
            for (int j = 0; j < sum.COLUMNS; j++) {
                int row = turn * ROWS + thread_index() % 128 / 32 * 16 + sum.row(i);
                ((float *)p.output)[row * COLUMNS + sum.column(j)] = sum.at(i, j);
            }
        }
    }
    copy_wait<0>();
}

}  // namespace

KERNEL(moa_probe_signals, 384, 1, probe_signals(p))
KERNEL(moa_probe_warpgroup, 128, 1, probe(p))
