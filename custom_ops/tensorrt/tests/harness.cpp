#include "harness.h"

#include <cstdio>
#include <vector>

namespace host {

namespace {

struct Entry {
    const char *name;
    void (*body)();
};

std::vector<Entry> &entries() {
    static std::vector<Entry> all;
    return all;
}

}  // namespace

Test::Test(const char *name, void (*body)()) { entries().push_back({name, body}); }

int run_tests(void (*reset)(), std::string (*log)()) {
    int passed = 0, failed = 0;
    std::printf("running %zu tests\n", entries().size());
    for (const Entry &entry : entries()) {
        reset();
        try {
            entry.body();
            std::printf("test %s ... ok\n", entry.name);
            ++passed;
        } catch (const Failed &failure) {
            std::printf("test %s ... FAILED\n  %s\n  log: %s\n", entry.name, failure.text.c_str(), log().c_str());
            ++failed;
        }
        std::fflush(stdout);
    }
    std::printf("\ntest result: %s. %d passed; %d failed; 0 ignored; 0 measured; 0 filtered out\n",
                failed ? "FAILED" : "ok", passed, failed);
    return failed ? 1 : 0;
}

}  // namespace host
