// All of TensorRT's headers, without their warnings about what they deprecate themselves.
#pragma once

#include "nvinfer.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wextra"
#include <NvInfer.h>
#include <NvOnnxParser.h>
#pragma GCC diagnostic pop

// The methods that the shim calls have stood at the same places since the first release of each major version; the
// tables of 8.5 and 9 are others.
static_assert(NV_TENSORRT_MAJOR >= 10 || (NV_TENSORRT_MAJOR == 8 && NV_TENSORRT_MINOR == 6),
              "the headers are of TensorRT 8.6, or of 10 or newer");
