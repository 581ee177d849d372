// Failures inside the engine shim; api.cpp turns them into codes and texts.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "moa_tensorrt_engine.h"

namespace moa::engine {

struct Error : std::runtime_error {
    Error(std::int32_t code, const std::string &text) : std::runtime_error(text), code(code) {}

    std::int32_t code;
};

}  // namespace moa::engine
