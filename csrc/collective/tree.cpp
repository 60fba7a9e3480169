// Binomial trees and the dissemination barrier: ceil(log2 p) steps.
#include "collective/algorithms.hpp"

namespace hdpcomm::collective {

void binomialBroadcast(Builder& b) {
  const Span data = b.whole(Buffer::kOut);
  const int relative = b.mod(b.r() - b.request.root);
  if (relative == 0) b.move(b.whole(Buffer::kIn), data);
  int bit = 1;
  if (relative == 0) {
    while (bit < b.p()) bit *= 2;
  } else {
    while ((relative & bit) == 0) bit *= 2;
    b.step().recvs.push_back({b.mod(b.r() - bit), data});
  }
  // Sends to the children, largest subtree first.
  for (bit /= 2; bit > 0; bit /= 2) {
    if (relative + bit < b.p()) b.step().sends.push_back({b.mod(b.r() + bit), data});
  }
}

void binomialReduce(Builder& b) {
  const int relative = b.mod(b.r() - b.request.root);
  const Span in = b.whole(Buffer::kIn);
  // Only the root's output may be written; inner ranks sum into a temporary.
  Span sum = b.whole(Buffer::kOut);
  bool has_sum = false;
  for (int bit = 1; bit < b.p(); bit *= 2) {
    if ((relative & bit) != 0) {
      b.step().sends.push_back({b.mod(b.r() - bit), has_sum ? sum : in});
      return;
    }
    if (relative + bit >= b.p()) continue;
    if (relative != 0 && !has_sum) {
      b.schedule.temp_bytes = in.bytes;
      sum = {Buffer::kTemp, 0, in.bytes};
    }
    b.step().recvs.push_back({b.mod(b.r() + bit), sum, true, has_sum ? sum : in});
    has_sum = true;
  }
  if (!has_sum) b.move(in, sum);
  b.divide(sum);
}

void disseminationBarrier(Builder& b) {
  for (int distance = 1; distance < b.p(); distance *= 2) {
    Step& step = b.step();
    step.sends.push_back({b.mod(b.r() + distance), {Buffer::kIn, 0, 0}});
    step.recvs.push_back({b.mod(b.r() - distance), {Buffer::kOut, 0, 0}});
  }
}

}  // namespace hdpcomm::collective
