// Configuring, keeping and enqueueing, against kernels that write down what they are asked.

#include <algorithm>
#include <cstring>

#include "host.h"

using namespace host;

namespace {

std::size_t count(const std::vector<std::string> &notes, const std::string &start) {
    return static_cast<std::size_t>(std::count_if(notes.begin(), notes.end(), [&](const std::string &note) {
        return note.rfind(start, 0) == 0 && (note.size() == start.size() || note[start.size()] == ' ');
    }));
}

std::string only(const std::vector<std::string> &notes) {
    if (notes.size() != 1) {
        std::string all;
        for (const auto &note : notes) all += note + "\n";
        throw Failed{"one note is expected:\n" + all};
    }
    return notes.front();
}

// As the kernels write down shapes.
std::string texts(const std::vector<Sizes> &shapes) {
    std::string text;
    for (const auto &shape : shapes) {
        for (std::size_t axis = 0; axis < shape.size(); ++axis) {
            text += (axis == 0 ? " " : "x") + std::to_string(shape[axis]);
        }
    }
    return text;
}

template <class T>
T *at(std::uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// Operator 2 with 4 inputs, for 1 to 8 tokens of fp16.
struct Forward {
    std::vector<DataType> types = legal_types(2, 4, DataType::kHALF);
    std::unique_ptr<Plugin> built = create(2, legal_fields(2));

    std::vector<Sizes> shapes(std::int64_t tokens) const { return legal_shapes(2, 4, tokens, 0); }
    bool configure() { return built->configure(types, shapes(1), shapes(8)); }
    bool enqueue(Plugin &plugin, std::int64_t tokens) const {
        return plugin.enqueue(types, shapes(tokens), {at<void>(16), at<void>(32), at<void>(48), at<void>(64)},
                              {at<void>(80)}, at<void>(4096), at<void>(7));
    }
};

}  // namespace

TEST(configuring_proves_both_ends_and_loads_once) {
    Forward forward;
    CHECK(forward.configure());
    const auto notes = taken_notes();
    CHECK(count(notes, "create") == 1 && count(notes, "load 1") == 1 && count(notes, "output_shapes") == 2);
    CHECK(notes[0].find("shapes 2x1x16 16x6 6x16x5 6x5x16 -") != std::string::npos);
    CHECK(notes[1].find("shapes 2x8x16 16x6 6x16x5 6x5x16 -") != std::string::npos);
    CHECK(forward.configure());
    CHECK(count(taken_notes(), "create") == 0);
}

TEST(attributes_reach_the_kernels) {
    Forward forward;
    CHECK(forward.configure());
    const std::string size = std::to_string(sizeof(moa_cuda_node));
    CHECK(taken_notes()[0].rfind("output_shapes node " + size + " 2 1 0 3 0 0 1 0 0 0 0 0 shapes", 0) == 0);
    const auto own = create(0, legal_fields(0).text("gate_mode", "topk_softmax").text("attention_mode", "stick_breaking"));
    const auto types = legal_types(0, 6, DataType::kFLOAT);
    CHECK(own->configure(types, legal_shapes(0, 6, 1, 0), legal_shapes(0, 6, 1, 0)));
    CHECK(taken_notes()[0].rfind("output_shapes node " + size + " 0 0 0 3 2 2 0 1 1 0 1 0.5 shapes", 0) == 0);
}

// The need of the kernels is no monotone function of the sizes: one in the middle has the largest here.
TEST(the_workspace_serves_every_size_of_the_range) {
    fake_control.workspace = [](const moa_cuda_shape *shapes) -> std::uint64_t {
        return shapes[0].dims[1] == 193 ? 1000000 : 1000;
    };
    const auto plugin = create(2, legal_fields(2));
    const auto types = legal_types(2, 4, DataType::kFLOAT);
    CHECK(plugin->configure(types, legal_shapes(2, 4, 1, 0), legal_shapes(2, 4, 4096, 0)));
    // A quarter more, in whole pieces of 256 bytes.
    EQUAL(plugin->workspace(), std::size_t{1250048});
    const auto notes = taken_notes();
    CHECK(notes.size() < 16400);
    std::size_t ends = 0;
    for (const auto &note : notes) {
        const bool plans = note.rfind("plan_create", 0) == 0;
        ends += plans && (note.find("2x1x16") != std::string::npos || note.find("2x4096x16") != std::string::npos);
    }
    CHECK(ends == 2);
}

TEST(sizes_of_all_inputs_go_together) {
    for (std::size_t index = 0; index < 3; ++index) {
        const std::size_t inputs = moa::contract::operators[index].inputs.count;
        const auto plugin = create(index, legal_fields(index));
        const auto types = legal_types(index, inputs, DataType::kFLOAT);
        CHECK(plugin->configure(types, legal_shapes(index, inputs, 1, 0), legal_shapes(index, inputs, 2, 3)));
        std::string planned, expected;
        for (const auto &note : taken_notes()) {
            if (note.rfind("plan_create", 0) != 0) continue;
            const std::size_t start = note.find(" shapes");
            planned += note.substr(start, note.find(" wanted") - start) + "\n";
        }
        for (const std::int64_t tokens : {1, 2}) {
            for (std::int64_t others = 0; others <= (index == 2 ? 0 : 3); ++others) {
                expected += " shapes" + texts(legal_shapes(index, inputs, tokens, others)) + "\n";
            }
        }
        EQUAL(planned, expected);
    }
}

// An input that is absent stands between others that move.
TEST(sizes_go_together_around_an_absent_input) {
    const auto plugin = create(0, legal_fields(0).integer("present_inputs", 0x1BF));
    auto types = legal_types(0, 9, DataType::kFLOAT);
    auto least = legal_shapes(0, 9, 1, 0), most = legal_shapes(0, 9, 1, 1);
    for (auto *list : {&least, &most}) list->erase(list->begin() + 6);
    types.erase(types.begin() + 6);
    CHECK(plugin->configure(types, least, most));
    const std::string wanted = " shapes 2x1x16 2x2 16x6 6x16x8 16x16 6x8x16 - 2x2x1x4 2x2x1x4";
    const auto notes = taken_notes();
    CHECK(std::any_of(notes.begin(), notes.end(), [&](const std::string &note) {
        return note.rfind("plan_create", 0) == 0 && note.find(wanted) != std::string::npos;
    }));
}

TEST(refused_shapes_and_missing_contexts_fail_the_configuration) {
    for (const char *name : {"create", "load", "output_shapes", "plan_create"}) {
        reset();
        fake_control.failing = name;
        Forward forward;
        CHECK(!forward.configure());
        CHECK(taken_log() == "ai.moa: " + std::string(name) + " was told to fail\n");
        CHECK(!forward.enqueue(*forward.built, 2));
        CHECK(count(taken_notes(), "enqueue") == 0);
    }
    reset();
    fake_control.context = nullptr;
    Forward forward;
    CHECK(!forward.configure());
    CHECK(taken_log() == "ai.moa: no CUDA context is current on this thread\n");
    auto shapes = forward.shapes(2);
    shapes[0] = {2, -1, 16};
    CHECK(!forward.built->configure(forward.types, shapes, shapes));
    CHECK(taken_log() == "ai.moa: MoEFeedForward: `hidden_states` has an impossible shape\n");
}

TEST(states_are_restored_as_they_were) {
    for (std::size_t index = 0; index < 3; ++index) {
        const std::size_t inputs[] = {13, 9, 6};
        const auto types = legal_types(index, inputs[index], DataType::kHALF);
        const auto shapes = legal_shapes(index, inputs[index], 3, 2);
        const auto plugin = create(index, legal_fields(index));
        CHECK(plugin->configure(types, shapes, shapes));
        const auto state = plugin->state();
        const auto restored = restore(index, state);
        CHECK(restored != nullptr && restored->state() == state);
        EQUAL(restored->identity(), plugin->identity());
        EQUAL(restored->outputs(), plugin->outputs());
        EQUAL(restored->workspace(), plugin->workspace());
        CHECK(restore((index + 1) % 3, state) == nullptr);
        CHECK(taken_log().find("is that of another operator") != std::string::npos);
    }
}

// The plan's workspace is allocated by then.
TEST(an_engine_grants_no_more_workspace) {
    Forward forward;
    CHECK(forward.configure());
    const auto loaded = restore(2, forward.built->state());
    const auto granted = loaded->workspace();
    CHECK(loaded->configure(forward.types, forward.shapes(1), forward.shapes(800)));
    EQUAL(loaded->workspace(), granted);
    CHECK(forward.built->configure(forward.types, forward.shapes(1), forward.shapes(800)));
    CHECK(forward.built->workspace() > granted);
    CHECK(forward.configure() && forward.built->workspace() > granted);
}

TEST(damaged_states_are_refused) {
    Forward forward;
    CHECK(forward.configure());
    const auto state = forward.built->state();
    for (std::size_t length = 0; length < state.size(); ++length) {
        CHECK(restore(2, {state.begin(), state.begin() + static_cast<std::ptrdiff_t>(length)}) == nullptr);
    }
    auto longer = state;
    longer.push_back(0);
    CHECK(restore(2, longer) == nullptr);
    for (std::size_t bit = 0; bit < state.size() * 8; ++bit) {
        auto flipped = state;
        flipped[bit / 8] = static_cast<unsigned char>(flipped[bit / 8] ^ 1U << bit % 8);
        CHECK(restore(2, flipped) == nullptr);
    }
    CHECK(restore(2, state) != nullptr);
}

// A state whose checksum was made to fit: every value is judged for itself.
TEST(forged_states_are_refused) {
    Forward forward;
    CHECK(forward.configure());
    const auto state = forward.built->state();
    const auto forged = [&](std::size_t place, std::uint32_t value) {
        auto bytes = state;
        std::memcpy(bytes.data() + place, &value, sizeof value);
        std::uint32_t crc = 0xFFFFFFFFU;
        for (std::size_t index = 0; index + 4 < bytes.size(); ++index) {
            crc ^= bytes[index];
            for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1U ? 0xEDB88320U : 0U);
        }
        crc = ~crc;
        std::memcpy(bytes.data() + bytes.size() - 4, &crc, sizeof crc);
        return bytes;
    };
    CHECK(restore(2, forged(20, 3)) != nullptr);
    // Version, length, kernels, operator, top_k, gate_mode, activation, scale, present_inputs, output_count,
    // input_count, element.
    for (const std::size_t place : {4, 8, 12, 16, 20, 40, 44, 48, 52, 56, 60, 64}) {
        for (const std::uint32_t value : {0x80000000U, 0x7FFFFFFFU, 0x7FC00000U}) {
            const bool is_legal = place == 20 && value < 0x80000000U;
            const bool is_zero = place == 48 && value == 0x80000000U;
            CHECK((restore(2, forged(place, value)) != nullptr) == (is_legal || is_zero));
        }
    }
}

