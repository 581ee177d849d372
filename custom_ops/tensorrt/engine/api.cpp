// The C interface: handles, checks of what the caller passes, and the end of exceptions.

#include <algorithm>
#include <cstring>
#include <memory>

#include "build.h"
#include "library.h"
#include "running.h"

using moa::engine::Error;

struct moa_trt_library {
    std::shared_ptr<moa::engine::Library> library;
};

struct moa_trt_plan {
    moa::engine::Built built;
};

struct moa_trt_engine {
    std::shared_ptr<moa::engine::Library> library;
    std::shared_ptr<moa::engine::Loaded> loaded;
};

struct moa_trt_context {
    std::unique_ptr<moa::engine::Running> running;
};

namespace {

// As much of `text` as there is room for, cut between two letters of UTF-8.
void write(moa_trt_error *error, const char *text) noexcept {
    if (error == nullptr) return;
    constexpr std::size_t room = sizeof error->text - 1;
    constexpr const char cut[] = "...";
    std::size_t length = std::strlen(text);
    const bool is_cut = length > room;
    if (is_cut) {
        length = room - (sizeof cut - 1);
        while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U) --length;
    }
    std::memcpy(error->text, text, length);
    if (is_cut) {
        std::memcpy(error->text + length, cut, sizeof cut - 1);
        length += sizeof cut - 1;
    }
    error->text[length] = '\0';
}

template <class Body>
std::int32_t call(moa_trt_error *error, Body &&body) noexcept {
    write(error, "");
    try {
        body();
        return MOA_TRT_OK;
    } catch (const Error &failure) {
        write(error, failure.what());
        return failure.code;
    } catch (const std::bad_alloc &) {
        write(error, "the host has not enough memory");
        return MOA_TRT_MEMORY;
    } catch (const std::exception &failure) {
        write(error, failure.what());
    } catch (...) {
        write(error, "an error of unknown type");
    }
    return MOA_TRT_INTERNAL;
}

[[noreturn]] void refuse(const std::string &what) { throw Error(MOA_TRT_ARGUMENT, what); }

template <class Pointer>
Pointer *present(Pointer *pointer, const char *name) {
    if (pointer == nullptr) refuse(std::string(name) + " is NULL");
    return pointer;
}

// The sizes that a caller may give: no fields were added since the first version.
template <class Structure>
std::size_t known_size(const Structure &given, const char *name) {
    if (given.struct_size != sizeof(Structure)) {
        refuse(std::string(name) + " has struct_size " + std::to_string(given.struct_size) + ", and this library takes " +
               std::to_string(sizeof(Structure)));
    }
    return sizeof(Structure);
}

// What the caller passes in, with zeros where it is older.
template <class Structure>
Structure taken(const Structure *given, const char *name) {
    Structure whole{};
    std::memcpy(&whole, present(given, name), known_size(*present(given, name), name));
    return whole;
}

// Fills a structure of the caller by what `body` writes.
template <class Structure, class Body>
void answer(Structure *wanted, const char *name, Body &&body) {
    const std::size_t size = known_size(*present(wanted, name), name);
    Structure whole{};
    body(whole);
    whole.struct_size = wanted->struct_size;
    std::memcpy(wanted, &whole, size);
}

