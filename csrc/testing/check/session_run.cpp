// Running the operations of a check.
#include <algorithm>
#include <chrono>
#include <ctime>

#include "device/simulated/wait.hpp"
#include "testing/check/session.hpp"

namespace hdpcomm::testing::check {
namespace {

constexpr unsigned char kCopyPoison = 0xDC;
constexpr int kMaxPieces = 4;

double processorSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Detects a stalled process: for a second nothing was submitted or run and no thread used the
// processor. Then some host thread waits, outside of the device's calls, for one that waits in
// them.
class StallDetector {
 public:
  bool stalled(uint64_t progress) {
    const auto now = std::chrono::steady_clock::now();
    if (progress != progress_) {
      progress_ = progress;
      restart(now);
      return false;
    }
    if (now - since_ < std::chrono::seconds(1)) return false;
    const bool idle = processorSeconds() - processor_ < 0.01;
    restart(now);
    return idle;
  }

 private:
  void restart(std::chrono::steady_clock::time_point now) {
    since_ = now;
    processor_ = processorSeconds();
  }
  uint64_t progress_ = ~uint64_t{0};
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  double processor_ = 0;
};

}  // namespace

bool Session::executed(NodeId id) const {
  if (id == kNoNode) return true;
  const Node& node = at(id);
  return streams_.at(node.entity).next > node.position;
}

bool Session::enabled(int stream) const {
  const auto& nodes = trace_.entities[static_cast<size_t>(stream)].nodes;
  const size_t next = streams_.at(stream).next;
  if (next >= nodes.size()) return false;
  const Node& node = at(nodes[next]);
  if (node.kind == NodeKind::kWaitEvent) return executed(node.record);
  if (node.kind == NodeKind::kWaitValue) return reached(loadWord(node.flag.flag), node.flag.value);
  return true;
}

// A copy may write any of its destination from its beginning on, and read any of its source until
// its end.
bool Session::copyPiece(StreamState& state, const Op& op) {
  if (state.pieces == 0) {
    std::memset(op.dst, kCopyPoison, op.bytes);
    state.pieces = 1 + random_() % kMaxPieces;
    for (size_t i = 0; i < state.pieces; ++i) state.left.push_back(i);
    std::shuffle(state.left.begin(), state.left.end(), random_);
    return false;
  }
  const size_t begin = op.bytes * state.left.back() / state.pieces;
  const size_t end = op.bytes * (state.left.back() + 1) / state.pieces;
  std::memcpy(static_cast<std::byte*>(op.dst) + begin,
              static_cast<const std::byte*>(op.src) + begin, end - begin);
  state.left.pop_back();
  if (!state.left.empty()) return false;
  state.pieces = 0;
  return true;
}

void Session::execute(NodeId id, Op& op) {
  if (op.kind == OpKind::kFill && op.bytes > 0) {
    std::memset(op.dst, op.byte, op.bytes);
  } else if (op.kind == OpKind::kKernel) {
    try {
      op.kernel.cpu();
    } catch (const std::exception& error) {
      fault_ = Error(ErrorKind::kDevice,
                     std::string("kernel ") + op.kernel.name + " failed: " + error.what());
    }
  }
  noteOverwrittenFlags(id);
}

void Session::step(int stream) {
  StreamState& state = streams_.at(stream);
  const NodeId id = trace_.entities[static_cast<size_t>(stream)].nodes[state.next];
  ++steps_;
  const Node& node = at(id);
  if (node.kind == NodeKind::kWriteValue) {
    storeWord(node.flag.flag, node.flag.value);
  } else if (const auto op = ops_.find(id); op != ops_.end()) {
    if (node.kind == NodeKind::kCopy && op->second.bytes > 0 && !copyPiece(state, op->second)) {
      return;
    }
    execute(id, op->second);
    ops_.erase(op);
  }
  ++state.next;
}

// In lazy mode, for a host that waits: the stream that holds it up. Else any stream that can run.
std::optional<int> Session::choose(NodeId wanted) {
  if (mode_ == Mode::kLazy && wanted != kNoNode && random_() % 8 != 0) {
    int stream = at(wanted).entity;
    for (size_t hops = 0; hops <= streams_.size(); ++hops) {
      if (enabled(stream)) return stream;
      const auto& nodes = trace_.entities[static_cast<size_t>(stream)].nodes;
      const size_t next = streams_.at(stream).next;
      if (next >= nodes.size() || at(nodes[next]).kind != NodeKind::kWaitEvent) break;
      stream = at(at(nodes[next]).record).entity;
    }
  }
  std::vector<int> ready;
  for (const auto& [stream, state] : streams_) {
    if (enabled(stream)) ready.push_back(stream);
  }
  if (ready.empty()) return std::nullopt;
  return ready[random_() % ready.size()];
}

bool Session::stepFor(NodeId wanted) {
  const std::optional<int> stream = choose(wanted);
  if (!stream) return false;
  step(*stream);
  return true;
}

// Called after every submission.
void Session::stepSome() {
  changed_.notify_all();
  if (mode_ == Mode::kLazy) return;
  int count = mode_ == Mode::kEager ? 1 << 20 : static_cast<int>(random_() % 4);
  while (count-- > 0 && stepFor(kNoNode)) {
  }
}

bool Session::allRanksWait() const {
  return !ranks_.empty() && waiters_.size() >= ranks_.size() &&
         std::all_of(ranks_.begin(), ranks_.end(), [&](int rank) {
           const auto& key = trace_.entities[static_cast<size_t>(rank)].key;
           return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter* waiter) {
             // A waiter whose work is done just has not woken up yet.
             return waiter->key == key && !executed(waiter->target);
           });
         });
}

