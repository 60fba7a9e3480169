// An ordered set of ranks of a world. Making one sends nothing and registers nothing: it is a list
// and a hash.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hdpcomm/comm/world.hpp"

namespace hdpcomm {

class Communicator {
 public:
  // All ranks of the world, in order.
  explicit Communicator(std::shared_ptr<World> world);

  // Positions in this communicator, in the order wanted. Null when this rank is not among them.
  // Throws InvalidUsage for an empty list, a duplicate or a position that does not exist. Local: no
  // other rank takes part.
  std::shared_ptr<Communicator> subset(std::span<const int> positions) const;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_->size()); }
  const std::vector<int>& ranks() const { return *ranks_; }
  uint64_t hash() const { return hash_; }
  World& world() const { return *world_; }
  const std::shared_ptr<World>& sharedWorld() const { return world_; }

  // What a collective works on. `count` as in ScheduleRequest.
  struct Operands {
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;
    DType dtype = DType::kUint8;
  };

  // What the ranks agree on, and what this one does: made here, run by the host's queue (below) or
  // by a StreamEngine.
  struct Plan {
    Call call;
    std::shared_ptr<const Schedule> schedule;
  };
  Plan planCollective(OpCode op, size_t count, DType dtype, RedOp redop, int root,
                      Algorithm algorithm) const;
  Plan planAllToAll(size_t count, DType dtype, std::vector<size_t> out_counts,
                    std::vector<size_t> in_counts, Algorithm algorithm) const;

  std::shared_ptr<Work> collective(OpCode op, const Operands& operands, RedOp redop, int root,
                                   Algorithm algorithm, bool background) const;
  std::shared_ptr<Work> allToAll(const Operands& operands, std::vector<size_t> out_counts,
                                 std::vector<size_t> in_counts, Algorithm algorithm,
                                 bool background) const;

  struct Message {
    void* data = nullptr;
    size_t count = 0;
    DType dtype = DType::kUint8;
    int peer = -1;  // position in this communicator
  };
  Call planExchange(std::span<const Message> sends, std::span<const Message> recvs) const;
  // Positions to global ranks. Throws InvalidUsage for one that does not exist.
  int globalRank(int position, const char* what) const;
  const Ranks& sharedRanks() const { return ranks_; }

  std::shared_ptr<Work> exchange(std::span<const Message> sends, std::span<const Message> recvs,
                                 bool background) const;

 private:
  Communicator(std::shared_ptr<World> world, Ranks ranks, int rank);
  void checkPosition(int position, const char* what) const;
  std::vector<ExchangeWork::Message> toWorld(std::span<const Message> messages,
                                             const char* what) const;

  std::shared_ptr<World> world_;
  Ranks ranks_;
  int rank_;
  uint64_t hash_;
};

}  // namespace hdpcomm
