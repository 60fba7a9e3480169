// Checks of arguments, common to all devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hdpcomm::device {

std::string hexOf(const void* memory);
// Each throws InvalidUsage.
void checkAllocation(size_t bytes);
void checkCopy(const void* dst, const void* src, size_t bytes);
void checkFill(const void* dst, size_t bytes);
void checkFlag(const char* call, const uint32_t* flag);
void checkTimeout(double timeout_s);
void checkPinned(const void* memory, size_t bytes);
[[noreturn]] void throwNotAllocated(const char* call, const void* memory);
[[noreturn]] void throwNotExportable(const void* memory);
[[noreturn]] void throwFreedExport();
[[noreturn]] void throwNotImported(const void* memory);
[[noreturn]] void throwRegistered(const void* memory, size_t bytes);
[[noreturn]] void throwNotRegistered(const void* memory);
[[noreturn]] void throwDefaultStream();

}  // namespace hdpcomm::device
