#include "log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "library.h"

namespace moa::engine {

namespace {

// More than any call needs, so that a loop of errors does not eat the memory.
constexpr std::size_t kept_errors = 64, kept_warnings = 8;

struct State {
    std::mutex door;
    std::vector<const Sink *> sinks;
    std::vector<Errors *> calls;
};

// Never destroyed: TensorRT logs until the process ends.
State &state() {
    static State *const one = new State;
    return *one;
}

bool tells_of_memory(const std::string &line) {
    for (const char *words : {"out of memory", "OutOfMemory", "bad_alloc", "insufficient memory"}) {
        if (line.find(words) != std::string::npos) return true;
    }
    return false;
}

// A line may come through the log and through the recorder, with and without a prefix.
void add_line(std::vector<std::string> &lines, const std::string &line) {
    if (line.empty() || lines.size() == kept_errors) return;
    const bool is_known = std::any_of(lines.begin(), lines.end(), [&](const std::string &known) {
        return known.find(line) != std::string::npos || line.find(known) != std::string::npos;
    });
    if (!is_known) lines.push_back(line);
}

}  // namespace

// The door is held.
void note_error(const std::string &line, bool is_memory) {
    auto &calls = state().calls;
    const auto here = std::this_thread::get_id();
    const bool is_owned = std::any_of(calls.begin(), calls.end(), [&](const Errors *call) { return call->owner_ == here; });
    for (Errors *const call : calls) {
        if (is_owned && call->owner_ != here) continue;
        call->is_memory_ = call->is_memory_ || is_memory || tells_of_memory(line);
        add_line(call->lines_, line);
    }
}

// As above; the last warning comes first, for it is the nearest to the failure.
void note_warning(const std::string &line) {
    for (Errors *const call : state().calls) {
        auto &known = call->warnings_;
        known.erase(std::remove(known.begin(), known.end(), line), known.end());
        known.insert(known.begin(), line);
        if (known.size() > kept_warnings) known.pop_back();
    }
}

namespace {

// Names the least grave severity that is written to the standard error too, for a process that dies within TensorRT.
constexpr const char *severity_variable = "MOA_TENSORRT_LOG";

void tell_the_user(std::int32_t severity, const char *line) {
    const char *const least = std::getenv(severity_variable);
    if (least == nullptr || *least == '\0' || severity > std::atoi(least)) return;
    std::fprintf(stderr, "TensorRT %d: %s\n", static_cast<int>(severity), line);
}

void log_line(std::int32_t severity, const char *text) noexcept {
    try {
        const std::string line = text == nullptr ? "" : text;
        auto &shared = state();
        const std::lock_guard<std::mutex> lock(shared.door);
        tell_the_user(severity, line.c_str());
        if (severity <= MOA_TRT_LOG_ERROR) note_error(line, false);
        if (severity == MOA_TRT_LOG_WARNING) note_warning(line);
        for (const Sink *const sink : shared.sinks) {
            if (sink->log != nullptr && severity <= sink->severity) sink->log(sink->user, severity, line.c_str());
        }
    } catch (...) {
        // A line that there is no memory for.
    }
}

class Logger final : public nvinfer1::ILogger {
public:
    void log(Severity severity, const nvinfer1::AsciiChar *text) noexcept override {
        log_line(static_cast<std::int32_t>(severity), text);
    }
};

class Recorder final : public nvinfer1::IErrorRecorder {
public:
    std::int32_t getNbErrors() const noexcept override {
        const std::lock_guard<std::mutex> lock(door_);
        return static_cast<std::int32_t>(codes_.size());
    }
    nvinfer1::ErrorCode getErrorCode(std::int32_t index) const noexcept override {
        const std::lock_guard<std::mutex> lock(door_);
        const auto place = static_cast<std::size_t>(index);
        return index >= 0 && place < codes_.size() ? codes_[place] : nvinfer1::ErrorCode::kINVALID_ARGUMENT;
    }
    // The texts are in the call's own list.
    ErrorDesc getErrorDesc(std::int32_t) const noexcept override { return ""; }
    bool hasOverflowed() const noexcept override { return false; }
    void clear() noexcept override {
        const std::lock_guard<std::mutex> lock(door_);
        codes_.clear();
    }
    bool reportError(nvinfer1::ErrorCode code, ErrorDesc text) noexcept override {
        try {
            {
                const std::lock_guard<std::mutex> lock(door_);
                if (codes_.size() < kept_errors) codes_.push_back(code);
            }
            const std::lock_guard<std::mutex> lock(state().door);
            note_error(text == nullptr ? "" : text, code == nvinfer1::ErrorCode::kFAILED_ALLOCATION);
        } catch (...) {
            // An error that there is no memory for.
        }
        return true;
    }
    RefCount incRefCount() noexcept override { return ++references_; }
    RefCount decRefCount() noexcept override { return --references_; }

private:
    mutable std::mutex door_;
    std::vector<nvinfer1::ErrorCode> codes_;
    std::atomic<RefCount> references_{0};
};

void log_plugin_error(const char *text) noexcept { log_line(MOA_TRT_LOG_ERROR, text); }

}  // namespace

LogTo::LogTo(const Sink &sink) : sink_(sink) {
    auto &shared = state();
    const std::lock_guard<std::mutex> lock(shared.door);
    shared.sinks.push_back(&sink_);
    set_engine_log(log_plugin_error);
}

LogTo::~LogTo() {
    auto &shared = state();
    const std::lock_guard<std::mutex> lock(shared.door);
    shared.sinks.erase(std::remove(shared.sinks.begin(), shared.sinks.end(), &sink_), shared.sinks.end());
    if (shared.sinks.empty()) set_engine_log(nullptr);
}

nvinfer1::ILogger &logger() {
    static Logger *const one = new Logger;
    return *one;
}

nvinfer1::IErrorRecorder &recorder() {
    static Recorder *const one = new Recorder;
    return *one;
}

Errors::Errors() {
    const std::lock_guard<std::mutex> lock(state().door);
    state().calls.push_back(this);
}

Errors::~Errors() {
    const std::lock_guard<std::mutex> lock(state().door);
    auto &calls = state().calls;
    calls.erase(std::remove(calls.begin(), calls.end(), this), calls.end());
}

Error Errors::as(std::int32_t code, const std::string &headline) const {
    const std::lock_guard<std::mutex> lock(state().door);
    std::string text = headline;
    const auto &told = lines_.empty() ? warnings_ : lines_;
    if (told.empty()) text += ", and does not say why";
    for (const std::string &line : told) text += (&line == &told.front() ? ": " : "\n") + line;
    return Error(is_memory_ ? MOA_TRT_MEMORY : code, text);
}

std::string Errors::added_to(std::string text) const {
    const std::lock_guard<std::mutex> lock(state().door);
    for (const std::string &line : lines_) {
        if (text.find(line) == std::string::npos) text += "\n" + line;
    }
    return text;
}

bool Errors::has(const char *text) const {
    const std::lock_guard<std::mutex> lock(state().door);
    return std::any_of(lines_.begin(), lines_.end(),
                       [&](const std::string &line) { return line.find(text) != std::string::npos; });
}

}  // namespace moa::engine
