// The fake on the streams of devices: an operation is a kernel that says that its stream has come
// to it, and a wait for its end.
#include <algorithm>
#include <utility>

#include "testing/check/checked_device.hpp"
#include "testing/fake_nccl.hpp"
#include "testing/test_device.hpp"

namespace hdpcomm::testing {
namespace {

// As TestDevice::captureOf(); 0 for another device.
uint64_t captureOf(DeviceApi& device, Stream stream) {
  auto* captures = dynamic_cast<TestDevice*>(&device);
  return captures != nullptr ? captures->captureOf(stream) : 0;
}

}  // namespace

// All operations of a communicator run in the order of issue, whatever their streams: each waits
// for the one before it.
void FakeNccl::launch(Rank& rank) {
  if (rank.device == nullptr) return;
  const Stream stream = rank.device_stream;
  if (const uint64_t number = captureOf(*rank.device, stream)) return capture(rank, number);
  if (dynamic_cast<check::CheckedDevice*>(rank.device.get()) != nullptr) {
    return launchChecked(rank);
  }
  uint32_t* before = nullptr;
  uint32_t* over = nullptr;
  {
    const auto held = lock();
    if (rank.stream.empty() || rank.stream.back().over != nullptr) return;
    before = rank.flags.empty() ? nullptr : &rank.flags.back();
    over = rank.stream.back().over = &rank.flags.emplace_back(0);
  }
  if (before != nullptr) rank.device->waitValue(stream, before, 1);
  KernelLaunch kernel;
  kernel.name = "nccl";
  kernel.cpu = [fake = shared_from_this(), &rank, over] { fake->begin(rank, over); };
  rank.device->launch(std::move(kernel), stream);
  rank.device->waitValue(stream, over, 1);
}

// The operations of a capture follow each other in the order of issue as well.
void FakeNccl::capture(Rank& rank, uint64_t number) {
  Captured* captured = nullptr;
  Event before;
  {
    const auto held = lock();
    if (rank.stream.empty() || rank.stream.back().over != nullptr) return;
    if (!rank.captured.empty() && rank.captured.back().capture == number) {
      before = rank.captured.back().end.get();
    }
    captured =
        &rank.captured.emplace_back(Captured{std::move(rank.stream.back()), 0, number,
                                             OwnedEvent(rank.device, rank.device->createEvent())});
    rank.stream.pop_back();
  }
  const Stream stream = rank.device_stream;
  if (before != Event{}) rank.device->wait(stream, before);
  KernelLaunch kernel;
  kernel.name = "nccl";
  kernel.cpu = [fake = shared_from_this(), &rank, captured] { fake->again(rank, *captured); };
  rank.device->launch(std::move(kernel), stream);
  rank.device->waitValue(stream, &captured->over, 1);
  rank.device->record(captured->end.get(), stream);
}

// Called by the kernel of an operation when its stream runs it.
void FakeNccl::begin(Rank& rank, const uint32_t* over) {
  const auto held = lock();
  for (Item& item : rank.stream) {
    if (item.over == over) item.arrived = true;
  }
  goOn();
}

// Called when a graph runs a captured operation: it is issued before those that no stream runs yet.
void FakeNccl::again(Rank& rank, Captured& captured) {
  const auto held = lock();
  rank.device->storeFlag(&captured.over, rank.aborted ? 1 : 0);
  if (rank.aborted) return;
  const auto place = std::find_if(rank.stream.begin(), rank.stream.end(),
                                  [](const Item& item) { return !item.arrived; });
  Item& item = *rank.stream.insert(place, captured.item);
  item.arrived = true;
  item.over = &captured.over;
  goOn();
}

void FakeNccl::goOn() {
  std::string wrong;
  for (bool moved = true; moved && wrong.empty();) {
    moved = false;
    for (Rank& rank : ranks_) {
      if (!rank.stream.empty() && rank.stream.front().arrived) moved |= start(rank);
    }
    while (wrong.empty() && !ready_.empty()) {
      const auto pair = ready_.back();
      ready_.pop_back();
      wrong = match(pair.first, pair.second);
      moved = true;
    }
    if (wrong.empty() && allAtWhole()) {
      wrong = runWhole();
      moved = true;
    }
  }
  // NCCL would not notice; the operations never end.
  if (!wrong.empty()) last_error_ = wrong;
}

}  // namespace hdpcomm::testing
