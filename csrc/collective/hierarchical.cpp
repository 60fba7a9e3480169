// Algorithms for groups that span several nodes: data crosses between two nodes only once.
//
// Every node has a lane for each rank of the other nodes: the member that receives that rank's data
// on behalf of its node, or sends the node's data to it. The lane follows from the rank's place in
// its own node, so all members of a node share its link. Nodes may have different sizes.
#include <algorithm>

#include "collective/algorithms.hpp"

namespace hdpcomm::collective {
namespace {

struct Nodes {
  explicit Nodes(const Builder& b) : node(b.request.nodes), local(static_cast<size_t>(b.p())) {
    node.resize(static_cast<size_t>(b.p()), 0);  // if nodes were not given: all ranks on one
    for (int rank = 0; rank < b.p(); ++rank) {
      const auto index = static_cast<size_t>(node[rank]);
      if (index >= members.size()) members.resize(index + 1);
      local[rank] = static_cast<int>(members[index].size());
      members[index].push_back(rank);
    }
  }

  int count() const { return static_cast<int>(members.size()); }
  const std::vector<int>& peersOf(int rank) const { return members[node[rank]]; }
  // The member of node `of` that serves `rank` of another node.
  int lane(int of, int rank) const {
    const auto& there = members[of];
    return there[local[rank] % there.size()];
  }
  // The ranks of other nodes that `rank` serves, in ascending order.
  std::vector<int> served(int rank) const {
    std::vector<int> result;
    for (int other = 0; other < static_cast<int>(node.size()); ++other) {
      if (node[other] != node[rank] && lane(node[rank], other) == rank) result.push_back(other);
    }
    return result;
  }

  std::vector<int> node;   // by rank
  std::vector<int> local;  // by rank: its place in the node
  std::vector<std::vector<int>> members;
};

using Block = Span (*)(const Builder&, Buffer, int);

Span blockOf(const Builder& b, Buffer buffer, int i) { return b.block(buffer, i); }
Span partOf(const Builder& b, Buffer buffer, int i) { return b.part(buffer, i); }

// All-gather of the blocks of the output, one per rank. A rank sends its block to its own node and
// to one lane of each other node at once; the lanes then pass it on inside their nodes.
void gatherBlocks(Builder& b, const Nodes& nodes, Block block) {
  const int r = b.r();
  const auto out = [&](int i) { return block(b, Buffer::kOut, i); };
  const std::vector<int> served = nodes.served(r);
  Step& first = b.step();
  for (int of = 0; of < nodes.count(); ++of) {
    if (of != nodes.node[r]) first.sends.push_back({nodes.lane(of, r), out(r)});
  }
  for (const int peer : nodes.peersOf(r)) {
    if (peer == r) continue;
    first.sends.push_back({peer, out(r)});
    first.recvs.push_back({peer, out(peer)});
  }
  for (const int from : served) first.recvs.push_back({from, out(from)});
  Step& second = b.step();
  for (const int peer : nodes.peersOf(r)) {
    if (peer == r) continue;
    for (const int from : served) second.sends.push_back({peer, out(from)});
    for (const int from : nodes.served(peer)) second.recvs.push_back({peer, out(from)});
  }
}

// Sets `out` to the sum of block r of all inputs. The members of a node add their contributions to
// a rank of another node on that rank's lane, in ring order from the lane on; one sum per node
// crosses.
void reduceBlocks(Builder& b, const Nodes& nodes, Block block, Span out) {
  const int r = b.r();
  const auto in = [&](int i) { return block(b, Buffer::kIn, i); };
  const std::vector<int>& peers = nodes.peersOf(r);
  const size_t m = peers.size();
  const std::vector<int> served = nodes.served(r);
  std::vector<Span> sums;  // for each rank of `served`
  for (const int to : served) {
    if (m == 1) {
      sums.push_back(in(to));
    } else {
      sums.push_back({Buffer::kTemp, b.schedule.temp_bytes, in(to).bytes});
      b.schedule.temp_bytes += in(to).bytes;
    }
  }
  const size_t first_step = b.schedule.steps.size();
  for (size_t s = 1; s < m; ++s) {
    const int peer = peers[(static_cast<size_t>(nodes.local[r]) + s) % m];
    Step& step = b.step();
    step.recvs.push_back({peer, out, true, s == 1 ? in(r) : out});
    for (size_t i = 0; i < served.size(); ++i) {
      step.recvs.push_back({peer, sums[i], true, s == 1 ? in(served[i]) : sums[i]});
    }
  }
  if (m > 1) {
    Step& posting = b.schedule.steps[first_step];
    for (size_t s = 1; s < m; ++s) {  // deferred: peers receive their parts in later steps
      const int peer = peers[(static_cast<size_t>(nodes.local[r]) + s) % m];
      posting.sends.push_back({peer, in(peer), true});
      for (const int to : nodes.served(peer)) posting.sends.push_back({peer, in(to), true});
    }
  } else if (nodes.count() == 1) {
    b.move(in(r), out);
  }
  for (int i = 1; i < nodes.count(); ++i) {
    const int of = (nodes.node[r] + i) % nodes.count();
    Step& step = b.step();
    step.recvs.push_back({nodes.lane(of, r), out, true, m == 1 && i == 1 ? in(r) : out});
    if (i > 1) continue;
    for (size_t j = 0; j < served.size(); ++j) step.sends.push_back({served[j], sums[j], true});
  }
}

// Binomial tree over the nodes, counted from the root's node: parent and children of node v.
struct Tree {
  Tree(int v, int count) {
    int bit = 1;
    while (v == 0 ? bit < count : (v & bit) == 0) bit *= 2;
    if (v != 0) parent = v - bit;
    for (bit /= 2; bit > 0; bit /= 2) {
      if (v + bit < count) children.push_back(v + bit);
    }
  }
  int parent = -1;
  std::vector<int> children;  // the largest subtree first
};

struct RootedNodes : Nodes {
  explicit RootedNodes(const Builder& b) : Nodes(b), root(b.request.root) {}

