// Bruck's algorithms: ceil(log2 p) steps for any p.
#include <algorithm>

#include "collective/algorithms.hpp"

namespace hdpcomm::collective {
namespace {

// Blocks first, first + 1, ... (mod p) of the output: one span, or two where they wrap.
std::vector<Span> wrapped(const Builder& b, int first, int count) {
  const size_t bytes = b.bytes(b.request.count);
  const int until_end = std::min(count, b.p() - first);
  std::vector<Span> spans = {{Buffer::kOut, first * bytes, until_end * bytes}};
  if (until_end < count) spans.push_back({Buffer::kOut, 0, (count - until_end) * bytes});
  return spans;
}

}  // namespace

// Blocks lie at their final places from the start (a message that wraps is cut in two), so nothing
// is rotated at the end.
void bruckAllGather(Builder& b) {
  b.move(b.whole(Buffer::kIn), b.block(Buffer::kOut, b.r()));
  for (int have = 1; have < b.p(); have *= 2) {
    const int count = std::min(have, b.p() - have);
    const int source = b.mod(b.r() + have);
    Step& step = b.step();
    for (const Span& span : wrapped(b, b.r(), count))
      step.sends.push_back({b.mod(b.r() - have), span});
    for (const Span& span : wrapped(b, source, count)) step.recvs.push_back({source, span});
  }
}

void bruckAllToAll(Builder& b) {
  const int p = b.p();
  const size_t bytes = b.bytes(b.request.count);
  if (!b.request.in_counts.empty()) {  // blocks of different sizes cannot be packed by index
    directAllToAll(b);
    b.schedule.algorithm = Algorithm::kDirect;
    return;
  }
  // The temporary holds p blocks ordered by distance to their target, then the packed outgoing and
  // the packed incoming message, up to p / 2 blocks each.
  const size_t half = static_cast<size_t>(p / 2 + 1) * bytes;
  b.schedule.temp_bytes = p * bytes + 2 * half;
  const auto slot = [&](int i) { return Span{Buffer::kTemp, i * bytes, bytes}; };
  const auto packed = [&](bool out, size_t i, size_t count) {
    return Span{Buffer::kTemp, p * bytes + (out ? 0 : half) + i * bytes, count * bytes};
  };
  for (int i = 0; i < p; ++i) b.move(b.block(Buffer::kIn, b.mod(b.r() + i)), slot(i));
  for (int distance = 1; distance < p; distance *= 2) {
    std::vector<int> moving;
    for (int i = 0; i < p; ++i) {
      if ((i & distance) != 0) moving.push_back(i);
    }
    for (size_t i = 0; i < moving.size(); ++i) b.move(slot(moving[i]), packed(true, i, 1));
    Step& step = b.step();
    step.sends.push_back({b.mod(b.r() + distance), packed(true, 0, moving.size())});
    step.recvs.push_back({b.mod(b.r() - distance), packed(false, 0, moving.size())});
    for (size_t i = 0; i < moving.size(); ++i) b.move(packed(false, i, 1), slot(moving[i]));
  }
  for (int i = 0; i < p; ++i) b.move(slot(i), b.block(Buffer::kOut, b.mod(b.r() - i)));
}

}  // namespace hdpcomm::collective
