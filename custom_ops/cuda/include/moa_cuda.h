/* The CUDA kernels of the ai.moa operators, for callers that are not written in Rust.
 *
 * Names, order of inputs and outputs, shapes and element types are those of the operators' schema
 * (custom_ops/schema). Every tensor is contiguous, row-major device memory; pointers that are multiples of 16 bytes
 * are fastest.
 *
 *   moa_cuda_kernels *kernels;            once for each context
 *   moa_cuda_create(NULL, &kernels, &error);
 *   moa_cuda_plan *plan;                  once for each shape
 *   moa_cuda_plan_create(kernels, &node, shapes, 9, wanted, 3, &plan, &error);
 *   size_t bytes = moa_cuda_plan_workspace_bytes(plan);
 *   moa_cuda_enqueue(plan, input_addresses, 9, output_addresses, 3, workspace, bytes, stream, &error);
 *
 * moa_cuda_enqueue neither waits for the device, nor allocates memory there, nor loads code: a stream may be captured
 * into a graph meanwhile. Everything may be called from any thread, except that a handle must not be destroyed while
 * another call uses it, or while work that it enqueued is pending, or a graph that holds such work may still run.
 *
 * The environment variable MOA_CUDA_OVERLAP=0 keeps kernels from starting before the one in front of them has ended.
 * MOA_CUDA_WGMMA=0 keeps large products of f16 and bf16 tensors from the warpgroup products of compute capability 9.0.
 * Both are read by moa_cuda_create. MOA_CUDA_MULTIPROCESSORS=N, read by moa_cuda_plan_create, plans as
 * for a device of N multiprocessors, for checks.
 *
 * Structures begin with their size, which the caller sets to sizeof: a newer library takes the structures of an older
 * caller, and refuses those of a newer one.
 */
#ifndef MOA_CUDA_H
#define MOA_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface; moa_cuda_abi_version() says what the library was built with. */
#define MOA_CUDA_ABI_VERSION 1

/* What a call returns. */
#define MOA_CUDA_OK 0
#define MOA_CUDA_ARGUMENT 1    /* shapes, pointers or attributes that do not fit */
#define MOA_CUDA_UNSUPPORTED 2 /* this device, or a size beyond the kernels' limits */
#define MOA_CUDA_MISSING 3     /* no driver, or no kernel archive */
#define MOA_CUDA_DRIVER 4      /* the driver refused a call */
#define MOA_CUDA_INTERNAL 5    /* an error of this library */

/* Operators. */
#define MOA_CUDA_SELF_ATTENTION 0
#define MOA_CUDA_CROSS_ATTENTION 1
#define MOA_CUDA_FEED_FORWARD 2

/* Element types of activations and weights. */
#define MOA_CUDA_F32 0
#define MOA_CUDA_F16 1
#define MOA_CUDA_BF16 2

/* gate_mode. */
#define MOA_CUDA_SOFTMAX_TOPK 0
#define MOA_CUDA_SOFTMAX_TOPK_RENORM 1
#define MOA_CUDA_TOPK_SOFTMAX 2

/* activation. */
#define MOA_CUDA_RELU 0
#define MOA_CUDA_GELU 1
#define MOA_CUDA_SILU 2
#define MOA_CUDA_GELU_TANH 3

/* attention_mode. */
#define MOA_CUDA_SOFTMAX 0
#define MOA_CUDA_STICK_BREAKING 1 /* needs causal */

/* flags of moa_cuda_node. */
#define MOA_CUDA_TF32 1u /* products of f32 tensors may round their factors to TF32 */
#define MOA_CUDA_SHARED_CACHES 2u /* caches of self-attention may have room, and are updated in place then: the schema's
                                     "Shared caches"; the new ones are wanted and have the addresses of the past */

#define MOA_CUDA_MAX_RANK 4

typedef struct moa_cuda_kernels moa_cuda_kernels;
typedef struct moa_cuda_plan moa_cuda_plan;

/* What went wrong: one line, ended by a zero. */
typedef struct moa_cuda_error {
    char text[512];
} moa_cuda_error;

