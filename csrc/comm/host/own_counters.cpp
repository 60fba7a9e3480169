#include "comm/host/own_counters.hpp"

namespace hdpcomm {

std::optional<OwnCounters::Place> OwnCounters::open(CounterWords& words) {
  for (uint32_t word = 0; word < kCounterWords; ++word) {
    Own& own = own_[word];
    if (own.open) continue;
    own.open = true;
    if (++own.generation == 0) ++own.generation;
    openWord(words.at[word], own.generation);
    return Place{word, own.generation};
  }
  return std::nullopt;
}

void OwnCounters::close(CounterWords& words, const Place& place, bool leaving) {
  Own& own = own_[place.word];
  if (!own.open || own.generation != place.generation) return;
  own.open = false;
  closeWord(words.at[place.word], leaving);
}

}  // namespace hdpcomm
