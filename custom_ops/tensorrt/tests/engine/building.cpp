// What a builder is told, and what it refuses.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "headers.h"
#include "models.h"

using namespace host;

namespace {

// What the builder was told, as the fake writes it into the plan.
std::string told(Asked &asked) {
    const LibraryOf library;
    PlanOf plan;
    DONE(asked.build(library, plan));
    const std::string bytes = plan.bytes();
    EngineOf engine;
    DONE(call(api().engine_create, library.handle, static_cast<const void *>(bytes.data()), std::uint64_t{bytes.size()}, &engine.handle));
    const char *layers = nullptr;
    DONE(call(api().engine_layers, engine.handle, &layers));
    return layers;
}

std::uint32_t number(const std::string &told, const std::string &name) {
    const auto at = told.find("\"" + name + "\":");
    if (at == std::string::npos) throw Failed{name + " is not told: " + told};
    return static_cast<std::uint32_t>(std::atoi(told.c_str() + at + name.size() + 3));
}

bool has_flag(const std::string &told, nvinfer1::BuilderFlag flag) {
    return (number(told, "flags") >> static_cast<unsigned>(flag) & 1U) != 0;
}

Answer refusal(Asked &asked) {
    const LibraryOf library;
    PlanOf plan;
    plan.handle = reinterpret_cast<moa_trt_plan *>(1);
    const Answer answer = asked.build(library, plan);
    CHECK(plan.handle == nullptr);
    return answer;
}

LayerModel golden() { return LayerModel::golden(); }

}  // namespace

TEST(networks_are_typed_by_the_model) {
    Asked plain(golden());
    const std::string usual = told(plain);
#if NV_TENSORRT_MAJOR >= 10
    EQUAL(number(usual, "network"), 1U << static_cast<unsigned>(nvinfer1::NetworkDefinitionCreationFlag::kSTRONGLY_TYPED));
#else
    using nvinfer1::BuilderFlag;
    EQUAL(number(usual, "network"), 1U << static_cast<unsigned>(nvinfer1::NetworkDefinitionCreationFlag::kEXPLICIT_BATCH));
    CHECK(number(usual, "shares") == 1);
    CHECK(!has_flag(usual, BuilderFlag::kFP16) && !has_flag(usual, BuilderFlag::kOBEY_PRECISION_CONSTRAINTS));
    EQUAL(number(usual, "precision"), static_cast<std::uint32_t>(-1));
    LayerModel halves = golden();
    halves.is_half = halves.is_copied = true;
    Asked half(halves);
    const std::string held = told(half);
    CHECK(has_flag(held, BuilderFlag::kFP16) && has_flag(held, BuilderFlag::kOBEY_PRECISION_CONSTRAINTS));
    CHECK(!has_flag(held, BuilderFlag::kPREFER_PRECISION_CONSTRAINTS));
    // A plugin is held to the types of its outputs alone, since its inputs have several.
    EQUAL(number(held, "precision"), static_cast<std::uint32_t>(-1));
    EQUAL(number(held, "output"), static_cast<std::uint32_t>(nvinfer1::DataType::kHALF));
    const std::string copied = held.substr(held.find("copied"));
    EQUAL(number(copied, "precision"), static_cast<std::uint32_t>(nvinfer1::DataType::kFLOAT));
    EQUAL(number(copied, "output"), static_cast<std::uint32_t>(nvinfer1::DataType::kFLOAT));
    // What nobody returns is f32 for the network, and f16 for the plugin and for what reads it.
    halves.is_routed = true;
    halves.copied = "key";
    Asked routed(halves);
    const std::string behind = told(routed).substr(told(routed).find("copied"));
    EQUAL(number(behind, "precision"), static_cast<std::uint32_t>(nvinfer1::DataType::kHALF));
    EQUAL(number(behind, "output"), static_cast<std::uint32_t>(nvinfer1::DataType::kHALF));
    // What moves values alone is left to TensorRT.
    halves.copied_by = "Reshape";
    Asked moved(halves);
    const std::string left = told(moved).substr(told(moved).find("copied"));
    EQUAL(number(left, "precision"), static_cast<std::uint32_t>(-1));
    EQUAL(number(left, "output"), static_cast<std::uint32_t>(-1));
    half.options.flags = MOA_TRT_PREFER_TYPES;
    const std::string preferred = told(half);
    CHECK(!has_flag(preferred, BuilderFlag::kOBEY_PRECISION_CONSTRAINTS));
    CHECK(has_flag(preferred, BuilderFlag::kPREFER_PRECISION_CONSTRAINTS));
#endif
}

