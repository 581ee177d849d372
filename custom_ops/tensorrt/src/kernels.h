// libmoa_cuda and the CUDA driver, loaded when the first plugin needs them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "moa_cuda.h"
#include "node.h"

namespace moa {

// The shapes of a call, by the schema's positions; an absent input has rank -1.
using Shapes = std::array<moa_cuda_shape, max_inputs>;

// Kernels of one CUDA context, shared by every plugin that works in it.
class Kernels {
public:
    // Those of the context that is current on this thread; throws Refusal where there is no library, driver or context.
    static std::shared_ptr<Kernels> of_current_context();

    ~Kernels();
    Kernels(const Kernels &) = delete;
    Kernels &operator=(const Kernels &) = delete;

    // Loads the kernels of an element type; afterwards plans of that type load nothing.
    void load(std::uint32_t element);

    moa_cuda_kernels *handle() const { return handle_; }

private:
    explicit Kernels(moa_cuda_kernels *handle) : handle_(handle) {}

    moa_cuda_kernels *handle_;
};

// The launches of one node for one set of shapes; made on the host alone once its element type is loaded.
class Plan {
public:
    Plan(std::shared_ptr<Kernels> kernels, const Node &node, const moa_cuda_node &described, const Shapes &shapes);
    ~Plan();
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;

    std::uint64_t workspace_bytes() const;

    // Puts the launches on `stream`; pointers are in the schema's positions.
    void enqueue(const void *const *inputs, std::size_t input_count, void *const *outputs, std::size_t output_count,
                 void *workspace, std::uint64_t workspace_bytes, void *stream) const;

private:
    std::shared_ptr<Kernels> kernels_;
    moa_cuda_plan *handle_ = nullptr;
};

// Proves the shapes by the operator's contract, without a device; throws Refusal.
void prove_shapes(const Node &node, const moa_cuda_node &described, const Shapes &shapes);

// Puts `count` int32 at `narrow`, none negative, as int64 to `wide`, on `stream`.
void widen(const void *narrow, void *wide, std::size_t count, void *stream);

// Puts `count` int64 at `wide`, each of which an int32 holds, as int32 to `narrow`, on `stream`.
void narrow(const void *wide, void *narrow, std::size_t count, void *stream);

}  // namespace moa
