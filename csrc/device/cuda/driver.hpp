// The CUDA driver, opened on first use. The declarations are our own, since CPU builds have no
// cuda.h; they follow the CUDA 13.0 driver API reference, and driver_check.cu compares them with
// cuda.h where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/device_api.hpp"

namespace hdpcomm::cuda {

using Result = int;        // CUresult
using Ordinal = int;       // CUdevice
using Pointer = uint64_t;  // CUdeviceptr
using Context = struct OpaqueContext*;
using DriverStream = struct OpaqueStream*;
using DriverEvent = struct OpaqueEvent*;
using Function = struct OpaqueFunction*;  // CUfunction, or a CUkernel
struct IpcHandle {                        // CUipcMemHandle
  char reserved[64];
};

// CUstreamBatchMemOpParams, of a wait or a write of 32 bits.
struct MemOp {
  uint32_t operation;  // kMemOpWait32, kMemOpWrite32
  Pointer address;
  uint64_t value;
  uint32_t flags;  // kWaitGeq, kWriteDefault
  Pointer alias;
  uint64_t unused;
};
inline constexpr uint32_t kMemOpWait32 = 1;
inline constexpr uint32_t kMemOpWrite32 = 2;

inline constexpr Result kSuccess = 0;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kNotReady = 600;
inline constexpr Result kPeerAccessAlreadyEnabled = 704;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHostMemoryNotRegistered = 713;
inline constexpr Result kNotSupported = 801;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostDeviceMap = 2;
inline constexpr unsigned kIpcLazyPeerAccess = 1;
inline constexpr unsigned kWaitGeq = 0;
inline constexpr unsigned kWriteDefault = 0;  // with a fence before the write

// Name in the library, then the types of the arguments; all return a Result.
#define HDP_DRIVER_FUNCTIONS(X)                                                           \
  X(cuInit, unsigned)                                                                     \
  X(cuDeviceGetCount, int*)                                                               \
  X(cuDeviceGet, Ordinal*, int)                                                           \
  X(cuDeviceGetName, char*, int, Ordinal)                                                 \
  X(cuDeviceGetPCIBusId, char*, int, Ordinal)                                             \
  X(cuDeviceCanAccessPeer, int*, Ordinal, Ordinal)                                        \
  X(cuDevicePrimaryCtxRetain, Context*, Ordinal)                                          \
  X(cuDevicePrimaryCtxRelease_v2, Ordinal)                                                \
  X(cuCtxPushCurrent_v2, Context)                                                         \
  X(cuCtxPopCurrent_v2, Context*)                                                         \
  X(cuCtxEnablePeerAccess, Context, unsigned)                                             \
  X(cuCtxGetStreamPriorityRange, int*, int*)                                              \
  X(cuMemAlloc_v2, Pointer*, size_t)                                                      \
  X(cuMemFree_v2, Pointer)                                                                \
  X(cuMemHostAlloc, void**, size_t, unsigned)                                             \
  X(cuMemFreeHost, void*)                                                                 \
  X(cuMemHostRegister_v2, void*, size_t, unsigned)                                        \
  X(cuMemHostUnregister, void*)                                                           \
  X(cuIpcGetMemHandle, IpcHandle*, Pointer)                                               \
  X(cuIpcOpenMemHandle_v2, Pointer*, IpcHandle, unsigned)                                 \
  X(cuIpcCloseMemHandle, Pointer)                                                         \
  X(cuStreamCreateWithPriority, DriverStream*, unsigned, int)                             \
  X(cuStreamDestroy_v2, DriverStream)                                                     \
  X(cuStreamIsCapturing, DriverStream, int*)                                              \
  X(cuThreadExchangeStreamCaptureMode, int*)                                              \
  X(cuStreamWaitEvent, DriverStream, DriverEvent, unsigned)                               \
  X(cuEventCreate, DriverEvent*, unsigned)                                                \
  X(cuEventDestroy_v2, DriverEvent)                                                       \
  X(cuEventRecord, DriverEvent, DriverStream)                                             \
  X(cuEventQuery, DriverEvent)                                                            \
  X(cuMemcpyAsync, Pointer, Pointer, size_t, DriverStream)                                \
  X(cuMemsetD8Async, Pointer, unsigned char, size_t, DriverStream)                        \
  X(cuStreamWriteValue32_v2, DriverStream, Pointer, uint32_t, unsigned)                   \
  X(cuStreamWaitValue32_v2, DriverStream, Pointer, uint32_t, unsigned)                    \
  X(cuStreamBatchMemOp_v2, DriverStream, unsigned, MemOp*, unsigned)                      \
  X(cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
    unsigned, DriverStream, void**, void**)                                               \
  X(cuGetErrorName, Result, const char**)                                                 \
  X(cuGetErrorString, Result, const char**)

struct Driver {
#define HDP_DRIVER_MEMBER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  HDP_DRIVER_FUNCTIONS(HDP_DRIVER_MEMBER)
#undef HDP_DRIVER_MEMBER

  // Opens and initialises the driver; throws DeviceError that says what is missing.
  static std::shared_ptr<const Driver> open(const char* library);
  // "CUDA_ERROR_OUT_OF_MEMORY: out of memory"
  std::string describe(Result result) const;
  // Throws DeviceError with the call's text and place if the result is an error.
  void check(Result result, const char* call, const char* file, int line) const;
};

inline constexpr const char* kDriverLibrary = "libcuda.so.1";

// Opens a device through the driver in this library.
std::shared_ptr<DeviceApi> openDevice(const char* library, int ordinal);

// For drivers without stream memory operations: kernels of one thread. The waiting one occupies a
// slot of an SM as long as it waits.
void launchWriteValue(uint32_t* flag, uint32_t value, void* stream);
void launchWaitValue(const uint32_t* flag, uint32_t value, void* stream);

}  // namespace hdpcomm::cuda

// HDP_CUDA(driver, cuEventQuery(event)): calls it and throws on an error.
#define HDP_CUDA(driver, call) (driver).check((driver).call, #call, __FILE__, __LINE__)
