// Random numbers with a fixed seed, so that equal input gives equal results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hdpcomm {

class Xorshift {  // xorshift64*
 public:
  uint32_t below(size_t bound) {
    return static_cast<uint32_t>((static_cast<uint64_t>(next()) * bound) >> 32);
  }
  double unit() { return next() * 0x1p-32; }

 private:
  uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1DULL) >> 32);
  }
  uint64_t state_ = 0x9E3779B97F4A7C15ULL;
};

}  // namespace hdpcomm
