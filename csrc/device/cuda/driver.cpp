#include "device/cuda/driver.hpp"

#include <dlfcn.h>

#include <cstring>

#include "base/error.hpp"

namespace hdpcomm::cuda {
namespace {

template <typename Function>
void resolve(void* library, const char* file, const char* name, Function*& function) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr) {
    throw Error(ErrorKind::kDevice, std::string(file) + " has no " + name +
                                        ": this NVIDIA driver is too old; CUDA 12.0 or newer (525 "
                                        "or newer) is needed");
  }
  std::memcpy(&function, &symbol, sizeof symbol);
}

}  // namespace

std::shared_ptr<const Driver> Driver::open(const char* library) {
  // Never closed: the driver's threads may outlive every device.
  void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    throw Error(ErrorKind::kDevice, std::string("no NVIDIA driver: ") + library + " not found (" +
                                        (reason == nullptr ? "" : reason) +
                                        "); use transport='shm' or 'sim' on this machine");
  }
  auto driver = std::make_shared<Driver>();
#define HDP_DRIVER_RESOLVE(name, ...) resolve(handle, library, #name, driver->name);
  HDP_DRIVER_FUNCTIONS(HDP_DRIVER_RESOLVE)
#undef HDP_DRIVER_RESOLVE
  HDP_CUDA(*driver, cuInit(0));
  return driver;
}

std::string Driver::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return std::string(name == nullptr ? "unknown error" : name) + " (" + std::to_string(result) +
         ")" + (text == nullptr ? "" : std::string(": ") + text);
}

void Driver::check(Result result, const char* call, const char* file, int line) const {
  if (result == kSuccess) return;
  const char* slash = std::strrchr(file, '/');
  throw Error(ErrorKind::kDevice, std::string(call) + " failed at " +
                                      (slash == nullptr ? file : slash + 1) + ":" +
                                      std::to_string(line) + ": " + describe(result));
}

}  // namespace hdpcomm::cuda
