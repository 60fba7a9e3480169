// Which pairs of ranks have a link: the two share a host, and each has mapped the other's memory.
// Equal on all ranks, so both ends of a message and all members of a subset decide alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hdpcomm {

class LinkMap {
 public:
  // `hosts`: the host of each rank, numbered from 0 without a gap; empty: all share one.
  LinkMap(int num_ranks, std::vector<int> hosts);

  int size() const { return static_cast<int>(hosts_.size()); }
  bool sameHost(int a, int b) const { return hostOf(a) == hostOf(b); }
  // The ranks of a rank's host, ascending, and the rank's place among them.
  const std::vector<int>& hostmates(int rank) const {
    return members_[static_cast<size_t>(hostOf(rank))];
  }
  int placeOf(int rank) const { return places_[static_cast<size_t>(rank)]; }

  // Which of its hostmates a rank reaches: a mask with a bit for each place, of so many bytes.
  size_t maskBytes() const { return mask_bytes_; }
  static void setReached(std::vector<uint8_t>& mask, int place) {
    mask[static_cast<size_t>(place / 8)] |= static_cast<uint8_t>(1 << (place % 8));
  }
  // The masks of all ranks, by rank. Before this call no pair is linked.
  void setMasks(std::vector<uint8_t> masks);

  // A rank is linked with itself where it is with another, or where all are.
  bool linked(int a, int b) const;
  bool all(const std::vector<int>& ranks) const;    // every pair of them
  bool complete() const { return complete_; }       // every pair of the world
  bool wholeHosts() const { return whole_hosts_; }  // every pair that shares a host
  bool any(int rank) const { return any_[static_cast<size_t>(rank)]; }
  bool none() const;

 private:
  int hostOf(int rank) const { return hosts_[static_cast<size_t>(rank)]; }
  bool reaches(int a, int b) const;

  std::vector<int> hosts_;
  std::vector<std::vector<int>> members_;
  std::vector<int> places_;
  size_t mask_bytes_ = 1;
  std::vector<uint8_t> masks_;
  std::vector<bool> any_;
  bool complete_ = false;
  bool whole_hosts_ = false;
};

}  // namespace hdpcomm
