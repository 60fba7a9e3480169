// A stream of SimDevice's fast mode: a queue and a thread that runs it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/ring_queue.hpp"
#include "device/simulated/op.hpp"
#include "device/simulated/wait.hpp"

namespace hdpcomm::simulated {

class FastStream;

// A position in a stream: the end of the first `ticket` operations submitted to it.
struct Point {
  std::shared_ptr<FastStream> stream;  // null: reached
  uint64_t ticket = 0;
  bool done() const;
};

// Shared by the streams of a device.
struct DeviceState {
  std::atomic<bool> stop{false};  // the device is being destroyed: all waits end
  std::mutex mutex;
  std::optional<Error> fault;  // the first fault of a kernel
  std::atomic<bool> faulty{false};

  // False: nothing more is run, and all waits end. Acquire: with the fault.
  bool works() const { return !faulty.load(std::memory_order_acquire) && !stop.load(); }
};

struct FastOp {
  Op op;
  Point point;  // kWaitEvent: what it waits for
};

// Create with make_shared: its thread keeps a reference.
class FastStream : public std::enable_shared_from_this<FastStream> {
 public:
  explicit FastStream(std::shared_ptr<DeviceState> device) : device_(std::move(device)) {}
  ~FastStream();
  FastStream(const FastStream&) = delete;
  FastStream& operator=(const FastStream&) = delete;

  // Runs a short operation on the calling thread if the stream is empty, else queues it: waking the
  // stream's thread costs more than a short copy.
  void submit(FastOp item);
  uint64_t submitted() const { return submitted_.load(std::memory_order_relaxed); }
  // Acquire: a reader of the count sees what these operations wrote.
  uint64_t completed() const { return completed_.load(std::memory_order_acquire); }
  // False if keep_waiting() returned false before the ticket was reached.
  bool waitCompleted(uint64_t ticket, const std::function<bool()>& keep_waiting);
  // The thread ends when the queue is empty; join waits for that.
  void close();
  void join();
  bool threadEnded() const { return ended_.load(std::memory_order_acquire); }
  // For messages: "it stands at waitValue(0x7f.., >= 3), called at a.cpp:7, ...".
  std::string progressText();

 private:
  bool runsAtOnce(const FastOp& item) const;
  void ensureThread();
  void run();
  void perform(FastOp& item);
  void performKernel(KernelLaunch& kernel);
  bool awaitFlag(const FlagValue& flag) const;
  void complete();

  std::shared_ptr<DeviceState> device_;
  std::mutex mutex_;  // guards queue_, busy_, closing_, current_, thread_
  RingQueue<FastOp> queue_;
  bool busy_ = false;  // an operation is running
  bool closing_ = false;
  std::optional<Op> current_;  // the wait in which the thread is, if it is in one
  std::thread thread_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<int> waiters_{0};
  std::atomic<bool> ended_{false};
  uint32_t work_word_ = 0;  // futex word; changes when the thread has something to do
  uint32_t done_word_ = 0;  // futex word; changes after completed_
};

}  // namespace hdpcomm::simulated
