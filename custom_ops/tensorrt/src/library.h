// What TensorRT asks the library for.
#pragma once

#include "nvinfer.h"

namespace moa {

#if MOA_PLUGIN_V2
nvinfer1::IPluginCreator *const *creators(std::int32_t &count);
#else
nvinfer1::IPluginCreatorInterface *const *creators(std::int32_t &count);
#endif

// Where errors go while an engine of this library is open, in place of the logger that TensorRT hands to plugins.
void set_engine_log(void (*log)(const char *text) noexcept);

}  // namespace moa
