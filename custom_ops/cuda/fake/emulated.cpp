// The kernels themselves, on the emulator of ../kernels/emulator, for the fake driver to run.

#include <string>
#include <vector>

#include "../kernels/emulator/block.h"

namespace emulator {

static std::vector<Kernel> &kernels() {
    static std::vector<Kernel> all;
    return all;
}

Registration::Registration(const char *name, void (*kernel)(const Parameters &), int threads) {
    kernels().push_back({name, kernel, threads});
}

}  // namespace emulator

// Name of kernel `index` as `MODULE:KERNEL`; null behind the last.
extern "C" const char *emulated_name(size_t index) {
    const auto &all = emulator::kernels();
    return index < all.size() ? all[index].name : nullptr;
}

// Runs one launch whose pointers are addresses of this process; 1 where there is no such kernel.
extern "C" int emulated_launch(const char *name, unsigned blocks, unsigned threads, size_t shared_bytes, const void *parameters) {
    for (const emulator::Kernel &kernel : emulator::kernels()) {
        if (kernel.name == std::string(name)) {
            const emulator::Grid grid = {static_cast<int>(blocks), static_cast<int>(threads), shared_bytes};
            emulator::run_grid(kernel, grid, *static_cast<const Parameters *>(parameters), emulator::Schedule{});
            return 0;
        }
    }
    return 1;
}
