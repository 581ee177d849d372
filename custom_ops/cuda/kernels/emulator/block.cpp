// Blocks of fibers: their order, their barriers and their shared memory.
#include "block.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include "fiber.h"

namespace emulator {

namespace {

const int WARP = 32;
const int MAX_THREADS = 1024;
const size_t STACK_BYTES = 64 << 10;
const size_t MAX_SHARED_BYTES = 228 << 10;
const unsigned SYSTEM_BYTES = 1024;

enum class State { ready, lingering, at_collective, at_signal, at_block, done };

typedef std::vector<Copy *> Copies;

struct Thread {
    Fiber fiber;
    State state = State::done;
    Copies open;
    std::vector<Copies> groups;
    Copies to_announce;
    Copies waited;  // and not handed over
    bool waited_for_grid = false;
};

// Threads on their way to one collective operation.
template <int COUNT>
struct Meeting {
    void (*work)(void *const (&operands)[COUNT]) = nullptr;
    void *operands[COUNT];
    int arrived = 0;
};

Fiber scheduler;
std::vector<Thread> threads(MAX_THREADS);
std::vector<Meeting<WARP>> warps(MAX_THREADS / WARP);
std::vector<Meeting<WARPGROUP>> warpgroups(MAX_THREADS / WARPGROUP);
// All copies of the block.
std::deque<Copy> copies;
// Of every 16 bytes of shared memory, the number of the copy to them that was not handed over, or 0.
std::vector<unsigned> copied(MAX_SHARED_BYTES / 16);
// The event that they belong to instead, or 0.
std::vector<unsigned> events(MAX_SHARED_BYTES / 16);
// And the number of barriers in front of where it was handed over.
std::vector<unsigned> handed(MAX_SHARED_BYTES / 16);
unsigned barriers = 0;
unsigned char *stacks = nullptr;
unsigned char *shared_end = nullptr;
size_t shared_bytes = 0;
int current = 0;
int current_block = 0, block_total = 0;
const char *kernel_name = "";
void (*kernel_function)(const Parameters &) = nullptr;
const Parameters *kernel_parameters = nullptr;
Schedule schedule;

uint64_t next_random() {
    schedule.seed += 0x9e3779b97f4a7c15;
    uint64_t z = schedule.seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// 0, 1, … in the order of the schedule.
std::vector<int> order_of(int count) {
    std::vector<int> order(count);
    for (int i = 0; i < count; i++) {
        order[i] = i;
    }
    if (schedule.order == Order::falling) {
        std::reverse(order.begin(), order.end());
    } else if (schedule.order == Order::random) {
        for (int i = count - 1; i > 0; i--) {
            std::swap(order[i], order[next_random() % (i + 1)]);
        }
    }
    return order;
}

void yield(State state) {
    Thread &own = threads[current];
    own.state = state;
    own.fiber.go_to(scheduler);
}

template <int COUNT>
void meet(std::vector<Meeting<COUNT>> &meetings, void (*work)(void *const (&operands)[COUNT]), void *operand) {
    Meeting<COUNT> &meeting = meetings[current / COUNT];
    const int first = current / COUNT * COUNT;
    if (meeting.arrived > 0 && meeting.work != work) {
        fail("is at another collective operation than the threads that it belongs to");
    }
    meeting.work = work;
    meeting.operands[current - first] = operand;
    if (++meeting.arrived < COUNT) {
        yield(State::at_collective);
        return;
    }
    meeting.arrived = 0;
    work(meeting.operands);
    for (int i = 0; i < COUNT; i++) {
        threads[first + i].state = State::ready;
    }
}

size_t piece_of(const void *address) { return ((const unsigned char *)address - shared_memory()) / 16; }
unsigned &copied_to(const void *address) { return copied[piece_of(address)]; }

// Keeps a list of copies short in kernels that never hand them over.
void forget_overwritten(Copies &waited) {
    if (waited.size() > 4096) {
        auto is_overwritten = [](const Copy *copy) { return copied_to(copy->to) != copy->number; };
        waited.erase(std::remove_if(waited.begin(), waited.end(), is_overwritten), waited.end());
    }
}

void run_thread() {
    kernel_function(*kernel_parameters);
    Thread &own = threads[current];
    end_products();
    if (!own.waited_for_grid) {
        fail("ends without having waited for the grid in front");
    }
    if (!own.open.empty()) {
        fail("ends with asynchronous copies that were never committed");
    }
    for (const Copies &group : own.groups) {
        if (!group.empty()) {
            fail("ends with asynchronous copies that were never waited for");
        }
    }
    yield(State::done);
}

// Runs the lanes of a warp until each waits for others or has ended; false where all did before.
bool run_warp(int warp, int count, const std::vector<int> &lanes) {
    bool progress = true, any = false;
    while (progress) {
        progress = false;
        for (int lane : lanes) {
            int index = warp * WARP + lane;
            if (index < count && threads[index].state == State::ready) {
                current = index;
                scheduler.go_to(threads[index].fiber);
                progress = any = true;
            }
        }
    }
    return any;
}

// Whether some thread lingered, and goes on.
bool end_lingering(int count) {
    bool any = false;
    for (int index = 0; index < count; index++) {
        if (threads[index].state == State::lingering) {
            threads[index].state = State::ready;
            any = true;
        }
    }
    return any;
}

// Runs the warps until each thread waits for the block or for ever, or has ended.
void run_warps(int count) {
    bool progress = true;
    while (progress) {
        progress = false;
        std::vector<int> lanes = order_of(WARP);
        for (int warp : order_of((count + WARP - 1) / WARP)) {
            progress = run_warp(warp, count, lanes) || progress;
        }
        progress = progress || end_lingering(count);
    }
}

void run_block(int count) {
    memset(shared_end - shared_bytes, 0xff, shared_bytes);
    for (int index = 0; index < count; index++) {
        Thread &thread = threads[index];
        thread.state = State::ready;
        thread.open.clear();
        thread.groups.clear();
        thread.to_announce.clear();
        thread.waited.clear();
        thread.waited_for_grid = false;
        thread.fiber.prepare(stacks + index * STACK_BYTES, STACK_BYTES, run_thread);
    }
    for (Meeting<WARP> &warp : warps) {
        warp.arrived = 0;
    }
    for (Meeting<WARPGROUP> &warpgroup : warpgroups) {
        warpgroup.arrived = 0;
    }
    copies.clear();
    std::fill(copied.begin(), copied.end(), 0);
    std::fill(events.begin(), events.end(), 0);
    std::fill(handed.begin(), handed.end(), 0);
    barriers = 1;
    begin_products(count);
    begin_signals(count);
    while (true) {
        run_warps(count);
        int waiting = 0, done = 0;
        for (int index = 0; index < count; index++) {
            waiting += threads[index].state == State::at_block;
            done += threads[index].state == State::done;
        }
        if (done == count) {
            return;
        }
        if (waiting + done < count) {
            fail("waits for ever: some threads are at a signal that too few reach, or at a collective operation that others of their warp or warpgroup never reach");
        }
        if (done != 0) {
            fail("waits at a barrier of the block that other threads ended without");
        }
        for (int index = 0; index < count; index++) {
            threads[index].state = State::ready;
        }
        barriers++;
    }
}

}  // namespace

void fail(const char *what) {
    fprintf(stderr, "kernel %s, block %d, thread %d: %s\n", kernel_name, current_block, current, what);
    exit(1);
}

void describe_place(const char *what) { fprintf(stderr, "kernel %s, block %d, thread %d: %s\n", kernel_name, current_block, current, what); }

unsigned char *shared_memory() { return shared_end - shared_bytes; }
int thread() { return current; }
int block() { return current_block; }
int blocks() { return block_total; }

void wait_for_grid() { threads[current].waited_for_grid = true; }
void block_barrier() { yield(State::at_block); }

void collective(WarpWork work, void *operand) { meet(warps, work, operand); }
void warpgroup_collective(WarpgroupWork work, void *operand) { meet(warpgroups, work, operand); }

void check_shared(const void *address, int bytes) {
    const unsigned char *at = (const unsigned char *)address;
    if (at < shared_memory() || at + bytes > shared_end) {
        fail("an address lies outside the shared memory of the block");
    }
    if ((uintptr_t)at % bytes != 0) {
        fail("an address in shared memory is not aligned");
    }
}

void perform(Copy &copy) {
    if (copy.happened) {
        return;
    }
    copy.happened = true;
    if (copy.keep) {
        memcpy(copy.to, copy.from, 16);
    } else {
        memset(copy.to, 0, 16);
    }
}

void copy(void *to, const void *from, bool keep) {
    check_shared(to, 16);
    if (keep && (uintptr_t)from % 16 != 0) {
        fail("an asynchronous copy reads from an address that is not aligned");
    }
    copies.push_back({to, from, keep, (unsigned)copies.size() + 1, false});
    Copy &copy = copies.back();
    copied_to(to) = copy.number;
    events[piece_of(to)] = 0;
    if (schedule.eager_copies) {
        perform(copy);
    }
    threads[current].open.push_back(&copy);
    threads[current].to_announce.push_back(&copy);
}

void ask(const void *from, unsigned bytes) {
    if ((uintptr_t)from % 16 != 0 || bytes == 0 || bytes % 16 != 0) {
        fail("what is asked ahead is not aligned");
    }
    // A device would fault on an address that is nobody's, and so does this.
    const volatile char *const first = (const volatile char *)from;
    for (unsigned i = 0; i < bytes; i += 4096) {
        (void)first[i];
    }
    (void)first[bytes - 1];
}

void commit() {
    Thread &own = threads[current];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}

void wait(int pending) {
    Thread &own = threads[current];
    while ((int)own.groups.size() > pending) {
        const Copies &oldest = own.groups.front();
        for (Copy *copy : oldest) {
            perform(*copy);
        }
        own.waited.insert(own.waited.end(), oldest.begin(), oldest.end());
        forget_overwritten(own.waited);
        own.groups.erase(own.groups.begin());
    }
}

void hand_over() {
    for (const Copy *copy : threads[current].waited) {
        if (copied_to(copy->to) == copy->number) {
            copied_to(copy->to) = 0;
            handed[piece_of(copy->to)] = barriers;
        }
    }
    threads[current].waited.clear();
    fence_events();
}

Copies copies_to_announce() {
    Copies found = std::move(threads[current].to_announce);
    threads[current].to_announce.clear();
    return found;
}

void hand_to_event(const Copy &copy, unsigned event) {
    if (copied_to(copy.to) == copy.number) {
        copied_to(copy.to) = 0;
        events[piece_of(copy.to)] = event;
    }
}

bool copies_are_eager() { return schedule.eager_copies; }
void suspend() { yield(State::at_signal); }
void linger() { yield(State::lingering); }
void resume(int thread) { threads[thread].state = State::ready; }

unsigned barriers_passed() { return barriers; }
bool is_handed_over(const void *address, unsigned passed, int warpgroup) {
    const unsigned event = events[piece_of(address)];
    if (event != 0) {
        return is_fenced(event, warpgroup);
    }
    return copied_to(address) == 0 && handed[piece_of(address)] < passed;
}
bool products_happen_at_once() { return !schedule.eager_copies; }
unsigned shared_offset(const void *address) { return SYSTEM_BYTES + (unsigned)((const unsigned char *)address - shared_memory()); }
unsigned char *shared_at(unsigned offset) { return shared_memory() + offset - SYSTEM_BYTES; }

unsigned char *guarded(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t inside = (bytes + page - 1) / page * page;
    void *mapped = mmap(nullptr, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char *start = (unsigned char *)mapped + page;
    if (mapped == MAP_FAILED || mprotect(start, inside, PROT_READ | PROT_WRITE) != 0) {
        fail("no memory");
    }
    return start + inside;
}

void run_grid(const Kernel &kernel, const Grid &grid, const Parameters &parameters, const Schedule &wanted) {
    if (stacks == nullptr) {
        stacks = (unsigned char *)mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        shared_end = guarded(MAX_SHARED_BYTES);
    }
    kernel_name = kernel.name;
    kernel_function = kernel.function;
    kernel_parameters = &parameters;
    schedule = wanted;
    shared_bytes = (grid.shared_bytes + 127) / 128 * 128;
    if (grid.block != kernel.threads || grid.block % WARP != 0 || shared_bytes > MAX_SHARED_BYTES) {
        fail("cannot be launched like this");
    }
    block_total = grid.blocks;
    for (int block : order_of(grid.blocks)) {
        current_block = block;
        run_block(grid.block);
    }
}

}  // namespace emulator
