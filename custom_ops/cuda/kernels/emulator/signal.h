// The signals of ../hopper.cuh on the host.
//
// What is checked on the way: a signal is begun in front of a barrier, and nobody writes over it; who waits for a phase
// does so while that phase or the one in front of it is under way, since hardware tells phases apart by parity alone; a
// product reads what copies announced to a signal only where every thread of its warpgroup has waited for that phase
// and handed it over; and a block's warpgroups claim no more registers than it was given. Announced copies happen when
// they are announced, or when somebody waits for them; who arrives goes on at once, or behind all others.
#pragma once

struct Signal;

namespace emulator {

void signal_init(Signal &signal, int count);
void signal_arrive(Signal &signal);
void signal_when_copied(Signal &signal);
void signal_wait(Signal &signal, int number);
void change_registers(int count);

}  // namespace emulator

inline void signal_init(Signal &signal, int count) { emulator::signal_init(signal, count); }
inline void signal_arrive(Signal &signal) { emulator::signal_arrive(signal); }
inline void signal_when_copied(Signal &signal) { emulator::signal_when_copied(signal); }
inline void signal_wait(Signal &signal, int number) { emulator::signal_wait(signal, number); }

template <int COUNT>
inline void release_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "as the PTX ISA has it");
    emulator::change_registers(COUNT);
}

template <int COUNT>
inline void claim_registers() {
    release_registers<COUNT>();
}
