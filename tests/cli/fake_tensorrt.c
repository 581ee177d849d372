/* libmoa_tensorrt for tests without TensorRT: the engine interface over one fixed network on the host.
 *
 *   x float32 [rows, 2], ids int64 [rows]  ->  y = x + x, twice = ids + ids
 *
 * Plans have one or more profiles. MOA_FAKE holds words with spaces between that change what it does; MOA_FAKE_MODEL names a file for the model that a
 * build is given. A plan is a text: what it is of, its ranges, and an end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <moa_tensorrt_engine.h>

#define MOST 4096

struct moa_trt_library {
    int unused;
};
struct moa_trt_plan {
    char text[MOST];
};
struct moa_trt_engine {
    char text[MOST];
};
struct moa_trt_context {
    const moa_trt_engine *engine;
    uint32_t profile;
    int64_t rows;
    float x[2 * MOST];
    int64_t ids[MOST];
};

static int told(const char *word) {
    const char *words = getenv("MOA_FAKE");
    const char *found = words == NULL ? NULL : strstr(words, word);
    return found != NULL;
}

static int fail(moa_trt_error *error, int code, const char *text) {
    snprintf(error->text, sizeof error->text, "%s", text);
    return code;
}

static const char *version(void) { return told("newer") ? "10.5.0.18" : "10.4.0.26"; }
static const char *device(void) { return told("a100") ? "NVIDIA A100-SXM4-80GB" : "NVIDIA H200"; }
static int is_narrow(void) { return told("narrow"); }

uint32_t moa_trt_abi_version(void) { return told("abi") ? 99 : MOA_TRT_ABI_VERSION; }

int32_t moa_trt_built_for(moa_trt_target *target, moa_trt_error *error) {
    (void)error;
    target->header_major = 10;
    target->header_minor = target->header_patch = 0;
    target->plugin_interface = 3;
    return MOA_TRT_OK;
}

int32_t moa_trt_open(const moa_trt_open_options *options, moa_trt_library **library, moa_trt_error *error) {
    static moa_trt_library one;
    *library = NULL;
    if (options->struct_size != sizeof *options) return fail(error, MOA_TRT_ARGUMENT, "wrong size");
    if (told("no-nvinfer")) {
        return fail(error, MOA_TRT_MISSING, "libnvinfer.so.10 cannot be opened\nit is not where the loader looks");
    }
    if (told("wrong-major")) {
        return fail(error, MOA_TRT_INCOMPATIBLE, "libnvinfer is TensorRT 8.6.1, and the plugin was built for 10");
    }
    *library = &one;
    return MOA_TRT_OK;
}

void moa_trt_close(moa_trt_library *library) { (void)library; }

int32_t moa_trt_get_versions(moa_trt_library *library, moa_trt_versions *versions, moa_trt_error *error) {
    unsigned numbers[4];
    (void)library;
    (void)error;
    sscanf(version(), "%u.%u.%u.%u", &numbers[0], &numbers[1], &numbers[2], &numbers[3]);
    versions->major = told("ancient") ? 8 : numbers[0];
    versions->minor = numbers[1];
    versions->patch = numbers[2];
    versions->build = numbers[3];
    versions->nvinfer_path = "/opt/tensorrt/lib/libnvinfer.so.10";
    versions->parser_path = NULL;
    return MOA_TRT_OK;
}

int32_t moa_trt_get_device(int32_t ordinal, moa_trt_device *found, moa_trt_error *error) {
    if (told("no-device")) return fail(error, MOA_TRT_MISSING, "there is no CUDA driver: libcuda.so.1 cannot be opened");
    found->ordinal = ordinal;
    found->compute_major = told("a100") ? 8 : told("volta") ? 7 : 9;
    found->compute_minor = 0;
    found->driver_version = 12090;
    snprintf(found->name, sizeof found->name, "%s", told("volta") ? "Tesla V100-SXM2-16GB" : device());
    return MOA_TRT_OK;
}

static size_t range_text(char *text, size_t room, const moa_trt_range *range) {
    const moa_trt_shape *shapes[3] = {&range->min, &range->opt, &range->max};
    size_t used = (size_t)snprintf(text, room, "%s", range->input);
    for (int which = 0; which < 3; ++which) {
        used += (size_t)snprintf(text + used, room - used, " %d", shapes[which]->rank);
        for (int axis = 0; axis < shapes[which]->rank; ++axis) {
            used += (size_t)snprintf(text + used, room - used, " %lld", (long long)shapes[which]->dims[axis]);
        }
    }
    return used + (size_t)snprintf(text + used, room - used, "\n");
}

int32_t moa_trt_build(moa_trt_library *library, const moa_trt_build_options *options, moa_trt_plan **plan,
                      moa_trt_error *error) {
    const char *place = getenv("MOA_FAKE_MODEL");
    size_t used;
    (void)library;
    *plan = NULL;
    if (options->struct_size != sizeof *options) return fail(error, MOA_TRT_ARGUMENT, "wrong size");
    if (place != NULL) {
        FILE *file = fopen(place, "wb");
        if (file == NULL) return fail(error, MOA_TRT_INTERNAL, "the model cannot be written");
        fwrite(options->model, 1, (size_t)options->model_bytes, file);
        fclose(file);
    }
    if (told("slow")) {
        for (int step = 0; step < 6000; ++step) {
            if (options->progress != NULL && options->progress(options->user, "Building", "", step, 6000) != 0) {
                return fail(error, MOA_TRT_CANCELLED, "the build was cancelled");
            }
            usleep(100000);
        }
    }
    if (told("parser")) {
        return fail(error, MOA_TRT_MODEL, "the parser refuses the model\nnode 3 (Wonder): no importer\nnode 4 (Add): no input");
    }
    if (told("memory")) return fail(error, MOA_TRT_MEMORY, "the device has not enough memory");
    if (told("broken")) return fail(error, MOA_TRT_RUNTIME, "could not find any implementation for node Add_y");
    *plan = calloc(1, sizeof **plan);
    used = (size_t)snprintf((*plan)->text, MOST, "plan of %s\non %s\nflags %u level %d workspace %llu timings %llu\n",
                            version(), device(), options->flags, options->optimization_level,
                            (unsigned long long)options->workspace_bytes,
                            (unsigned long long)options->timing_cache_bytes);
    for (size_t profile = 0; profile < options->profile_count; ++profile) {
        for (size_t index = 0; index < options->profiles[profile].range_count; ++index) {
            used += range_text((*plan)->text + used, MOST - used, &options->profiles[profile].ranges[index]);
        }
    }
    snprintf((*plan)->text + used, MOST - used, "end\n");
    return MOA_TRT_OK;
}

void moa_trt_plan_destroy(moa_trt_plan *plan) { free(plan); }
const void *moa_trt_plan_data(const moa_trt_plan *plan) { return plan->text; }
uint64_t moa_trt_plan_bytes(const moa_trt_plan *plan) { return strlen(plan->text); }
const void *moa_trt_plan_timing_cache(const moa_trt_plan *plan) {
    (void)plan;
    return "timings";
}
uint64_t moa_trt_plan_timing_cache_bytes(const moa_trt_plan *plan) {
    (void)plan;
    return 7;
}

int32_t moa_trt_engine_create(moa_trt_library *library, const void *plan, uint64_t bytes, moa_trt_engine **engine,
                              moa_trt_error *error) {
    char expected[64];
    (void)library;
    *engine = NULL;
    if (told("deserialised")) return fail(error, MOA_TRT_INTERNAL, "a plan was loaded that must not be");
    if (bytes < 4 || bytes >= MOST || memcmp((const char *)plan + bytes - 4, "end\n", 4) != 0) {
        return fail(error, MOA_TRT_PLAN, "the bytes are no whole plan");
    }
    *engine = calloc(1, sizeof **engine);
    memcpy((*engine)->text, plan, (size_t)bytes);
    snprintf(expected, sizeof expected, "plan of %s\n", version());
    if (strncmp((*engine)->text, expected, strlen(expected)) != 0) {
        free(*engine);
        *engine = NULL;
        return fail(error, MOA_TRT_INCOMPATIBLE, "the plan was built by another release of TensorRT");
    }
    return MOA_TRT_OK;
}

void moa_trt_engine_destroy(moa_trt_engine *engine) { free(engine); }

static const char *const names[4] = {"x", "ids", "y", "twice"};

int32_t moa_trt_get_engine_info(const moa_trt_engine *engine, moa_trt_engine_info *info, moa_trt_error *error) {
    (void)error;
    info->tensor_count = 4;
    info->profile_count = 0;
    for (const char *line = engine->text; (line = strstr(line, "\nx ")) != NULL; ++line) ++info->profile_count;
    info->layer_count = 2;
    return MOA_TRT_OK;
}

int32_t moa_trt_get_tensor(const moa_trt_engine *engine, uint32_t index, moa_trt_tensor *tensor, moa_trt_error *error) {
    const int is_float = index % 2 == 0;
    (void)engine;
    (void)error;
    tensor->element = is_float ? MOA_TRT_FLOAT : is_narrow() ? MOA_TRT_INT32 : MOA_TRT_INT64;
    if (told("bool") && index == 3) tensor->element = MOA_TRT_BOOL;
    tensor->is_input = index < 2;
    tensor->is_on_host = 0;
    tensor->name = names[index];
    tensor->shape.rank = is_float ? 2 : 1;
    tensor->shape.dims[0] = -1;
    tensor->shape.dims[1] = 2;
    return MOA_TRT_OK;
}

int32_t moa_trt_get_range(const moa_trt_engine *engine, uint32_t profile, const char *input, moa_trt_range *range,
                          moa_trt_error *error) {
    moa_trt_shape *shapes[3] = {&range->min, &range->opt, &range->max};
    char start[64];
    const char *line;
    snprintf(start, sizeof start, "\n%s ", input);
    line = strstr(engine->text, start);
    for (; line != NULL && profile > 0; --profile) line = strstr(line + 1, start);
    if (line == NULL) return fail(error, MOA_TRT_ARGUMENT, "the profile has no such input");
    line += strlen(start);
    for (int which = 0; which < 3; ++which) {
        char *rest;
        shapes[which]->rank = (int32_t)strtol(line, &rest, 10);
        for (int axis = 0; axis < shapes[which]->rank; ++axis) shapes[which]->dims[axis] = strtoll(rest, &rest, 10);
        line = rest;
    }
    return MOA_TRT_OK;
}

int32_t moa_trt_engine_layers(moa_trt_engine *engine, const char **json, moa_trt_error *error) {
    (void)engine;
    (void)error;
    *json = "{\"Layers\": [{\"Name\": \"Add_y\", \"TacticValue\": \"0x1\"}]}";
    return MOA_TRT_OK;
}

int32_t moa_trt_context_create(moa_trt_engine *engine, uint32_t profile, moa_trt_context **context,
                               moa_trt_error *error) {
    (void)error;
    *context = calloc(1, sizeof **context);
    (*context)->engine = engine;
    (*context)->profile = profile;
    return MOA_TRT_OK;
}

void moa_trt_context_destroy(moa_trt_context *context) { free(context); }

int32_t moa_trt_set_shape(moa_trt_context *context, const char *input, const moa_trt_shape *shape,
                          moa_trt_error *error) {
    moa_trt_range range;
    if (moa_trt_get_range(context->engine, context->profile, input, &range, error) != MOA_TRT_OK) return MOA_TRT_ARGUMENT;
    if (shape->dims[0] > MOST || shape->dims[0] < range.min.dims[0] || shape->dims[0] > range.max.dims[0]) {
        return fail(error, MOA_TRT_PROFILE, "the shape is outside the profile");
    }
    context->rows = shape->dims[0];
    return MOA_TRT_OK;
}

int32_t moa_trt_tensor_shape(moa_trt_context *context, const char *name, moa_trt_shape *shape, moa_trt_error *error) {
    (void)error;
    shape->rank = strcmp(name, "x") == 0 || strcmp(name, "y") == 0 ? 2 : 1;
    shape->dims[0] = context->rows;
    shape->dims[1] = 2;
    return MOA_TRT_OK;
}

int32_t moa_trt_upload(moa_trt_context *context, const char *input, const void *values, uint64_t bytes,
                       moa_trt_error *error) {
    const uint64_t width = is_narrow() ? 4 : 8;
    const int is_float = strcmp(input, "x") == 0;
    if (bytes != (uint64_t)context->rows * (is_float ? 8 : width)) return fail(error, MOA_TRT_ARGUMENT, "wrong count");
    if (is_float) {
        memcpy(context->x, values, (size_t)bytes);
        return MOA_TRT_OK;
    }
    for (int64_t row = 0; row < context->rows; ++row) {
        context->ids[row] = is_narrow() ? ((const int32_t *)values)[row] : ((const int64_t *)values)[row];
    }
    return MOA_TRT_OK;
}

int32_t moa_trt_run(moa_trt_context *context, moa_trt_error *error) {
    (void)context;
    return told("crash") ? fail(error, MOA_TRT_DRIVER, "the driver refused a launch (code 700)") : MOA_TRT_OK;
}

/* A quarter of a millisecond, and another for each profile before the context's own. */
int32_t moa_trt_run_timed(moa_trt_context *context, float *milliseconds, moa_trt_error *error) {
    *milliseconds = 0.25F * (float)(context->profile + 1);
    return moa_trt_run(context, error);
}

int32_t moa_trt_download(moa_trt_context *context, const char *output, void *values, uint64_t bytes,
                         moa_trt_error *error) {
    (void)bytes;
    (void)error;
    for (int64_t row = 0; row < context->rows; ++row) {
        if (strcmp(output, "y") == 0) {
            ((float *)values)[2 * row] = 2 * context->x[2 * row];
            ((float *)values)[2 * row + 1] = 2 * context->x[2 * row + 1] + (told("marked") ? (float)context->profile : 0);
        } else if (is_narrow()) {
            ((int32_t *)values)[row] = (int32_t)(2 * context->ids[row]);
        } else {
            ((int64_t *)values)[row] = 2 * context->ids[row];
        }
    }
    return MOA_TRT_OK;
}
