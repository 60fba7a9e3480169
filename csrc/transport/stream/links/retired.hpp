// Arenas whose rank has closed while others may still write into them.
#pragma once

#include <memory>

#include "transport/stream/call_board.hpp"
#include "transport/stream/links/arena.hpp"

namespace hdpcomm::device {

// Keeps the arena until every rank of its board has departed or died; at the end of the process the
// system does the rest. Never waits for them.
void retireArena(std::unique_ptr<Arena> arena, std::shared_ptr<SharedBoard> board);
// Frees the arenas whose ranks have all departed by now; called by retireArena, and before a world
// allocates.
void freeRetiredArenas();

}  // namespace hdpcomm::device
