// The two types that TensorRT's headers take from the CUDA toolkit, for builds without one.
#pragma once

using cudaEvent_t = struct CUevent_st *;
using cudaStream_t = struct CUstream_st *;
