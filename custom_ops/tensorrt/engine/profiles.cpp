// Optimisation profiles, held against the inputs of a network before TensorRT sees them.

#include <set>

#include "build.h"
#include "shapes.h"

namespace moa::engine {

namespace {

using nvinfer1::Dims;
using nvinfer1::IOptimizationProfile;
using nvinfer1::ITensor;
using nvinfer1::OptProfileSelector;

[[noreturn]] void refuse(std::size_t profile, const std::string &why) {
    throw Error(MOA_TRT_PROFILE, "profile " + std::to_string(profile) + ": " + why);
}

bool is_dynamic(const Dims &dims) {
    for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) {
        if (dims.d[axis] < 0) return true;
    }
    return false;
}

// Rank and fixed sizes as in the network, and min <= opt <= max.
void check_shapes(std::size_t profile, const moa_trt_range &range, const Dims &dims) {
    const std::string name = std::string("`") + range.input + "`";
    for (const auto *shape : {&range.min, &range.opt, &range.max}) {
        to_dims(*shape, "profile " + std::to_string(profile) + ": " + name, MOA_TRT_PROFILE);
        bool fits = shape->rank == dims.nbDims;
        for (std::int32_t axis = 0; fits && axis < dims.nbDims; ++axis) {
            fits = dims.d[axis] < 0 || shape->dims[axis] == dims.d[axis];
        }
        if (!fits) refuse(profile, name + " is given " + text(*shape) + ", and the model says " + text(from_dims(dims)));
    }
    for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) {
        const std::int64_t least = range.min.dims[axis], usual = range.opt.dims[axis], most = range.max.dims[axis];
        if (least > usual || usual > most) {
            refuse(profile, name + " has min " + text(range.min) + ", opt " + text(range.opt) + " and max " +
                                text(range.max) + ", which do not ascend in dimension " + std::to_string(axis));
        }
    }
}

bool set_values(IOptimizationProfile &profile, const moa_trt_range &range, OptProfileSelector which,
                const moa_trt_shape &values) {
#if NV_TENSORRT_MAJOR >= 11
    return profile.setShapeValuesV2(range.input, which, values.dims, values.rank);
#else
    std::int32_t narrow[MOA_TRT_MAX_RANK] = {};
    for (std::int32_t index = 0; index < values.rank; ++index) {
        narrow[index] = static_cast<std::int32_t>(values.dims[index]);
        if (narrow[index] != values.dims[index]) return false;
    }
    return profile.setShapeValues(range.input, which, narrow, values.rank);
#endif
}

void set_range(IOptimizationProfile &made, std::size_t profile, const moa_trt_range &range, const ITensor &input) {
    const bool is_values = input.isShapeTensor();
    if (!is_values) check_shapes(profile, range, input.getDimensions());
    const std::pair<OptProfileSelector, const moa_trt_shape *> all[] = {
        {OptProfileSelector::kMIN, &range.min}, {OptProfileSelector::kOPT, &range.opt}, {OptProfileSelector::kMAX, &range.max}};
    for (const auto &[which, shape] : all) {
        const std::string what = "profile " + std::to_string(profile) + ": `" + range.input + "`";
        const Dims dims = to_dims(*shape, what, MOA_TRT_PROFILE);
        const bool is_taken =
            is_values ? set_values(made, range, which, *shape) : made.setDimensions(range.input, which, dims);
        if (!is_taken) refuse(profile, "TensorRT does not take " + text(*shape) + " for `" + range.input + "`");
    }
}

}  // namespace

void add_profiles(nvinfer1::IBuilder &builder, const nvinfer1::INetworkDefinition &network,
                  nvinfer1::IBuilderConfig &config, const moa_trt_build_options &options) {
    std::set<std::string> dynamic;
    std::string names;
    for (std::int32_t index = 0; index < network.getNbInputs(); ++index) {
        const ITensor &input = *network.getInput(index);
        if (is_dynamic(input.getDimensions()) || input.isShapeTensor()) dynamic.insert(input.getName());
        names += std::string(index == 0 ? "`" : ", `") + input.getName() + "`";
    }
    if (!dynamic.empty() && options.profile_count == 0) {
        throw Error(MOA_TRT_PROFILE, "`" + *dynamic.begin() + "` has a dynamic shape, and there is no profile");
    }
    for (std::size_t place = 0; place < options.profile_count; ++place) {
        const moa_trt_profile &profile = options.profiles[place];
        const Errors errors;
        // The builder owns it.
        IOptimizationProfile *const made = builder.createOptimizationProfile();
        if (made == nullptr) throw errors.as(MOA_TRT_RUNTIME, "TensorRT makes no profile");
        auto missing = dynamic;
        for (std::size_t index = 0; index < profile.range_count; ++index) {
            const moa_trt_range &range = profile.ranges[index];
            if (range.input == nullptr) refuse(place, "a range names no input");
            const ITensor *input = nullptr;
            for (std::int32_t tensor = 0; tensor < network.getNbInputs(); ++tensor) {
                if (std::string(network.getInput(tensor)->getName()) == range.input) input = network.getInput(tensor);
            }
            if (input == nullptr) {
                refuse(place, std::string("the model has no input `") + range.input + "`, it has " + names);
            }
            set_range(*made, place, range, *input);
            missing.erase(range.input);
        }
        if (!missing.empty()) refuse(place, "`" + *missing.begin() + "` has a dynamic shape and no range");
        if (!made->isValid() || config.addOptimizationProfile(made) < 0) {
            throw errors.as(MOA_TRT_PROFILE, "TensorRT does not take profile " + std::to_string(place));
        }
    }
}

}  // namespace moa::engine
