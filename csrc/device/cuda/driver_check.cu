// Compares driver.hpp with the toolkit's cuda.h; makes no code.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "device/cuda/driver.hpp"

namespace hdpcomm::cuda {
namespace {

static_assert(kSuccess == CUDA_SUCCESS && kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(kNotReady == CUDA_ERROR_NOT_READY && kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
static_assert(kHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(kHostMemoryNotRegistered == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostPortable == CU_MEMHOSTALLOC_PORTABLE &&
              kHostPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kHostDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP &&
              kHostDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(kWaitGeq == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(kWriteDefault == CU_STREAM_WRITE_VALUE_DEFAULT);
static_assert(kMemOpWait32 == CU_STREAM_MEM_OP_WAIT_VALUE_32 &&
              kMemOpWrite32 == CU_STREAM_MEM_OP_WRITE_VALUE_32);
static_assert(sizeof(MemOp) == sizeof(CUstreamBatchMemOpParams) &&
              alignof(MemOp) == alignof(CUstreamBatchMemOpParams));
static_assert(offsetof(MemOp, address) == offsetof(CUstreamBatchMemOpParams, waitValue.address) &&
              offsetof(MemOp, value) == offsetof(CUstreamBatchMemOpParams, waitValue.value) &&
              offsetof(MemOp, flags) == offsetof(CUstreamBatchMemOpParams, waitValue.flags) &&
              offsetof(MemOp, alias) == offsetof(CUstreamBatchMemOpParams, waitValue.alias));
static_assert(offsetof(MemOp, address) == offsetof(CUstreamBatchMemOpParams, writeValue.address) &&
              offsetof(MemOp, value) == offsetof(CUstreamBatchMemOpParams, writeValue.value) &&
              offsetof(MemOp, flags) == offsetof(CUstreamBatchMemOpParams, writeValue.flags));
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(Pointer) == sizeof(CUdeviceptr) && std::is_unsigned_v<CUdeviceptr>);
static_assert(sizeof(Ordinal) == sizeof(CUdevice) && sizeof(Result) == sizeof(CUresult));

// Whether two functions have as many arguments, of the same sizes.
template <typename Ours, typename Theirs>
struct Alike : std::false_type {};
template <typename... Ours, typename... Theirs>
struct Alike<Result (*)(Ours...), CUresult(Theirs...)> {
  static constexpr bool kCount = sizeof...(Ours) == sizeof...(Theirs);
  static constexpr bool value = kCount && ((sizeof(Ours) == sizeof(Theirs)) && ...);
};
#define HDP_DRIVER_COMPARE(name, ...) \
  static_assert(Alike<decltype(Driver::name), decltype(::name)>::value, #name);
HDP_DRIVER_FUNCTIONS(HDP_DRIVER_COMPARE)
#undef HDP_DRIVER_COMPARE

}  // namespace
}  // namespace hdpcomm::cuda
