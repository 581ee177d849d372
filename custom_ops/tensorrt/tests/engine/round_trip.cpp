// From a model to numbers, through the plugin and the kernels themselves.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "models.h"

using namespace host;

namespace {

struct Ready {
    explicit Ready(const std::string &plan) {
        DONE(call(api().engine_create, library.handle, static_cast<const void *>(plan.data()), std::uint64_t{plan.size()}, &engine.handle));
        DONE(call(api().context_create, engine.handle, 0U, &context.handle));
    }

    void feed(const std::vector<std::int64_t> &sizes, const std::vector<float> &values) {
        const auto hidden = shape(sizes), mask = shape({sizes[0], sizes[1]});
        const std::vector<std::int32_t> ones(static_cast<std::size_t>(sizes[0] * sizes[1]), 1);
        DONE(call(api().set_shape, context.handle, "hidden", &hidden));
        DONE(call(api().set_shape, context.handle, "mask", &mask));
        DONE(call(api().upload, context.handle, "hidden", static_cast<const void *>(values.data()), std::uint64_t{values.size() * 4}));
        DONE(call(api().upload, context.handle, "mask", static_cast<const void *>(ones.data()), std::uint64_t{ones.size() * 4}));
    }
    std::vector<float> output(std::size_t count) {
        std::vector<float> values(count, -1.0F);
        DONE(call(api().download, context.handle, "output", static_cast<void *>(values.data()), std::uint64_t{count * 4}));
        return values;
    }

    LibraryOf library;
    EngineOf engine;
    ContextOf context;
};

std::string plan_of(const LayerModel &model) {
    const LibraryOf library;
    Asked asked(model);
    asked.options.is_detailed = 1;
    PlanOf plan;
    DONE(asked.build(library, plan));
    return plan.bytes();
}

// A plan of the golden layer; made once.
const std::string &golden_plan() {
    static const std::string bytes = plan_of(LayerModel::golden());
    return bytes;
}

double worst(const std::vector<float> &found, const std::vector<float> &expected) {
    double most = found.size() == expected.size() ? 0.0 : INFINITY;
    for (std::size_t index = 0; index < std::min(found.size(), expected.size()); ++index) {
        const double off = std::fabs(static_cast<double>(found[index]) - static_cast<double>(expected[index]));
        most = off <= most ? most : off;
    }
    return most;
}

}  // namespace

TEST(a_trained_layer_gives_its_numbers) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query"), &expected = layer.at("output");
    Ready ready(golden_plan());
    ready.feed(input.sizes, input.values);
    DONE(call(api().run, ready.context.handle));
    moa_trt_shape found{};
    DONE(call(api().tensor_shape, ready.context.handle, "output", &found));
    CHECK(found.rank == 3 && std::equal(found.dims, found.dims + 3, input.sizes.begin()));
    const double off = worst(ready.output(expected.values.size()), expected.values);
    if (!(off < 1e-5)) throw Failed{"off by " + std::to_string(off)};
}

// As int32 in 8.6, which has no int64.
TEST(the_chosen_experts_are_an_output) {
#if MOA_PLUGIN_V2
    using Index = std::int32_t;
    constexpr std::int32_t element = MOA_TRT_INT32;
#else
    using Index = std::int64_t;
    constexpr std::int32_t element = MOA_TRT_INT64;
#endif
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query"), &probs = layer.at("router.probs"), &gates = layer.at("router.gates");
    LayerModel model = LayerModel::golden();
    model.is_routed = true;
    Ready ready(plan_of(model));
    moa_trt_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    DONE(call(api().get_tensor, ready.engine.handle, 3U, &tensor));
    CHECK(std::string(tensor.name) == "indices" && tensor.element == element);
    ready.feed(input.sizes, input.values);
    DONE(call(api().run, ready.context.handle));
    std::vector<Index> found(gates.values.size(), -1);
    const std::uint64_t bytes = found.size() * sizeof(Index);
    DONE(call(api().download, ready.context.handle, "indices", static_cast<void *>(found.data()), bytes));
    const auto experts = static_cast<std::size_t>(model.experts), top_k = static_cast<std::size_t>(model.top_k);
    for (std::size_t slot = 0; slot < found.size(); ++slot) {
        CHECK(found[slot] >= 0 && found[slot] < model.experts);
        // An expert's gate is its probability.
        CHECK(probs.values[slot / top_k * experts + static_cast<std::size_t>(found[slot])] == gates.values[slot]);
    }
    CHECK(worst(ready.output(layer.at("output").values.size()), layer.at("output").values) < 1e-5);
}

TEST(shapes_change_between_runs) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query"), &expected = layer.at("output");
    Ready ready(golden_plan());
    // One token alone, and then the same sentence three times over.
    const std::vector<float> first(input.values.begin(), input.values.begin() + input.sizes[2]);
    ready.feed({1, 1, input.sizes[2]}, first);
    DONE(call(api().run, ready.context.handle));
    CHECK(worst(ready.output(first.size()), std::vector<float>(first.size(), 0.0F)) > 1e-3);
    std::vector<float> thrice, expected_thrice;
    for (int turn = 0; turn < 3; ++turn) {
        thrice.insert(thrice.end(), input.values.begin(), input.values.end());
        expected_thrice.insert(expected_thrice.end(), expected.values.begin(), expected.values.end());
    }
    ready.feed({3, input.sizes[1], input.sizes[2]}, thrice);
    DONE(call(api().run, ready.context.handle));
    CHECK(worst(ready.output(thrice.size()), expected_thrice) < 1e-5);
}

