#include "comm/stream/path_board.hpp"

namespace hdpcomm {

PathBoard::PathBoard(World& world, std::shared_ptr<device::SharedBoard> local, const LinkMap& map)
    : local_(std::move(local)), far_(world) {
  for (int rank = 0; rank < map.size(); ++rank) here_.push_back(map.sameHost(rank, world.rank()));
}

// The host's own board first: its peers read the error there before the host world ends.
void PathBoard::fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) {
  local_->fail(own, error, valid_posts);
  far_.fail(own, error, valid_posts);
}

void PathBoard::leave(int own, const std::string& reason,
                      const std::vector<uint64_t>& valid_posts) {
  local_->leave(own, reason, valid_posts);
  far_.leave(own, reason, valid_posts);
}

}  // namespace hdpcomm