const moa::engine::Loaded &loaded(const moa_trt_engine *engine) { return *present(engine, "engine")->loaded; }
moa::engine::Running &running(moa_trt_context *context) { return *present(context, "context")->running; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

std::uint32_t moa_trt_abi_version() { return MOA_TRT_ABI_VERSION; }

std::int32_t moa_trt_built_for(moa_trt_target *target, moa_trt_error *error) {
    return call(error, [&] {
        answer(target, "target", [](moa_trt_target &told) {
            told.abi_version = MOA_TRT_ABI_VERSION;
            told.header_major = NV_TENSORRT_MAJOR;
            told.header_minor = NV_TENSORRT_MINOR;
            told.header_patch = NV_TENSORRT_PATCH;
            told.plugin_interface = MOA_PLUGIN_V2 ? 2 : 3;
        });
    });
}

std::int32_t moa_trt_open(const moa_trt_open_options *options, moa_trt_library **library, moa_trt_error *error) {
    return call(error, [&] {
        *present(library, "library") = nullptr;
        moa_trt_open_options asked{};
        if (options != nullptr) asked = taken(options, "options");
        std::string folder = asked.folder == nullptr ? "" : asked.folder;
        while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
        const moa::engine::Sink sink{asked.log, asked.log_severity, asked.user};
        auto made = std::make_unique<moa_trt_library>();
        made->library = std::make_shared<moa::engine::Library>(folder, asked.device, sink);
        *library = made.release();
    });
}

void moa_trt_close(moa_trt_library *library) { delete library; }

std::int32_t moa_trt_get_versions(moa_trt_library *library, moa_trt_versions *versions, moa_trt_error *error) {
    return call(error, [&] {
        const auto &tensorrt = present(library, "library")->library->tensorrt;
        answer(versions, "versions", [&](moa_trt_versions &told) {
            told.major = tensorrt.version().major;
            told.minor = tensorrt.version().minor;
            told.patch = tensorrt.version().patch;
            told.build = tensorrt.build_number();
            told.nvinfer_path = tensorrt.path().c_str();
            try {
                told.parser = tensorrt.parser().version;
                told.parser_path = tensorrt.parser().path.c_str();
            } catch (const Error &) {
                told.parser_path = nullptr;
            }
        });
    });
}

std::int32_t moa_trt_get_device(std::int32_t ordinal, moa_trt_device *device, moa_trt_error *error) {
    return call(error, [&] {
        answer(device, "device", [&](moa_trt_device &told) { moa::engine::Device::describe(ordinal, told); });
    });
}

std::int32_t moa_trt_build(moa_trt_library *library, const moa_trt_build_options *options, moa_trt_plan **plan,
                           moa_trt_error *error) {
    return call(error, [&] {
        *present(plan, "plan") = nullptr;
        const moa_trt_build_options asked = taken(options, "options");
        auto made = std::make_unique<moa_trt_plan>();
        made->built = moa::engine::build(*present(library, "library")->library, asked);
        *plan = made.release();
    });
}

void moa_trt_plan_destroy(moa_trt_plan *plan) { delete plan; }

const void *moa_trt_plan_data(const moa_trt_plan *plan) { return plan == nullptr ? nullptr : plan->built.plan->data(); }
std::uint64_t moa_trt_plan_bytes(const moa_trt_plan *plan) { return plan == nullptr ? 0 : plan->built.plan->size(); }
const void *moa_trt_plan_timing_cache(const moa_trt_plan *plan) {
    return plan == nullptr || plan->built.timing_cache == nullptr ? nullptr : plan->built.timing_cache->data();
}
std::uint64_t moa_trt_plan_timing_cache_bytes(const moa_trt_plan *plan) {
    return plan == nullptr || plan->built.timing_cache == nullptr ? 0 : plan->built.timing_cache->size();
}

std::int32_t moa_trt_engine_create(moa_trt_library *library, const void *plan, std::uint64_t bytes,
                                   moa_trt_engine **engine, moa_trt_error *error) {
    return call(error, [&] {
        *present(engine, "engine") = nullptr;
        auto made = std::make_unique<moa_trt_engine>();
        made->library = present(library, "library")->library;
        made->loaded = std::make_shared<moa::engine::Loaded>(made->library, plan, bytes);
        *engine = made.release();
    });
}

void moa_trt_engine_destroy(moa_trt_engine *engine) { delete engine; }

std::int32_t moa_trt_get_engine_info(const moa_trt_engine *engine, moa_trt_engine_info *info, moa_trt_error *error) {
    return call(error, [&] {
        answer(info, "info", [&](moa_trt_engine_info &told) { loaded(engine).describe(told); });
    });
}

std::int32_t moa_trt_get_tensor(const moa_trt_engine *engine, std::uint32_t index, moa_trt_tensor *tensor,
                                moa_trt_error *error) {
    return call(error, [&] {
        const auto &all = loaded(engine).tensors();
        if (index >= all.size()) refuse("the engine has " + std::to_string(all.size()) + " tensors");
        answer(tensor, "tensor", [&](moa_trt_tensor &told) {
            told.element = all[index].element;
            told.is_input = all[index].is_input;
            told.is_on_host = all[index].is_on_host;
            told.name = all[index].name.c_str();
            told.shape = all[index].shape;
        });
    });
}

std::int32_t moa_trt_get_range(const moa_trt_engine *engine, std::uint32_t profile, const char *input,
                               moa_trt_range *range, moa_trt_error *error) {
    return call(error, [&] {
        const auto &from = loaded(engine);
        from.range(profile, from.index_of(present(input, "input")), *present(range, "range"));
    });
}

std::int32_t moa_trt_engine_layers(moa_trt_engine *engine, const char **json, moa_trt_error *error) {
    return call(error, [&] {
        *present(json, "json") = nullptr;
        *json = present(engine, "engine")->loaded->layers();
    });
}

std::int32_t moa_trt_context_create(moa_trt_engine *engine, std::uint32_t profile, moa_trt_context **context,
                                    moa_trt_error *error) {
    return call(error, [&] {
        *present(context, "context") = nullptr;
        auto made = std::make_unique<moa_trt_context>();
        made->running = std::make_unique<moa::engine::Running>(present(engine, "engine")->loaded, profile);
        *context = made.release();
    });
}

void moa_trt_context_destroy(moa_trt_context *context) { delete context; }

std::int32_t moa_trt_set_shape(moa_trt_context *context, const char *input, const moa_trt_shape *shape,
                               moa_trt_error *error) {
    return call(error, [&] { running(context).set_shape(present(input, "input"), *present(shape, "shape")); });
}

std::int32_t moa_trt_tensor_shape(moa_trt_context *context, const char *name, moa_trt_shape *shape,
                                  moa_trt_error *error) {
    return call(error, [&] { *present(shape, "shape") = running(context).shape(present(name, "name")); });
}

std::int32_t moa_trt_upload(moa_trt_context *context, const char *input, const void *values, std::uint64_t bytes,
                            moa_trt_error *error) {
    return call(error, [&] { running(context).upload(present(input, "input"), values, bytes); });
}

std::int32_t moa_trt_run(moa_trt_context *context, moa_trt_error *error) {
    return call(error, [&] { running(context).run(); });
}

std::int32_t moa_trt_run_timed(moa_trt_context *context, float *milliseconds, moa_trt_error *error) {
    return call(error, [&] {
        auto &asked = running(context);
        *present(milliseconds, "milliseconds") = asked.run_timed();
    });
}

std::int32_t moa_trt_download(moa_trt_context *context, const char *output, void *values, std::uint64_t bytes,
                              moa_trt_error *error) {
    return call(error, [&] { running(context).download(present(output, "output"), values, bytes); });
}

std::int32_t moa_trt_time(moa_trt_context *context, const moa_trt_timing *timing, float *milliseconds,
                          moa_trt_error *error) {
    return call(error, [&] {
        const moa_trt_timing asked = taken(timing, "timing");
        if (asked.runs != 0) present(milliseconds, "milliseconds");
        running(context).time(asked, milliseconds);
    });
}

std::int32_t moa_trt_profile_layers(moa_trt_context *context, std::uint32_t runs, moa_trt_on_layer layer, void *user,
                                    moa_trt_error *error) {
    return call(error, [&] { running(context).profile_layers(runs, present(layer, "layer"), user); });
}

}  // extern "C"
#pragma GCC visibility pop
