// One transport made of several: each peer is reached by the one that suits it, for example shared
// memory on this host and a process group beyond it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm {

// route[i]: which of `members` reaches rank i; all members have the world's size and this rank. The
// first member is the one that sleeps (idle) and allocates. Events of the others have to end that
// sleep: the caller connects them to members[0]->waker().
std::unique_ptr<Transport> makeCompositeTransport(std::vector<std::unique_ptr<Transport>> members,
                                                  std::vector<int> route, const std::string& name);

}  // namespace hdpcomm
