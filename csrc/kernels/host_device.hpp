// Element functions are written once, for the CPU loops (*.cpp) and for the CUDA kernels (*.cu).
#pragma once

#if defined(__CUDACC__)
#define HDP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HDP_HOST_DEVICE inline
#endif
