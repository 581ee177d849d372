// What happens where the kernels are not as they should be. They are loaded once in a process, so each case has its own.

#include <cstdio>

#include "host.h"

using namespace host;

namespace {

// What a plugin logs in a process of its own that configures it, with `environment` before the command.
std::string said(const std::string &environment, const std::string &abi_version) {
    const std::string command = environment + " " + program() + " " + library_path() + " " + abi_version + " 2>&1";
    std::FILE *const output = popen(command.c_str(), "r");
    CHECK(output != nullptr);
    std::string text;
    for (int letter = std::fgetc(output); letter != EOF; letter = std::fgetc(output)) text += static_cast<char>(letter);
    pclose(output);
    return text;
}

}  // namespace

int host::configure_alone() {
    const auto plugin = create(2, legal_fields(2));
    const auto shapes = legal_shapes(2, 4, 2, 0);
    const bool configured = plugin->configure(legal_types(2, 4, DataType::kFLOAT), shapes, shapes);
    std::printf("%s%s\n", taken_log().c_str(), configured ? "configured" : "refused");
    return 0;
}

TEST(kernels_beside_the_plugin_are_found) { EQUAL(said("", "1"), std::string("configured\n")); }

TEST(kernels_of_another_version_are_refused) {
    const std::string text = said("", "2");
    CHECK(text.find("libmoa_cuda.so has version 2 of its interface, and version 1 is needed") != std::string::npos);
    CHECK(text.find("\nrefused\n") != std::string::npos);
}

TEST(a_library_that_is_named_and_missing_is_refused) {
    const std::string text = said("MOA_CUDA_LIBRARY=/nowhere/kernels.so", "1");
    CHECK(text.find("MOA_CUDA_LIBRARY=/nowhere/kernels.so cannot be loaded") != std::string::npos);
}

TEST(a_library_that_is_no_kernels_is_refused) {
    const std::string text = said("MOA_CUDA_LIBRARY=" + library_path(), "1");
    CHECK(text.find("lacks moa_cuda_abi_version") != std::string::npos);
}
