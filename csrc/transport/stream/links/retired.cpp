#include "transport/stream/links/retired.hpp"

#include <mutex>
#include <vector>

namespace hdpcomm::device {
namespace {

struct Retired {
  std::unique_ptr<Arena> arena;
  std::shared_ptr<SharedBoard> board;
};

struct Home {
  std::mutex mutex;
  std::vector<Retired> arenas;
};

// Never destroyed: at the end of the process a device may be gone before its memory.
Home& home() {
  static Home* const instance = new Home;
  return *instance;
}

}  // namespace

void retireArena(std::unique_ptr<Arena> arena, std::shared_ptr<SharedBoard> board) {
  {
    const std::lock_guard lock(home().mutex);
    home().arenas.push_back({std::move(arena), std::move(board)});
  }
  freeRetiredArenas();
}

void freeRetiredArenas() {
  std::vector<Retired> over;
  {
    const std::lock_guard lock(home().mutex);
    std::erase_if(home().arenas, [&](Retired& each) {
      if (!each.board->allDeparted()) return false;
      over.push_back(std::move(each));
      return true;
    });
  }
  for (const Retired& each : over) each.arena->device().annotateAcquire(each.board->key());
  // `over` goes here, and its memory with it: outside the lock, since freeing may take long.
}

}  // namespace hdpcomm::device