TEST(equal_identities_mean_equal_attributes) {
    if (MOA_PLUGIN_V2 != 0) return;
    const auto plain = create(0, legal_fields(0));
    EQUAL(plain->identity(), create(0, legal_fields(0))->identity());
    EQUAL(plain->identity(), plain->clone()->identity());
    const Fields others[] = {legal_fields(0).integer("top_k", 2),         legal_fields(0).integer("kv_num_heads", 1),
                             legal_fields(0).integer("causal", 0),        legal_fields(0).real("scale", 0.25F),
                             legal_fields(0).integer("output_count", 1),  legal_fields(0).text("gate_mode", "topk_softmax"),
                             legal_fields(0).integer("present_inputs", 63), legal_fields(0).integer("skip_padded_queries", 0)};
    for (const Fields &fields : others) CHECK(create(0, fields)->identity() != plain->identity());
    CHECK(plain->identity().find("kernel_abi=1") != std::string::npos);
}

TEST(a_call_is_one_enqueue_and_nothing_else) {
    Forward forward;
    CHECK(forward.configure());
    const auto loaded = restore(2, forward.built->state());
    const auto context = loaded->attached();
    taken_notes();
    if (MOA_PLUGIN_V2 == 0) CHECK(context->shapes_change(forward.types, forward.shapes(3)));
    if (MOA_PLUGIN_V2 != 0) CHECK(forward.enqueue(*context, 3));
    CHECK(count(taken_notes(), "plan_create") == 1);
    for (int call = 0; call < 3; ++call) {
        CHECK(forward.enqueue(*context, 3));
        EQUAL(only(taken_notes()), std::string("enqueue in 16 32 48 64 0 0 out 80 workspace 4096 enough yes stream 7"));
    }
}

