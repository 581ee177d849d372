#include "layer.h"

#include <algorithm>

#include "failure.h"
#include "workspace.h"

namespace moa {

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

constexpr std::uint64_t alignment = 256;

// Shapes that stay planned; decoding and a few lengths of prompts take turns.
constexpr std::size_t kept_plans = 8;

bool equal(const moa_cuda_shape &left, const moa_cuda_shape &right) {
    return left.rank == right.rank && (left.rank <= 0 || std::equal(left.dims, left.dims + left.rank, right.dims));
}

std::size_t product(const moa_cuda_shape &shape, std::int32_t axes) {
    std::size_t count = 1;
    for (std::int32_t axis = 0; axis < axes; ++axis) count *= static_cast<std::size_t>(shape.dims[axis]);
    return count;
}

bool is_known(const Dims &dims) {
    return std::all_of(dims.d, dims.d + std::clamp<std::int32_t>(dims.nbDims, 0, Dims::MAX_DIMS), [](auto dim) { return dim >= 0; });
}

std::uint64_t rounded_up(std::uint64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

Range::Range(const nvinfer1::DynamicPluginTensorDesc *inputs, std::int32_t count) {
    const bool is_of_a_call = std::all_of(inputs, inputs + count, [](const auto &input) { return is_known(input.desc.dims); });
    for (std::int32_t index = 0; index < count; ++index) {
        for (const bool is_most : {false, true}) {
            PluginTensorDesc tensor = inputs[index].desc;
            if (!is_of_a_call) tensor.dims = is_most ? inputs[index].max : inputs[index].min;
            (is_most ? most : least).push_back(tensor);
        }
    }
}

Layer::Planned Layer::describe(const PluginTensorDesc *inputs, std::int32_t count) {
    if (positions_.size() != static_cast<std::size_t>(count) || count == 0) positions_ = node_.positions(count);
    Planned made{node_.kernel_node(inputs[0].type), {}, 0, 0, 0, 0, nullptr};
    for (auto &shape : made.shapes) shape.rank = -1;
    for (std::size_t index = 0; index < positions_.size(); ++index) {
        const auto &input = node_.contract().inputs[positions_[index]];
        const Dims &dims = inputs[index].dims;
        const bool is_legal = dims.nbDims >= 0 && dims.nbDims <= MOA_CUDA_MAX_RANK &&
                              std::all_of(dims.d, dims.d + std::max(dims.nbDims, 0), [](auto dim) { return dim >= 0; });
        if (!is_legal) {
            throw Refusal(std::string(node_.contract().name) + ": `" + input.name + "` has an impossible shape");
        }
        auto &shape = made.shapes[positions_[index]];
        shape.rank = dims.nbDims;
        std::copy(dims.d, dims.d + dims.nbDims, shape.dims);
        if (input.element == contract::Element::int64 && inputs[index].type == DataType::kINT32) {
            made.positions_count = product(shape, shape.rank);
            made.positions_bytes = rounded_up(made.positions_count * sizeof(std::int64_t));
        }
    }
    if (node_.narrowed_output() != undecided) {
        // hidden_states is [B, T, C], and topk_indices [B, T, top_k].
        const auto &hidden_states = made.shapes.front();
        made.indices_count = product(hidden_states, hidden_states.rank - 1) * made.described.top_k;
        made.indices_bytes = rounded_up(made.indices_count * sizeof(std::int64_t));
    }
    return made;
}

void Layer::configure(const Range &range) {
    for (const auto *tensors : {&range.least, &range.most}) {
        const Planned described = describe(tensors->data(), static_cast<std::int32_t>(tensors->size()));
        prove_shapes(node_, described.described, described.shapes);
    }
    const std::uint32_t element = node_.kernel_node(range.most.front().type).element;
    load(element);
    if (is_built_) return;
    node_.settle(static_cast<std::int32_t>(range.most.size()), element);
    node_.grant_workspace(largest_workspace(range));
}

void Layer::attach() {
    if (node_.element() != undecided) load(static_cast<std::uint32_t>(node_.element()));
}

void Layer::load(std::uint32_t element) {
    if (!kernels_) kernels_ = Kernels::of_current_context();
    if (loaded_element_ == element) return;
    kernels_->load(element);
    loaded_element_ = element;
}

void Layer::detach() {
    plans_.clear();
    kernels_.reset();
    loaded_element_ = UINT32_MAX;
}

std::uint64_t Layer::largest_workspace(const Range &range) {
    std::uint64_t most = 0;
    for_each_size(node_, positions_, range, [&](const Tensors &tensors) {
        const Planned described = describe(tensors.data(), static_cast<std::int32_t>(tensors.size()));
        const Plan plan(kernels_, node_, described.described, described.shapes);
        most = std::max(most, described.own_bytes() + plan.workspace_bytes());
    });
    return rounded_up(most + most / workspace_reserve);
}

const Layer::Planned &Layer::planned(const PluginTensorDesc *inputs, std::int32_t count) {
    Planned wanted = describe(inputs, count);
    const auto same = [&](const Planned &other) {
        return other.described.element == wanted.described.element && other.positions_bytes == wanted.positions_bytes &&
               std::equal(other.shapes.begin(), other.shapes.end(), wanted.shapes.begin(), equal);
    };
    const auto found = std::find_if(plans_.begin(), plans_.end(), same);
    if (found != plans_.end()) {
        std::rotate(plans_.begin(), found, found + 1);
        return plans_.front();
    }
    load(wanted.described.element);
    wanted.plan = std::make_unique<Plan>(kernels_, node_, wanted.described, wanted.shapes);
    const std::uint64_t needed = wanted.own_bytes() + wanted.plan->workspace_bytes();
    if (needed > node_.workspace_bytes()) {
        throw Refusal(std::string(node_.contract().name) + ": these shapes need " + std::to_string(needed) +
                      " bytes of workspace, and the engine was built with " + std::to_string(node_.workspace_bytes()) +
                      "; build it on this GPU, with a profile that contains them");
    }
    if (plans_.size() == kept_plans) plans_.pop_back();
    plans_.insert(plans_.begin(), std::move(wanted));
    return plans_.front();
}

void Layer::prepare(const PluginTensorDesc *inputs, std::int32_t count) { planned(inputs, count); }

void Layer::enqueue(const PluginTensorDesc *tensors, const void *const *inputs, void *const *outputs, void *workspace,
                    void *stream) {
    if (node_.input_count() == 0) throw Refusal(std::string(node_.contract().name) + " was never configured");
    const Planned &planned_shapes = planned(tensors, node_.input_count());
    const void *given[max_inputs] = {};
    std::int32_t next = 0;
    for (std::size_t position = 0; position < node_.contract().inputs.count; ++position) {
        if (planned_shapes.shapes[position].rank >= 0) given[position] = inputs[next++];
    }
    auto *free = static_cast<unsigned char *>(workspace);
    if (planned_shapes.positions_bytes > 0) {
        auto &positions = given[contract::self_attention::position_ids];
        widen(positions, free, planned_shapes.positions_count, stream);
        positions = free;
    }
    free += planned_shapes.positions_bytes;
    const auto output_count = static_cast<std::size_t>(node_.output_count());
    void *taken[max_outputs] = {};
    std::copy(outputs, outputs + output_count, taken);
    const std::int32_t narrowed = node_.narrowed_output();
    void *const wide = free;
    if (narrowed != undecided) taken[narrowed] = wide;
    free += planned_shapes.indices_bytes;
    planned_shapes.plan->enqueue(given, node_.contract().inputs.count, taken, output_count, free,
                                 node_.workspace_bytes() - planned_shapes.own_bytes(), stream);
    if (narrowed != undecided) narrow(wide, outputs[narrowed], planned_shapes.indices_count, stream);
}

}  // namespace moa