  int leader(int of) const { return of == node[root] ? root : members[of][0]; }
  int fromRoot(int of) const { return (of - node[root] + count()) % count(); }
  int at(int v) const { return (v + node[root]) % count(); }

  int root;
};

}  // namespace

void hierarchicalAllGather(Builder& b) {
  b.move(b.whole(Buffer::kIn), b.block(Buffer::kOut, b.r()));
  gatherBlocks(b, Nodes(b), blockOf);
}

void hierarchicalReduceScatter(Builder& b) {
  reduceBlocks(b, Nodes(b), blockOf, b.whole(Buffer::kOut));
  b.divide(b.whole(Buffer::kOut));
}

void hierarchicalAllReduce(Builder& b) {
  const Nodes nodes(b);
  const Span out = b.part(Buffer::kOut, b.r());
  reduceBlocks(b, nodes, partOf, out);
  b.divide(out);
  gatherBlocks(b, nodes, partOf);
}

void hierarchicalBroadcast(Builder& b) {
  const RootedNodes nodes(b);
  const int r = b.r();
  const int own = nodes.node[r];
  const Span data = b.whole(Buffer::kOut);
  if (r != nodes.leader(own)) {
    b.step().recvs.push_back({nodes.leader(own), data});
    return;
  }
  const Tree tree(nodes.fromRoot(own), nodes.count());
  if (tree.parent < 0) {
    b.move(b.whole(Buffer::kIn), data);
  } else {
    b.step().recvs.push_back({nodes.leader(nodes.at(tree.parent)), data});
  }
  Step& step = b.step();
  for (const int v : tree.children) step.sends.push_back({nodes.leader(nodes.at(v)), data});
  for (const int peer : nodes.peersOf(r)) {
    if (peer != r) step.sends.push_back({peer, data});
  }
}

void hierarchicalReduce(Builder& b) {
  const RootedNodes nodes(b);
  const int r = b.r();
  const int own = nodes.node[r];
  const Span in = b.whole(Buffer::kIn);
  if (r != nodes.leader(own)) {
    b.step().sends.push_back({nodes.leader(own), in});
    return;
  }
  // Only the root's output may be written; other leaders sum into a temporary.
  const bool root = r == nodes.root;
  const Span sum{root ? Buffer::kOut : Buffer::kTemp, 0, in.bytes};
  Span have = in;
  const auto add = [&](int from) {
    b.step().recvs.push_back({from, sum, true, have});
    have = sum;
  };
  const std::vector<int>& peers = nodes.peersOf(r);
  for (size_t s = 1; s < peers.size(); ++s) {
    add(peers[(static_cast<size_t>(nodes.local[r]) + s) % peers.size()]);
  }
  const Tree tree(nodes.fromRoot(own), nodes.count());
  for (auto v = tree.children.rbegin(); v != tree.children.rend(); ++v) {
    add(nodes.leader(nodes.at(*v)));
  }
  if (!root) {
    if (have.buffer == Buffer::kTemp) b.schedule.temp_bytes = in.bytes;
    b.step().sends.push_back({nodes.leader(nodes.at(tree.parent)), have});
    return;
  }
  if (have.buffer != Buffer::kOut) b.move(in, sum);
  b.divide(sum);
}

}  // namespace hdpcomm::collective
