/* TensorRT engines through libmoa_tensorrt.so: build a plan from ONNX with the ai.moa plugins registered, load it, run it.
 *
 * Nothing here links against TensorRT or CUDA: libnvinfer, the ONNX parser and the CUDA driver are opened when first
 * needed, and their absence is an error with a text. They stay open until the process ends, and a process has one
 * libnvinfer: opening another folder's is refused.
 *
 *   moa_trt_library *tensorrt;                          once a process and device
 *   moa_trt_open(&open_options, &tensorrt, &error);
 *   moa_trt_plan *plan;                                 minutes, on the device that will run it
 *   moa_trt_build(tensorrt, &build_options, &plan, &error);
 *   moa_trt_engine *engine;
 *   moa_trt_engine_create(tensorrt, moa_trt_plan_data(plan), moa_trt_plan_bytes(plan), &engine, &error);
 *   moa_trt_context *context;
 *   moa_trt_context_create(engine, 0, &context, &error);
 *   moa_trt_set_shape(context, "input_ids", &shape, &error);          each input
 *   moa_trt_upload(context, "input_ids", values, bytes, &error);      each input
 *   moa_trt_run(context, &error);
 *   moa_trt_tensor_shape(context, "logits", &shape, &error);
 *   moa_trt_download(context, "logits", values, bytes, &error);
 *
 * RELEASES. The classes behind builders and engines are laid out alike within one major version of TensorRT and unlike
 * between two, so the library serves engines of the major version whose headers it was compiled with
 * (moa_trt_built_for), and moa_trt_open refuses any other libnvinfer with MOA_TRT_INCOMPATIBLE. The V3 plugins in the
 * same file, which trtexec and Polygraphy load, are not bound to it: those of a build for 10 load in 11 too.
 *
 * OWNERSHIP. Every *_create, open and build hands a handle to the caller, who ends it with the *_destroy (or
 * moa_trt_close) of its kind, NULL being allowed. An engine keeps its library, and a context its engine: handles may be
 * destroyed in any order. `const char *` and `const void *` results belong to the handle that they came from and live
 * as long as it. What the caller passes in is read during the call alone, except the callbacks and `user` of
 * moa_trt_open_options, which live until every handle of that library is gone. A handle is written where the call
 * returns MOA_TRT_OK; else it is set to NULL.
 *
 * THREADS. Handles may move between threads. A library and an engine may be used by several threads at a time; builds
 * and loads of one process follow one another. A context is used by one thread at a time; two contexts of one engine
 * run side by side. Callbacks are called from any thread, TensorRT's own included, one at a time for a library; they must
 * neither throw nor unwind, nor call into this interface. TensorRT has one log a process, so the log of each open library
 * gets the lines of all.
 *
 * DEVICE. Calls that need the device make its primary context current on the calling thread and put the former one back
 * before they return.
 *
 * ERRORS. Every call that can fail returns a code and, where `error` is not NULL, fills it; nothing is thrown, printed
 * or aborted. TensorRT's own words stand in the text. The lines of the log are beside it, not instead of it.
 *
 * Structures with a struct_size begin with it. The caller sets it to sizeof, and everything else in them may be zero: a
 * newer library takes the structures of an older caller, and refuses those of a newer one.
 */
#ifndef MOA_TENSORRT_ENGINE_H
#define MOA_TENSORRT_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface; moa_trt_abi_version() says what the library was built with. */
#define MOA_TRT_ABI_VERSION 2

/* What a call returns. */
#define MOA_TRT_OK 0
#define MOA_TRT_ARGUMENT 1     /* the caller's: NULL, an unknown name, a count of bytes that does not fit, a wrong order */
#define MOA_TRT_MISSING 2      /* no libnvinfer, no ONNX parser, no driver, no device, no libmoa_cuda */
#define MOA_TRT_INCOMPATIBLE 3 /* libnvinfer, or the plan, is of another release; or the plan of another GPU */
#define MOA_TRT_MODEL 4        /* the parser refuses the model: every error of it is in the text */
#define MOA_TRT_PROFILE 5      /* a shape outside the profile, or a profile that does not fit the network */
#define MOA_TRT_PLAN 6         /* the bytes are no plan, or not all of one */
#define MOA_TRT_UNSUPPORTED 7  /* what this interface or release cannot do: shapes that depend on data */
#define MOA_TRT_CANCELLED 8    /* the progress callback asked for it */
#define MOA_TRT_MEMORY 9       /* the host or the device has not enough memory */
#define MOA_TRT_RUNTIME 10     /* TensorRT failed otherwise; the text is its own */
#define MOA_TRT_DRIVER 11      /* the CUDA driver refused a call */
#define MOA_TRT_INTERNAL 12    /* an error of this library */

