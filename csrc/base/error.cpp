#include "base/error.hpp"

#include <cstring>

namespace hdpcomm {

void throwInvalidUsage(const std::string& message) {
  throw Error(ErrorKind::kInvalidUsage, message);
}

void throwSystemError(const char* call, const char* file, int line, int error_number) {
  throw Error(ErrorKind::kInternal, std::string(call) + " failed at " + file + ":" +
                                        std::to_string(line) + ": " + std::strerror(error_number) +
                                        " (errno " + std::to_string(error_number) + ")");
}

}  // namespace hdpcomm
