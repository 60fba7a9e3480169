// What a simulated stream does, and the checks of arguments that both modes share.
#pragma once

#include <cstring>
#include <string>

#include "hdpcomm/base/error.hpp"
#include "hdpcomm/device/device_api.hpp"

namespace hdpcomm::sim {

enum class OpKind : uint8_t { kCopy, kFill, kWriteValue, kWaitValue, kWaitEvent, kRecord, kKernel };

const char* kindName(OpKind kind);

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

  // Bytes that it touches: a measure of its time.
  size_t cost() const;
};

std::string placeOf(const Site& site);  // "file.cpp:12"
std::string hexOf(const void* memory);
void checkFlag(const char* call, const uint32_t* flag);
void checkTimeout(double timeout_s);

}  // namespace hdpcomm::sim