// Nothing can happen before a timeout, so the earliest one expires now.
void Session::expireOne() {
  const auto first =
      std::min_element(waiters_.begin(), waiters_.end(), [&](const Waiter* a, const Waiter* b) {
        const bool a_done = executed(a->target);
        const bool b_done = executed(b->target);
        return std::tie(a_done, a->timeout_s, a->key) < std::tie(b_done, b->timeout_s, b->key);
      });
  (*first)->expired = true;
  changed_.notify_all();
}

std::string Session::progressText(NodeId target) const {
  const int stream = at(target).entity;
  const Entity& entity = trace_.entities[static_cast<size_t>(stream)];
  const Node& node = at(entity.nodes[streams_.at(stream).next]);
  std::string text = entity.name + " stands at " + std::string(nodeName(node.kind));
  if (node.kind == NodeKind::kWaitValue) {
    text += "(" + hexOf(node.flag.flag) + ", >= " + std::to_string(node.flag.value) + ")";
  }
  text += ", called at " + placeOf(node.site);
  if (node.kind == NodeKind::kWaitValue) {
    text += "; the flag holds " + std::to_string(loadWord(node.flag.flag));
  }
  return text;
}

void Session::await(NodeId target, NodeId waiting, double timeout_s,
                    const DeviceApi::InterruptCheck& check, std::unique_lock<std::mutex>& lock) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(timeout_s, 1e9));
  const Site site = at(waiting).site;
  Waiter self{timeout_s, trace_.entities[static_cast<size_t>(host())].key, target, false};
  waiters_.push_back(&self);
  struct Leave {
    std::vector<Waiter*>& waiters;
    Waiter* self;
    ~Leave() { std::erase(waiters, self); }
  } leave{waiters_, &self};
  StallDetector stall;
  while (!executed(target)) {
    checkRunning();
    if (self.expired || std::chrono::steady_clock::now() > deadline) {
      at(waiting).abandoned = true;
      throw Error(ErrorKind::kTimeout,
                  "device work did not end within " + std::to_string(timeout_s) +
                      " s (synchronize at " + placeOf(site) + "): " + progressText(target) +
                      (self.expired ? "; all ranks wait and nothing can run" : ""));
    }
    if (stepFor(target)) {
      changed_.notify_all();
      if (steps_ % 256 != 0) continue;
    } else {
      if (allRanksWait()) expireOne();
      if (self.expired) continue;
      changed_.wait_for(lock, std::chrono::milliseconds(50));
      if (stall.stalled(steps_ + trace_.nodes.size())) expireOne();
    }
    if (!check) continue;
    lock.unlock();
    try {
      check();
    } catch (...) {
      lock.lock();
      at(waiting).abandoned = true;
      throw;
    }
    lock.lock();
  }
  checkRunning();
}

}  // namespace hdpcomm::testing::check