/* Element types, numbered as in ONNX's TensorProto.DataType. */
#define MOA_TRT_FLOAT 1
#define MOA_TRT_UINT8 2
#define MOA_TRT_INT8 3
#define MOA_TRT_INT32 6
#define MOA_TRT_INT64 7
#define MOA_TRT_BOOL 9
#define MOA_TRT_FLOAT16 10
#define MOA_TRT_BFLOAT16 16
#define MOA_TRT_FLOAT8E4M3FN 17
#define MOA_TRT_INT4 22
#define MOA_TRT_FLOAT4E2M1 23
#define MOA_TRT_FLOAT8E8M0 24

/* Severities of log lines, as TensorRT's ILogger numbers them. */
#define MOA_TRT_LOG_INTERNAL_ERROR 0
#define MOA_TRT_LOG_ERROR 1
#define MOA_TRT_LOG_WARNING 2
#define MOA_TRT_LOG_INFO 3
#define MOA_TRT_LOG_VERBOSE 4

/* flags of moa_trt_build_options. */
#define MOA_TRT_TF32 1u         /* products of f32 tensors may round their factors to TF32; TensorRT's own default */
#define MOA_TRT_PREFER_TYPES 2u /* 8.6: a layer that has no kernel of the model's types takes another instead of failing */

#define MOA_TRT_MAX_RANK 8

typedef struct moa_trt_library moa_trt_library;
typedef struct moa_trt_plan moa_trt_plan;
typedef struct moa_trt_engine moa_trt_engine;
typedef struct moa_trt_context moa_trt_context;

/* What went wrong, in UTF-8, ended by a zero. The first line says it all; further lines are TensorRT's or the parser's
 * errors, one each. A text that does not fit ends in "...". */
typedef struct moa_trt_error {
    char text[8192];
} moa_trt_error;

/* `rank` sizes; -1 is a size that is known at run time alone. A rank of -1: the shape is not known. */
typedef struct moa_trt_shape {
    int32_t rank;
    int32_t reserved;
    int64_t dims[MOA_TRT_MAX_RANK];
} moa_trt_shape;

/* --- versions and devices ------------------------------------------------------------------------------------------- */

/* What the library was compiled for. */
typedef struct moa_trt_target {
    uint32_t struct_size;
    uint32_t abi_version;
    uint32_t header_major, header_minor, header_patch; /* TensorRT's headers; the major version is that of its engines */
    uint32_t plugin_interface;                         /* 3: IPluginV3; 2: IPluginV2DynamicExt */
} moa_trt_target;

uint32_t moa_trt_abi_version(void);

/* Needs neither TensorRT nor a GPU. */
int32_t moa_trt_built_for(moa_trt_target *target, moa_trt_error *error);

/* One line of TensorRT's log, without a newline. */
typedef void (*moa_trt_log)(void *user, int32_t severity, const char *text);

typedef struct moa_trt_open_options {
    uint32_t struct_size;
    int32_t device;         /* CUDA ordinal */
    const char *folder;     /* where libnvinfer.so.N and libnvonnxparser.so.N lie; NULL: where the loader looks */
    moa_trt_log log;        /* NULL: no log */
    int32_t log_severity;   /* the least grave severity that is logged; a MOA_TRT_LOG_ value */
    uint32_t reserved;
    void *user;             /* handed to `log` */
} moa_trt_open_options;

/* Opens libnvinfer and registers the plugins with it. Needs no GPU: the device is asked for by the calls that use it.
 * `options` may be NULL. MOA_TRT_MISSING, MOA_TRT_INCOMPATIBLE. */
int32_t moa_trt_open(const moa_trt_open_options *options, moa_trt_library **library, moa_trt_error *error);
void moa_trt_close(moa_trt_library *library);

/* What was opened. The parser is opened by this call where no build did so before; where there is none,
 * `parser_path` is NULL and nothing fails. */
typedef struct moa_trt_versions {
    uint32_t struct_size;
    uint32_t major, minor, patch, build; /* of libnvinfer; `build` is 0 where it does not say */
    uint32_t parser;                     /* getNvOnnxParserVersion() */
    const char *nvinfer_path;            /* as the loader resolved it; of the library */
    const char *parser_path;
} moa_trt_versions;

int32_t moa_trt_get_versions(moa_trt_library *library, moa_trt_versions *versions, moa_trt_error *error);

typedef struct moa_trt_device {
    uint32_t struct_size;
    int32_t ordinal;
    uint32_t compute_major, compute_minor;
    uint32_t driver_version;      /* the newest CUDA that the driver serves: 12090 is 12.9 */
    uint32_t multiprocessors;
    uint64_t total_bytes;         /* device memory */
    char name[256];
    char uuid[40];                /* as nvidia-smi writes it behind "GPU-"; empty where the driver does not say */
} moa_trt_device;

