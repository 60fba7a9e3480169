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
  // `local`: of this rank's host, with the world's numbers.
  PathBoard(World& world, std::shared_ptr<device::SharedBoard> local, const LinkMap& map);

  uint64_t key() const override { return local_->key(); }
  void enter(int own) override { local_->enter(own); }
  void opened() override { local_->opened(); }
  void fail(int own, const Error& error, const std::vector<uint64_t>& sound) override;
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& sound) override;
  uint64_t sound(int src, int own) override { return of(src).sound(src, own); }
  device::BoardState state(int rank) override { return of(rank).state(rank); }
  Error lastWords(int rank) override { return of(rank).lastWords(rank); }
  bool processAlive(int rank) override { return of(rank).processAlive(rank); }
  bool post(int own, int dst, const device::CallEntry& entry) override {
    return of(dst).post(own, dst, entry);
  }
  void expect(int src, int own, const device::CallEntry& entry) override {
    of(src).expect(src, own, entry);
  }
  std::optional<device::CallEntry> take(int src, int own) override {
    return of(src).take(src, own);
  }
  void accept(int src, int own) override { of(src).accept(src, own); }
  uint64_t accepted(int own, int dst) override { return of(dst).accepted(own, dst); }

 private:
  CallBoard& of(int rank) {
    if (here_[static_cast<size_t>(rank)]) return *local_;
    return far_;
  }

  const std::shared_ptr<device::SharedBoard> local_;
  HostBoard far_;
  std::vector<bool> here_;
};

}  // namespace hdpcomm
