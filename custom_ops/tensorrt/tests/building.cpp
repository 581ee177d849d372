// Types, formats and shapes: what a builder asks.

#include "host.h"

using namespace host;

namespace {

constexpr std::size_t all_inputs[] = {12, 9, 5};

// The type of `topk_indices`.
#if MOA_PLUGIN_V2
constexpr DataType integers = DataType::kINT32;
#else
constexpr DataType integers = DataType::kINT64;
#endif

std::string joined(const std::optional<std::vector<std::string>> &texts) {
    std::string all;
    for (const auto &text : texts.value_or(std::vector<std::string>{"refused"})) all += text;
    return all;
}

std::vector<DataType> activations() {
    std::vector<DataType> types{DataType::kFLOAT, DataType::kHALF};
#if NV_TENSORRT_MAJOR >= 10
    types.push_back(DataType::kBF16);
#endif
    return types;
}

}  // namespace

TEST(outputs_have_the_type_of_the_hidden_states) {
    for (std::size_t index = 0; index < 3; ++index) {
        for (const DataType activation : activations()) {
            const auto plugin = create(index, legal_fields(index));
            const auto found = plugin->types(legal_types(index, all_inputs[index], activation));
            CHECK(found == std::vector<DataType>(static_cast<std::size_t>(plugin->outputs()), activation));
        }
    }
}

TEST(self_attention_appends_its_tokens_to_the_past) {
    const auto plugin = create(0, legal_fields(0));
    std::vector<Sizes> shapes{{-1, -2, 16}, {-1, -4}, {16, 6}, {6, 16, 8}, {16, 16}, {6, 8, 16}};
    EQUAL(joined(plugin->shapes(shapes)), std::string("[B, T, 16][B, 2, T, 4][B, 2, T, 4]"));
    shapes.insert(shapes.end(), {{16}, {-1, 2, -3, 4}, {-1, 2, -3, 4}});
    EQUAL(joined(plugin->shapes(shapes)), std::string("[B, T, 16][B, 2, (P + T), 4][B, 2, (P + T), 4]"));
}

TEST(absent_inputs_in_the_middle_are_told_by_an_attribute) {
    // No bias: inputs 0 to 5, 7 and 8.
    const auto plugin = create(0, legal_fields(0).integer("present_inputs", 0x1BF));
    std::vector<Sizes> shapes{{-1, 1, 16}, {-1, -4}, {16, 6}, {6, 16, 8}, {16, 16}, {6, 8, 16}, {-1, 2, 7, 4}, {-1, 2, 7, 4}};
    EQUAL(joined(plugin->shapes(shapes)), std::string("[B, 1, 16][B, 2, 8, 4][B, 2, 8, 4]"));
    shapes.pop_back();
    CHECK(!plugin->shapes(shapes));
    CHECK(taken_log().find("7 inputs do not fit") != std::string::npos);
    const auto half = create(0, legal_fields(0).integer("present_inputs", 0x0BF));
    CHECK(!half->shapes(shapes));
    CHECK(taken_log().find("`past_key` to `past_value` are given together") != std::string::npos);
}

TEST(scales_of_int8_weights_are_no_inputs) {
    CHECK(!create(2, legal_fields(2))->shapes({{-1, -2, 16}, {16, 6}, {6, 16, 5}, {6, 5, 16}, {16}, {6, 5}, {6, 16}}));
    CHECK(taken_log().find("7 inputs do not fit") != std::string::npos);
}

TEST(routers_may_read_an_input_of_their_own) {
    std::vector<Sizes> shapes{{-1, -2, 16}, {7, 6}, {6, 16, 5}, {6, 5, 16}, {16}, {-1, -2, 7}};
    EQUAL(joined(create(2, legal_fields(2))->shapes(shapes)), std::string("[B, T, 16]"));
    shapes[1][0] = 16;
    CHECK(!create(2, legal_fields(2))->shapes(shapes));
    CHECK(taken_log().find("`router_weight` must have 7 in dimension 0, found 16") != std::string::npos);
}

TEST(keys_and_values_may_be_the_hidden_states) {
    // Inputs 0 to 3, 5, and 12, which the router reads.
    const auto plugin = create(0, legal_fields(0).integer("present_inputs", 0x102F));
    std::vector<Sizes> shapes{{-1, -2, 8}, {-1, -4}, {3, 6}, {6, 8, 8}, {6, 8, 8}, {-1, -2, 3}};
    EQUAL(joined(plugin->shapes(shapes)), std::string("[B, T, 8][B, 2, T, 4][B, 2, T, 4]"));
    shapes[3][2] = 16;
    CHECK(!plugin->shapes(shapes));
    CHECK(taken_log().find("`query_weight` must have 8 in dimension 2, found 16") != std::string::npos);
}

TEST(the_other_operators_keep_the_shape_of_the_hidden_states) {
    const auto cross = create(1, legal_fields(1));
    const std::vector<Sizes> shapes{{-1, -2, 16}, {-1, 2, -4, 4}, {-1, 2, -4, 4}, {-1, -4}, {-1, -2}, {16, 6}, {6, 16, 8},
                                    {6, 8, 16}};
    EQUAL(joined(cross->shapes(shapes)), std::string("[B, T, 16]"));
    const auto forward = create(2, legal_fields(2));
    EQUAL(joined(forward->shapes({{-1, -2, 16}, {16, 6}, {6, 16, 5}, {6, 5, 16}})), std::string("[B, T, 16]"));
}

