// Runs the launches of a request file under several schedules, and writes the buffers that they leave.
//
// Request, little-endian: count of buffers; of each its bytes (u64), whether it may be written (u64), its content.
// Count of launches (u64); of each the length of its name (u64), the name, blocks, threads, bytes of shared memory (u64
// each) and the parameters, whose pointers are 0 or `(buffer + 1) << 40 | offset`. Result: the contents of all buffers
// that may be written.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "block.h"

namespace emulator {

namespace {

std::vector<Kernel> &kernels() {
    static std::vector<Kernel> all;
    return all;
}

struct Buffer {
    size_t bytes;
    bool writable;
    unsigned char *start;
    unsigned char *initial;
};

struct Launch {
    std::string name;
    Grid grid;
    Parameters parameters;
};

const unsigned char CANARY = 0xa5;

[[noreturn]] void refuse(const std::string &what) {
    fprintf(stderr, "%s\n", what.c_str());
    exit(1);
}

struct Reader {
    FILE *file;

    void bytes(void *to, size_t count) {
        if (count != 0 && fread(to, 1, count, file) != count) {
            refuse("the request ends early");
        }
    }

    uint64_t number() {
        uint64_t value;
        bytes(&value, sizeof value);
        return value;
    }
};

size_t padded(size_t bytes) { return (bytes + 15) / 16 * 16; }

std::vector<Buffer> read_buffers(Reader &reader) {
    std::vector<Buffer> buffers(reader.number());
    for (Buffer &buffer : buffers) {
        buffer.bytes = reader.number();
        buffer.writable = reader.number() != 0;
        buffer.start = guarded(buffer.bytes + 16) - padded(buffer.bytes);
        buffer.initial = (unsigned char *)malloc(buffer.bytes + 1);
        reader.bytes(buffer.initial, buffer.bytes);
    }
    return buffers;
}

void reset(const Buffer &buffer) {
    memset(buffer.start - 16, CANARY, 16 + padded(buffer.bytes));
    memcpy(buffer.start, buffer.initial, buffer.bytes);
}

void protect(const Buffer &buffer) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)(buffer.start - 16) / page * page;
    if (mprotect((void *)first, (uintptr_t)(buffer.start + padded(buffer.bytes)) - first, PROT_READ) != 0) {
        refuse("a buffer cannot be protected");
    }
}

bool canaries_live(const Buffer &buffer) {
    for (int i = 1; i <= 16; i++) {
        if (buffer.start[-i] != CANARY) {
            return false;
        }
    }
    for (size_t i = buffer.bytes; i < padded(buffer.bytes); i++) {
        if (buffer.start[i] != CANARY) {
            return false;
        }
    }
    return true;
}

std::vector<Launch> read_launches(Reader &reader, const std::vector<Buffer> &buffers) {
    std::vector<Launch> launches(reader.number());
    for (Launch &launch : launches) {
        launch.name.resize(reader.number());
        reader.bytes(&launch.name[0], launch.name.size());
        launch.grid.blocks = (int)reader.number();
        launch.grid.block = (int)reader.number();
        launch.grid.shared_bytes = reader.number();
        reader.bytes(&launch.parameters, sizeof launch.parameters);
        uint64_t pointers[PARAMETERS_POINTERS];
        memcpy(pointers, &launch.parameters, sizeof pointers);
        for (uint64_t &pointer : pointers) {
            if (pointer != 0) {
                uint64_t buffer = (pointer >> 40) - 1, offset = pointer & (((uint64_t)1 << 40) - 1);
                if (buffer >= buffers.size() || offset > buffers[buffer].bytes) {
                    refuse("a pointer leaves its buffer");
                }
                pointer = (uint64_t)(uintptr_t)(buffers[buffer].start + offset);
            }
        }
        memcpy(&launch.parameters, pointers, sizeof pointers);
    }
    return launches;
}

void run(const Launch &launch, const Schedule &schedule) {
    for (const Kernel &kernel : kernels()) {
        if (launch.name == kernel.name) {
            run_grid(kernel, launch.grid, launch.parameters, schedule);
            return;
        }
    }
    refuse("there is no kernel " + launch.name);
}

void report_fault(int, siginfo_t *, void *) {
    describe_place("touches memory outside its buffers, or writes to an input");
    _exit(1);
}

void catch_faults() {
    static unsigned char stack[1 << 16];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

Registration::Registration(const char *name, void (*kernel)(const Parameters &), int threads) {
    kernels().push_back({name, kernel, threads});
}

int main(const char *request, const char *result) {
    catch_faults();
    Reader reader = {fopen(request, "rb")};
    if (reader.file == nullptr) {
        refuse("the request cannot be opened");
    }
    std::vector<Buffer> buffers = read_buffers(reader);
    std::vector<Launch> launches = read_launches(reader, buffers);
    for (const Buffer &buffer : buffers) {
        reset(buffer);
        if (!buffer.writable) {
            protect(buffer);
        }
    }
    const Schedule schedules[] = {
        {Order::rising, false, 1}, {Order::falling, true, 2}, {Order::random, false, 3}, {Order::random, true, 4}};
    std::vector<std::vector<unsigned char>> first;
    for (const Schedule &schedule : schedules) {
        for (const Buffer &buffer : buffers) {
            if (buffer.writable) {
                reset(buffer);
            }
        }
        for (const Launch &launch : launches) {
            run(launch, schedule);
        }
        size_t index = 0;
        for (const Buffer &buffer : buffers) {
            if (!canaries_live(buffer)) {
                refuse("a kernel wrote beside buffer " + std::to_string(&buffer - &buffers[0]));
            }
            if (!buffer.writable) {
                continue;
            }
            std::vector<unsigned char> found(buffer.start, buffer.start + buffer.bytes);
            if (index == first.size()) {
                first.push_back(found);
            } else if (first[index] != found) {
                refuse("the order of threads changes buffer " + std::to_string(&buffer - &buffers[0]));
            }
            index++;
        }
    }
    FILE *file = fopen(result, "wb");
    for (const std::vector<unsigned char> &content : first) {
        if (file == nullptr || fwrite(content.data(), 1, content.size(), file) != content.size()) {
            refuse("the result cannot be written");
        }
    }
    return fclose(file);
}

}  // namespace emulator

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: emulator REQUEST RESULT\n");
        return 2;
    }
    return emulator::main(arguments[1], arguments[2]);
}
