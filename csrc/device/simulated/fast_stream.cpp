#include "device/simulated/fast_stream.hpp"

namespace hdpcomm::simulated {
namespace {

constexpr size_t kShortBytes = 32768;

// Changes a futex word, which wakes its waiters.
void bump(uint32_t* word) { storeWord(word, loadWord(word) + 1); }

}  // namespace

bool Point::done() const { return stream == nullptr || stream->completed() >= ticket; }

FastStream::~FastStream() {
  if (thread_.joinable()) thread_.detach();  // it has ended, or is the calling thread
}

bool FastStream::runsAtOnce(const FastOp& item) const {
  switch (item.op.kind) {
    case OpKind::kWaitEvent:
      return item.point.done();
    case OpKind::kWaitValue:
      return reached(loadWord(item.op.flag.flag), item.op.flag.value);
    case OpKind::kKernel:
      return item.op.kernel.waits.empty() && item.op.cost() <= kShortBytes;
    default:
      return item.op.cost() <= kShortBytes;
  }
}

void FastStream::ensureThread() {
  if (thread_.joinable()) return;
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
}

void FastStream::submit(FastOp item) {
  std::unique_lock lock(mutex_);
  const bool at_once = !busy_ && queue_.empty() && runsAtOnce(item);
  if (!at_once) ensureThread();  // may throw; nothing has changed by then
  submitted_.fetch_add(1, std::memory_order_relaxed);
  if (at_once) {
    busy_ = true;
    lock.unlock();
    perform(item);
    complete();
    lock.lock();
    busy_ = false;
    if (queue_.empty()) return;
  } else {
    queue_.push(std::move(item));
  }
  bump(&work_word_);
}

void FastStream::run() {
  for (;;) {
    FastOp item;
    {
      std::unique_lock lock(mutex_);
      if (busy_ || queue_.empty()) {
        if (queue_.empty() && !busy_ && closing_) break;
        const uint32_t seen = loadWord(&work_word_);
        lock.unlock();
        waitFor(
            &work_word_, [&] { return loadWord(&work_word_) != seen; }, [] { return true; },
            std::chrono::seconds(60));
        continue;
      }
      busy_ = true;
      item = std::move(queue_.front());
      queue_.pop();
      if (item.op.kind == OpKind::kWaitEvent || item.op.kind == OpKind::kWaitValue) {
        current_ = item.op;
      }
    }
    perform(item);
    complete();
    const std::lock_guard lock(mutex_);
    busy_ = false;
    current_.reset();
  }
  // Release: a thread that sees it can join this one without waiting.
  ended_.store(true, std::memory_order_release);
}

bool FastStream::awaitFlag(const FlagValue& flag) const {
  return waitFor(
      flag.flag, [&] { return reached(loadWord(flag.flag), flag.value); },
      [this] { return device_->works(); });
}

void FastStream::perform(FastOp& item) {
  Op& op = item.op;
  // A failed device does nothing any more, like a CUDA context after a fault.
  if (!device_->works()) return;
  switch (op.kind) {
    case OpKind::kCopy:
      if (op.bytes > 0) std::memcpy(op.dst, op.src, op.bytes);
      return;
    case OpKind::kFill:
      if (op.bytes > 0) std::memset(op.dst, op.byte, op.bytes);
      return;
    case OpKind::kWriteValue:
      return storeWord(op.flag.flag, op.flag.value);
    case OpKind::kWaitValue:
      awaitFlag(op.flag);
      return;
    case OpKind::kWaitEvent:
      item.point.stream->waitCompleted(item.point.ticket, [this] { return device_->works(); });
      return;
    case OpKind::kKernel:
      return performKernel(op.kernel);
  }
}

void FastStream::performKernel(KernelLaunch& kernel) {
  for (const FlagValue& flag : kernel.waits) {
    if (!awaitFlag(flag)) return;
  }
  try {
    kernel.cpu();
  } catch (const std::exception& error) {
    const std::lock_guard lock(device_->mutex);
    if (!device_->fault) {
      device_->fault = Error(ErrorKind::kDevice,
                             std::string("kernel ") + kernel.name + " failed: " + error.what());
    }
    device_->faulty.store(true, std::memory_order_release);
  }
  kernel.cpu = nullptr;  // releases what it captured before its end becomes visible
  if (device_->faulty.load(std::memory_order_relaxed)) return;
  for (const FlagValue& flag : kernel.signals) storeWord(flag.flag, flag.value);
}

void FastStream::complete() {
  // Release: the operation's writes happen before its count. seq_cst with waiters_: either this
  // thread sees the waiter, or the waiter sees the count before it sleeps.
  completed_.fetch_add(1, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) > 0) bump(&done_word_);
}

bool FastStream::waitCompleted(uint64_t ticket, const std::function<bool()>& keep_waiting) {
  if (completed() >= ticket) return true;
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  struct Leave {
    std::atomic<int>& waiters;
    ~Leave() { waiters.fetch_sub(1, std::memory_order_seq_cst); }
  } leave{waiters_};
  return waitFor(
      &done_word_, [&] { return completed_.load(std::memory_order_seq_cst) >= ticket; },
      keep_waiting);
}

void FastStream::close() {
  const std::lock_guard lock(mutex_);
  closing_ = true;
  if (thread_.joinable()) {
    bump(&work_word_);
  } else {
    ended_.store(true, std::memory_order_release);
  }
}

void FastStream::join() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    // The device may be destroyed by its own operation, on this thread.
    if (!thread_.joinable() || thread_.get_id() == std::this_thread::get_id()) return;
    thread = std::move(thread_);
  }
  thread.join();
}

std::string FastStream::progressText() {
  const std::lock_guard lock(mutex_);
  std::string text;
  if (!current_) {
    text = std::to_string(submitted() - completed()) + " operations are not done";
  } else if (current_->kind == OpKind::kWaitEvent) {
    text = "it stands at wait(event), called at " + placeOf(current_->site);
  } else {
    const FlagValue& flag = current_->flag;
    text = "it stands at waitValue(" + hexOf(flag.flag) + ", >= " + std::to_string(flag.value) +
           "), called at " + placeOf(current_->site) + "; the flag holds " +
           std::to_string(loadWord(flag.flag));
  }
  return text;
}

}  // namespace hdpcomm::simulated
