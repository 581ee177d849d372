// The C interface as a caller has it: functions of a library that was opened at run time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../harness.h"
#include "moa_tensorrt_engine.h"

namespace host {

#define MOA_TRT_FUNCTIONS(one)                                                                                   \
    one(abi_version) one(built_for) one(open) one(close) one(get_versions) one(get_device) one(build)            \
    one(plan_destroy) one(plan_data) one(plan_bytes) one(plan_timing_cache) one(plan_timing_cache_bytes)          \
    one(engine_create) one(engine_destroy) one(get_engine_info) one(get_tensor) one(get_range) one(engine_layers) \
    one(context_create) one(context_destroy) one(set_shape) one(tensor_shape) one(upload) one(run) one(run_timed) \
    one(download) one(time) one(profile_layers)

struct Api {
#define MOA_MEMBER(name) decltype(moa_trt_##name) *name;
    MOA_TRT_FUNCTIONS(MOA_MEMBER)
#undef MOA_MEMBER
};

const Api &api();

// Paths of this program, of the library, and of the folder with the fakes.
struct Paths {
    std::string program, library, fakes, root;
};
const Paths &paths();

// What the fakes are told until the next test.
void tell(const std::string &words);

// The lines of the log since the test began, as "SEVERITY TEXT\n".
std::string taken_log();

// What a call returns, and the text of its error.
struct Answer {
    std::int32_t code;
    std::string text;

    bool says(const std::string &part) const { return text.find(part) != std::string::npos; }
};

#define REFUSED(answer, expected, part)                                                                          \
    do {                                                                                                         \
        const host::Answer found_answer = (answer);                                                              \
        if (found_answer.code != (expected) || !found_answer.says(part)) {                                       \
            throw host::Failed{std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " + std::to_string(found_answer.code) + \
                               " " + found_answer.text};                                                         \
        }                                                                                                        \
    } while (false)
#define DONE(answer) REFUSED(answer, MOA_TRT_OK, "")

// Calls a function with an error of its own behind its arguments.
template <class Function, class... Arguments>
Answer call(Function *function, Arguments... arguments) {
    moa_trt_error error;
    std::fill(std::begin(error.text), std::end(error.text), 'x');
    const std::int32_t code = function(arguments..., &error);
    return {code, error.text};
}

template <class Handle>
class Held {
public:
    explicit Held(void (*end)(Handle *)) : end_(end) {}
    ~Held() { end_(handle); }
    Held(const Held &) = delete;
    Held &operator=(const Held &) = delete;

    Handle *handle = nullptr;

private:
    void (*end_)(Handle *);
};

struct LibraryOf : Held<moa_trt_library> {
    LibraryOf();
};

moa_trt_shape shape(const std::vector<std::int64_t> &sizes);
moa_trt_range range(const char *input, const std::vector<std::int64_t> &min, const std::vector<std::int64_t> &opt,
                    const std::vector<std::int64_t> &max);

// What one process says that does `what` with these variables: see alone.cpp.
std::string said_alone(const std::string &what, const std::string &environment);
int do_alone(const std::string &what);

}  // namespace host