TEST(kernels_are_loaded_when_a_context_is_made) {
    Forward forward;
    CHECK(forward.configure());
    const auto state = forward.built->state();
    forward.built.reset();
    CHECK(count(taken_notes(), "destroy") == 1);
    const auto loaded = restore(2, state);
    CHECK(taken_notes().empty());
    const auto context = loaded->attached();
    auto notes = taken_notes();
    CHECK(count(notes, "create") == 1 && count(notes, "load 1") == 1);
    const auto second = loaded->attached();
    notes = taken_notes();
    CHECK(count(notes, "create") == 0 && count(notes, "load 1") == 1);
}

TEST(each_cuda_context_has_kernels_of_its_own) {
    Forward forward;
    CHECK(forward.configure());
    const auto loaded = restore(2, forward.built->state());
    int another = 0;
    fake_control.context = &another;
    taken_notes();
    const auto context = loaded->attached();
    CHECK(count(taken_notes(), "create") == 1);
}

TEST(a_clone_outlives_its_original) {
    Forward forward;
    CHECK(forward.configure());
    auto copy = forward.built->clone();
    const auto state = forward.built->state();
    forward.built.reset();
    CHECK(copy->state() == state);
    const auto context = copy->attached();
    copy.reset();
    if (MOA_PLUGIN_V2 == 0) CHECK(context->shapes_change(forward.types, forward.shapes(8)));
    CHECK(forward.enqueue(*context, 8));
}

