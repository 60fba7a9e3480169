#include "transport/stream/links/retired.hpp"

#include <mutex>
#include <vector>

namespace hdpcomm::device {
namespace {

struct Retired {
  std::unique_ptr<Arena> arena;
  std::shared_ptr<SharedBoard> board;
};

struct RetiredArenas {
  std::mutex mutex;
  std::vector<Retired> list;
};

// Never destroyed: at the end of the process a device may be gone before its memory.
RetiredArenas& retiredArenas() {
  static RetiredArenas* const instance = new RetiredArenas;
  return *instance;
}

}  // namespace

void retireArena(std::unique_ptr<Arena> arena, std::shared_ptr<SharedBoard> board) {
  {
    const std::lock_guard lock(retiredArenas().mutex);
    retiredArenas().list.push_back({std::move(arena), std::move(board)});
  }
  freeRetiredArenas();
}

void freeRetiredArenas() {
  std::vector<Retired> done;
  {
    const std::lock_guard lock(retiredArenas().mutex);
    std::erase_if(retiredArenas().list, [&](Retired& each) {
      if (!each.board->allDeparted()) return false;
      done.push_back(std::move(each));
      return true;
    });
  }
  for (const Retired& each : done) each.arena->device().annotateAcquire(each.board->key());
  // `done` is destroyed here, outside the lock, since freeing device memory may take long.
}

}  // namespace hdpcomm::device
