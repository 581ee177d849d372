// Switching between stacks.
#pragma once

#include <cstddef>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

#if defined(__x86_64__)

// Saves the registers that a function keeps, and the stack; goes on with the stack `to`.
extern "C" void emulator_switch(void **from, void *to);

asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

struct Fiber {
    void *stack_pointer = nullptr;

    // Prepares `entry`, which must never return, on a stack.
    void prepare(unsigned char *stack, size_t bytes, void (*entry)()) {
        void **top = (void **)(stack + bytes) - 2;
        top[0] = (void *)entry;
        for (int i = 1; i <= 6; i++) {
            top[-i] = nullptr;
        }
        stack_pointer = top - 6;
    }

    void go_to(Fiber &other) { emulator_switch(&stack_pointer, other.stack_pointer); }
};

#else



struct Fiber {
    ucontext_t context;

    void prepare(unsigned char *stack, size_t bytes, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = bytes;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }

    void go_to(Fiber &other) { swapcontext(&context, &other.context); }
};

#endif

}  // namespace emulator
