// TensorRT's log and its errors, for every handle of the process.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "nvinfer.h"

namespace moa::engine {

// Where an open library sends the log.
struct Sink {
    moa_trt_log log;
    std::int32_t severity;
    void *user;
};

// Sends the log there while it lives.
class LogTo {
public:
    explicit LogTo(const Sink &sink);
    ~LogTo();
    LogTo(const LogTo &) = delete;
    LogTo &operator=(const LogTo &) = delete;

private:
    Sink sink_;
};

// The one logger of the process: TensorRT keeps the first that it is given.
nvinfer1::ILogger &logger();

// Takes errors with their codes; made for the builders, runtimes and contexts of all threads.
nvinfer1::IErrorRecorder &recorder();

// The errors of TensorRT and of the plugins while it lives: those of this thread, and those of threads that have none.
class Errors {
public:
    Errors();
    ~Errors();
    Errors(const Errors &) = delete;
    Errors &operator=(const Errors &) = delete;

    // `headline`: the first error, then every error on a line of its own; `code` unless the errors say more.
    Error as(std::int32_t code, const std::string &headline) const;

    // `text` and those errors that it does not hold.
    std::string added_to(std::string text) const;

    bool has(const char *text) const;

private:
    friend void note_error(const std::string &line, bool is_memory);
    friend void note_warning(const std::string &line);

    std::thread::id owner_ = std::this_thread::get_id();
    // Some failures of TensorRT are warnings in its log.
    std::vector<std::string> lines_, warnings_;
    bool is_memory_ = false;
};

}  // namespace moa::engine