typedef struct moa_cuda_options {
    uint32_t struct_size;
    int32_t device;           /* ordinal whose primary context is used; -1: the context that is current */
    uint32_t compute_major;   /* 0: the device's own. Else kernels of this older architecture, by their PTX. */
    uint32_t compute_minor;
    const void *archive;      /* kernel archive in memory, copied; NULL: MOA_CUDA_KERNELS, else the one of the build */
    uint64_t archive_bytes;
} moa_cuda_options;

typedef struct moa_cuda_device {
    uint32_t struct_size;
    uint32_t compute_major, compute_minor; /* of the kernels that run */
    uint32_t device_major, device_minor;   /* of the device */
    uint32_t multiprocessors;
    uint32_t shared_bytes_per_block;
    uint32_t l2_bytes;
} moa_cuda_device;

/* One operator and its attributes; those that it does not have are ignored. */
typedef struct moa_cuda_node {
    uint32_t struct_size;
    uint32_t operator_id;
    uint32_t element;
    uint32_t flags;
    uint32_t top_k;
    uint32_t kv_num_heads;
    uint32_t gate_mode;
    uint32_t activation;
    uint32_t causal;
    uint32_t skip_padded_queries;
    uint32_t gated;
    float scale;
    uint32_t attention_mode;
} moa_cuda_node;

/* The shape of one input; an absent input has rank -1. */
typedef struct moa_cuda_shape {
    int32_t rank;
    int32_t reserved;
    int64_t dims[MOA_CUDA_MAX_RANK];
} moa_cuda_shape;

typedef struct moa_cuda_plan_info {
    uint32_t struct_size;
    uint32_t launches;        /* kernels of one call */
    uint32_t regime;          /* 0 dense, 1 sparse, 2 grouped, 3 grouped with a last sum */
    uint32_t reserved;
    uint64_t workspace_bytes;
} moa_cuda_plan_info;

uint32_t moa_cuda_abi_version(void);

/* Kernels of one context. `options` may be NULL: the current context, its device's own architecture. */
int32_t moa_cuda_create(const moa_cuda_options *options, moa_cuda_kernels **kernels, moa_cuda_error *error);
void moa_cuda_destroy(moa_cuda_kernels *kernels);

/* Loads the kernels of one element type, which a plan would else do. Not while a stream is captured. */
int32_t moa_cuda_load(moa_cuda_kernels *kernels, uint32_t element, moa_cuda_error *error);
int32_t moa_cuda_device_facts(const moa_cuda_kernels *kernels, moa_cuda_device *device, moa_cuda_error *error);

/* Bits that kernels set where a result holds NaN because of its inputs: 1 a router logit that is not finite, 2 a
 * position outside the rotary caches. Work on streams that do not wait for the legacy stream must have ended before. */
int32_t moa_cuda_faults(const moa_cuda_kernels *kernels, uint32_t *faults, moa_cuda_error *error);

/* Shapes of a node's outputs; `outputs` holds as many as the operator has. */
int32_t moa_cuda_output_shapes(const moa_cuda_node *node, const moa_cuda_shape *inputs, size_t input_count,
                               moa_cuda_shape *outputs, size_t output_count, moa_cuda_error *error);

/* Proves the shapes and plans the launches. `wanted[i]` is not 0 where somebody asks for output i; NULL: the first
 * output alone. */
int32_t moa_cuda_plan_create(moa_cuda_kernels *kernels, const moa_cuda_node *node, const moa_cuda_shape *inputs,
                             size_t input_count, const uint8_t *wanted, size_t wanted_count, moa_cuda_plan **plan,
                             moa_cuda_error *error);
void moa_cuda_plan_destroy(moa_cuda_plan *plan);
int32_t moa_cuda_plan_describe(const moa_cuda_plan *plan, moa_cuda_plan_info *info, moa_cuda_error *error);
size_t moa_cuda_plan_workspace_bytes(const moa_cuda_plan *plan);

/* Puts one call on `stream` (a CUstream or cudaStream_t of the kernels' context). Absent tensors are NULL, all
 * others begin at a multiple of the size of their elements. The workspace starts at a multiple of 256 bytes, may hold
 * anything, and belongs to this call until it has run. */
int32_t moa_cuda_enqueue(const moa_cuda_plan *plan, const void *const *inputs, size_t input_count,
                         void *const *outputs, size_t output_count, void *workspace, size_t workspace_bytes,
                         void *stream, moa_cuda_error *error);

#ifdef __cplusplus
}
#endif

#endif
