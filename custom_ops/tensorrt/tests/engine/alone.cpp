// What happens once in a process: libraries that are missing, or are others.

#include <cstdio>
#include <cstdlib>

#include "headers.h"
#include "models.h"

using namespace host;

namespace {

std::string folder(const std::string &name) { return paths().fakes + "/" + name; }

void print(const Answer &answer) { std::printf("%d %s\n", answer.code, answer.text.c_str()); }

// As `what` says: open a folder, then build, load or ask for the device.
void act(const std::string &what) {
    moa_trt_open_options options{};
    options.struct_size = sizeof options;
    const char *const named = std::getenv("MOA_TEST_FOLDER");
    options.folder = named;
    Held<moa_trt_library> library(api().close);
    const Answer opened = call(api().open, &options, &library.handle);
    if (what == "open" || opened.code != MOA_TRT_OK) return print(opened);
    if (what == "other") {
        Held<moa_trt_library> second(api().close);
        options.folder = "/another/folder";
        return print(call(api().open, &options, &second.handle));
    }
    if (what == "versions") {
        moa_trt_versions versions{};
        versions.struct_size = sizeof versions;
        DONE(call(api().get_versions, library.handle, &versions));
        std::printf("%u.%u.%u parser %s\n", versions.major, versions.minor, versions.patch, versions.parser_path == nullptr ? "none" : versions.parser_path);
        return;
    }
    if (what == "load") {
        Held<moa_trt_engine> engine(api().engine_destroy);
        return print(call(api().engine_create, library.handle, static_cast<const void *>("plan"), std::uint64_t{4}, &engine.handle));
    }
    LayerModel model;
    model.width = 4;
    model.experts = 2;
    model.head = 4;
    model.constants = {{"router", {4, 2}, std::vector<float>(8)}, {"query", {2, 4, 4}, std::vector<float>(32)},
                       {"kv", {4, 8}, std::vector<float>(32)}, {"out", {2, 4, 4}, std::vector<float>(32)}};
    Asked asked(model);
    Held<moa_trt_plan> plan(api().plan_destroy);
    print(call(api().build, library.handle, &asked.options, &plan.handle));
}

}  // namespace

int host::do_alone(const std::string &what) {
    try {
        act(what);
    } catch (const Failed &failed) {
        std::printf("%s\n", failed.text.c_str());
    }
    return 0;
}

std::string host::said_alone(const std::string &what, const std::string &environment) {
    const std::string command = "env " + environment + " " + paths().program + " " + paths().library + " " + paths().fakes + " " +
                                paths().root + " " + what + " 2>&1";
    std::FILE *const output = popen(command.c_str(), "r");
    CHECK(output != nullptr);
    std::string text;
    for (int letter = std::fgetc(output); letter != EOF; letter = std::fgetc(output)) text += static_cast<char>(letter);
    const int status = pclose(output);
    CHECK(status == 0);
    return text;
}

#define SAYS(text, part)                                                                                    \
    do {                                                                                                    \
        const std::string said = (text);                                                                    \
        if (said.find(part) == std::string::npos) throw host::Failed{"expected " + std::string(part) + ": " + said}; \
    } while (false)

TEST(without_tensorrt_there_is_one_clear_line) {
    SAYS(said_alone("open", "LD_LIBRARY_PATH=/nowhere"), "2 there is no TensorRT: libnvinfer.so.");
    SAYS(said_alone("open", "MOA_TEST_FOLDER=/nowhere"), "2 there is no TensorRT: /nowhere/libnvinfer.so.");
}

