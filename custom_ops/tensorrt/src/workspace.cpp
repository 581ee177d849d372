#include "workspace.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

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

// A dimension of an input that varies, as a sum of symbols.
struct Place {
    std::size_t input;
    std::size_t axis;
    std::vector<Symbol> symbols;
};

std::vector<Symbol> symbols_of(contract::Extent extent) {
    switch (extent) {
        case contract::Extent::batch: return {batch};
        case contract::Extent::tokens: return {tokens};
        case contract::Extent::others: return {others};
        case contract::Extent::tokens_and_others: return {tokens, others};
        case contract::Extent::fixed: break;
    }
    return {};
}

std::vector<Place> places(const contract::Operator &contract, const std::vector<std::size_t> &positions) {
    std::vector<Place> found;
    for (std::size_t input = 0; input < positions.size(); ++input) {
        for (std::size_t axis = 0; axis < contract::max_rank; ++axis) {
            auto symbols = symbols_of(contract.inputs[positions[input]].extents[axis]);
            if (!symbols.empty()) found.push_back({input, axis, std::move(symbols)});
        }
    }
    return found;
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
    const std::vector<Place> varying = places(node.contract(), positions);
    for (const Place &place : varying) {
        if (place.symbols.size() > 1) continue;
        const Symbol symbol = place.symbols.front();
        least[symbol] = range.least[place.input].dims.d[place.axis];
        most[symbol] = std::max<std::int64_t>(least[symbol], range.most[place.input].dims.d[place.axis]);
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
                const std::int64_t sizes[symbol_count] = {b, t, s};
                for (const Place &place : varying) {
                    std::int64_t size = 0;
                    for (const Symbol symbol : place.symbols) size += sizes[symbol];
                    auto &dim = tensors[place.input].dims.d[place.axis];
                    dim = static_cast<std::remove_reference_t<decltype(dim)>>(size);
                }
                visit(tensors);
            }
        }
    }
}

}  // namespace moa
