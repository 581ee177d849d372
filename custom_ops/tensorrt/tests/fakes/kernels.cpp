// libmoa_cuda without kernels: it writes down what it is asked.

#include <cstdio>
#include <cstring>
#include <string>

#include "control.h"

struct moa_cuda_kernels {
    int number;
};

struct moa_cuda_plan {
    std::uint64_t workspace_bytes;
};

namespace {

int handles = 0;

std::int32_t answer(const char *name, const std::string &details, moa_cuda_error *error) {
    fake_note((std::string(name) + details).c_str());
    if (fake_control.failing == nullptr || std::strcmp(fake_control.failing, name) != 0) return MOA_CUDA_OK;
    std::snprintf(error->text, sizeof error->text, "%s was told to fail", name);
    return MOA_CUDA_ARGUMENT;
}

std::string text(const moa_cuda_shape &shape) {
    std::string dims;
    for (std::int32_t axis = 0; axis < shape.rank; ++axis) dims += (axis ? "x" : "") + std::to_string(shape.dims[axis]);
    return shape.rank < 0 ? " -" : " " + dims;
}

std::string text(const moa_cuda_node *node, const moa_cuda_shape *inputs, std::size_t count) {
    const std::uint32_t numbers[] = {node->struct_size, node->operator_id, node->element,  node->flags,
                                     node->top_k,       node->kv_num_heads, node->gate_mode, node->activation,
                                     node->causal,      node->skip_padded_queries, node->gated,     node->attention_mode};
    std::string line = " node";
    for (const std::uint32_t number : numbers) line += " " + std::to_string(number);
    char scale[32];
    std::snprintf(scale, sizeof scale, " %g", static_cast<double>(node->scale));
    line += std::string(scale) + " shapes";
    for (std::size_t index = 0; index < count; ++index) line += text(inputs[index]);
    return line;
}

std::string address(const void *pointer) { return " " + std::to_string(reinterpret_cast<std::uintptr_t>(pointer)); }

}  // namespace

extern "C" {

std::uint32_t moa_cuda_abi_version() { return fake_control.abi_version; }

std::int32_t moa_cuda_create(const moa_cuda_options *options, moa_cuda_kernels **kernels, moa_cuda_error *error) {
    const auto code = answer("create", options == nullptr ? "" : " options", error);
    if (code == MOA_CUDA_OK) *kernels = new moa_cuda_kernels{++handles};
    return code;
}

void moa_cuda_destroy(moa_cuda_kernels *kernels) {
    fake_note("destroy");
    delete kernels;
}

std::int32_t moa_cuda_load(moa_cuda_kernels *, std::uint32_t element, moa_cuda_error *error) {
    return answer("load", " " + std::to_string(element), error);
}

std::int32_t moa_cuda_output_shapes(const moa_cuda_node *node, const moa_cuda_shape *inputs, std::size_t input_count,
                                    moa_cuda_shape *, std::size_t, moa_cuda_error *error) {
    return answer("output_shapes", text(node, inputs, input_count), error);
}

std::int32_t moa_cuda_plan_create(moa_cuda_kernels *, const moa_cuda_node *node, const moa_cuda_shape *inputs,
                                  std::size_t input_count, const std::uint8_t *wanted, std::size_t wanted_count,
                                  moa_cuda_plan **plan, moa_cuda_error *error) {
    std::string outputs = " wanted";
    for (std::size_t index = 0; index < wanted_count; ++index) outputs += " " + std::to_string(wanted[index]);
    const auto code = answer("plan_create", text(node, inputs, input_count) + outputs, error);
    if (code == MOA_CUDA_OK) *plan = new moa_cuda_plan{fake_control.workspace(inputs)};
    return code;
}

void moa_cuda_plan_destroy(moa_cuda_plan *plan) { delete plan; }

std::size_t moa_cuda_plan_workspace_bytes(const moa_cuda_plan *plan) { return plan->workspace_bytes; }

std::int32_t moa_cuda_enqueue(const moa_cuda_plan *plan, const void *const *inputs, std::size_t input_count,
                              void *const *outputs, std::size_t output_count, void *workspace,
                              std::size_t workspace_bytes, void *stream, moa_cuda_error *error) {
    std::string line = " in";
    for (std::size_t index = 0; index < input_count; ++index) line += address(inputs[index]);
    line += " out";
    for (std::size_t index = 0; index < output_count; ++index) line += address(outputs[index]);
    line += " workspace" + address(workspace) + " enough " + (workspace_bytes >= plan->workspace_bytes ? "yes" : "no");
    return answer("enqueue", line + " stream" + address(stream), error);
}

}  // extern "C"
