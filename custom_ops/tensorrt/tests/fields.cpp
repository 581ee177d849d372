// Creators, and what they take and refuse.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "host.h"

using namespace host;
using nvinfer1::PluginFieldType;

namespace {

// That `fields` are refused with one line that holds `text`.
void refused(std::size_t index, const Fields &fields, const std::string &text) {
    CHECK(create(index, fields) == nullptr);
    const std::string log = taken_log();
    if (log.find(text) == std::string::npos || std::count(log.begin(), log.end(), '\n') != 1) {
        throw Failed{"expected \"" + text + "\", logged: " + log};
    }
}

}  // namespace

TEST(creators_are_found_under_the_domain) {
    const auto names = creator_names();
    const std::vector<std::string> expected{"ai.moa::MoASelfAttention 1", "ai.moa::MoACrossAttention 1",
                                            "ai.moa::MoEFeedForward 1"};
    CHECK(names == expected);
}

TEST(creators_announce_every_attribute_of_the_contract) {
    for (std::size_t index = 0; index < 3; ++index) {
        std::vector<std::string> expected;
        for (const auto &attribute : moa::contract::operators[index].attributes) expected.emplace_back(attribute.name);
        expected.insert(expected.end(), {"present_inputs", "output_count"});
        CHECK(creator_fields(index) == expected);
    }
}

TEST(legal_fields_make_plugins) {
    const std::int32_t outputs[] = {3, 1, 1};
    for (std::size_t index = 0; index < 3; ++index) {
        const auto plugin = create(index, legal_fields(index));
        CHECK(plugin != nullptr);
        EQUAL(plugin->name(), std::string(moa::contract::operators[index].name));
        EQUAL(plugin->version(), std::string("1"));
        EQUAL(plugin->space(), std::string("ai.moa"));
        EQUAL(plugin->outputs(), outputs[index]);
    }
    EQUAL(taken_log(), std::string());
}

TEST(attributes_of_parsers_are_no_error) {
    auto fields = legal_fields(0).text("plugin_version", "1").text("plugin_namespace", "ai.moa");
    CHECK(create(0, fields) != nullptr);
}

TEST(a_text_may_end_with_a_zero) {
    const char text[] = "topk_softmax";
    auto fields = legal_fields(2).raw("gate_mode", PluginFieldType::kCHAR, text, sizeof text, sizeof text);
    CHECK(create(2, fields) != nullptr);
}

TEST(each_missing_attribute_is_named) {
    for (std::size_t index = 0; index < 3; ++index) {
        for (const auto &attribute : moa::contract::operators[index].attributes) {
            refused(index, legal_fields(index).without(attribute.name),
                    std::string("attribute `") + attribute.name + "` of type ");
        }
        CHECK(create_from_nothing(index) == nullptr);
        CHECK(taken_log().find("there are no fields") != std::string::npos);
    }
}

TEST(each_wrong_type_is_named) {
    const double number = 1.0;
    for (std::size_t index = 0; index < 3; ++index) {
        for (const auto &attribute : moa::contract::operators[index].attributes) {
            const std::string where = std::string("attribute `") + attribute.name + "`";
            refused(index, legal_fields(index).raw(attribute.name, PluginFieldType::kFLOAT64, &number, sizeof number, 1),
                    where);
        }
    }
}

TEST(each_wrong_length_is_named) {
    const std::int32_t two[] = {1, 1};
    for (std::size_t index = 0; index < 3; ++index) {
        for (const auto &attribute : moa::contract::operators[index].attributes) {
            const std::string where = std::string("attribute `") + attribute.name + "`";
            const auto type = attribute.kind == moa::contract::Kind::integer ? PluginFieldType::kINT32
                              : attribute.kind == moa::contract::Kind::real  ? PluginFieldType::kFLOAT32
                                                                             : PluginFieldType::kCHAR;
            for (const std::int32_t length : {-1, 0, 2, std::numeric_limits<std::int32_t>::max()}) {
                refused(index, legal_fields(index).raw(attribute.name, type, two, sizeof two, length), where);
            }
        }
    }
}

TEST(hostile_values_are_refused) {
    for (std::size_t index = 0; index < 3; ++index) {
        refused(index, legal_fields(index).integer("top_k", 0), "`top_k` must be at least 1");
        refused(index, legal_fields(index).integer("top_k", -1), "`top_k`: must be between 0 and");
        refused(index, legal_fields(index).integer("top_k", std::numeric_limits<std::int32_t>::min()), "found -2147483648");
        refused(index, legal_fields(index).text("gate_mode", ""), "must be one of softmax_topk, softmax_topk_renorm");
        refused(index, legal_fields(index).text("gate_mode", std::string("softmax_topk\0x", 14)), "must be one of");
        refused(index, legal_fields(index).integer("typo", 1), "attribute `typo` is unknown");
        refused(index, legal_fields(index).integer("output_count", 6), "`output_count` must be between 1 and");
        refused(index, legal_fields(index).integer("present_inputs", 1), "`present_inputs` lacks");
        refused(index, legal_fields(index).integer("present_inputs", 1 << 30), "names inputs that");
        const std::int32_t scales[] = {0xE03F, 0x6FF, 0xCF};
        refused(index, legal_fields(index).integer("present_inputs", scales[index]), "names inputs that");
    }
    for (const std::size_t index : {0, 1}) {
        refused(index, legal_fields(index).integer("kv_num_heads", 0), "`kv_num_heads` must be at least 1");
        refused(index, legal_fields(index).real("scale", std::nanf("")), "`scale`: must be finite");
        refused(index, legal_fields(index).real("scale", std::numeric_limits<float>::infinity()), "`scale`: must be finite");
        refused(index, legal_fields(index).integer("skip_padded_queries", 2), "must be 0 or 1, found 2");
    }
    refused(0, legal_fields(0).integer("causal", 2), "`causal` must be 0 or 1, found 2");
    refused(2, legal_fields(2).integer("gated", 2), "`gated` must be 0 or 1, found 2");
    refused(2, legal_fields(2).text("activation", "tanh"), "must be one of relu, gelu, silu, gelu_tanh, found \"tanh\"");
    refused(0, legal_fields(0).text("attention_mode", "linear"), "must be one of softmax, stick_breaking, found \"linear\"");
    refused(0, legal_fields(0).integer("causal", 0).text("attention_mode", "stick_breaking"), "which needs `causal` = 1");
}

TEST(routing_is_an_output_that_is_asked_for) {
    CHECK(create(0, legal_fields(0))->outputs() == 3);
    CHECK(create(0, legal_fields(0).integer("output_count", 5))->outputs() == 5);
}
