#include "transport/stream/pacer.hpp"

namespace hdpcomm::device {

void Pacer::pass(Stream stream, size_t operations, const WaitCheck& check) {
  // The deadline is the operation's: `check` throws when it has passed.
  constexpr double kNever = 1e9;
  unmarked_ += operations;
  if (unmarked_ < kEvery || unmarked_ == operations) return;
  if (device_->isCapturing(stream)) {  // nothing runs, and events may not be asked
    unmarked_ = 0;
    return;
  }
  OwnedEvent event;
  while (!marks_.empty() && marked_ + unmarked_ > kRoom) {
    Mark& oldest = marks_.front();
    device_->synchronize(oldest.event.get(), kNever, check);
    marked_ -= oldest.operations;
    event = std::move(oldest.event);
    marks_.pop_front();
  }
  if (!event) event = OwnedEvent(device_, device_->createEvent());
  device_->record(event.get(), stream);
  marks_.push_back({std::move(event), unmarked_ - operations});
  marked_ += unmarked_ - operations;
  unmarked_ = operations;
}

}  // namespace hdpcomm::device
