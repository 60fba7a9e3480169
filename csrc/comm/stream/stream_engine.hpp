// One rank's end of a device world: operations on device memory, enqueued whole on streams.
//
// The host only enqueues; it never waits between the steps of an operation. A thread of the engine
// checks what streams cannot: whether both sides called the same, whether the peers live, and the
// deadline, which follows from the moves of the awaited ranks where the world goes by liveness.
// When one of these checks fails, the engine sets the flags that its streams wait for until they
// have drained, and from then on refuses device operations (docs/stream-transport.md).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/host/communicator.hpp"
#include "comm/stream/peer_calls.hpp"
#include "comm/stream/stream_work.hpp"
#include "comm/stream/stuck_guard.hpp"
#include "comm/wait_counts.hpp"
#include "transport/stream/call_board.hpp"
#include "transport/stream/pacer.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

class StreamEngine final : public WorldPart {
 public:
  // Collective over the ranks of `comm`; when it returns, every rank may submit operations.
  static std::shared_ptr<StreamEngine> start(const Communicator& comm, DevicePtr device,
                                             std::shared_ptr<device::CallBoard> board,
                                             std::unique_ptr<StreamMover> mover);
  // Only start() makes one and its deleter ends one: an engine whose streams have not drained is
  // kept (freeUndrained()).
  ~StreamEngine() override = default;
  // Destroys the engines that were let go of while streams still used their memory, and whose
  // streams have drained since.
  static void freeUndrained();

  const DevicePtr& device() const { return device_; }
  // The stream of tensors that belong to no stream (CPU tensors of a SimDevice).
  Stream hostStream() const { return host_stream_.get(); }
  // The name of the transport.
  const char* name() const { return mover_->name(); }
  StreamMover::Zone zone() const { return mover_->zone(); }
  size_t scratchBytes() const;
  size_t arenaBytes() const { return mover_->arenaBytes(); }
  // `peer`: global rank.
  bool lands(int peer) const { return mover_->lands(peer); }
  PlanningRules planning(const std::vector<int>& ranks) const { return mover_->planning(ranks); }

  static constexpr uint64_t kNoLanding = StreamMover::kNoLanding;
  using Message = StreamMover::Message;

  // Enqueue an operation behind what `caller` holds now. In the foreground later work of `caller`
  // comes after it; in the background after waitOn(). Data must stay until the operation has ended.
  std::shared_ptr<StreamWork> exchange(const Call& call, Ranks ranks,
                                       const std::vector<Message>& sends,
                                       const std::vector<Message>& recvs, Stream caller,
                                       bool background);
  std::shared_ptr<StreamWork> collective(const CollectivePlan& plan, Ranks ranks, const void* in,
                                         void* out, Stream caller, bool background);

  // Later work of `stream` comes after the operation. Throws the operation's error if it has
  // failed.
  void waitOn(StreamWork& work, Stream stream);
  // The host waits; throws the operation's error. Past the deadline the engine fails. A timeout of
  // 0 or less: the world's, or by liveness if the operation was called so.
  void waitFor(const std::shared_ptr<StreamWork>& work, double timeout_s,
               const World::InterruptCheck& check);
  // The host waits for all operations so far. The timeout is as in waitFor().
  void waitForAll(double timeout_s, const World::InterruptCheck& check);
  // True when the work has ended, well or not: no stream uses its buffers any more.
  bool test(StreamWork& work);
  // Whether the work ended with an error; waitFor() raises it.
  bool failed(const StreamWork& work) const;

  // The last operations of this rank; nothing while another thread keeps the lock.
  FlightRecorder::Flight flight() const;

  // The mover's counts, and `wait_ns`: nanoseconds that host threads have waited for operations.
  Stats stats() const;
  // See World::waitedSeconds().
  double waitedSeconds(const Ranks& ranks);
  void abort(const std::string& reason) override;
  void close(const std::string& reason) override;

 private:
  using WorkPtr = std::shared_ptr<StreamWork>;

