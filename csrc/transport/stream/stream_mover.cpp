#include "transport/stream/stream_mover.hpp"

#include <string>

#include "base/error.hpp"

namespace hdpcomm {

StreamMover::Traffic StreamMover::trafficOf(const Collective& operation) const {
  Traffic traffic{.sent = std::vector<uint64_t>(operation.ranks.size()),
                  .received = std::vector<uint64_t>(operation.ranks.size())};
  for (const Step& step : operation.plan.schedule->steps) {
    for (const Send& each : step.sends) {
      traffic.sent[static_cast<size_t>(each.peer)] += each.from.bytes;
    }
    for (const Recv& each : step.recvs) {
      traffic.received[static_cast<size_t>(each.peer)] += each.to.bytes;
    }
  }
  return traffic;
}

void StreamMover::checkLanding(const Message& message, bool received) const {
  if (message.landing == kNoLanding) return;
  const Zone zone = this->zone();
  const size_t bytes = message.bytes();
  if (message.landing > zone.bytes || bytes > zone.bytes - message.landing) {
    throwInvalidUsage("exchange() got a landing place of " + std::to_string(bytes) + " bytes at " +
                      std::to_string(message.landing) + "; the zone has " +
                      std::to_string(zone.bytes) + " (HDPCOMM_DEVICE_LANDING_BYTES)");
  }
  if (received && bytes > 0 && message.data != zone.data + message.landing) {
    throwInvalidUsage("exchange() got a receive whose tensor is not at offset " +
                      std::to_string(message.landing) +
                      " of the landing zone for messages of that rank; pass a view of "
                      "landing_zone().memory there");
  }
}

}  // namespace hdpcomm
