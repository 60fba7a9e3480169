// The counters of transports: plain integers on the path of messages, names where they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace hdpcomm {

// Counts by name, as Communicator.stats() of Python shows them.
using Stats = std::map<std::string, uint64_t>;

inline void addStats(Stats& sum, const Stats& more) {
  for (const auto& [name, count] : more) sum[name] += count;
}

// The messages between a rank and its peers.
struct MessageCounts {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t messages_sent = 0;
  uint64_t messages_received = 0;
  uint64_t remote_bytes_sent = 0;  // the part of bytes_sent that went to other hosts
  uint64_t remote_bytes_received = 0;

  void countSent(size_t bytes) {
    ++messages_sent;
    bytes_sent += bytes;
  }
  void countReceived(size_t bytes) {
    ++messages_received;
    bytes_received += bytes;
  }

  // `peers`: the number of ranks with which there were messages.
  Stats named(size_t peers) const {
    return {{"bytes_sent", bytes_sent},
            {"bytes_received", bytes_received},
            {"messages_sent", messages_sent},
            {"messages_received", messages_received},
            {"remote_bytes_sent", remote_bytes_sent},
            {"remote_bytes_received", remote_bytes_received},
            {"peers", peers}};
  }
};

}  // namespace hdpcomm
