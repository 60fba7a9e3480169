#include "transport/stream/nccl/nccl_api.hpp"

#include <dlfcn.h>

#include "base/error.hpp"

namespace hdpcomm {
namespace {

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function*& target) {
  target = reinterpret_cast<Function*>(::dlsym(library, name));
  if (target != nullptr) return;
  throw Error(ErrorKind::kDevice, path + " has no function " + name +
                                      ": it is no NCCL, or one older than " +
                                      ncclVersionText(kOldestNccl) +
                                      "; install a newer one, e.g. pip install nvidia-nccl-cu13");
}

}  // namespace

std::string ncclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::shared_ptr<const NcclApi> loadNccl(const std::vector<std::string>& candidates) {
  std::string tried;
  void* library = nullptr;
  auto api = std::make_shared<NcclApi>();
  for (const std::string& candidate : candidates) {
    library = ::dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      api->path = candidate;
      break;
    }
    const char* why = ::dlerror();
    tried += "\n  " + candidate + ": " + (why != nullptr ? why : "cannot be opened");
  }
  if (library == nullptr) {
    throw Error(ErrorKind::kDevice,
                "NCCL was not found; install it, e.g. pip install nvidia-nccl-cu13, or name the "
                "library by HDPCOMM_NCCL. Tried:" +
                    tried);
  }
  const std::string& path = api->path;
  find(library, path, "ncclGetVersion", api->getVersion);
  find(library, path, "ncclGetUniqueId", api->getUniqueId);
  find(library, path, "ncclCommInitRankConfig", api->commInitRankConfig);
  find(library, path, "ncclCommDestroy", api->commDestroy);
  find(library, path, "ncclCommAbort", api->commAbort);
  find(library, path, "ncclCommGetAsyncError", api->commGetAsyncError);
  find(library, path, "ncclGetErrorString", api->getErrorString);
  find(library, path, "ncclGetLastError", api->getLastError);
  find(library, path, "ncclGroupStart", api->groupStart);
  find(library, path, "ncclGroupEnd", api->groupEnd);
  find(library, path, "ncclSend", api->send);
  find(library, path, "ncclRecv", api->recv);
  find(library, path, "ncclAllReduce", api->allReduce);
  find(library, path, "ncclAllGather", api->allGather);
  find(library, path, "ncclReduceScatter", api->reduceScatter);
  find(library, path, "ncclBroadcast", api->broadcast);
  ncclCheck(*api, api->getVersion(&api->version), "ncclGetVersion", nullptr, -1);
  if (api->version < kOldestNccl) {
    throw Error(ErrorKind::kDevice, path + " is NCCL " + ncclVersionText(api->version) +
                                        "; at least " + ncclVersionText(kOldestNccl) +
                                        " is needed: install a newer one");
  }
  return api;  // the library stays open: its functions are used until the process ends
}

int ncclTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUint8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kUint32:
      return 3;
    case DType::kInt64:
      return 4;
    case DType::kUint64:
      return 5;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    default:
      return -1;
  }
}

int ncclOpOf(RedOp op) {
  switch (op) {
    case RedOp::kProd:
      return 1;
    case RedOp::kMax:
      return 2;
    case RedOp::kMin:
      return 3;
    case RedOp::kAvg:
      return 4;
    default:
      return 0;
  }
}

void ncclCheck(const NcclApi& api, int result, const char* call, NcclComm comm, int rank) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  std::string text = std::string(call) + " failed";
  if (rank >= 0) text += " on rank " + std::to_string(rank);
  text += std::string(": ") + api.getErrorString(result);
  const char* last = api.getLastError(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  text +=
      "; NCCL " + ncclVersionText(api.version) + " at " + api.path + ", NCCL_DEBUG=WARN says more";
  throw Error(result == kNcclRemoteError ? ErrorKind::kPeerLost : ErrorKind::kDevice, text,
              {.rank = rank, .peer = -1, .op = {}, .ranks = {}, .seq = -1});
}

}  // namespace hdpcomm
