#include "comm/stream/path_board.hpp"

namespace hdpcomm {

PathBoard::PathBoard(World& world, std::shared_ptr<device::SharedBoard> local, const LinkMap& map)
    : local_(std::move(local)), far_(world) {
  for (int rank = 0; rank < map.size(); ++rank) here_.push_back(map.sameHost(rank, world.rank()));
}

// The peers of this host hear it with its words before the host world ends.
void PathBoard::fail(int own, const Error& error, const std::vector<uint64_t>& sound) {
  local_->fail(own, error, sound);
  far_.fail(own, error, sound);
}

void PathBoard::leave(int own, const std::string& reason, const std::vector<uint64_t>& sound) {
  local_->leave(own, reason, sound);
  far_.leave(own, reason, sound);
}

}  // namespace hdpcomm
