// Which sizes between the smallest and the largest stand for all of them.
#pragma once

#include <functional>
#include <vector>

#include "layer.h"

namespace moa {

// The workspace grows by one part in this many over what the visited sizes need. Short inputs are cut into parts that
// fill the device, so the need is no monotone function of the sizes, and may double from one size to the next: where
// ranges are small enough every size is visited, else those up to some length, beyond which the need grows with the
// size. Each call compares its need with what was granted.
constexpr std::uint64_t workspace_reserve = 4;

// Calls `visit` with the shapes of the inputs for batch, tokens and past or source tokens on a grid over the range,
// both ends included.
void for_each_size(const Node &node, const std::vector<std::size_t> &positions, const Range &range,
                   const std::function<void(const Tensors &)> &visit);

}  // namespace moa