TEST(options_reach_the_builder) {
    using nvinfer1::BuilderFlag;
    Asked asked(golden());
    const std::string usual = told(asked);
    CHECK(!has_flag(usual, BuilderFlag::kTF32) && !has_flag(usual, BuilderFlag::kREFIT));
    CHECK(!has_flag(usual, BuilderFlag::kVERSION_COMPATIBLE));
    CHECK(number(usual, "workspace") == 0 && number(usual, "level") == static_cast<std::uint32_t>(-1));
    CHECK(number(usual, "verbosity") == static_cast<std::uint32_t>(nvinfer1::ProfilingVerbosity::kLAYER_NAMES_ONLY));
    CHECK(number(usual, "sources") == (NV_TENSORRT_MAJOR >= 11 ? 0xFF : 0xF8));
    asked.options.flags = MOA_TRT_TF32;
    asked.options.workspace_bytes = 12345;
    asked.options.optimization_level = 5;
    asked.options.is_detailed = 1;
    const std::string changed = told(asked);
    CHECK(has_flag(changed, BuilderFlag::kTF32));
    CHECK(number(changed, "workspace") == 12345 && number(changed, "level") == 5);
    CHECK(number(changed, "verbosity") == static_cast<std::uint32_t>(nvinfer1::ProfilingVerbosity::kDETAILED));
}

TEST(a_timing_cache_goes_in_and_out) {
    const LibraryOf library;
    Asked asked(golden());
    std::string cache;
    const auto build = [&] {
        PlanOf plan;
        asked.options.timing_cache = cache.data();
        asked.options.timing_cache_bytes = cache.size();
        DONE(asked.build(library, plan));
        return std::string(static_cast<const char *>(api().plan_timing_cache(plan.handle)), api().plan_timing_cache_bytes(plan.handle));
    };
    cache = build();
    EQUAL(cache, std::string("fake cache+"));
    EQUAL(build(), std::string("fake cache++"));
    for (const char *foreign : {"fake cache of an other device", "hostile"}) {
        cache = foreign;
        EQUAL(build(), std::string("fake cache+"));
    }
}

TEST(several_profiles_and_none) {
    const LibraryOf library;
    Asked asked(golden());
    const auto width = asked.ranges[0].max.dims[2];
    const std::vector<moa_trt_range> decoding{range("hidden", {1, 1, width}, {1, 1, width}, {8, 1, width}), range("mask", {1, 1}, {1, 1}, {8, 1})};
    asked.profiles.push_back({decoding.data(), decoding.size()});
    asked.options.profiles = asked.profiles.data();
    asked.options.profile_count = 2;
    PlanOf plan;
    DONE(asked.build(library, plan));
    EngineOf engine;
    DONE(call(api().engine_create, library.handle, api().plan_data(plan.handle), api().plan_bytes(plan.handle), &engine.handle));
    ContextOf context;
    DONE(call(api().context_create, engine.handle, 1U, &context.handle));
    const auto sentence = shape({1, 7, width}), token = shape({8, 1, width});
    REFUSED(call(api().set_shape, context.handle, "hidden", &sentence), MOA_TRT_PROFILE, "profile 1 of the engine takes [1, 1, 32] to [8, 1, 32]");
    DONE(call(api().set_shape, context.handle, "hidden", &token));
    ContextOf none;
    REFUSED(call(api().context_create, engine.handle, 2U, &none.handle), MOA_TRT_ARGUMENT, "has 2 profiles, and no profile 2");
    LayerModel fixed = golden();
    fixed.is_fixed = true;
    Asked without(fixed);
    PlanOf fixed_plan;
    DONE(without.build(library, fixed_plan));
}

TEST(steps_of_a_build_are_told_and_stop_it) {
    const LibraryOf library;
    Asked asked(golden());
    std::string told;
    asked.options.user = &told;
    asked.options.progress = [](void *user, const char *phase, const char *parent, std::int32_t step, std::int32_t steps) -> std::int32_t {
        *static_cast<std::string *>(user) += std::string(phase) + "<" + parent + " " + std::to_string(step) + "/" + std::to_string(steps) + "\n";
        return 0;
    };
    PlanOf plan;
    DONE(asked.build(library, plan));
#if NV_TENSORRT_MAJOR >= 10
    EQUAL(told, std::string("Building< -1/1\nTiming<Building -1/1\nBuilding< 0/1\nTiming<Building 1/1\nBuilding< 1/1\n"));
    asked.options.progress = [](void *, const char *, const char *, std::int32_t, std::int32_t) -> std::int32_t { return 1; };
    PlanOf none;
    REFUSED(asked.build(library, none), MOA_TRT_CANCELLED, "the build is cancelled");
    CHECK(none.handle == nullptr);
#else
    EQUAL(told, std::string());
#endif
}

