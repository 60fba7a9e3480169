// Direct algorithms: every pair exchanges at once. Receivers copy (or reduce) straight from the
// senders' buffers where the transport can, so the bytes move once; sums go in the order of the
// group's ranks, the same on all of them.
#include "collective/algorithms.hpp"

namespace hdpcomm::collective {
namespace {

// Visits the peers in the order r+1, r+2, ..., so that no rank is the first target of all others.
template <typename Visit>
void forPeers(const Builder& b, Visit&& visit) {
  for (int s = 1; s < b.p(); ++s) visit(b.mod(b.r() + s));
}

}  // namespace

void directAllGather(Builder& b) {
  b.move(b.whole(Buffer::kIn), b.block(Buffer::kOut, b.r()));
  Step& step = b.step();
  forPeers(b, [&](int peer) {
    step.sends.push_back({peer, b.whole(Buffer::kIn)});
    step.recvs.push_back({peer, b.block(Buffer::kOut, peer)});
  });
}

// out = own + contribution of r+1 + r+2 + ...: one rank sums each block, in an order that is the
// same in every run (hence one step per contribution). `mine` holds this rank's contribution to
// every rank's block; all of them are posted in the first step.
static void reduceOwn(Builder& b, const std::vector<Span>& mine, Span out) {
  if (b.p() == 1) b.move(mine[0], out);
  const size_t first_step = b.schedule.steps.size();
  for (int s = 1; s < b.p(); ++s) {
    b.step().recvs.push_back({b.mod(b.r() + s), out, true, s == 1 ? mine[b.r()] : out});
  }
  if (b.p() == 1) return;
  // Deferred: a peer receives its part in a later step of its own schedule, while this rank already
  // receives other parts.
  Step& posting = b.schedule.steps[first_step];
  forPeers(b, [&](int peer) { posting.sends.push_back({peer, mine[peer], true}); });
}

void directReduceScatter(Builder& b) {
  std::vector<Span> blocks;
  for (int i = 0; i < b.p(); ++i) blocks.push_back(b.block(Buffer::kIn, i));
  reduceOwn(b, blocks, b.whole(Buffer::kOut));
  b.divide(b.whole(Buffer::kOut));
}

void directAllReduce(Builder& b) {
  const Span out = b.part(Buffer::kOut, b.r());
  std::vector<Span> parts;
  for (int i = 0; i < b.p(); ++i) parts.push_back(b.part(Buffer::kIn, i));
  reduceOwn(b, parts, out);
  b.divide(out);
  Step& step = b.step();
  forPeers(b, [&](int peer) {
    step.sends.push_back({peer, out});
    step.recvs.push_back({peer, b.part(Buffer::kOut, peer)});
  });
}

void directBroadcast(Builder& b) {
  const int root = b.request.root;
  Step& step = b.step();
  if (b.r() != root) {
    step.recvs.push_back({root, b.whole(Buffer::kOut)});
    return;
  }
  step.moves.push_back({MoveKind::kCopy, b.whole(Buffer::kIn), b.whole(Buffer::kOut)});
  forPeers(b, [&](int peer) { step.sends.push_back({peer, b.whole(Buffer::kOut)}); });
}

void directReduce(Builder& b) {
  const Span out = b.whole(Buffer::kOut);
  if (b.r() != b.request.root) {
    b.step().sends.push_back({b.request.root, b.whole(Buffer::kIn)});
    return;
  }
  for (int s = 1; s < b.p(); ++s) {
    b.step().recvs.push_back({b.mod(b.r() + s), out, true, s == 1 ? b.whole(Buffer::kIn) : out});
  }
  if (b.p() == 1) b.move(b.whole(Buffer::kIn), out);
  b.divide(out);
}

void directGather(Builder& b) {
  const int root = b.request.root;
  if (b.r() != root) {
    b.step().sends.push_back({root, b.whole(Buffer::kIn)});
    return;
  }
  b.move(b.whole(Buffer::kIn), b.block(Buffer::kOut, b.r()));
  Step& step = b.step();
  forPeers(b, [&](int peer) { step.recvs.push_back({peer, b.block(Buffer::kOut, peer)}); });
}

void directScatter(Builder& b) {
  const int root = b.request.root;
  if (b.r() != root) {
    b.step().recvs.push_back({root, b.whole(Buffer::kOut)});
    return;
  }
  b.move(b.block(Buffer::kIn, b.r()), b.whole(Buffer::kOut));
  Step& step = b.step();
  forPeers(b, [&](int peer) { step.sends.push_back({peer, b.block(Buffer::kIn, peer)}); });
}

void directAllToAll(Builder& b) {
  const auto& in = b.request.in_counts;
  const auto& out = b.request.out_counts;
  const auto spans = [&](const std::vector<size_t>& counts, Buffer buffer) {
    std::vector<Span> result;
    size_t offset = 0;
    for (int i = 0; i < b.p(); ++i) {
      const size_t count = counts.empty() ? b.request.count : counts[static_cast<size_t>(i)];
      result.push_back({buffer, offset, b.bytes(count)});
      offset += b.bytes(count);
    }
    return result;
  };
  const auto from = spans(in, Buffer::kIn);
  const auto to = spans(out, Buffer::kOut);
  b.move(from[b.r()], to[b.r()]);
  Step& step = b.step();
  forPeers(b, [&](int peer) {
    step.sends.push_back({peer, from[peer]});
    step.recvs.push_back({peer, to[peer]});
  });
}

}  // namespace hdpcomm::collective