  static constexpr auto kReleaseInterval = std::chrono::milliseconds(2);
  // Seconds in which streams drain once all flags that they wait for are set.
  static constexpr double kDrainTimeout = 5;
  double drainTimeout() const { return std::min(kDrainTimeout, timeout_s_); }

  static double secondsBetween(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }

  StreamEngine(DevicePtr device, std::shared_ptr<device::CallBoard> board,
               std::unique_ptr<StreamMover> mover, World& world);

  // stream_engine.cpp
  WorkPtr begin(const Call& call, Ranks ranks, bool captured);
  void checkUsable() const;
  void end(StreamWork& work, StreamWork::State state);
  void markEnds(StreamWork& work, Stream caller);
  template <typename Announce, typename Enqueue>
  void submit(std::unique_lock<std::mutex>& lock, const WorkPtr& work, Stream caller,
              Announce announce, Enqueue enqueue);
  void pace(Stream stream, size_t operations, const StreamMover::WaitCheck& check);
  StreamMover::WaitCheck waitCheckOf(StreamWork& work);

  // stream_monitor.cpp
  void compareCalls();
  std::optional<Error> checkWork(StreamWork& work, Clock::time_point now);
  bool ended(const StreamWork& work) const;
  void collectEnded();
  void fail(const Error& error);
  void failWork(StreamWork& work, const Error& error);
  Error errorOf(const std::exception& failure) const;
  bool releasing() const { return failed_ && (release_due_ || !released_.empty()); }
  bool releaseOnce();
  void checkHealth();
  void watch();

  // stream_deadlines.cpp
  std::optional<Error> checkDeadline(StreamWork& work, Clock::time_point start,
                                     Clock::time_point now);
  void reportMoves();
  Error timeoutOf(const StreamWork& work, double seconds,
                  const std::optional<Deadlines::Stuck>& stuck) const;

  // stream_waits.cpp
  class HostWait;
  bool endsWithin(Event event, double seconds, const World::InterruptCheck& check);
  bool conclude(const WorkPtr& work, bool check_lives);
  void raiseFailure(StreamWork& work);
  bool awaitDrained(StreamWork& work);

  // What keeps operations from ending, for the guard: takes no lock.
  std::optional<std::string> lost();

  // stream_teardown.cpp
  static void endEngine(StreamEngine* engine);
  bool drained(const StreamWork& work) const;
  bool deviceLost() const;
  bool settle();

  const DevicePtr device_;
  World* world_;  // null after close(), which comes before the world's end
  const int num_ranks_;
  const int rank_;
  const double timeout_s_;
  const std::shared_ptr<device::CallBoard> board_;
  std::shared_ptr<EventPool> events_;
  const std::unique_ptr<StreamMover> mover_;
  std::map<uintptr_t, device::Pacer> pacers_;  // of the streams that operations were called on
  OwnedStream host_stream_;
  OwnedStream background_stream_;  // collectives in the background
  OwnedStream control_stream_;     // sets flags that the others wait for
  OwnedEvent probe_;               // never recorded: asking it fails where the device has failed

  mutable std::mutex mutex_;
  PeerCalls calls_;
  std::vector<WorkPtr> running_;  // in order of submission; without captured ones
  // How many make begin() look which have ended: twice as many as were left the last time, so
  // that an operation asks for a few events, however far the host is ahead.
  size_t look_at_ = kLeastLook;
  static constexpr size_t kLeastLook = 64;
  std::vector<WorkPtr> released_;  // failed, until their streams have drained
  bool release_due_ = false;       // failed, and the mover's release() was not called yet
  int64_t next_seq_ = 0;
  uint64_t num_ended_ = 0;
  WaitCounts waited_;
  FlightRecorder recorder_;
  std::optional<Error> failed_;
  std::atomic<bool> has_failed_{false};
  mutable bool device_lost_ = false;
  bool closed_ = false;

  std::condition_variable wake_;
  bool stop_ = false;
  bool retired_ = false;  // the streams have drained, and the mover's memory is given up
  StuckGuard guard_;
  std::thread watcher_;  // last: it uses all of the above from its start
};

}  // namespace hdpcomm