/* The CUDA device of `ordinal`, asked through the driver alone: TensorRT is not needed. MOA_TRT_MISSING where there is
 * no driver or no such device. */
int32_t moa_trt_get_device(int32_t ordinal, moa_trt_device *device, moa_trt_error *error);

/* --- building ------------------------------------------------------------------------------------------------------- */

/* The shapes of one input in one profile. For an input that lies in host memory and whose values are shapes, the dims
 * are those values, `rank` their count. */
typedef struct moa_trt_range {
    const char *input;
    moa_trt_shape min, opt, max;
} moa_trt_range;

/* One profile. It names every input that has a dynamic size; inputs of fixed shape may be left out. */
typedef struct moa_trt_profile {
    const moa_trt_range *ranges;
    size_t range_count;
} moa_trt_profile;

/* One error of the ONNX parser; texts live during the callback and are "" where the parser does not say. */
typedef struct moa_trt_parser_error {
    uint32_t struct_size;
    int32_t code;               /* nvonnxparser::ErrorCode */
    int32_t node;               /* position in the graph, -1: none */
    int32_t line;               /* of `file` */
    const char *node_name;      /* 10.0 and newer */
    const char *node_operator;  /* 10.0 and newer */
    const char *description;
    const char *file;           /* of the parser's source */
    const char *function;
} moa_trt_parser_error;

/* One step of a build: step `step` of `steps` of `phase`, whose parent is `parent` ("" at the top); `step` is -1 when
 * the phase begins, and `steps` when it has ended. Not 0: the build is cancelled as soon as TensorRT can. */
typedef int32_t (*moa_trt_progress)(void *user, const char *phase, const char *parent, int32_t step, int32_t steps);

typedef void (*moa_trt_on_parser_error)(void *user, const moa_trt_parser_error *error);

/* Networks are strongly typed: each tensor has the type that the model gives it. In 8.6, which has no such networks,
 * every layer is held to the types of the model. Plans can neither be refitted nor loaded by another release. */
typedef struct moa_trt_build_options {
    uint32_t struct_size;
    uint32_t flags;                /* MOA_TRT_TF32, … */
    const void *model;             /* an ONNX ModelProto, NULL: the file of `model_path` */
    uint64_t model_bytes;
    const char *model_path;        /* external data is looked for beside it; NULL where the model has none */
    const moa_trt_profile *profiles;
    size_t profile_count;          /* 0: every input has a fixed shape */
    uint64_t workspace_bytes;      /* most that one layer may use; 0: TensorRT's choice */
    int32_t optimization_level;    /* 1 … 5, more is slower to build; 0: TensorRT's choice */
    uint32_t is_detailed;          /* not 0: moa_trt_engine_layers tells types, formats and tactics */
    const void *timing_cache;      /* of an earlier build, NULL: an empty one */
    uint64_t timing_cache_bytes;
    moa_trt_progress progress;     /* NULL, or 8.6, which never calls it */
    moa_trt_on_parser_error parser_error; /* NULL: they are in the error's text alone */
    void *user;                    /* handed to both */
} moa_trt_build_options;

/* A timing cache of another device or release is not an error: TensorRT says so in its log, and an empty one is used. */
int32_t moa_trt_build(moa_trt_library *library, const moa_trt_build_options *options, moa_trt_plan **plan,
                      moa_trt_error *error);
void moa_trt_plan_destroy(moa_trt_plan *plan);

/* The bytes that moa_trt_engine_create and `trtexec --loadEngine` take. */
const void *moa_trt_plan_data(const moa_trt_plan *plan);
uint64_t moa_trt_plan_bytes(const moa_trt_plan *plan);
/* The timing cache as the build left it. */
const void *moa_trt_plan_timing_cache(const moa_trt_plan *plan);
uint64_t moa_trt_plan_timing_cache_bytes(const moa_trt_plan *plan);

/* --- engines -------------------------------------------------------------------------------------------------------- */

/* Loads a plan. A plan is code that the GPU and the host run: load those that you built, or trust. The bytes are not
 * needed afterwards. MOA_TRT_PLAN, MOA_TRT_INCOMPATIBLE, MOA_TRT_MISSING (a plugin), MOA_TRT_MEMORY. */
int32_t moa_trt_engine_create(moa_trt_library *library, const void *plan, uint64_t bytes, moa_trt_engine **engine,
                              moa_trt_error *error);
void moa_trt_engine_destroy(moa_trt_engine *engine);

typedef struct moa_trt_engine_info {
    uint32_t struct_size;
    uint32_t tensor_count;    /* inputs and outputs */
    uint32_t profile_count;   /* at least 1 */
    uint32_t layer_count;
    uint64_t device_bytes;    /* that one context needs beside weights, inputs and outputs */
} moa_trt_engine_info;

