// Large rooted operations by pipelined chains, and the binomial trees of gather and scatter.
#include <algorithm>

#include "collective/algorithms.hpp"

namespace hdpcomm::collective {
namespace {

constexpr size_t kPieceBytes = 128 * 1024;  // of a pipelined chain: fits the second-level cache
constexpr size_t kMaxPieces = 256;

// The pieces of a buffer for a chain; equal on all ranks, since they depend on its size only.
std::vector<Span> pieces(const Builder& b, Buffer buffer) {
  const size_t count = b.request.count;
  const size_t wanted = (b.bytes(count) + kPieceBytes - 1) / kPieceBytes;
  const size_t number = std::clamp<size_t>(wanted, 1, kMaxPieces);
  std::vector<Span> result;
  size_t begin = 0;
  for (size_t i = 0; i < number; ++i) {
    const size_t end = count / number * (i + 1) + std::min(i + 1, count % number);
    result.push_back({buffer, b.bytes(begin), b.bytes(end - begin)});
    begin = end;
  }
  return result;
}

// Ranks counted from the root; the subtree of v in the binomial tree covers [v, v + size).
struct Subtree {
  int parent;  // -1: the root
  int size;
};

Subtree subtreeOf(int v, int p) {
  if (v == 0) return {-1, p};
  const int low_bit = v & -v;
  return {v - low_bit, std::min(low_bit, p - v)};
}

std::vector<int> childrenOf(int v, int p) {  // the largest subtree first
  std::vector<int> children;
  int bit = 1;
  while (v == 0 ? bit < p : bit < (v & -v)) bit *= 2;
  for (bit /= 2; bit > 0; bit /= 2) {
    if (v + bit < p) children.push_back(v + bit);
  }
  return children;
}

}  // namespace

void chainBroadcast(Builder& b) {
  const int v = b.mod(b.r() - b.request.root);
  const auto data = pieces(b, Buffer::kOut);
  if (v == 0) b.move(b.whole(Buffer::kIn), b.whole(Buffer::kOut));
  const bool last = v == b.p() - 1;
  for (size_t i = 0; i < data.size() + 1; ++i) {
    Step& step = b.step();
    if (v != 0 && i < data.size()) step.recvs.push_back({b.mod(b.r() - 1), data[i]});
    if (!last && i > 0) step.sends.push_back({b.mod(b.r() + 1), data[i - 1]});
  }
}

// Sums travel from the rank before the root backwards around the ring, a piece at a time; each rank
// adds its own contribution and passes the piece on.
void chainReduce(Builder& b) {
  const int v = b.mod(b.r() - b.request.root);
  const auto in = pieces(b, Buffer::kIn);
  const auto out = pieces(b, Buffer::kOut);
  const bool first = v == b.p() - 1;
  if (b.p() == 1) {
    b.move(b.whole(Buffer::kIn), b.whole(Buffer::kOut));
    return;
  }
  size_t piece_bytes = 0;
  for (const Span& span : in) piece_bytes = std::max(piece_bytes, span.bytes);
  if (v != 0 && !first) b.schedule.temp_bytes = 2 * piece_bytes;
  const auto sum = [&](size_t i) {
    return v == 0 ? out[i] : Span{Buffer::kTemp, (i % 2) * piece_bytes, in[i].bytes};
  };
  for (size_t i = 0; i < in.size() + 1; ++i) {
    Step& step = b.step();
    if (!first && i < in.size()) step.recvs.push_back({b.mod(b.r() + 1), sum(i), true, in[i]});
    if (v != 0 && i > 0) step.sends.push_back({b.mod(b.r() - 1), first ? in[i - 1] : sum(i - 1)});
  }
  if (v == 0) b.divide(b.whole(Buffer::kOut));
}

namespace {

// The spans of the blocks of ranks [low, high), counted from the root, on rank v: by rank on the
// root, in the temporary from v on elsewhere. All ranks cut them where the ranks wrap around, so
// that the messages of both ends have the same sizes.
std::vector<Span> subtreeSpans(const Builder& b, int v, int low, int high, Buffer root_buffer) {
  const size_t bytes = b.bytes(b.request.count);
  const int wrap = b.p() - b.request.root;
  std::vector<Span> spans;
  const auto add = [&](int from, int to) {
    if (from >= to) return;
    const Buffer buffer = v == 0 ? root_buffer : Buffer::kTemp;
    const auto first = static_cast<size_t>(v == 0 ? b.mod(from + b.request.root) : from - v);
    spans.push_back({buffer, first * bytes, (to - from) * bytes});
  };
  add(low, std::min(high, wrap));
  add(std::max(low, wrap), high);
  return spans;
}

}  // namespace

void binomialGather(Builder& b) {
  const int v = b.mod(b.r() - b.request.root);
  const Subtree own = subtreeOf(v, b.p());
  if (v != 0) b.schedule.temp_bytes = own.size * b.bytes(b.request.count);
  b.move(b.whole(Buffer::kIn),
         v == 0 ? b.block(Buffer::kOut, b.r()) : Span{Buffer::kTemp, 0, b.bytes(b.request.count)});
  auto children = childrenOf(v, b.p());
  std::reverse(children.begin(), children.end());  // the smallest subtree is complete first
  for (const int child : children) {
    Step& step = b.step();
    for (const Span& span :
         subtreeSpans(b, v, child, child + subtreeOf(child, b.p()).size, Buffer::kOut)) {
      step.recvs.push_back({b.mod(b.request.root + child), span});
    }
  }
  if (v == 0) return;
  Step& step = b.step();
  for (const Span& span : subtreeSpans(b, v, v, v + own.size, Buffer::kOut)) {
    step.sends.push_back({b.mod(b.request.root + own.parent), span});
  }
}

void binomialScatter(Builder& b) {
  const int v = b.mod(b.r() - b.request.root);
  const Subtree own = subtreeOf(v, b.p());
  if (v != 0) {
    b.schedule.temp_bytes = own.size * b.bytes(b.request.count);
    Step& step = b.step();
    for (const Span& span : subtreeSpans(b, v, v, v + own.size, Buffer::kIn)) {
      step.recvs.push_back({b.mod(b.request.root + own.parent), span});
    }
  }
  for (const int child : childrenOf(v, b.p())) {
    Step& step = b.step();
    for (const Span& span :
         subtreeSpans(b, v, child, child + subtreeOf(child, b.p()).size, Buffer::kIn)) {
      step.sends.push_back({b.mod(b.request.root + child), span});
    }
  }
  b.move(v == 0 ? b.block(Buffer::kIn, b.r()) : Span{Buffer::kTemp, 0, b.bytes(b.request.count)},
         b.whole(Buffer::kOut));
}

}  // namespace hdpcomm::collective
