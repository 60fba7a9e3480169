#include "device/arguments.hpp"

#include <cstdio>

#include "base/error.hpp"

namespace hdpcomm::device {

std::string hexOf(const void* memory) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", memory);
  return text;
}

void checkAllocation(size_t bytes) {
  if (bytes == 0) throwInvalidUsage("cannot allocate 0 bytes; give a number above 0");
}

void checkCopy(const void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  const std::string call =
      "copy of " + std::to_string(bytes) + " bytes to " + hexOf(dst) + " from " + hexOf(src);
  if (dst == nullptr || src == nullptr) throwInvalidUsage(call + ": an address is null");
  const auto* to = static_cast<const std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  if (to < from + bytes && from < to + bytes) {
    throwInvalidUsage(call + ": the two overlap; copy through another buffer");
  }
}

void checkFill(const void* dst, size_t bytes) {
  if (bytes > 0 && dst == nullptr) {
    throwInvalidUsage("fill of " + std::to_string(bytes) + " bytes: the address is null");
  }
}

void checkFlag(const char* call, const uint32_t* flag) {
  if (flag == nullptr || reinterpret_cast<uintptr_t>(flag) % alignof(uint32_t) != 0) {
    throwInvalidUsage(std::string(call) + ": the flag's address is " + hexOf(flag) +
                      "; give an aligned uint32_t in device, imported or pinned memory");
  }
}

void checkTimeout(double timeout_s) {
  if (!(timeout_s > 0)) {
    throwInvalidUsage("synchronize: the timeout is " + std::to_string(timeout_s) +
                      " s; give a number above 0");
  }
}

void checkPinned(const void* memory, size_t bytes) {
  if (memory == nullptr || bytes == 0) throwInvalidUsage("registerPinned needs memory and a size");
}

void throwNotAllocated(const char* call, const void* memory) {
  throwInvalidUsage(std::string(call) + "(" + hexOf(memory) +
                    "): this device has no such allocation; give the address that it returned, "
                    "once");
}

void throwNotExportable(const void* memory) {
  throwInvalidUsage("exportMemory(" + hexOf(memory) +
                    "): give the first byte of memory that this device allocated");
}

void throwFreedExport() {
  throwInvalidUsage(
      "importMemory: the exported memory was freed; import before its owner frees it");
}

void throwNotImported(const void* memory) {
  throwInvalidUsage("closeMemory(" + hexOf(memory) +
                    "): not imported; close each import once, by the address that it returned");
}

void throwRegistered(const void* memory, size_t bytes) {
  throwInvalidUsage("registerPinned(" + hexOf(memory) + ", " + std::to_string(bytes) +
                    "): part of it is registered already; register each piece once");
}

void throwNotRegistered(const void* memory) {
  throwInvalidUsage("unregisterPinned(" + hexOf(memory) +
                    "): not registered; give the address that registerPinned got, once");
}

void throwDefaultStream() { throwInvalidUsage("destroyStream: the default stream stays"); }

}  // namespace hdpcomm::device