TEST(another_major_is_refused) {
    const int own = NV_TENSORRT_MAJOR, other = own == 8 ? 10 : 8;
    const std::string told = other == 8 ? "8600" : "100001", name = other == 8 ? "8.6.0" : "10.0.1";
    const std::string wanted = own == 8 ? "8.6" : std::to_string(own);
    const std::string text = "3 libmoa_tensorrt.so was built for TensorRT " + wanted + ", and ";
    // The wrong file, and the right name with a wrong library behind it.
    const std::string renamed = said_alone("open", "MOA_TEST_FOLDER=" + folder("other") + " MOA_FAKE_TENSORRT=version=" + told);
    SAYS(renamed, text);
    SAYS(renamed, "libnvinfer.so." + std::to_string(other) + " is " + name + ": build it against the headers of that release");
    SAYS(said_alone("open", "MOA_TEST_FOLDER=" + paths().fakes + " MOA_FAKE_TENSORRT=version=" + told), text);
    if (own == 8) SAYS(said_alone("open", "MOA_TEST_FOLDER=" + paths().fakes + " MOA_FAKE_TENSORRT=version=8503"), text);
    const std::string newer = own == 8 ? "8601" : std::to_string(own * 10000 + 1300);
    SAYS(said_alone("open", "MOA_TEST_FOLDER=" + paths().fakes + " MOA_FAKE_TENSORRT=version=" + newer), "0 ");
}

TEST(a_process_has_one_tensorrt) {
    SAYS(said_alone("other", "MOA_TEST_FOLDER=" + paths().fakes), "1 this process works with ");
    SAYS(said_alone("open", "MOA_TEST_FOLDER=" + paths().fakes + " MOA_FAKE_TENSORRT=no_register"), "10 TensorRT does not take the plugin MoASelfAttention");
}

TEST(without_a_parser_plans_are_loaded_and_not_built) {
    const std::string here = "MOA_TEST_FOLDER=" + folder("no_parser");
    SAYS(said_alone("build", here), "2 there is no ONNX parser of TensorRT: ");
    SAYS(said_alone("load", here), "6 TensorRT");
    SAYS(said_alone("versions", here), "parser none");
    SAYS(said_alone("versions", "MOA_TEST_FOLDER=" + paths().fakes), "parser " + paths().fakes + "/libnvonnxparser.so.");
}

TEST(without_a_driver_or_device_there_is_one_clear_line) {
    const std::string here = "MOA_TEST_FOLDER=" + paths().fakes + " ";
    for (const std::string what : {"build", "load"}) {
        SAYS(said_alone(what, here + "LD_LIBRARY_PATH=/nowhere"), "2 there is no CUDA driver: libcuda.so.1");
        SAYS(said_alone(what, here + "MOA_FAKE_NO_DEVICE=1"), "2 there is no CUDA device 0: the driver has 0");
    }
}

TEST(without_kernels_nothing_is_built) {
    const std::string here = "MOA_TEST_FOLDER=" + paths().fakes + " ";
    SAYS(said_alone("build", here + "MOA_CUDA_LIBRARY=/nowhere/kernels.so"), "2 MOA_CUDA_LIBRARY=/nowhere/kernels.so cannot be loaded");
}

TEST(versions_and_devices_are_told) {
    moa_trt_target target{};
    target.struct_size = sizeof target;
    DONE(call(api().built_for, &target));
    CHECK(target.abi_version == MOA_TRT_ABI_VERSION && api().abi_version() == MOA_TRT_ABI_VERSION);
    CHECK(target.header_major == NV_TENSORRT_MAJOR && target.header_minor == NV_TENSORRT_MINOR);
    CHECK(target.plugin_interface == (NV_TENSORRT_MAJOR >= 10 ? 3U : 2U));
    moa_trt_device device{};
    device.struct_size = sizeof device;
    DONE(call(api().get_device, 0, &device));
    EQUAL(std::string(device.name), std::string("Fake GPU"));
    EQUAL(std::string(device.uuid), std::string("00010203-0405-0607-0809-0a0b0c0d0e0f"));
    CHECK(device.compute_major == 9 && device.compute_minor == 0 && device.multiprocessors == 132);
    CHECK(device.driver_version == 13000 && device.total_bytes == std::uint64_t{8} << 30);
    REFUSED(call(api().get_device, 1, &device), MOA_TRT_MISSING, "there is no CUDA device 1: the driver has 1");
    REFUSED(call(api().get_device, -1, &device), MOA_TRT_MISSING, "there is no CUDA device -1");
}