int32_t moa_trt_get_engine_info(const moa_trt_engine *engine, moa_trt_engine_info *info, moa_trt_error *error);

/* An input or output. */
typedef struct moa_trt_tensor {
    uint32_t struct_size;
    int32_t element;          /* MOA_TRT_FLOAT, … */
    uint32_t is_input;
    uint32_t is_on_host;      /* its values are in host memory: shapes */
    const char *name;         /* of the engine */
    moa_trt_shape shape;      /* -1: dynamic */
} moa_trt_tensor;

/* Tensor `index`, of moa_trt_engine_info.tensor_count: inputs and outputs in the model's order. */
int32_t moa_trt_get_tensor(const moa_trt_engine *engine, uint32_t index, moa_trt_tensor *tensor, moa_trt_error *error);

/* The shapes that profile `profile` gives to an input; `range->input` is set to the engine's own name. */
int32_t moa_trt_get_range(const moa_trt_engine *engine, uint32_t profile, const char *input, moa_trt_range *range,
                          moa_trt_error *error);

/* All layers as JSON, as TensorRT's inspector writes them; with types and tactics where the plan was built with
 * is_detailed. The text is the engine's. */
int32_t moa_trt_engine_layers(moa_trt_engine *engine, const char **json, moa_trt_error *error);

/* --- running -------------------------------------------------------------------------------------------------------- */

/* A context that works in one profile, on a stream of its own, with device buffers of its own for every tensor. */
int32_t moa_trt_context_create(moa_trt_engine *engine, uint32_t profile, moa_trt_context **context,
                               moa_trt_error *error);
void moa_trt_context_destroy(moa_trt_context *context);

/* Sets the shape of an input; MOA_TRT_PROFILE where the profile does not hold it. Uploaded values stay where the count
 * of bytes does. */
int32_t moa_trt_set_shape(moa_trt_context *context, const char *input, const moa_trt_shape *shape,
                          moa_trt_error *error);

/* The shape of an input or output, once those of all inputs are set (and the values of those on the host uploaded);
 * before, MOA_TRT_ARGUMENT. MOA_TRT_UNSUPPORTED where it depends on the values of device tensors. */
int32_t moa_trt_tensor_shape(moa_trt_context *context, const char *name, moa_trt_shape *shape, moa_trt_error *error);

/* Copies the values of an input to the device; row-major, exactly as many bytes as its shape and type take. */
int32_t moa_trt_upload(moa_trt_context *context, const char *input, const void *values, uint64_t bytes,
                       moa_trt_error *error);

/* One inference on what is uploaded; returns when it has ended. */
int32_t moa_trt_run(moa_trt_context *context, moa_trt_error *error);

/* The same; `milliseconds` gets the time between two CUDA events on the context's stream, one before the run and one behind
 * it: what the device took, and the host where it gives the device work more slowly than that is done. */
int32_t moa_trt_run_timed(moa_trt_context *context, float *milliseconds, moa_trt_error *error);

/* Copies an output of the last run from the device; `bytes` exactly as many as its shape and type take. */
int32_t moa_trt_download(moa_trt_context *context, const char *output, void *values, uint64_t bytes,
                         moa_trt_error *error);

typedef struct moa_trt_timing {
    uint32_t struct_size;
    uint32_t warmup;          /* runs before the clock starts; at least one is made */
    uint32_t runs;            /* that are timed, each on its own */
    uint32_t use_graph;       /* not 0: a run is captured into a CUDA graph, whose launches are timed */
    uint64_t flush_bytes;     /* not 0: so many bytes are written before each run, outside its time, to cool the L2 cache */
    int32_t (*is_cancelled)(void *user); /* asked now and then; not 0: MOA_TRT_CANCELLED. NULL: never */
    void *user;
} moa_trt_timing;

/* Times inference on what is uploaded, without copies: `milliseconds` gets timing->runs figures, each between two CUDA
 * events around one run on an otherwise idle stream. MOA_TRT_UNSUPPORTED where the engine cannot be captured. */
int32_t moa_trt_time(moa_trt_context *context, const moa_trt_timing *timing, float *milliseconds, moa_trt_error *error);

/* The time of one layer in one run. */
typedef void (*moa_trt_on_layer)(void *user, uint32_t run, const char *layer, float milliseconds);

/* Runs `runs` times, after a warm-up, with TensorRT's profiler attached, which adds to the time of each layer. */
int32_t moa_trt_profile_layers(moa_trt_context *context, uint32_t runs, moa_trt_on_layer layer, void *user,
                               moa_trt_error *error);

#ifdef __cplusplus
}
#endif

#endif