TEST(the_shapes_of_a_call_are_told_without_a_range) {
    Forward forward;
    CHECK(forward.configure());
    const auto loaded = restore(2, forward.built->state());
    const auto context = loaded->attached();
    for (const std::int64_t tokens : {3, 8, 1}) {
        std::string hidden_states;
        const auto shapes = forward.shapes(tokens);
        for (const auto size : shapes.front()) hidden_states += (hidden_states.empty() ? "" : "x") + std::to_string(size);
        taken_notes();
        CHECK(context->shapes_change(forward.types, shapes));
        const auto notes = taken_notes();
        CHECK(!notes.empty());
        for (const auto &note : notes) CHECK(note.find(" " + hidden_states + " ") != std::string::npos);
        CHECK(forward.enqueue(*context, tokens));
    }
    EQUAL(context->workspace(), loaded->workspace());
}

TEST(shapes_take_turns_without_planning_again) {
    Forward forward;
    CHECK(forward.configure());
    const auto context = forward.built->attached();
    for (const std::int64_t tokens : {1, 2, 3, 4}) CHECK(forward.enqueue(*context, tokens));
    taken_notes();
    for (const std::int64_t tokens : {4, 1, 3, 2, 1}) CHECK(forward.enqueue(*context, tokens));
    CHECK(count(taken_notes(), "plan_create") == 0);
    for (std::int64_t tokens = 1; tokens <= 8; ++tokens) CHECK(forward.enqueue(*context, tokens));
}

