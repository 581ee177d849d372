#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include "api.h"

namespace host {

namespace {

Api functions;
Paths places;
std::string logged;

void log_line(void *user, std::int32_t severity, const char *text) {
    *static_cast<std::string *>(user) += std::to_string(severity) + " " + text + "\n";
}

void reset() {
    unsetenv("MOA_FAKE_TENSORRT");
    logged.clear();
}

// An archive with every kernel of the emulator, for libmoa_cuda.
std::string archive(const std::string &emulator) {
    void *const library = dlopen(emulator.c_str(), RTLD_NOW | RTLD_LOCAL);
    auto *const name = library == nullptr ? nullptr : reinterpret_cast<const char *(*)(std::size_t)>(dlsym(library, "emulated_name"));
    if (name == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(2);
    }
    std::string images, payload;
    for (const std::string module : {"f32", "f16", "bf16"}) {
        std::string kernels;
        for (std::size_t index = 0; name(index) != nullptr; ++index) {
            const std::string full = name(index);
            if (full.rfind(module + ":", 0) != 0) continue;
            kernels += std::string(kernels.empty() ? "" : ",") + "{\"name\":\"" + full.substr(module.size() + 1) +
                       "\",\"registers\":40,\"shared_bytes\":0,\"local_bytes\":0,\"max_threads\":256}";
        }
        const std::string image = module + "-sm_90a" + std::string(1, '\0');
        images += std::string(images.empty() ? "" : ",") + "{\"module\":\"" + module + "\",\"target\":\"sm_90a\",\"offset\":" +
                  std::to_string(payload.size()) + ",\"bytes\":" + std::to_string(image.size()) + ",\"kernels\":[" + kernels + "]}";
        payload += image;
    }
    const std::string source = MOA_CUDA_SOURCE_HASH;
    const std::string manifest = "{\"source_hash\":\"" + source + "\",\"compiler\":\"\",\"images\":[" + images + "]}";
    std::uint64_t length = manifest.size();
    return "MOACUDA1" + std::string(reinterpret_cast<const char *>(&length), sizeof length) + manifest + payload;
}

bool load() {
    void *const library = dlopen(places.library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::printf("%s\n", dlerror());
        return false;
    }
#define MOA_FIND(name) functions.name = reinterpret_cast<decltype(moa_trt_##name) *>(dlsym(library, "moa_trt_" #name));
    MOA_TRT_FUNCTIONS(MOA_FIND)
#undef MOA_FIND
#define MOA_CHECK(name) \
    if (functions.name == nullptr) std::printf("moa_trt_" #name " is not exported\n");
    MOA_TRT_FUNCTIONS(MOA_CHECK)
#undef MOA_CHECK
    return functions.abi_version != nullptr && functions.profile_layers != nullptr;
}

}  // namespace

const Api &api() { return functions; }
const Paths &paths() { return places; }
void tell(const std::string &words) { setenv("MOA_FAKE_TENSORRT", words.c_str(), 1); }
std::string taken_log() { return std::exchange(logged, ""); }

LibraryOf::LibraryOf() : Held(api().close) {
    moa_trt_open_options options{};
    options.struct_size = sizeof options;
    options.folder = places.fakes.c_str();
    options.log = log_line;
    options.log_severity = MOA_TRT_LOG_VERBOSE;
    options.user = &logged;
    DONE(call(api().open, &options, &handle));
}

moa_trt_shape shape(const std::vector<std::int64_t> &sizes) {
    moa_trt_shape made{};
    made.rank = static_cast<std::int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), made.dims);
    return made;
}

moa_trt_range range(const char *input, const std::vector<std::int64_t> &min, const std::vector<std::int64_t> &opt,
                    const std::vector<std::int64_t> &max) {
    return {input, shape(min), shape(opt), shape(max)};
}

}  // namespace host

// main LIBRARY FAKES ROOT: the tests; with a word more: that alone.
int main(int count, char **arguments) {
    if (count != 4 && count != 5) return 2;
    host::places = {arguments[0], arguments[1], arguments[2], arguments[3]};
    if (!host::load()) return 1;
    if (count == 5) return host::do_alone(arguments[4]);
    const std::string kernels = host::places.fakes + "/kernels.bin";
    std::ofstream(kernels, std::ios::binary) << host::archive(host::places.fakes + "/libemulated.so");
    setenv("MOA_CUDA_KERNELS", kernels.c_str(), 1);
    return host::run_tests(host::reset, host::taken_log);
}
