// NCCL as a table of functions: found at run time, checked, and replaceable by a fake one.
//
// The declarations are our own, written from NVIDIA's documentation of the C API
// (docs.nvidia.com/deeplearning/nccl/user-guide, "NCCL API"), so that nothing is needed to build.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/call.hpp"

namespace hdpcomm {

using NcclComm = struct NcclCommOpaque*;
using NcclStream = void*;  // cudaStream_t

inline constexpr int kByteType = 1;  // ncclUint8: messages are bytes

struct NcclUniqueId {
  char bytes[128];
};

// ncclResult_t
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclUnhandledCudaError = 1;
inline constexpr int kNcclSystemError = 2;
inline constexpr int kNcclInternalError = 3;
inline constexpr int kNcclInvalidArgument = 4;
inline constexpr int kNcclInvalidUsage = 5;
inline constexpr int kNcclRemoteError = 6;
inline constexpr int kNcclInProgress = 7;

// ncclConfig_t as of 2.14; the library takes the fields that come later from their defaults.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

struct NcclApi {
  std::string path;  // of the library
  int version = 0;   // 22809: 2.28.9

  int (*getVersion)(int* version) = nullptr;
  int (*getUniqueId)(NcclUniqueId* id) = nullptr;
  int (*commInitRankConfig)(NcclComm* comm, int num_ranks, NcclUniqueId id, int rank,
                            NcclConfig* config) = nullptr;
  int (*commDestroy)(NcclComm comm) = nullptr;
  int (*commAbort)(NcclComm comm) = nullptr;
  int (*commGetAsyncError)(NcclComm comm, int* error) = nullptr;
  const char* (*getErrorString)(int result) = nullptr;
  const char* (*getLastError)(NcclComm comm) = nullptr;
  int (*groupStart)() = nullptr;
  int (*groupEnd)() = nullptr;
  int (*send)(const void* data, size_t count, int type, int peer, NcclComm comm,
              NcclStream stream) = nullptr;
  int (*recv)(void* data, size_t count, int type, int peer, NcclComm comm,
              NcclStream stream) = nullptr;
  int (*allReduce)(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                   NcclStream stream) = nullptr;
  int (*allGather)(const void* in, void* out, size_t count, int type, NcclComm comm,
                   NcclStream stream) = nullptr;
  int (*reduceScatter)(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                       NcclStream stream) = nullptr;
  int (*broadcast)(const void* in, void* out, size_t count, int type, int root, NcclComm comm,
                   NcclStream stream) = nullptr;
};

// The oldest library whose functions and whose non-blocking initialisation are all there.
inline constexpr int kOldestNccl = 21804;

// Opens the first library of `candidates` (paths or names for dlopen) that can be opened. Throws
// Error (kDevice) saying what was tried, which symbol is missing, or that it is too old.
std::shared_ptr<const NcclApi> loadNccl(const std::vector<std::string>& candidates);

// "2.28.9"
std::string ncclVersionText(int version);
// ncclDataType_t of an element type; -1: NCCL has none.
int ncclTypeOf(DType dtype);
// ncclRedOp_t
int ncclOpOf(RedOp op);
// Throws Error (kDevice) with the call, the meaning of its result, and NCCL's last error text,
// unless the call succeeded or is in progress.
void ncclCheck(const NcclApi& api, int result, const char* call, NcclComm comm, int rank);

}  // namespace hdpcomm
