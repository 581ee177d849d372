// Signals: barriers at which some threads arrive and others wait.
#include <bitset>
#include <deque>
#include <map>
#include <vector>

#include "block.h"

namespace emulator {

namespace {

// Copies that a thread announced to a signal and that have not happened.
struct Announcement {
    int thread;
    std::vector<Copy *> copies;
};

struct State {
    int count = 0, arrived = 0;
    int phase = 0;  // the one under way
    unsigned event = 0, ended_event = 0;  // the end of that phase, and of the one in front of it
    unsigned begun = 0;  // barriers passed when it was
    std::vector<Announcement> late;
    std::vector<int> waiting;
};

std::map<const Signal *, State> signals;
// What each thread has announced, and no announcement made happen.
std::vector<std::deque<Copy *>> announced;
// The events that each thread has waited for and not handed over.
std::vector<std::vector<unsigned>> acquired;
// The threads of each warpgroup that have handed an event over.
std::vector<std::map<unsigned, std::bitset<WARPGROUP>>> fenced;
unsigned events = 0;
// Registers of a thread of each warpgroup, 0 until it asks for a number.
std::vector<int> registers;

// What the memory of a signal holds.
uint64_t mark_of(const Signal &signal) { return 0x5160a1ull << 32 | shared_offset(&signal); }

State &state_of(Signal &signal) {
    auto found = signals.find(&signal);
    if (found == signals.end() || found->second.begun == barriers_passed()) {
        fail("uses a signal that was not begun in front of a barrier");
    }
    if (signal.state != mark_of(signal)) {
        fail("finds that somebody wrote over a signal");
    }
    return found->second;
}

void arrive(State &state) {
    if (++state.arrived < state.count) {
        return;
    }
    state.arrived = 0;
    state.phase++;
    state.ended_event = state.event;
    state.event = ++events;
    for (int thread : state.waiting) {
        resume(thread);
    }
    state.waiting.clear();
}

// The copies of an announcement, and those in front of it, happen.
void come_true(State &state, const Announcement &announcement) {
    std::deque<Copy *> &all = announced[announcement.thread];
    while (!announcement.copies.empty() && !all.empty() && all.front()->number <= announcement.copies.back()->number) {
        perform(*all.front());
        all.pop_front();
    }
    for (Copy *copy : announcement.copies) {
        hand_to_event(*copy, state.event);
    }
    arrive(state);
}

void come_true_now(State &state) {
    std::vector<Announcement> late = std::move(state.late);
    state.late.clear();
    for (const Announcement &announcement : late) {
        come_true(state, announcement);
    }
}

// Registers of a block: as many for each thread, a multiple of 8, as the file of a multiprocessor has.
void change(void *const (&operands)[WARPGROUP]) {
    registers[thread() / WARPGROUP] = *(const int *)operands[0];
    int total = 0;
    for (int count : registers) {
        if (count == 0) {
            return;
        }
        total += count;
    }
    const int warpgroups = (int)registers.size();
    if (total > (64 << 10) / (warpgroups * WARPGROUP) / 8 * 8 * warpgroups) {
        fail("claims registers that its block was not given, and waits for ever");
    }
}

}  // namespace

void signal_init(Signal &signal, int count) {
    check_shared(&signal, sizeof(Signal));
    State state;
    state.count = count;
    state.event = ++events;
    state.begun = barriers_passed();
    signals[&signal] = state;
    signal.state = mark_of(signal);
}

void signal_arrive(Signal &signal) {
    arrive(state_of(signal));
    // Whatever it set free is used at once, where products come late.
    if (!products_happen_at_once()) {
        linger();
    }
}

void signal_when_copied(Signal &signal) {
    State &state = state_of(signal);
    const Announcement announcement = {thread(), copies_to_announce()};
    std::deque<Copy *> &all = announced[thread()];
    all.insert(all.end(), announcement.copies.begin(), announcement.copies.end());
    if (copies_are_eager() || !state.waiting.empty()) {
        come_true(state, announcement);
    } else {
        state.late.push_back(announcement);
    }
}

void signal_wait(Signal &signal, int number) {
    State &state = state_of(signal);
    come_true_now(state);
    if (state.phase != number && state.phase != number + 1) {
        fail("waits for a phase of a signal that hardware would take for another one");
    }
    while (state.phase == number) {
        state.waiting.push_back(thread());
        suspend();
    }
    if (state.phase != number + 1) {
        fail("waits for a phase of a signal while the next one ends");
    }
    acquired[thread()].push_back(state.ended_event);
}

void change_registers(int count) { warpgroup_collective(change, &count); }

void begin_signals(int threads) {
    signals.clear();
    announced.assign(threads, {});
    acquired.assign(threads, {});
    fenced.assign((threads + WARPGROUP - 1) / WARPGROUP, {});
    registers.assign(fenced.size(), 0);
    events = 0;
}

void fence_events() {
    for (unsigned event : acquired[thread()]) {
        fenced[thread() / WARPGROUP][event].set(thread() % WARPGROUP);
    }
    acquired[thread()].clear();
}

bool is_fenced(unsigned event, int warpgroup) {
    auto found = fenced[warpgroup].find(event);
    return found != fenced[warpgroup].end() && found->second.all();
}

}  // namespace emulator
