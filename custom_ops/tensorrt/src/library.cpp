#include "library.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>

#include "failure.h"

namespace moa {

namespace {

std::atomic<nvinfer1::ILoggerFinder *> finder{nullptr};
std::atomic<void (*)(const char *) noexcept> engine_log{nullptr};

// Loggers became versioned interfaces, and their tables of functions changed: one is called only by the release whose
// headers are compiled in. Plugins and creators are laid out alike from 10.0 on.
bool runs_in_the_release_of_the_headers() {
    const auto version = reinterpret_cast<std::int32_t (*)()>(dlsym(RTLD_DEFAULT, "getInferLibVersion"));
    return version != nullptr && version() / 100 == NV_TENSORRT_VERSION / 100;
}

}  // namespace

void set_engine_log(void (*log)(const char *text) noexcept) { engine_log.store(log); }

void log_error(const char *text) noexcept {
    if (auto *const log = engine_log.load()) {
        try {
            return log((std::string("ai.moa: ") + text).c_str());
        } catch (const std::bad_alloc &) {
            return log(text);
        }
    }
    auto *const source = finder.load();
    try {
        const bool is_callable = source != nullptr && runs_in_the_release_of_the_headers();
        auto *const logger = is_callable ? source->findLogger() : nullptr;
        if (logger != nullptr) {
            const std::string line = std::string("ai.moa: ") + text;
            return logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
        }
    } catch (...) {
        // A logger that fails leaves stderr.
    }
    std::fprintf(stderr, "ai.moa: %s\n", text);
}

}  // namespace moa

#pragma GCC visibility push(default)
extern "C" {

#if MOA_PLUGIN_V2
nvinfer1::IPluginCreator *const *getPluginCreators(std::int32_t &count) { return moa::creators(count); }
#else
nvinfer1::IPluginCreatorInterface *const *getCreators(std::int32_t &count) { return moa::creators(count); }
#endif

void setLoggerFinder(nvinfer1::ILoggerFinder *source) { moa::finder.store(source); }

}  // extern "C"
#pragma GCC visibility pop
