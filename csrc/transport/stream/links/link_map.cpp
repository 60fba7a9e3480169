#include "transport/stream/links/link_map.hpp"

#include <algorithm>

namespace hdpcomm {

LinkMap::LinkMap(int num_ranks, std::vector<int> hosts)
    : hosts_(std::move(hosts)), any_(static_cast<size_t>(num_ranks)) {
  hosts_.resize(static_cast<size_t>(num_ranks), 0);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto host = static_cast<size_t>(hostOf(rank));
    if (host >= members_.size()) members_.resize(host + 1);
    places_.push_back(static_cast<int>(members_[host].size()));
    members_[host].push_back(rank);
  }
  for (const auto& members : members_) {
    mask_bytes_ = std::max(mask_bytes_, (members.size() + 7) / 8);
  }
}

bool LinkMap::reaches(int a, int b) const {
  const auto place = static_cast<size_t>(placeOf(b));
  const uint8_t byte = masks_[static_cast<size_t>(a) * mask_bytes_ + place / 8];
  return (byte >> (place % 8) & 1) != 0;
}

void LinkMap::setMasks(std::vector<uint8_t> masks) {
  masks_ = std::move(masks);
  whole_hosts_ = true;
  for (const auto& members : members_) {
    for (const int a : members) {
      for (const int b : members) {
        if (a == b) continue;
        const bool linked = reaches(a, b) && reaches(b, a);
        if (linked) any_[static_cast<size_t>(a)] = true;
        whole_hosts_ = whole_hosts_ && linked;
      }
    }
  }
  complete_ = whole_hosts_ && members_.size() == 1;
}

bool LinkMap::linked(int a, int b) const {
  if (masks_.empty() || !sameHost(a, b)) return false;
  return a == b ? any(a) || complete_ : reaches(a, b) && reaches(b, a);
}

bool LinkMap::all(const std::vector<int>& ranks) const {
  if (complete_) return true;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!linked(ranks[0], ranks[i])) return false;
  }
  if (whole_hosts_) return true;
  for (size_t i = 1; i < ranks.size(); ++i) {
    for (size_t j = i + 1; j < ranks.size(); ++j) {
      if (!linked(ranks[i], ranks[j])) return false;
    }
  }
  return true;
}

bool LinkMap::none() const {
  return !complete_ && std::find(any_.begin(), any_.end(), true) == any_.end();
}

}  // namespace hdpcomm
