// Tests, and the program that runs them.
#pragma once

#include <string>
#include <type_traits>

namespace host {

struct Failed {
    std::string text;
};

struct Test {
    Test(const char *name, void (*body)());
};

#define TEST(name)                                   \
    static void name();                              \
    static const host::Test registered_##name(#name, name); \
    static void name()

#define CHECK(condition)                                                                            \
    do {                                                                                            \
        if (!(condition)) throw host::Failed{std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition}; \
    } while (false)

template <class Left, class Right>
std::string both(const Left &left, const Right &right) {
    if constexpr (std::is_arithmetic_v<Left>) {
        return std::to_string(left) + " and " + std::to_string(right);
    } else {
        return std::string(left) + "\n  and " + std::string(right);
    }
}

#define EQUAL(left, right)                                                                                \
    do {                                                                                                  \
        const auto &left_value = (left);                                                                  \
        const auto &right_value = (right);                                                                \
        if (!(left_value == right_value)) {                                                               \
            throw host::Failed{std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #left " is\n  " + \
                               host::both(left_value, right_value)};                                      \
        }                                                                                                 \
    } while (false)

// Runs every test behind `reset`, prints them as Rust's runner does; what `log` holds stands beside a failure.
int run_tests(void (*reset)(), std::string (*log)());

}  // namespace host
