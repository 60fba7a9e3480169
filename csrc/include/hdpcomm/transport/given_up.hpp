// Which operations of a pair have failed, as the transports' failure notices tell.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "hdpcomm/base/error.hpp"

namespace hdpcomm {

// What a failure ends: sends up to a number, receives up to a number, or both. Differences of
// numbers are signed, so that they are right across the wrap.
struct GiveUp {
  std::optional<uint32_t> sends;
  std::optional<uint32_t> recvs;
};

inline bool upTo(uint32_t number, std::optional<uint32_t> limit) {
  return limit && static_cast<int32_t>(*limit - number) >= 0;
}

// The failures that one peer told of; ours are the sends that it does not take, and the receives
// that it does not serve.
class GivenUp {
 public:
  void add(const GiveUp& ours, const Error& error) {
    if (ours.sends && (!up_to_.sends || upTo(*up_to_.sends, ours.sends))) up_to_.sends = ours.sends;
    if (ours.recvs && (!up_to_.recvs || upTo(*up_to_.recvs, ours.recvs))) up_to_.recvs = ours.recvs;
    last_ = error;
    if (notices_.size() == kNotices) notices_.erase(notices_.begin());
    notices_.push_back({ours, error});
  }

  // Why a request with this number fails as soon as it is posted, or null.
  const Error* send(uint32_t number) const {
    return upTo(number, up_to_.sends) ? &*last_ : nullptr;
  }
  const Error* recv(uint32_t number) const {
    return upTo(number, up_to_.recvs) ? &*last_ : nullptr;
  }

  // The failure of the very operation that has these numbers, or null.
  const Error* operation(std::optional<uint32_t> send, std::optional<uint32_t> recv) const {
    for (const Notice& notice : notices_) {
      if ((send && notice.ours.sends == send) || (recv && notice.ours.recvs == recv)) {
        return &notice.error;
      }
    }
    return nullptr;
  }

 private:
  struct Notice {
    GiveUp ours;
    Error error;
  };
  static constexpr size_t kNotices = 64;  // older ones are forgotten

  GiveUp up_to_;
  std::optional<Error> last_;
  std::vector<Notice> notices_;
};

}  // namespace hdpcomm