TEST(every_error_of_the_parser_is_told) {
    LayerModel unknown = golden();
    unknown.op = "MoATypo";
    Asked asked(unknown);
    std::string told;
    asked.options.user = &told;
    asked.options.parser_error = [](void *user, const moa_trt_parser_error *error) {
        *static_cast<std::string *>(user) += std::to_string(error->code) + " " + std::to_string(error->node) + " " + error->node_name + " " +
                                             error->node_operator + " " + error->description + " " + error->file + ":" +
                                             std::to_string(error->line) + " " + error->function;
    };
    const Answer answer = refusal(asked);
    REFUSED(answer, MOA_TRT_MODEL, "the ONNX parser refuses the model: node 0");
    REFUSED(answer, MOA_TRT_MODEL, "getPluginCreator could not find plugin: MoATypo");
    const std::string names = NV_TENSORRT_MAJOR >= 10 ? "layers.0 MoATypo " : "  ";
    EQUAL(told, "8 0 " + names + "getPluginCreator could not find plugin: MoATypo fake/parser.cpp:7 parse");
    if (NV_TENSORRT_MAJOR >= 10) CHECK(answer.says("node 0 `layers.0` (MoATypo): "));
}

TEST(what_a_plugin_refuses_stands_in_the_text) {
    LayerModel wrong = golden();
    wrong.top_k = 0;
    Asked asked(wrong);
    REFUSED(refusal(asked), MOA_TRT_MODEL, "ai.moa: MoASelfAttention: attribute `top_k` must be at least 1");
    wrong.top_k = 5;
    Asked late(wrong);
    const Answer answer = refusal(late);
    REFUSED(answer, MOA_TRT_RUNTIME, "TensorRT builds no engine: ");
    REFUSED(answer, MOA_TRT_RUNTIME, "has 4 experts, and `top_k` is 5");
}

TEST(models_that_are_none_are_refused) {
    Asked asked(golden());
    for (const std::string &bytes : {std::string("\x3a\x7f", 2), std::string(1000, '\xff'), asked.model.substr(0, asked.model.size() / 2)}) {
        asked.options.model = bytes.data();
        asked.options.model_bytes = bytes.size();
        REFUSED(refusal(asked), MOA_TRT_MODEL, "Failed to parse the ONNX model");
    }
    asked.options.model = nullptr;
    REFUSED(refusal(asked), MOA_TRT_ARGUMENT, "there is no model");
    asked.options.model_path = "/nowhere/model.onnx";
    REFUSED(refusal(asked), MOA_TRT_MODEL, "/nowhere/model.onnx");
}

TEST(profiles_that_do_not_fit_are_refused) {
    const auto refused = [](const char *part, const moa_trt_range &one, const moa_trt_range &other) {
        Asked asked(golden());
        asked.ranges = {one, other};
        REFUSED(refusal(asked), MOA_TRT_PROFILE, part);
    };
    const auto hidden = range("hidden", {1, 1, 32}, {1, 7, 32}, {3, 16, 32}), mask = range("mask", {1, 1}, {1, 7}, {3, 16});
    refused("`mask` has a dynamic shape and no range", hidden, hidden);
    refused("has no input `typo`, it has `hidden`, `mask`", hidden, range("typo", {1, 1}, {1, 7}, {3, 16}));
    refused("a range names no input", hidden, range(nullptr, {1, 1}, {1, 7}, {3, 16}));
    refused("`mask` is given [1, 1, 1], and the model says [-1, -1]", hidden, range("mask", {1, 1, 1}, {1, 7, 1}, {3, 16, 1}));
    refused("`hidden` is given [1, 1, 33], and the model says [-1, -1, 32]", range("hidden", {1, 1, 33}, {1, 7, 32}, {3, 16, 32}), mask);
    refused("which do not ascend in dimension 1", hidden, range("mask", {1, 8}, {1, 7}, {3, 16}));
    refused("which do not ascend in dimension 1", hidden, range("mask", {1, 1}, {1, 17}, {3, 16}));
    refused("`mask` has the impossible shape [-1, 1]", hidden, range("mask", {-1, 1}, {1, 7}, {3, 16}));
    moa_trt_range endless = mask;
    endless.max.rank = 9;
    refused("has 9 dimensions", hidden, endless);
    Asked none(golden());
    none.options.profile_count = 0;
    REFUSED(refusal(none), MOA_TRT_PROFILE, "has a dynamic shape, and there is no profile");
    tell("bad_profile");
    Asked asked(golden());
    REFUSED(refusal(asked), MOA_TRT_PROFILE, "TensorRT does not take profile 0");
}

