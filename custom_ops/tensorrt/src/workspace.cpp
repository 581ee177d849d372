#include "workspace.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "failure.h"

namespace moa {

namespace {

constexpr std::size_t most_visits = 4096;

// Which sizes stand for those between them: every one up to `dense`, then steps by `ratio`.
struct Steps {
    std::int64_t dense;
    double ratio;
};

// From the finest on. Short inputs are cut into parts that fill the device, so that one token more may double the need.
constexpr Steps finest_first[] = {{most_visits, 1.1}, {1024, 1.1}, {512, 1.1}, {256, 1.15}, {128, 1.25},
                                  {64, 1.25},      {16, 1.25},  {1, 1.25},  {1, 1.5625}};

// Sizes that may vary: batch, tokens, and past or source tokens.
enum Symbol : std::size_t { batch, tokens, others, symbol_count };

// A dimension of an input as a sum of symbols.
struct Place {
    std::size_t position;
    std::int32_t axis;
    bool is_tokens, is_others;
};

std::vector<Place> places(std::size_t operator_index) {
    if (operator_index == MOA_CUDA_SELF_ATTENTION) {
        namespace own = contract::self_attention;
        return {{own::hidden_states, 0, false, false}, {own::hidden_states, 1, true, false},
                {own::attention_mask, 0, false, false}, {own::attention_mask, 1, true, true},
                {own::past_key, 0, false, false}, {own::past_key, 2, false, true},
                {own::past_value, 0, false, false}, {own::past_value, 2, false, true},
                {own::position_ids, 0, false, false}, {own::position_ids, 1, true, false}};
    }
    if (operator_index == MOA_CUDA_CROSS_ATTENTION) {
        namespace cross = contract::cross_attention;
        return {{cross::hidden_states, 0, false, false}, {cross::hidden_states, 1, true, false},
                {cross::key, 0, false, false}, {cross::key, 2, false, true},
                {cross::value, 0, false, false}, {cross::value, 2, false, true},
                {cross::key_mask, 0, false, false}, {cross::key_mask, 1, false, true},
                {cross::query_mask, 0, false, false}, {cross::query_mask, 1, true, false}};
    }
    namespace forward = contract::feed_forward;
    return {{forward::hidden_states, 0, false, false}, {forward::hidden_states, 1, true, false}};
}

std::vector<std::int64_t> points(std::int64_t least, std::int64_t most, const Steps &steps) {
    std::vector<std::int64_t> found{most};
    for (std::int64_t point = std::max<std::int64_t>(least, 1); point < most;) {
        found.push_back(point);
        const double next = point < steps.dense ? 0 : std::ceil(static_cast<double>(point) * steps.ratio);
        point = std::max(point + 1, static_cast<std::int64_t>(next));
    }
    found.push_back(least);
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

}  // namespace

void for_each_size(const Node &node, const std::vector<std::size_t> &positions, const Range &range,
                   const std::function<void(const Tensors &)> &visit) {
    std::int64_t least[symbol_count] = {0, 0, 0}, most[symbol_count] = {0, 0, 0};
    std::vector<std::pair<std::size_t, Place>> used;
    for (const Place &place : places(node.operator_index())) {
        const auto found = std::find(positions.begin(), positions.end(), place.position);
        if (found == positions.end()) continue;
        const auto input = static_cast<std::size_t>(found - positions.begin());
        used.emplace_back(input, place);
        if (place.is_tokens && place.is_others) continue;
        const Symbol symbol = place.is_tokens ? tokens : place.is_others ? others : batch;
        least[symbol] = range.least[input].dims.d[place.axis];
        most[symbol] = std::max<std::int64_t>(least[symbol], range.most[input].dims.d[place.axis]);
    }
    std::vector<std::int64_t> grid[symbol_count];
    const auto cut = [&](const Steps &steps) {
        std::size_t visits = 1;
        for (std::size_t symbol = 0; symbol < symbol_count; ++symbol) {
            grid[symbol] = points(least[symbol], most[symbol], steps);
            visits *= grid[symbol].size();
        }
        return visits <= most_visits;
    };
    if (std::none_of(std::begin(finest_first), std::end(finest_first), cut)) {
        for (double ratio = 2; !cut({1, ratio}); ratio *= 1.25) {
        }
    }
    Tensors tensors = range.most;
    for (const std::int64_t b : grid[batch]) {
        for (const std::int64_t t : grid[tokens]) {
            for (const std::int64_t s : grid[others]) {
                for (const auto &[input, place] : used) {
                    const bool is_batch = !place.is_tokens && !place.is_others;
                    const std::int64_t size = is_batch ? b : (place.is_tokens ? t : 0) + (place.is_others ? s : 0);
                    auto &dim = tensors[input].dims.d[place.axis];
                    dim = static_cast<std::remove_reference_t<decltype(dim)>>(size);
                }
                visit(tensors);
            }
        }
    }
}

}  // namespace moa
