// Recursive doubling and halving: ceil(log2 p) steps. Groups whose size is no power of two are
// folded: rank q + i gives its part to rank i beforehand and gets the result afterwards.
#include <algorithm>
#include <optional>

#include "collective/algorithms.hpp"

namespace hdpcomm::collective {

int powerOfTwoBelow(int p) {
  int q = 1;
  while (2 * q <= p) q *= 2;
  return q;
}

namespace {

// The spans of units [low, high) of a buffer of p blocks. Rank q + i is folded onto rank i, with q
// the largest power of two up to p. Unit i of the q units is block i and, where rank q + i exists,
// block q + i.
std::vector<Span> unitSpans(const Builder& b, Buffer buffer, int low, int high) {
  const int q = powerOfTwoBelow(b.p());
  const size_t bytes = b.bytes(b.request.count);
  std::vector<Span> spans = {{buffer, low * bytes, (high - low) * bytes}};
  const int folded_high = std::min(q + high, b.p());
  if (q + low < folded_high) {
    spans.push_back({buffer, (q + low) * bytes, (folded_high - q - low) * bytes});
  }
  return spans;
}

void addSends(Step& step, int peer, const std::vector<Span>& spans) {
  for (const Span& span : spans) step.sends.push_back({peer, span});
}

}  // namespace

void recursiveReduceScatter(Builder& b) {
  const int q = powerOfTwoBelow(b.p());
  const int r = b.r();
  const Span out = b.whole(Buffer::kOut);
  const size_t total = b.p() * out.bytes;
  if (b.p() == 1) {
    b.move(b.block(Buffer::kIn, 0), out);
    return;
  }
  if (r >= q) {
    b.step().sends.push_back({r - q, {Buffer::kIn, 0, total}});
    b.step().recvs.push_back({r - q, out});
    return;
  }
  b.schedule.temp_bytes = total;
  Buffer sums = Buffer::kIn;  // where the sums so far are
  const bool has_folded = q + r < b.p();
  if (has_folded) {
    b.step().recvs.push_back({q + r, {Buffer::kTemp, 0, total}, true, {Buffer::kIn, 0, total}});
    sums = Buffer::kTemp;
  }
  int low = 0;
  int high = q;
  for (int distance = q / 2; distance > 0; distance /= 2) {
    const int middle = low + distance;
    const bool lower = r < middle;
    Step& step = b.step();
    addSends(step, r ^ distance, unitSpans(b, sums, lower ? middle : low, lower ? high : middle));
    (lower ? high : low) = middle;
    for (Span span : unitSpans(b, Buffer::kTemp, low, high)) {
      Span operand = span;
      operand.buffer = sums;
      step.recvs.push_back({r ^ distance, span, true, operand});
    }
    sums = Buffer::kTemp;
  }
  const size_t bytes = out.bytes;
  const Span own{sums, r * bytes, bytes};
  const Span folded{sums, static_cast<size_t>(q + r) * bytes, bytes};
  b.move(own, out);
  b.divide(out);
  if (has_folded) {
    b.divide(folded);
    b.step().sends.push_back({q + r, folded});
  }
}

namespace {

// Ranks from q (a power of two) on send their operands to ranks below q, and get the result from
// them at the end. Returns the buffer with this rank's sum so far, or nothing for a folded rank,
// whose schedule is then complete.
std::optional<Buffer> foldAllReduce(Builder& b, int q) {
  const int r = b.r();
  const Span in = b.whole(Buffer::kIn);
  const Span out = b.whole(Buffer::kOut);
  if (r >= q) {
    b.step().sends.push_back({r - q, in});
    b.step().recvs.push_back({r - q, out});
    return std::nullopt;
  }
  if (q + r >= b.p()) return Buffer::kIn;
  b.step().recvs.push_back({q + r, out, true, in});
  return Buffer::kOut;
}

}  // namespace

void recursiveAllReduce(Builder& b) {
  const int q = powerOfTwoBelow(b.p());
  const int r = b.r();
  const auto folded = foldAllReduce(b, q);
  if (!folded) return;
  const Span in = b.whole(Buffer::kIn);
  const Span out = b.whole(Buffer::kOut);
  Span current = b.whole(*folded);
  // Each sum goes to another buffer than the one being sent: the temporary and the output in turn,
  // the temporary first, since in place the input is the output.
  const Span temp{Buffer::kTemp, 0, in.bytes};
  for (int distance = 1; distance < q; distance *= 2) {
    const Span target = current.buffer == Buffer::kTemp ? out : temp;
    b.schedule.temp_bytes = in.bytes;
    Step& step = b.step();
    step.sends.push_back({r ^ distance, current});
    step.recvs.push_back({r ^ distance, target, true, current});
    current = target;
  }
  if (current.buffer != Buffer::kOut) b.move(current, out);
  b.divide(out);
  if (q + r < b.p()) b.step().sends.push_back({q + r, out});
}

namespace {

// Parts [low, high) of the buffer, cut in q.
Span parts(const Builder& b, Buffer buffer, int low, int high) {
  const auto boundary = [&](int i) {
    const size_t q = static_cast<size_t>(powerOfTwoBelow(b.p()));
    const auto index = static_cast<size_t>(i);
    return b.bytes(b.request.count / q * index + std::min(index, b.request.count % q));
  };
  return {buffer, boundary(low), boundary(high) - boundary(low)};
}

}  // namespace

void rabenseifnerAllReduce(Builder& b) {
  const int q = powerOfTwoBelow(b.p());
  const int r = b.r();
  const auto folded = foldAllReduce(b, q);
  if (!folded) return;
  const Span out = b.whole(Buffer::kOut);
  Buffer sums = *folded;
  int low = 0;
  int high = q;
  for (int distance = q / 2; distance > 0; distance /= 2) {  // reduce-scatter by halving
    const int middle = low + distance;
    const bool lower = r < middle;
    Step& step = b.step();
    step.sends.push_back(
        {r ^ distance, parts(b, sums, lower ? middle : low, lower ? high : middle)});
    (lower ? high : low) = middle;
    step.recvs.push_back(
        {r ^ distance, parts(b, Buffer::kOut, low, high), true, parts(b, sums, low, high)});
    sums = Buffer::kOut;
  }
  if (q == 1) b.move(b.whole(sums), out);
  b.divide(parts(b, Buffer::kOut, low, high));
  for (int distance = 1; distance < q; distance *= 2) {  // all-gather by doubling
    const int mine = r / distance * distance;
    const int theirs = (r ^ distance) / distance * distance;
    Step& step = b.step();
    step.sends.push_back({r ^ distance, parts(b, Buffer::kOut, mine, mine + distance)});
    step.recvs.push_back({r ^ distance, parts(b, Buffer::kOut, theirs, theirs + distance)});
  }
  if (q + r < b.p()) b.step().sends.push_back({q + r, out});
}

}  // namespace hdpcomm::collective