TEST(builders_that_fail_say_why) {
    const struct {
        const char *told;
        std::int32_t code;
        const char *part;
    } cases[] = {
        {"no_builder", MOA_TRT_RUNTIME, "CUDA initialization failure"},
        {"warned", MOA_TRT_RUNTIME, "makes no builder: CUDA initialization failure with error: 36"},
        {"no_network", MOA_TRT_RUNTIME, "TensorRT makes no network"},
        {"no_config", MOA_TRT_RUNTIME, "TensorRT makes no builder configuration"},
        {"no_parser", MOA_TRT_RUNTIME, "TensorRT makes no ONNX parser"},
        {"build_fails", MOA_TRT_RUNTIME, "TensorRT builds no engine: Could not find any implementation for node"},
        {"build_silent", MOA_TRT_RUNTIME, "TensorRT builds no engine, and does not say why"},
        {"build_memory", MOA_TRT_MEMORY, "could not be allocated"},
        {"forget", MOA_TRT_MODEL, "could not find plugin: MoASelfAttention"},
    };
    for (const auto &one : cases) {
        Asked asked(golden());
        tell(one.told);
        const Answer answer = refusal(asked);
        if (answer.code != one.code || !answer.says(one.part)) throw Failed{std::string(one.told) + ": " + answer.text};
    }
}

TEST(what_callers_get_wrong_is_refused) {
    const auto refused = [](const char *part, void (*spoil)(moa_trt_build_options &)) {
        Asked asked(golden());
        spoil(asked.options);
        REFUSED(refusal(asked), MOA_TRT_ARGUMENT, part);
    };
    refused("options has struct_size 8", [](auto &options) { options.struct_size = 8; });
    refused("options has struct_size", [](auto &options) { options.struct_size += 8; });
    refused("an optimisation level of 6", [](auto &options) { options.optimization_level = 6; });
    refused("an optimisation level of -1", [](auto &options) { options.optimization_level = -1; });
    refused("the flags 128 are unknown", [](auto &options) { options.flags = 128; });
    refused("profiles or timing cache are NULL", [](auto &options) { options.profiles = nullptr; });
    refused("profiles or timing cache are NULL", [](auto &options) { options.timing_cache_bytes = 4; });
    Asked asked(golden());
    moa_trt_plan *plan = nullptr;
    REFUSED(call(api().build, static_cast<moa_trt_library *>(nullptr), &asked.options, &plan), MOA_TRT_ARGUMENT, "library is NULL");
    const LibraryOf library;
    REFUSED(call(api().build, library.handle, static_cast<const moa_trt_build_options *>(nullptr), &plan), MOA_TRT_ARGUMENT, "options is NULL");
    REFUSED(call(api().build, library.handle, &asked.options, static_cast<moa_trt_plan **>(nullptr)), MOA_TRT_ARGUMENT, "plan is NULL");
    EQUAL(api().build(library.handle, nullptr, &plan, nullptr), MOA_TRT_ARGUMENT);
    CHECK(api().plan_data(nullptr) == nullptr && api().plan_bytes(nullptr) == 0);
    CHECK(api().plan_timing_cache(nullptr) == nullptr && api().plan_timing_cache_bytes(nullptr) == 0);
}

// What `body` writes to the standard error.
template <class Body>
std::string said(Body &&body) {
    std::FILE *const file = std::tmpfile();
    const int before = dup(STDERR_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    body();
    dup2(before, STDERR_FILENO);
    close(before);
    std::rewind(file);
    std::string text(1 << 16, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    return text;
}

TEST(the_environment_has_the_log_written_to_the_standard_error) {
    const auto build = [] {
        const LibraryOf library;
        Asked asked(golden());
        PlanOf plan;
        DONE(asked.build(library, plan));
    };
    CHECK(said(build).empty());
    setenv("MOA_TENSORRT_LOG", "2", 1);
    CHECK(said(build).find("a builder is made") == std::string::npos);
    setenv("MOA_TENSORRT_LOG", "3", 1);
    CHECK(said(build).find("TensorRT 3: [fake] a builder is made\n") != std::string::npos);
    unsetenv("MOA_TENSORRT_LOG");
}

TEST(the_log_of_the_builder_is_handed_on) {
    const LibraryOf library;
    Asked asked(golden());
    PlanOf plan;
    DONE(asked.build(library, plan));
    CHECK(taken_log().find("3 [fake] a builder is made\n") != std::string::npos);
    tell("build_fails");
    PlanOf none;
    CHECK(asked.build(library, none).code == MOA_TRT_RUNTIME);
    CHECK(taken_log().find("1 2: [fake] Error Code 2: Could not find any implementation") != std::string::npos);
}
