// Fuzz targets: what a hostile peer writes, made from bytes. Each runs one case on a new rank and
// returns what the rank made of it; memory errors are for AddressSanitizer to find.
#pragma once

#include <cstdint>
#include <cstring>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm::testing {

using FuzzInput = std::vector<uint8_t>;

// Takes values from the bytes of a case; zeros when there are no more.
class FuzzBytes {
 public:
  explicit FuzzBytes(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool empty() const { return at_ >= bytes_.size(); }
  uint8_t byte() { return at_ < bytes_.size() ? bytes_[at_++] : 0; }
  size_t below(size_t limit) { return byte() % limit; }
  // A boundary that a check may get wrong, one beside it, or any number.
  uint64_t number();
  // At most `most` bytes of what is no text, or none that a terminal should get: halves of
  // characters, surrogates, control characters, NULs.
  std::string text(size_t most);

 private:
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

// The end of a pair that is attacked: receives and sends whose buffers lie between guards, and all
// else that a world asks of a transport.
class FuzzedRank {
 public:
  FuzzedRank(Transport& transport, FuzzBytes& bytes);

  struct Posted {
    std::vector<std::byte> memory;  // guard, buffer, guard
    Call call;
    size_t bytes = 0;
    uint32_t number = 0;
    Completion completion;
  };
  // The next receive from rank 1, in order; after the last one, one that was never posted.
  const Posted& expected(size_t index) const;
  // One call of the transport, as the bytes choose.
  void call(FuzzBytes& bytes);
  void checkPulse();
  // Fetches of rank 1's counters that were started; those of one host need none.
  size_t fetches() const { return fetches_.size(); }
  // Ends everything; throws std::runtime_error where a guard has changed. Returns what came of the
  // requests: the texts of their errors, without numbers.
  std::set<std::string> end();

  static constexpr size_t kGuard = 4096;

 private:
  Posted& post(FuzzBytes& bytes);

  Transport& transport_;
  std::vector<std::unique_ptr<Posted>> receives_;
  std::vector<std::unique_ptr<Posted>> sends_;
  std::vector<std::unique_ptr<RemoteFetch>> fetches_;
  Posted nothing_;
};

// Throws std::runtime_error unless a terminal may show the text of an error.
void checkPlain(const std::string& text);

// The functions of base/text.hpp by themselves.
std::set<std::string> fuzzTexts(std::span<const uint8_t> bytes);
std::set<std::string> fuzzFrames(std::span<const uint8_t> bytes);
std::set<std::string> fuzzSlots(std::span<const uint8_t> bytes);

}  // namespace hdpcomm::testing
