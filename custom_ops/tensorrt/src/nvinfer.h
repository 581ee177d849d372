// TensorRT's headers, without their warnings about what they deprecate themselves.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wextra"
#include <NvInferRuntime.h>
#pragma GCC diagnostic pop

// IPluginV3 exists from TensorRT 10.0 on. IPluginV2DynamicExt is for 8.6 alone: its classes changed in 10 and in 11.
#ifndef MOA_PLUGIN_V2
#if NV_TENSORRT_MAJOR >= 10
#define MOA_PLUGIN_V2 0
#else
#define MOA_PLUGIN_V2 1
#endif
#endif
