// Operations of a simulated stream, and the checks of their arguments.
#pragma once

#include <cstring>
#include <string>

#include "base/error.hpp"
#include "device/arguments.hpp"
#include "device/device_api.hpp"

namespace hdpcomm::simulated {

using device::checkFlag;
using device::checkTimeout;
using device::hexOf;
using device::throwDefaultStream;

enum class OpKind : uint8_t { kCopy, kFill, kWriteValue, kWaitValue, kWaitEvent, kKernel };

struct Op {
  OpKind kind = OpKind::kCopy;
  Site site;
  void* dst = nullptr;  // kCopy, kFill
  const void* src = nullptr;
  size_t bytes = 0;
  unsigned char byte = 0;
  FlagValue flag;       // kWriteValue, kWaitValue
  KernelLaunch kernel;  // kKernel

  static Op copy(void* dst, const void* src, size_t bytes, Site site);
  static Op fill(void* dst, unsigned char value, size_t bytes, Site site);
  static Op write(uint32_t* flag, uint32_t value, Site site);
  static Op wait(uint32_t* flag, uint32_t value, Site site);
  static Op launch(KernelLaunch kernel, Site site);

  // Bytes that it reads and writes, as a measure of its time.
  size_t cost() const;
};

std::string placeOf(const Site& site);  // "file.cpp:12"

}  // namespace hdpcomm::simulated