TEST(shapes_beyond_the_granted_workspace_are_refused) {
    Forward forward;
    CHECK(forward.configure());
    const auto context = forward.built->attached();
    taken_notes();
    CHECK(!forward.enqueue(*context, 4000));
    CHECK(count(taken_notes(), "enqueue") == 0);
    CHECK(taken_log().find("bytes of workspace, and the engine was built with") != std::string::npos);
}

TEST(a_failing_launch_is_reported) {
    Forward forward;
    CHECK(forward.configure());
    const auto context = forward.built->attached();
    fake_control.failing = "enqueue";
    CHECK(!forward.enqueue(*context, 2));
    CHECK(taken_log() == "ai.moa: enqueue was told to fail\n");
    const auto never = create(2, legal_fields(2));
    CHECK(!forward.enqueue(*never, 2));
    CHECK(taken_log().find("was never configured") != std::string::npos);
}

// Tensor addresses go to the schema's positions; positions of 32 bits are widened at the start of the workspace.
TEST(positions_of_32_bits_are_widened) {
    // No bias, no past, rotary tables: inputs 0 to 5 and 9 to 11.
    const auto plugin = create(0, legal_fields(0).integer("present_inputs", 0xE3F));
    auto types = legal_types(0, 12, DataType::kFLOAT);
    auto shapes = legal_shapes(0, 12, 3, 0);
    for (int removed = 0; removed < 3; ++removed) {
        types.erase(types.begin() + 6);
        shapes.erase(shapes.begin() + 6);
    }
    CHECK(plugin->configure(types, shapes, shapes));
    const auto context = plugin->attached();
    const std::int32_t narrow[] = {0, 1, 2, 5, 6, 2147483647};
    alignas(256) std::int64_t workspace[64];
    std::fill(std::begin(workspace), std::end(workspace), -1);
    std::vector<const void *> inputs;
    for (std::uintptr_t address = 1; address <= 8; ++address) inputs.push_back(at<void>(address * 16));
    inputs.push_back(narrow);
    CHECK(plugin->workspace() >= 256 + 6000);
    taken_notes();
    CHECK(context->enqueue(types, shapes, inputs, {at<void>(256), at<void>(512), at<void>(768)}, workspace, at<void>(9)));
    const auto notes = taken_notes();
    const auto start = reinterpret_cast<std::uintptr_t>(workspace);
    CHECK(notes.size() == 4 && notes[1] == "memset stream 9" && notes[2] == "copy stream 9");
    EQUAL(notes[3], "enqueue in 16 32 48 64 80 96 0 0 0 112 128 " + std::to_string(start) + " 0 out 256 512 768 workspace " +
                        std::to_string(start + 256) + " enough yes stream 9");
    for (std::size_t index = 0; index < 6; ++index) CHECK(workspace[index] == narrow[index]);
    CHECK(workspace[6] == -1);
    fake_control.failing = "memset";
    CHECK(!context->enqueue(types, shapes, inputs, {at<void>(256), at<void>(512), at<void>(768)}, workspace, at<void>(9)));
    CHECK(taken_log().find("refused to widen `position_ids`") != std::string::npos);
}

