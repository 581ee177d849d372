// Errors inside the library, and the end of them at TensorRT's interfaces, through which nothing may be thrown.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace moa {

// One line for the user: what does not fit, what was expected, what was found.
struct Refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Hands one line to TensorRT's logger, or to stderr where there is none.
void log_error(const char *text) noexcept;

// What `body` returns, or `otherwise` behind a logged line.
template <class T, class Body>
T guarded(T otherwise, Body &&body) noexcept {
    try {
        return std::forward<Body>(body)();
    } catch (const std::exception &error) {
        log_error(error.what());
    } catch (...) {
        log_error("an error of unknown type");
    }
    return otherwise;
}

}  // namespace moa