TEST(routing_has_a_slot_for_each_chosen_expert) {
    const auto plugin = create(2, legal_fields(2).integer("output_count", 3));
    EQUAL(joined(plugin->shapes({{-1, -2, 16}, {16, 6}, {6, 16, 5}, {6, 5, 16}})),
          std::string("[B, T, 16][B, T, 3][B, T, 3]"));
    const std::vector<DataType> expected{DataType::kHALF, integers, DataType::kFLOAT};
    auto types = legal_types(2, 4, DataType::kHALF);
    CHECK(plugin->types(types) == expected);
    types.insert(types.end(), expected.begin(), expected.end());
    std::vector<nvinfer1::PluginTensorDesc> tensors;
    for (const DataType type : types) tensors.push_back(tensor(type, {1}));
    for (std::int32_t place = 0; place < 7; ++place) CHECK(plugin->supports(place, tensors, 4));
    tensors[5].type = DataType::kFLOAT;
    CHECK(!plugin->supports(5, tensors, 4));
#if NV_TENSORRT_MAJOR >= 10
    tensors[5].type = MOA_PLUGIN_V2 != 0 ? DataType::kINT64 : DataType::kINT32;
    CHECK(!plugin->supports(5, tensors, 4));
#endif
}

TEST(constant_shapes_that_cannot_fit_are_refused) {
    const auto refused = [](const char *text, const Fields &fields, std::size_t index, std::size_t input, Sizes shape) {
        auto shapes = legal_shapes(index, index == 0 ? 9 : all_inputs[index], 3, 2);
        shapes[input] = std::move(shape);
        CHECK(!create(index, fields)->shapes(shapes));
        const std::string log = taken_log();
        if (log.find(text) == std::string::npos) throw Failed{"expected \"" + std::string(text) + "\": " + log};
    };
    for (std::size_t index = 0; index < 3; ++index) {
        const std::size_t router = index == 0 ? 2 : index == 1 ? 5 : 1;
        refused("has 6 experts, and `top_k` is 7", legal_fields(index).integer("top_k", 7), index, router, {16, 6});
        refused("`router_weight` must have 16 in dimension 0, found 17", legal_fields(index), index, router, {17, 6});
        refused("`router_weight` must have 2 dimensions, found 3", legal_fields(index), index, router, {16, 6, 1});
        refused("`hidden_states` must have 3 dimensions, found 2", legal_fields(index), index, 0, {2, 16});
    }
    CHECK(create(2, legal_fields(2).integer("top_k", 6))->shapes(legal_shapes(2, 5, 3, 0)));
    refused("which `kv_num_heads` = 3 does not divide", legal_fields(0).integer("kv_num_heads", 3), 0, 7, {2, 3, 2, 4});
    refused("`past_key` must have 2 in dimension 1, found 3", legal_fields(0), 0, 7, {2, 3, 2, 4});
    refused("`key` must have 4 in dimension 3, found 5", legal_fields(1), 1, 1, {2, 2, 2, 5});
}

// Every type and format at every place, behind legal neighbours: exactly one family is taken.
TEST(one_family_of_formats_is_taken) {
    std::vector<DataType> every{DataType::kFLOAT, DataType::kHALF, DataType::kINT8, DataType::kINT32, DataType::kBOOL};
#if NV_TENSORRT_MAJOR >= 10
    every.insert(every.end(), {DataType::kUINT8, DataType::kFP8, DataType::kBF16, DataType::kINT64, DataType::kINT4});
#endif
    for (std::size_t index = 0; index < 3; ++index) {
        for (const DataType activation : activations()) {
            const auto plugin = create(index, legal_fields(index));
            const auto inputs = all_inputs[index];
            auto types = legal_types(index, inputs, activation);
            types.insert(types.end(), static_cast<std::size_t>(plugin->outputs()), activation);
            std::vector<nvinfer1::PluginTensorDesc> tensors;
            for (const DataType type : types) tensors.push_back(tensor(type, {1}));
            for (std::size_t place = 0; place < types.size(); ++place) {
                const bool is_positions = index == 0 && place == moa::contract::self_attention::position_ids;
                for (const DataType type : every) {
                    for (std::int32_t format = 0; format < 13; ++format) {
                        auto given = tensors;
                        given[place].type = type;
                        given[place].format = static_cast<nvinfer1::TensorFormat>(format);
                        bool expected = type == types[place] || (place == 0 && type == DataType::kFLOAT) ||
                                        (place == 0 && type == DataType::kHALF);
#if NV_TENSORRT_MAJOR >= 10
                        expected = expected || (place == 0 && type == DataType::kBF16) ||
                                   (is_positions && type == DataType::kINT64);
#endif
                        expected = expected && given[place].format == nvinfer1::TensorFormat::kLINEAR;
                        (void)is_positions;
                        const auto position = static_cast<std::int32_t>(place);
                        CHECK(plugin->supports(position, given, static_cast<std::int32_t>(inputs)) == expected);
                    }
                }
            }
            CHECK(!plugin->supports(-1, tensors, static_cast<std::int32_t>(inputs)));
            CHECK(!plugin->supports(static_cast<std::int32_t>(tensors.size()), tensors, static_cast<std::int32_t>(inputs)));
        }
    }
}