#if MOA_PLUGIN_V2
// The kernels write int64 behind the widened positions, and the output has the same numbers in 32 bits.
TEST(indices_are_narrowed_to_32_bits) {
    const auto plugin = create(0, legal_fields(0).integer("output_count", 5));
    const auto types = legal_types(0, 12, DataType::kFLOAT);
    const auto shapes = legal_shapes(0, 12, 3, 2);
    CHECK(plugin->configure(types, shapes, shapes));
    const auto context = plugin->attached();
    // 48 bytes of positions and 144 of indices, each in whole pieces of 256, 6000 for the kernels, and a quarter more.
    EQUAL(plugin->workspace(), std::size_t{8192});
    alignas(256) std::int64_t workspace[96];
    for (std::int64_t index = 0; index < 96; ++index) workspace[index] = index - 33;
    std::int32_t narrow[19];
    std::fill(std::begin(narrow), std::end(narrow), 99);
    std::int64_t positions[3] = {};
    std::vector<const void *> inputs;
    for (std::uintptr_t address = 1; address <= 11; ++address) inputs.push_back(at<void>(address * 16));
    inputs.push_back(positions);
    const std::vector<void *> outputs{at<void>(256), at<void>(512), at<void>(768), narrow, at<void>(1024)};
    taken_notes();
    CHECK(context->enqueue(types, shapes, inputs, outputs, workspace, at<void>(9)));
    const auto notes = taken_notes();
    CHECK(notes.size() == 5 && notes[4] == "copy stream 9");
    const auto start = reinterpret_cast<std::uintptr_t>(workspace);
    EQUAL(notes[3].substr(notes[3].find("out")), "out 256 512 768 " + std::to_string(start + 256) + " 1024 workspace " +
                                                     std::to_string(start + 512) + " enough yes stream 9");
    // From word 32 on, which is -1, to the 2 * 3 * 3 of the shape.
    for (std::int32_t index = 0; index < 18; ++index) CHECK(narrow[index] == index - 1);
    CHECK(narrow[18] == 99);
    fake_control.failing = "copy";
    CHECK(!context->enqueue(types, shapes, inputs, outputs, workspace, at<void>(9)));
    taken_log();
    const auto routed = create(2, legal_fields(2).integer("output_count", 2));
    fake_control.failing = nullptr;
    CHECK(routed->configure(legal_types(2, 4, DataType::kFLOAT), legal_shapes(2, 4, 3, 0), legal_shapes(2, 4, 3, 0)));
    fake_control.failing = "copy";
    CHECK(!routed->attached()->enqueue(legal_types(2, 4, DataType::kFLOAT), legal_shapes(2, 4, 3, 0),
                                       {at<void>(16), at<void>(32), at<void>(48), at<void>(64)}, {at<void>(80), narrow},
                                       workspace, at<void>(9)));
    CHECK(taken_log().find("refused to narrow `topk_indices`") != std::string::npos);
}

TEST(the_workspace_holds_the_wide_indices_of_every_size) {
    fake_control.workspace = [](const moa_cuda_shape *) -> std::uint64_t { return 1000; };
    const auto types = legal_types(2, 4, DataType::kFLOAT);
    const auto least = legal_shapes(2, 4, 1, 0), most = legal_shapes(2, 4, 4096, 0);
    const auto plain = create(2, legal_fields(2)), routed = create(2, legal_fields(2).integer("output_count", 2));
    CHECK(plain->configure(types, least, most) && routed->configure(types, least, most));
    EQUAL(plain->workspace(), std::size_t{1280});
    // 2 * 4096 * 3 words of 8 bytes more, and a quarter.
    EQUAL(routed->workspace(), std::size_t{247040});
}
#endif

#if NV_TENSORRT_MAJOR >= 10
TEST(positions_of_64_bits_are_taken_as_they_are) {
    const auto plugin = create(0, legal_fields(0));
    auto types = legal_types(0, 12, DataType::kFLOAT);
    types.back() = DataType::kINT64;
    const auto shapes = legal_shapes(0, 12, 3, 2);
    CHECK(plugin->configure(types, shapes, shapes));
    const auto context = plugin->attached();
    std::vector<const void *> inputs;
    for (std::uintptr_t address = 1; address <= 12; ++address) inputs.push_back(at<void>(address * 16));
    taken_notes();
    CHECK(context->enqueue(types, shapes, inputs, {at<void>(256), at<void>(512), at<void>(768)}, at<void>(4096), at<void>(9)));
    const auto notes = taken_notes();
    CHECK(notes.size() == 2);
    EQUAL(notes[1], std::string("enqueue in 16 32 48 64 80 96 112 128 144 160 176 192 0 out 256 512 768 workspace "
                                "4096 enough yes stream 9"));
}
#endif
