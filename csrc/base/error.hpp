// Errors of the core. Each says what was given, what was expected and what to do, and carries the
// coordinates of the operation where they are known; the bindings translate them into the Python
// classes of hdpcomm.errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/text.hpp"

namespace hdpcomm {

enum class ErrorKind : uint8_t {
  kInternal,
  kInvalidUsage,
  kTimeout,
  kPeerLost,
  kMismatch,
  kAborted,
  kDevice,
};

// Where an error happened; fields that are not known keep their defaults.
struct ErrorContext {
  int rank = -1;           // global rank that raises
  int peer = -1;           // global rank that it concerns
  std::string op;          // "all_gather", "send", ...
  std::vector<int> ranks;  // ranks of the communicator, in its order
  int64_t seq = -1;        // number of the operation on the raising rank
};

// Its text may be made of what a peer wrote, so it is plain text always.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorContext context = {})
      : std::runtime_error(plainText(message)), kind_(kind), context_(std::move(context)) {}

  ErrorKind kind() const noexcept { return kind_; }
  const ErrorContext& context() const noexcept { return context_; }

 private:
  ErrorKind kind_;
  ErrorContext context_;
};

[[noreturn]] void throwInvalidUsage(const std::string& message);

// Throws Error(kInternal) with the call's text, its place, and the text of `error_number` (errno).
[[noreturn]] void throwSystemError(const char* call, const char* file, int line, int error_number);

}  // namespace hdpcomm

// Evaluates a system call that returns -1 on failure; throws with the call's text, file:line and
// the error string.
#define HDP_SYS(call)                                                \
  [&] {                                                              \
    const auto hdp_result = (call);                                  \
    if (hdp_result < 0) {                                            \
      ::hdpcomm::throwSystemError(#call, __FILE__, __LINE__, errno); \
    }                                                                \
    return hdp_result;                                               \
  }()
