// One transport made of several: each peer is reached by the one that suits it, shared memory on
// the own host, say, and a process group beyond it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm {

// route[i]: which of `members` reaches rank i; all members have the world's size and this rank.
// This rank sleeps in the first member, and has its memory (allocate) from it. The events of the
// others must end that sleep: whoever makes them connects their sources to members[0]->waker().
std::unique_ptr<Transport> makeCompositeTransport(std::vector<std::unique_ptr<Transport>> members,
                                                  std::vector<int> route, const std::string& name);

}  // namespace hdpcomm