TEST(handles_end_in_any_order_and_outlive_each_other) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query");
    auto ready = std::make_unique<Ready>(golden_plan());
    api().engine_destroy(ready->engine.handle);
    ready->engine.handle = nullptr;
    api().close(ready->library.handle);
    ready->library.handle = nullptr;
    ready->feed(input.sizes, input.values);
    DONE(call(api().run, ready->context.handle));
    CHECK(worst(ready->output(input.values.size()), layer.at("output").values) < 1e-5);
}

TEST(two_contexts_of_one_engine_run_on_two_threads) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query"), &expected = layer.at("output");
    Ready first(golden_plan()), second(golden_plan());
    // The second one on the engine of the first.
    std::swap(second.engine.handle, first.engine.handle);
    ContextOf beside;
    DONE(call(api().context_create, second.engine.handle, 0U, &beside.handle));
    std::swap(second.context.handle, beside.handle);
    double off[2] = {INFINITY, INFINITY};
    const auto work = [&](Ready &ready, double &most) {
        ready.feed(input.sizes, input.values);
        DONE(call(api().run, ready.context.handle));
        most = worst(ready.output(expected.values.size()), expected.values);
    };
    std::thread other([&] { work(second, off[1]); });
    work(first, off[0]);
    other.join();
    CHECK(off[0] < 1e-5 && off[1] < 1e-5);
}

TEST(an_engine_tells_what_it_has) {
    Ready ready(golden_plan());
    moa_trt_engine_info info{};
    info.struct_size = sizeof info;
    DONE(call(api().get_engine_info, ready.engine.handle, &info));
    CHECK(info.tensor_count == 3 && info.profile_count == 1 && info.layer_count == 1 && info.device_bytes == 4096);
    const char *const names[] = {"hidden", "mask", "output"};
    const std::int32_t elements[] = {MOA_TRT_FLOAT, MOA_TRT_INT32, MOA_TRT_FLOAT};
    for (std::uint32_t index = 0; index < 3; ++index) {
        moa_trt_tensor tensor{};
        tensor.struct_size = sizeof tensor;
        DONE(call(api().get_tensor, ready.engine.handle, index, &tensor));
        EQUAL(std::string(tensor.name), std::string(names[index]));
        CHECK(tensor.element == elements[index] && (tensor.is_input == 1) == (index < 2) && tensor.is_on_host == 0);
        CHECK(tensor.shape.rank == (index == 1 ? 2 : 3) && tensor.shape.dims[0] == -1);
    }
    moa_trt_range found{};
    DONE(call(api().get_range, ready.engine.handle, 0U, "mask", &found));
    EQUAL(std::string(found.input), std::string("mask"));
    CHECK(found.min.dims[1] == 1 && found.opt.dims[1] == 7 && found.max.dims[0] == 3 && found.max.dims[1] == 16);
    const char *layers = nullptr;
    DONE(call(api().engine_layers, ready.engine.handle, &layers));
    CHECK(std::string(layers).find("\"Name\":\"layers.0\"") != std::string::npos);
}

TEST(runs_are_timed_one_by_one) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query");
    Ready ready(golden_plan());
    ready.feed(input.sizes, input.values);
    for (const std::uint32_t use_graph : {0U, 1U}) {
        moa_trt_timing timing{};
        timing.struct_size = sizeof timing;
        timing.warmup = 2;
        timing.runs = 5;
        timing.use_graph = use_graph;
        timing.flush_bytes = 1024;
        std::vector<float> times(6, -1.0F);
        DONE(call(api().time, ready.context.handle, &timing, times.data()));
        // The clock of the fake goes on by half a millisecond with each event.
        CHECK(times == std::vector<float>({0.5F, 0.5F, 0.5F, 0.5F, 0.5F, -1.0F}));
        int left = 3;
        timing.user = &left;
        timing.is_cancelled = [](void *user) -> std::int32_t { return --*static_cast<int *>(user) == 0; };
        REFUSED(call(api().time, ready.context.handle, &timing, times.data()), MOA_TRT_CANCELLED, "cancelled");
        // Runs that ended before are whole.
        CHECK(!ready.output(layer.at("output").values.size()).empty());
    }
}

TEST(a_run_tells_the_time_between_its_events) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query");
    Ready timed(golden_plan()), plain(golden_plan());
    timed.feed(input.sizes, input.values);
    plain.feed(input.sizes, input.values);
    DONE(call(api().run, plain.context.handle));
    for (int turn = 0; turn < 2; ++turn) {
        float milliseconds = -1.0F;
        DONE(call(api().run_timed, timed.context.handle, &milliseconds));
        EQUAL(milliseconds, 0.5F);
    }
    const std::size_t count = layer.at("output").values.size();
    CHECK(timed.output(count) == plain.output(count));
    REFUSED(call(api().run_timed, timed.context.handle, static_cast<float *>(nullptr)), MOA_TRT_ARGUMENT, "milliseconds is NULL");
    tell("run_fails");
    float milliseconds = 0.0F;
    REFUSED(call(api().run_timed, timed.context.handle, &milliseconds), MOA_TRT_RUNTIME, "does not run the engine");
}

TEST(layers_are_timed) {
    const auto layer = read_layer("self_small");
    const auto &input = layer.at("input.query");
    Ready ready(golden_plan());
    ready.feed(input.sizes, input.values);
    std::string told;
    const moa_trt_on_layer note = [](void *user, std::uint32_t run, const char *name, float milliseconds) {
        *static_cast<std::string *>(user) += std::to_string(run) + name + (milliseconds == 0.25F ? " " : "?");
    };
    DONE(call(api().profile_layers, ready.context.handle, 2U, note, static_cast<void *>(&told)));
    EQUAL(told, std::string("0layers.0 1layers.0 "));
    DONE(call(api().run, ready.context.handle));
    EQUAL(told, std::string("0layers.0 1layers.0 "));
}
