// Ring algorithms: p - 1 steps between neighbours. Each block is summed in the order of the ring,
// so all ranks get the same bits.
#include "collective/algorithms.hpp"

namespace hdpcomm::collective {

void ringAllGather(Builder& b) {
  b.move(b.whole(Buffer::kIn), b.block(Buffer::kOut, b.r()));
  for (int s = 0; s + 1 < b.p(); ++s) {
    Step& step = b.step();
    step.sends.push_back({b.mod(b.r() + 1), b.block(Buffer::kOut, b.mod(b.r() - s))});
    step.recvs.push_back({b.mod(b.r() - 1), b.block(Buffer::kOut, b.mod(b.r() - 1 - s))});
  }
}

void ringReduceScatter(Builder& b) {
  const Span out = b.whole(Buffer::kOut);
  if (b.p() == 1) {
    b.move(b.block(Buffer::kIn, 0), out);
    return;
  }
  // Two temporaries in turn, for the block being sent and the one being received; the last sum goes
  // to the output.
  const size_t bytes = out.bytes;
  b.schedule.temp_bytes = b.p() > 2 ? 2 * bytes : 0;
  for (int s = 0; s + 1 < b.p(); ++s) {
    const bool last = s + 2 == b.p();
    const Span sum = last ? out : Span{Buffer::kTemp, (s % 2) * bytes, bytes};
    const Span sent = s == 0 ? b.block(Buffer::kIn, b.mod(b.r() - 1))
                             : Span{Buffer::kTemp, ((s - 1) % 2) * bytes, bytes};
    Step& step = b.step();
    step.sends.push_back({b.mod(b.r() + 1), sent});
    step.recvs.push_back({b.mod(b.r() - 1), sum, true, b.block(Buffer::kIn, b.mod(b.r() - 2 - s))});
  }
  b.divide(out);
}

void ringAllReduce(Builder& b) {
  if (b.p() == 1) {
    b.move(b.whole(Buffer::kIn), b.whole(Buffer::kOut));
    return;
  }
  for (int s = 0; s + 1 < b.p(); ++s) {  // reduce-scatter: rank r ends with part r
    const int sent = b.mod(b.r() - 1 - s);
    const int received = b.mod(b.r() - 2 - s);
    Step& step = b.step();
    step.sends.push_back({b.mod(b.r() + 1), b.part(s == 0 ? Buffer::kIn : Buffer::kOut, sent)});
    step.recvs.push_back(
        {b.mod(b.r() - 1), b.part(Buffer::kOut, received), true, b.part(Buffer::kIn, received)});
  }
  b.divide(b.part(Buffer::kOut, b.r()));
  for (int s = 0; s + 1 < b.p(); ++s) {
    Step& step = b.step();
    step.sends.push_back({b.mod(b.r() + 1), b.part(Buffer::kOut, b.mod(b.r() - s))});
    step.recvs.push_back({b.mod(b.r() - 1), b.part(Buffer::kOut, b.mod(b.r() - 1 - s))});
  }
}

}  // namespace hdpcomm::collective
