// Plans that do not load, and contexts that do not run.

#include <cstring>

#include "headers.h"
#include "models.h"

using namespace host;

namespace {

const std::string &small_plan() {
    static const std::string bytes = [] {
        const LibraryOf library;
        Asked asked(LayerModel::golden());
        PlanOf plan;
        DONE(asked.build(library, plan));
        return plan.bytes();
    }();
    return bytes;
}

Answer load(const LibraryOf &library, const std::string &plan, EngineOf &engine) {
    return call(api().engine_create, library.handle, static_cast<const void *>(plan.data()), std::uint64_t{plan.size()}, &engine.handle);
}

Answer load(const std::string &plan) {
    const LibraryOf library;
    EngineOf engine;
    const Answer answer = load(library, plan, engine);
    CHECK((engine.handle == nullptr) == (answer.code != MOA_TRT_OK));
    return answer;
}

struct Context {
    Context() {
        DONE(load(library, small_plan(), engine));
        DONE(call(api().context_create, engine.handle, 0U, &context.handle));
    }
    Answer set(const char *name, const std::vector<std::int64_t> &sizes) {
        const auto wanted = shape(sizes);
        return call(api().set_shape, context.handle, name, &wanted);
    }
    Answer upload(const char *name, std::size_t bytes) {
        const std::string values(bytes, '\0');
        return call(api().upload, context.handle, name, static_cast<const void *>(values.data()), std::uint64_t{bytes});
    }
    void fill() {
        DONE(set("hidden", {1, 2, 32}));
        DONE(set("mask", {1, 2}));
        DONE(upload("hidden", 256));
        DONE(upload("mask", 8));
    }
    Answer download(std::size_t bytes) {
        std::string values(bytes, '\0');
        return call(api().download, context.handle, "output", static_cast<void *>(values.data()), std::uint64_t{bytes});
    }
    Answer run() { return call(api().run, context.handle); }

    LibraryOf library;
    EngineOf engine;
    ContextOf context;
};

}  // namespace

TEST(plans_that_are_cut_or_changed_are_refused) {
    const std::string &plan = small_plan();
    REFUSED(load(""), MOA_TRT_PLAN, "the plan is empty");
    REFUSED(load("not a plan at all"), MOA_TRT_PLAN, "cannot load the plan: Serialization assertion");
    for (std::size_t length = 1; length < plan.size(); length += plan.size() / 37) {
        REFUSED(load(plan.substr(0, length)), MOA_TRT_PLAN, "cannot load the plan");
    }
    REFUSED(load(plan + "more"), MOA_TRT_PLAN, "cannot load the plan");
    // A state of the plugin that it did not write.
    std::string changed = plan;
    changed[changed.size() - 20] = static_cast<char>(changed[changed.size() - 20] ^ 0x55);
    CHECK(load(changed).code != MOA_TRT_OK);
    DONE(load(plan));
}

TEST(plans_of_other_releases_and_devices_are_refused) {
    small_plan();
    tell("version=" + std::to_string(NV_TENSORRT_VERSION + 1));
    REFUSED(load(small_plan()), MOA_TRT_INCOMPATIBLE, "the plan was built by another release than TensorRT");
    tell("capability=70");
    const Answer answer = load(small_plan());
    REFUSED(answer, MOA_TRT_INCOMPATIBLE, "the plan was built for another GPU: ");
    REFUSED(answer, MOA_TRT_INCOMPATIBLE, "expecting compute 7.0 got compute 9.0");
    tell("forget");
    REFUSED(load(small_plan()), MOA_TRT_MISSING, "the plan needs a plugin that is not there");
    tell("load_memory");
    REFUSED(load(small_plan()), MOA_TRT_MEMORY, "out of memory");
    tell("no_runtime");
    REFUSED(load(small_plan()), MOA_TRT_RUNTIME, "makes no runtime");
    tell("odd_format");
    REFUSED(load(small_plan()), MOA_TRT_UNSUPPORTED, "`hidden` is not in the linear format");
}

TEST(shapes_outside_the_profile_are_refused) {
    Context context;
    for (const auto &sizes : {std::vector<std::int64_t>{1, 17, 32}, {0, 7, 32}, {4, 7, 32}, {1, 7, 33}, {1, 7}, {1, 7, 32, 1}}) {
        REFUSED(context.set("hidden", sizes), MOA_TRT_PROFILE, "and profile 0 of the engine takes [1, 1, 32] to [3, 16, 32]");
    }
    REFUSED(context.set("hidden", {1, -1, 32}), MOA_TRT_PROFILE, "impossible shape");
    auto wrong = shape({1, 7, 32});
    wrong.rank = 1 << 20;
    REFUSED(call(api().set_shape, context.context.handle, "hidden", &wrong), MOA_TRT_PROFILE, "dimensions");
    REFUSED(context.set("typo", {1}), MOA_TRT_ARGUMENT, "the engine has no tensor `typo`, it has `hidden`, `mask`, `output`");
    REFUSED(context.set("output", {1, 7, 32}), MOA_TRT_ARGUMENT, "`output` is an output");
    tell("no_shape");
    REFUSED(context.set("hidden", {1, 7, 32}), MOA_TRT_PROFILE, "the shape is not supported");
}

