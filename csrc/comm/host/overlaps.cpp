#include "comm/host/overlaps.hpp"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

namespace hdpcomm {
namespace {

// Up to so many pairs are compared one by one; more buffers are sorted.
constexpr size_t kPairs = 256;

struct Extent {
  uintptr_t begin = 0;
  size_t bytes = 0;

  template <typename Buffer>
  explicit Extent(const Buffer& of)
      : begin(reinterpret_cast<uintptr_t>(of.data)), bytes(of.count * dtypeBytes(of.dtype)) {}
  uintptr_t end() const { return begin + bytes; }
  bool overlaps(const Extent& other) const {
    return begin < other.end() && other.begin < end() && bytes > 0 && other.bytes > 0;
  }
};

std::string shown(const std::string& name, const Extent& extent) {
  char place[32];
  std::snprintf(place, sizeof place, "0x%zx", static_cast<size_t>(extent.begin));
  return name + " (" + std::to_string(extent.bytes) + " bytes at " + place + ")";
}

[[noreturn, gnu::cold]] void throwOverlap(const std::string& call, const std::string& first,
                                          const Extent& one, const std::string& second,
                                          const Extent& other, const std::string& in_place) {
  throwInvalidUsage(call + "() got " + shown(first, one) + " and " + shown(second, other) +
                    ", which overlap; give buffers of their own" + in_place);
}

struct Place {
  Extent extent;
  size_t index;
  bool receives;

  std::string name() const {
    return (receives ? "recvs[" : "sends[") + std::to_string(index) + "]";
  }
};

[[noreturn, gnu::cold]] void throwMessages(const Place& one, const Place& other) {
  throwOverlap("exchange", one.name(), one.extent, other.name(), other.extent, "");
}

// In the order of their places, a message overlaps one before it if it does the one that ends last.
[[gnu::cold]] void checkSorted(std::span<const Message> sends, std::span<const Message> recvs) {
  std::vector<Place> places;
  places.reserve(sends.size() + recvs.size());
  const auto add = [&](std::span<const Message> messages, bool receives) {
    for (size_t i = 0; i < messages.size(); ++i) {
      const Extent extent(messages[i]);
      if (extent.bytes > 0) places.push_back({extent, i, receives});
    }
  };
  add(sends, false);
  add(recvs, true);
  std::ranges::sort(places, {}, [](const Place& each) { return each.extent.begin; });
  const Place* last = nullptr;          // of all before
  const Place* last_receive = nullptr;  // of the receives before
  const auto later = [](const Place* now, const Place& each) {
    return now == nullptr || each.extent.end() > now->extent.end() ? &each : now;
  };
  for (const Place& each : places) {
    const Place* before = each.receives ? last : last_receive;
    if (before != nullptr && before->extent.overlaps(each.extent)) throwMessages(*before, each);
    last = later(last, each);
    if (each.receives) last_receive = later(last_receive, each);
  }
}

}  // namespace

void checkOverlap(const OperationRule& rule, const TensorView& x, const TensorView& out, int rank) {
  const Extent from(x);
  const Extent to(out);
  if (!from.overlaps(to)) return;
  std::string in_place;
  if (rule.x.per_rank != rule.out.per_rank) {
    const Extent& part = rule.x.per_rank ? to : from;
    const Extent& whole = rule.x.per_rank ? from : to;
    if (part.begin == whole.begin + static_cast<size_t>(rank) * part.bytes) return;
    const std::string names[] = {"x", "out"};
    in_place = ", or, in place, " + names[rule.x.per_rank] + " that is part " +
               std::to_string(rank) + " of " + names[rule.out.per_rank];
  } else if (!rule.x.per_rank) {
    if (from.begin == to.begin) return;
    in_place = ", or, in place, the same buffer for both";
  }
  throwOverlap(opName(rule.op), "x", from, "out", to, in_place);
}

void checkOverlaps(std::span<const Message> sends, std::span<const Message> recvs) {
  if (recvs.size() * (sends.size() + recvs.size()) > kPairs) return checkSorted(sends, recvs);
  for (size_t i = 0; i < recvs.size(); ++i) {
    const Extent written(recvs[i]);
    for (size_t j = 0; j < sends.size(); ++j) {
      const Extent read(sends[j]);
      if (written.overlaps(read)) throwMessages({read, j, false}, {written, i, true});
    }
    for (size_t j = 0; j < i; ++j) {
      const Extent other(recvs[j]);
      if (written.overlaps(other)) throwMessages({other, j, true}, {written, i, true});
    }
  }
}

}  // namespace hdpcomm
