// Shapes of the outputs, as expressions of those of the inputs.

#include "failure.h"
#include "node.h"

namespace moa {

namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using nvinfer1::IDimensionExpr;

// The inputs of a node by their position in the schema.
class Inputs {
public:
    Inputs(const Node &node, const DimsExprs *given, std::int32_t count) : contract_(node.contract()) {
        const auto positions = node.positions(count);
        for (std::size_t index = 0; index < positions.size(); ++index) by_position_[positions[index]] = given + index;
    }

    bool has(std::size_t position) const { return by_position_[position] != nullptr; }

    const IDimensionExpr &dim(std::size_t position, std::int32_t axis, std::int32_t rank) const {
        const DimsExprs *shape = by_position_[position];
        if (shape == nullptr || shape->nbDims != rank) {
            throw Refusal(where(position) + " must have " + std::to_string(rank) + " dimensions, found " +
                          std::to_string(shape == nullptr ? 0 : shape->nbDims));
        }
        return *shape->d[axis];
    }

    // Refuses what is known to differ; a dimension that is not constant is checked with the shapes themselves.
    void equal(std::size_t position, std::int32_t axis, std::int32_t rank, const IDimensionExpr &expected) const {
        const auto &found = dim(position, axis, rank);
        if (!found.isConstant() || !expected.isConstant()) return;
        if (found.getConstantValue() != expected.getConstantValue()) {
            throw Refusal(where(position) + " must have " + std::to_string(expected.getConstantValue()) +
                          " in dimension " + std::to_string(axis) + ", found " +
                          std::to_string(found.getConstantValue()));
        }
    }

    // Columns of what the router reads: its own input, or the hidden states.
    const IDimensionExpr &read_by_router(std::size_t router_input) const {
        return dim(has(router_input) ? router_input : 0, 2, 3);
    }

    std::string where(std::size_t position) const {
        return std::string(contract_.name) + ": `" + contract_.inputs[position].name + "`";
    }

private:
    const contract::Operator &contract_;
    const DimsExprs *by_position_[max_inputs] = {};
};

DimsExprs shape(std::initializer_list<const IDimensionExpr *> dims) {
    DimsExprs made{};
    for (const IDimensionExpr *dim : dims) made.d[made.nbDims++] = dim;
    return made;
}

void choose_among(const Inputs &inputs, const IDimensionExpr &experts, std::int64_t top_k, std::size_t router) {
    if (experts.isConstant() && experts.getConstantValue() < top_k) {
        throw Refusal(inputs.where(router) + " has " + std::to_string(experts.getConstantValue()) +
                      " experts, and `top_k` is " + std::to_string(top_k));
    }
}

// D of `[E, C, G * D]`.
const IDimensionExpr &head(const Inputs &inputs, std::size_t query_weight, std::int64_t groups,
                           nvinfer1::IExprBuilder &builder) {
    const auto &columns = inputs.dim(query_weight, 2, 3);
    if (columns.isConstant() && columns.getConstantValue() % groups != 0) {
        throw Refusal(inputs.where(query_weight) + " has " + std::to_string(columns.getConstantValue()) +
                      " columns, which `kv_num_heads` = " + std::to_string(groups) + " does not divide");
    }
    return *builder.operation(DimensionOperation::kFLOOR_DIV, columns,
                              *builder.constant(static_cast<std::int32_t>(groups)));
}

}  // namespace

void Node::shapes(const DimsExprs *given, std::int32_t input_count, DimsExprs *outputs,
                  nvinfer1::IExprBuilder &builder) const {
    const Inputs inputs(*this, given, input_count);
    const auto &batch = inputs.dim(0, 0, 3);
    const auto &tokens = inputs.dim(0, 1, 3);
    const auto &width = inputs.dim(0, 2, 3);
    const DimsExprs routing = shape({&batch, &tokens, builder.constant(top_k_)});
    std::vector<DimsExprs> made{shape({&batch, &tokens, &width})};
    if (operator_index_ == MOA_CUDA_SELF_ATTENTION) {
        namespace own = contract::self_attention;
        inputs.equal(own::router_weight, 0, 2, inputs.read_by_router(own::router_input));
        inputs.equal(own::query_weight, 1, 3, width);
        if (inputs.has(own::kv_weight)) {
            inputs.equal(own::kv_weight, 0, 2, width);
        } else {
            inputs.equal(own::query_weight, 2, 3, width);
        }
        inputs.equal(own::output_weight, 2, 3, width);
        choose_among(inputs, inputs.dim(own::router_weight, 1, 2), top_k_, own::router_weight);
        inputs.equal(own::query_weight, 0, 3, inputs.dim(own::router_weight, 1, 2));
        const auto *groups = builder.constant(kv_num_heads_);
        const auto *keys = &tokens;
        if (inputs.has(own::past_key)) {
            inputs.equal(own::past_key, 1, 4, *groups);
            keys = builder.operation(DimensionOperation::kSUM, inputs.dim(own::past_key, 2, 4), tokens);
        }
        const auto &size = head(inputs, own::query_weight, kv_num_heads_, builder);
        made.insert(made.end(), 2, shape({&batch, groups, keys, &size}));
    } else if (operator_index_ == MOA_CUDA_CROSS_ATTENTION) {
        namespace cross = contract::cross_attention;
        inputs.equal(cross::router_weight, 0, 2, width);
        inputs.equal(cross::output_weight, 2, 3, width);
        choose_among(inputs, inputs.dim(cross::router_weight, 1, 2), top_k_, cross::router_weight);
        inputs.equal(cross::key, 3, 4, head(inputs, cross::query_weight, kv_num_heads_, builder));
    } else {
        namespace forward = contract::feed_forward;
        inputs.equal(forward::router_weight, 0, 2, inputs.read_by_router(forward::router_input));
        inputs.equal(forward::output_weight, 2, 3, width);
        choose_among(inputs, inputs.dim(forward::router_weight, 1, 2), top_k_, forward::router_weight);
    }
    made.insert(made.end(), 2, routing);
    for (std::int32_t index = 0; index < output_count_; ++index) outputs[index] = made[static_cast<std::size_t>(index)];
}

}  // namespace moa
