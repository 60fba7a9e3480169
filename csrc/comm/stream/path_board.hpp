// The call board of ranks on several hosts: shared memory for the peers of this host, messages of
// the host world for the others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/stream/host_board.hpp"
#include "transport/stream/links/link_map.hpp"

namespace hdpcomm {

class PathBoard final : public device::CallBoard {
 public:
  // `local`: the board of this rank's host, which numbers ranks as the world does.
  PathBoard(World& world, std::shared_ptr<device::SharedBoard> local, const LinkMap& map);

  uint64_t key() const override { return local_->key(); }
  void enter(int own) override { local_->enter(own); }
  void opened() override { local_->opened(); }
  void fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) override;
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& valid_posts) override;
  uint64_t validPosts(int src, int own) override { return boardOf(src).validPosts(src, own); }
  device::BoardState state(int rank) override { return boardOf(rank).state(rank); }
  Error lastError(int rank) override { return boardOf(rank).lastError(rank); }
  bool processAlive(int rank) override { return boardOf(rank).processAlive(rank); }
  bool post(int own, int dst, const device::CallEntry& entry) override {
    return boardOf(dst).post(own, dst, entry);
  }
  void expect(int src, int own, const device::CallEntry& entry) override {
    boardOf(src).expect(src, own, entry);
  }
  std::optional<device::CallEntry> take(int src, int own) override {
    return boardOf(src).take(src, own);
  }
  void accept(int src, int own) override { boardOf(src).accept(src, own); }
  uint64_t accepted(int own, int dst) override { return boardOf(dst).accepted(own, dst); }

 private:
  CallBoard& boardOf(int rank) {
    if (here_[static_cast<size_t>(rank)]) return *local_;
    return far_;
  }

  const std::shared_ptr<device::SharedBoard> local_;
  HostBoard far_;
  std::vector<bool> here_;
};

}  // namespace hdpcomm
