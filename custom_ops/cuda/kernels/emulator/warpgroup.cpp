// Products of warpgroups: their factors as the descriptors of the PTX ISA lay them out, and when they happen.
#include <map>
#include <vector>

#include "../hardware.cuh"

namespace emulator {

namespace {

const int ROWS = 64, DEPTH = 16;

// A register that a product owns: a NaN that no arithmetic makes.
const uint32_t OWNED = 0x7fc0dead;

// The registers of one sum of one thread.
struct Sum {
    std::vector<float> value;  // what they hold once all products on them have happened, or held after the last
    int under_way = 0;
};

struct Thread {
    std::map<float *, Sum> sums;
    const float *fenced = nullptr;  // the sum behind the last fence, until a group is closed
    int open = 0;             // products of the open group
    std::vector<int> groups;  // products of each closed group that was not waited for
    int retired = 0;          // products that were waited for
};

struct Operation {
    WarpgroupProduct part[WARPGROUP];
    unsigned fragment[WARPGROUP][4];
    unsigned barriers;  // passed before it was issued
    int warpgroup;
};

struct Group {
    std::vector<Operation> operations;  // all of this block
    int performed = 0;
};

std::vector<Thread> threads;
std::vector<Group> groups;

struct Descriptor {
    int start, leading, stride, swizzle;
};

Descriptor decode(uint64_t bits) {
    auto field = [bits](int first) { return (int)(bits >> first & 0x3fff) << 4; };
    Descriptor found = {field(0), field(16), field(32), (int)(bits >> 62)};
    if ((bits & 0x3ffeC000c000c000) != 0) {
        fail("a descriptor has bits that nothing is known of, or a base offset");
    }
    return found;
}

// Bytes of a line of a pattern, by the number of the swizzle.
const int LINE_BYTES[] = {16, 128, 64, 32};

// The 16-bit element `(outer, inner)` of a factor.
uint16_t element(const Descriptor &from, bool outer_along_line, int outer, int inner, const Operation &operation) {
    const int line_bytes = LINE_BYTES[from.swizzle], line = line_bytes / 2;
    int place;
    if (from.swizzle == NO_SWIZZLE) {
        // Blocks of 8 lines of 16 bytes.
        place = outer_along_line ? outer / 8 * from.stride + inner / 8 * from.leading + inner % 8 * 16 + outer % 8 * 2
                                 : outer / 8 * from.stride + inner / 8 * from.leading + outer % 8 * 16 + inner % 8 * 2;
    } else if (outer_along_line) {
        place = outer / line * from.leading + inner / 8 * from.stride + inner % 8 * line_bytes + outer % line * 2;
    } else {
        place = outer / 8 * from.stride + outer % 8 * line_bytes + inner * 2;
    }
    int address = from.start + place;
    address ^= (address >> 7 & (line_bytes / 16 - 1)) << 4;
    const unsigned char *at = shared_at(address);
    check_shared(at, 2);
    if (!is_handed_over(at, operation.barriers, operation.warpgroup)) {
        fail("a product reads shared memory whose copies were not waited for, handed over and behind a barrier or signal");
    }
    uint16_t bits;
    memcpy(&bits, at, 2);
    return bits;
}

Sum &sum_of(int thread, float *registers) { return threads[thread].sums[registers]; }

// The factors as they are in shared memory: a [64, 16], b [columns, 16].
void read_factors(const Operation &operation, std::vector<double> &a, std::vector<double> &b) {
    const WarpgroupProduct &any = operation.part[0];
    const Descriptor right = decode(any.b), left = decode(any.a);
    a.resize(ROWS * DEPTH);
    b.resize(DEPTH * any.columns);
    for (int lane = 0; any.fragment && lane < WARPGROUP; lane++) {
        for (int i = 0; i < 8; i++) {
            int row = lane / 32 * 16 + lane % 32 / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i % 2 + i / 4 * 8;
            a[row * DEPTH + k] = any.value((uint16_t)(operation.fragment[lane][i / 2] >> i % 2 * 16));
        }
    }
    for (int k = 0; k < DEPTH; k++) {
        for (int row = 0; !any.fragment && row < ROWS; row++) {
            a[row * DEPTH + k] = any.value(element(left, false, row, k, operation));
        }
        for (int column = 0; column < any.columns; column++) {
            b[column * DEPTH + k] = any.value(element(right, any.b_outer, column, k, operation));
        }
    }
}

// Adds up as tensor cores do, without rounding every product: in f64.
void perform(int first_thread, const Operation &operation) {
    const WarpgroupProduct &any = operation.part[0];
    std::vector<double> a, b;
    read_factors(operation, a, b);
    for (int lane = 0; lane < WARPGROUP; lane++) {
        std::vector<float> &sum = sum_of(first_thread + lane, operation.part[lane].sum).value;
        for (int i = 0; i < any.columns / 2; i++) {
            int row = lane / 32 * 16 + lane % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            double total = any.adds ? sum[i] : 0;
            for (int k = 0; k < DEPTH; k++) {
                total += a[row * DEPTH + k] * b[column * DEPTH + k];
            }
            sum[i] = (float)total;
        }
    }
}

// Performs the products of a warpgroup up to the one of this number.
void perform_until(int group, int count) {
    for (int &done = groups[group].performed; done < count; done++) {
        perform(group * WARPGROUP, groups[group].operations[done]);
    }
}

bool all_owned(const float *registers, int count) {
    for (int i = 0; i < count; i++) {
        if (bits_of(registers[i]) != OWNED) {
            return false;
        }
    }
    return true;
}

// Takes over the registers of one thread.
void own(int thread, const WarpgroupProduct &part) {
    const int count = part.columns / 2;
    Thread &state = threads[thread];
    const bool known = state.sums.count(part.sum) != 0;
    Sum &sum = state.sums[part.sum];
    if (sum.under_way > 0) {
        if (!all_owned(part.sum, count)) {
            fail("writes to registers that a product under way owns");
        }
    } else {
        const bool untouched = known && (int)sum.value.size() == count &&
                               memcmp(sum.value.data(), part.sum, count * sizeof(float)) == 0;
        if (state.fenced != part.sum && (!untouched || part.fragment)) {
            fail("begins a product on registers without a fence");
        }
        sum.value.assign(part.sum, part.sum + count);
        for (int i = 0; i < count; i++) {
            part.sum[i] = float_of(OWNED);
        }
    }
    sum.under_way++;
    state.open++;
}

void issue(void *const (&operands)[WARPGROUP]) {
    const int group = thread() / WARPGROUP;
    Operation operation;
    for (int lane = 0; lane < WARPGROUP; lane++) {
        operation.part[lane] = *(const WarpgroupProduct *)operands[lane];
        const WarpgroupProduct &part = operation.part[lane], &first = operation.part[0];
        if (part.a != first.a || part.b != first.b || part.columns != first.columns || part.adds != first.adds) {
            fail("brings other factors to a product than its warpgroup does");
        }
        if (part.fragment) {
            memcpy(operation.fragment[lane], part.fragment, sizeof operation.fragment[lane]);
        }
        own(group * WARPGROUP + lane, part);
    }
    operation.barriers = barriers_passed();
    operation.warpgroup = group;
    groups[group].operations.push_back(operation);
    if (products_happen_at_once()) {
        perform_until(group, (int)groups[group].operations.size());
    } else {
        // What it needs must be there already.
        std::vector<double> a, b;
        read_factors(operation, a, b);
    }
}

// Gives back the registers of the oldest `count` products of a thread.
void retire(int index, int count) {
    Thread &state = threads[index];
    const int group = index / WARPGROUP;
    perform_until(group, state.retired + count);
    for (int i = 0; i < count; i++) {
        const Operation &operation = groups[group].operations[state.retired++];
        const WarpgroupProduct &part = operation.part[index % WARPGROUP];
        const unsigned(&fragment)[4] = operation.fragment[index % WARPGROUP];
        if (part.fragment && memcmp(part.fragment, fragment, sizeof fragment) != 0) {
            fail("changes the left factor of a product under way");
        }
        Sum &sum = state.sums[part.sum];
        if (!all_owned(part.sum, part.columns / 2)) {
            fail("writes to registers that a product under way owns");
        }
        if (--sum.under_way == 0) {
            memcpy(part.sum, sum.value.data(), sum.value.size() * sizeof(float));
        }
    }
}

}  // namespace

void warpgroup_product(const WarpgroupProduct &own) { warpgroup_collective(issue, (void *)&own); }

void warpgroup_fence(const float *sum) {
    sync_warp();
    threads[thread()].fenced = sum;
}

void warpgroup_commit() {
    sync_warp();
    Thread &state = threads[thread()];
    state.groups.push_back(state.open);
    state.open = 0;
    state.fenced = nullptr;
}

void warpgroup_wait(int pending) {
    sync_warp();
    Thread &state = threads[thread()];
    while ((int)state.groups.size() > pending) {
        retire(thread(), state.groups.front());
        state.groups.erase(state.groups.begin());
    }
}

void begin_products(int count) {
    threads.assign(count, Thread());
    groups.assign((count + WARPGROUP - 1) / WARPGROUP, Group());
}

void end_products() {
    const Thread &state = threads[thread()];
    bool waits = state.open > 0;
    for (int group : state.groups) {
        waits = waits || group > 0;
    }
    if (waits) {
        fail("ends with products that were never waited for");
    }
}

}  // namespace emulator
