// Random numbers with a fixed seed, so that equal input gives equal results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hdpcomm {

class Xorshift {  // xorshift64*
 public:
  uint32_t below(size_t bound) {
    return static_cast<uint32_t>((static_cast<uint64_t>(next()) * bound) >> 32);
  }
  double unit() { return next() * 0x1p-32; }

  // What the state becomes after so many numbers. Steps are linear in its bits, so it is the sum of
  // what its bytes become.
  class Leap {
   public:
    explicit Leap(uint64_t numbers) {
      std::array<uint64_t, 64> of_bits;
      for (int bit = 0; bit < 64; ++bit) {
        of_bits[bit] = uint64_t{1} << bit;
        for (uint64_t i = 0; i < numbers; ++i) of_bits[bit] = stepped(of_bits[bit]);
      }
      for (int byte = 0; byte < 8; ++byte) {
        for (int value = 0; value < 256; ++value) {
          for (int bit = 0; bit < 8; ++bit) {
            if ((value >> bit & 1) != 0) table_[byte][value] ^= of_bits[8 * byte + bit];
          }
        }
      }
    }

   private:
    friend class Xorshift;
    std::array<std::array<uint64_t, 256>, 8> table_{};
  };

  // As if so many numbers had been taken.
  void leap(const Leap& leap) {
    uint64_t state = 0;
    for (int byte = 0; byte < 8; ++byte) state ^= leap.table_[byte][state_ >> (8 * byte) & 0xFF];
    state_ = state;
  }

 private:
  static uint64_t stepped(uint64_t state) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state;
  }
  uint32_t next() {
    state_ = stepped(state_);
    return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1DULL) >> 32);
  }
  uint64_t state_ = 0x9E3779B97F4A7C15ULL;
};

}  // namespace hdpcomm