TEST(calls_in_a_wrong_order_are_refused) {
    Context context;
    REFUSED(context.upload("hidden", 256), MOA_TRT_ARGUMENT, "`hidden` has no shape yet");
    REFUSED(context.run(), MOA_TRT_ARGUMENT, "`hidden` has no shape yet");
    moa_trt_shape found{};
    REFUSED(call(api().tensor_shape, context.context.handle, "output", &found), MOA_TRT_ARGUMENT, "`hidden` has no shape yet");
    DONE(context.set("hidden", {1, 2, 32}));
    DONE(context.set("mask", {1, 2}));
    REFUSED(context.run(), MOA_TRT_ARGUMENT, "`hidden` has no values yet");
    REFUSED(context.upload("hidden", 255), MOA_TRT_ARGUMENT, "has 256 bytes, and 255 are given");
    REFUSED(call(api().upload, context.context.handle, "hidden", static_cast<const void *>(nullptr), std::uint64_t{256}), MOA_TRT_ARGUMENT, "none are given");
    REFUSED(context.download(256), MOA_TRT_ARGUMENT, "has not run");
    context.fill();
    DONE(context.run());
    REFUSED(context.download(255), MOA_TRT_ARGUMENT, "has 256 bytes, and there is room for 255");
    DONE(context.download(256));
    DONE(context.set("mask", {1, 2}));
    REFUSED(context.download(256), MOA_TRT_ARGUMENT, "has not run");
    DONE(context.run());
    DONE(context.set("mask", {1, 3}));
    REFUSED(context.run(), MOA_TRT_ARGUMENT, "`mask` has no values yet");
}

TEST(runs_that_fail_say_why) {
    Context context;
    context.fill();
    DONE(context.run());
    tell("run_fails");
    REFUSED(context.run(), MOA_TRT_RUNTIME, "TensorRT does not run the engine: Cuda failure (an illegal memory access");
    REFUSED(context.download(256), MOA_TRT_ARGUMENT, "has not run");
    moa_trt_timing timing{};
    timing.struct_size = sizeof timing;
    REFUSED(call(api().time, context.context.handle, &timing, static_cast<float *>(nullptr)), MOA_TRT_RUNTIME, "does not run");
    tell("run_fails,no_text");
    REFUSED(context.run(), MOA_TRT_RUNTIME, "TensorRT does not run the engine: 2: [fake] Error Code 2: Cuda failure");
    tell("data_shapes");
    DONE(context.set("mask", {1, 2}));
    REFUSED(context.run(), MOA_TRT_UNSUPPORTED, "`output` has the shape [-1, -1, 32], which depends on values");
    tell("no_address");
    REFUSED(context.upload("mask", 8), MOA_TRT_RUNTIME, "does not take an address for `mask`");
    tell("no_context");
    ContextOf other;
    REFUSED(call(api().context_create, context.engine.handle, 0U, &other.handle), MOA_TRT_MEMORY, "makes no execution context");
    tell("");
    // The plugin's own contract: a mask of another length than the sentence.
    DONE(context.set("hidden", {1, 3, 32}));
    DONE(context.upload("hidden", 384));
    const Answer answer = context.run();
    CHECK(answer.code == MOA_TRT_RUNTIME && answer.says("ai.moa: "));
}

TEST(null_is_no_crash) {
    const Context context;
    for (const auto end : {0, 1}) {
        if (end == 0) api().close(nullptr);
        api().plan_destroy(nullptr);
        api().engine_destroy(nullptr);
        api().context_destroy(nullptr);
    }
    moa_trt_engine_info info{};
    info.struct_size = sizeof info;
    REFUSED(call(api().get_engine_info, static_cast<const moa_trt_engine *>(nullptr), &info), MOA_TRT_ARGUMENT, "engine is NULL");
    info.struct_size = 0;
    REFUSED(call(api().get_engine_info, context.engine.handle, &info), MOA_TRT_ARGUMENT, "info has struct_size 0");
    REFUSED(call(api().run, static_cast<moa_trt_context *>(nullptr)), MOA_TRT_ARGUMENT, "context is NULL");
    moa_trt_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    REFUSED(call(api().get_tensor, context.engine.handle, 3U, &tensor), MOA_TRT_ARGUMENT, "has 3 tensors");
    moa_trt_range found{};
    REFUSED(call(api().get_range, context.engine.handle, 1U, "mask", &found), MOA_TRT_ARGUMENT, "no profile 1");
    REFUSED(call(api().get_range, context.engine.handle, 0U, "output", &found), MOA_TRT_ARGUMENT, "is an output");
    REFUSED(call(api().get_range, context.engine.handle, 0U, static_cast<const char *>(nullptr), &found), MOA_TRT_ARGUMENT, "input is NULL");
    moa_trt_timing timing{};
    timing.struct_size = sizeof timing;
    timing.runs = 1;
    REFUSED(call(api().time, context.context.handle, &timing, static_cast<float *>(nullptr)), MOA_TRT_ARGUMENT, "milliseconds is NULL");
    REFUSED(call(api().profile_layers, context.context.handle, 1U, static_cast<moa_trt_on_layer>(nullptr), static_cast<void *>(nullptr)), MOA_TRT_ARGUMENT, "layer is NULL");
}

TEST(long_texts_are_cut) {
    Context context;
    // Letters of two bytes, of which none may be halved.
    std::string name;
    for (int letter = 0; letter < 5000; ++letter) name += "ä";
    const Answer answer = context.set(name.c_str(), {1});
    CHECK(answer.code == MOA_TRT_ARGUMENT && answer.text.size() < sizeof(moa_trt_error) && answer.text.size() > 8000);
    EQUAL(answer.text.substr(answer.text.size() - 3), std::string("..."));
    CHECK(static_cast<unsigned char>(answer.text[answer.text.size() - 4]) == 0xA4);
}
