// One rank's end of the global transport: the queue of its operations, and everything that waits.
//
// Operations run in the order of submission: the next one posts its messages when the one before
// has posted all of its own, so that the messages of a pair of ranks follow one order on both
// sides. If all ranks submit in one global order, no mix of overlapping subsets can deadlock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/process.hpp"
#include "comm/host/deadlines.hpp"
#include "comm/host/deadlock.hpp"
#include "comm/host/heard_failures.hpp"
#include "comm/host/own_counters.hpp"
#include "comm/host/schedule_cache.hpp"
#include "comm/host/work.hpp"
#include "comm/wait_counts.hpp"

namespace hdpcomm {

// Something that joined the world beside its transport (a stream engine), and leaves with it.
class WorldPart {
 public:
  virtual ~WorldPart() = default;
  virtual void abort(const std::string& reason) = 0;
  virtual void close(const std::string& reason) = 0;
};

class World {
 public:
  // Called a few times a second on a thread that waits; may throw to give up (Ctrl-C).
  using InterruptCheck = std::function<void()>;

  World(std::unique_ptr<Transport> transport, double timeout_s);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const noexcept { return transport_->rank(); }
  int size() const noexcept { return transport_->size(); }
  double timeout() const noexcept { return timeout_s_; }
  const char* transportName() const noexcept { return transport_->name(); }
  // Counts of the transport, and `wait_ns`: nanoseconds that callers have waited in operations so
  // far, all threads together. The first few microseconds of each operation are not counted: it
  // polls without reading the clock.
  Stats stats();
  // The same in operations of the communicator with this list, since the first such question.
  double waitedSeconds(const Ranks& ranks);
  // See Transport::allocate().
  std::shared_ptr<std::byte> allocate(size_t bytes);

  // Queues and starts an operation. It also proceeds while nobody waits for it, on a thread of this
  // world, which gives it up when it has run for the world's timeout.
  void submit(const std::shared_ptr<Work>& work);
  // Waits until the work has ended; throws its error. A timeout of 0 or less: the world's. Past the
  // deadline the operation is given up on all ranks concerned.
  void wait(Work& work, double timeout_s, const InterruptCheck& check_interrupt);
  // Whether the work failed, and an operation has thrown an error to the caller that tells of this
  // failure: this one or another.
  bool heard(const Work& work);
  // Submits an operation and waits for it, on this thread alone; `work` may lie on the stack.
  void run(Work& work, double timeout_s, const InterruptCheck& check_interrupt);
  // Collective over the given ranks: brings their pairs into step again (transport.hpp). Fails the
  // operations that are under way between them, and drops what was sent before. Deadline as for
  // wait(). `quiet`: the caller tells the program of no error (Work::keepQuiet), and each of the
  // ranks calls resync() again when it fails (ResyncWork::keepOn).
  void resync(const Call& call, const Ranks& ranks, double timeout_s,
              const InterruptCheck& check_interrupt, bool quiet);
  // True when the work has ended (an error is thrown by wait()). Never blocks.
  bool test(Work& work);

  // From goByLiveness(true) to the matching goByLiveness(false), operations that wait for the
  // world's timeout wait on while the ranks that they await move (liveness.hpp), as far as these
  // tell it: a rank tells it from its first call of one of the following on.
  void goByLiveness(bool on);
  void tick();
  // This rank does something that is no operation: the others wait, at most for the limit. Returns
  // a number for endActivity().
  uint64_t beginActivity(const std::string& what, double limit_s);
  void endActivity(uint64_t activity);

  // For a part whose operations go by liveness, too. Whether operations called now do:
  bool goesByLiveness() const noexcept { return deadlines_.byLiveness(); }
  // Whether the others are told anything: if not, the part need not tell the following.
  bool tells() const noexcept { return deadlines_.tells(); }
  void reportPartMoves(Deadlines::PartMoves moves);
  // The calling thread waits in an operation of the part.
  void beginWait();
  void endWait();
  // Until when an operation that began at `start` may wait for these ranks, as they move.
  Deadlines::Allowed allowed(const std::vector<int>& awaited, Clock::time_point start);

  // The schedule of one of this rank's collectives.
  std::shared_ptr<const Schedule> schedule(const ScheduleRequest& request) {
    refuseInChild();
    return schedules_.get(request);
  }
  ScheduleCache& schedules() noexcept { return schedules_; }
  const ScheduleCache& schedules() const noexcept { return schedules_; }

  // At most one, for the rest of the world's life.
  void attach(std::shared_ptr<WorldPart> part);

  // Counters (counter.hpp). Throws InvalidUsage if this rank owns too many.
  OwnCounters::Place openCounter();
  // Idempotent; does nothing in a forked child.
  void closeCounter(const OwnCounters::Place& place);
  // Those of a rank of this host; null for other ranks.
  std::shared_ptr<CounterWords> counterWords(int owner);
  // Waits for the answer of a rank of another host, with the deadline of operations.
  FetchResult fetchFrom(int owner, const FetchRequest& request, const Ranks& ranks,
                        const InterruptCheck& check_interrupt);
  // A fetch is a move of this rank.
  void noteFetch() noexcept { fetches_.fetch_add(1, std::memory_order_relaxed); }
  bool usable() const noexcept { return !over() && forkGeneration() == forks_; }
  void checkUsable();  // throws the error of operations that come too late

  // The last operations of this rank.
  FlightRecorder::Flight flight();

  // PeerLost, if the peer has left or died.
  std::optional<Error> departure(int peer);

  // Ends all pending operations here with Aborted, tells their members, and refuses new ones.
  void abort(const std::string& reason);
  // The same without the part that joined beside the transport: for that part.
  void abortTransport(const std::string& reason);
  // Leaves the world; peers that still need this rank get PeerLost with the reason. Idempotent.
  // Does nothing in a forked child.
  void close(const std::string& reason);
  // Closed or aborted: operations are refused from now on.
  bool over() const noexcept { return over_.load(std::memory_order_relaxed); }

 private:
  void enterLocked(Work& work);
  void enqueueLocked(const std::shared_ptr<Work>& work);
  bool runAloneLocked(Work& work);
  bool spinLocked(Work& work);
  [[noreturn]] void throwFailureLocked(const Work& work);
  void forgetLocked(Work& work);
  void failAllWithLocked(const std::vector<int>& ranks, const Error& error);
  std::string reasonForPeersLocked(const std::string& reason) const;
  std::string causeOfResyncLocked(const std::vector<int>& ranks);
  Error explainedLocked(const Work& work, const Error& error);
  void progressLocked();
  void postAllLocked();
  bool advanceLocked();
  void rejectUnexpectedLocked();
  void pollFailuresLocked();
  void giveUpLateLocked(Clock::time_point now);
  void checkHealthLocked(Clock::time_point now);
  WaitRecord waitRecordLocked();
  Error timeoutError(const Work& work, Clock::duration waited,
                     const std::optional<Deadlines::Stuck>& stuck);

  // world_counters.cpp
  void leaveCountersLocked();
  FetchResult waitForFetch(int owner, const FetchRequest& request, Clock::time_point start,
                           const InterruptCheck& check_interrupt);

  // world_liveness.cpp
  void tellLocked();
  void publishPulseLocked(Clock::time_point now);
  std::string lastOperationLocked() const;
  std::vector<int> awaitedLocked(const Work& work) const;

  void stopWaitingLocked(const Work& work, Clock::time_point start);
  // These two leave the work in the queue until dropEndedLocked().
  void fail(Work& work, const Error& given);
  void finish(Work& work, Work::State state);
  void dropEndedLocked();
  [[noreturn]] void throwUnusable() const;
  [[noreturn]] void throwInChild() const;
  // In a forked child no lock may be taken: a thread that only its parent has may hold it.
  void refuseInChild() const {
    if (forkGeneration() != forks_) [[unlikely]]
      throwInChild();
  }
  void ensureProgressThread();
  void progressLoop();
  void waitSlowly(Work& work, double timeout_s, const InterruptCheck& check);
  void waitSlowly(Work& work, Clock::time_point start, Clock::time_point deadline, bool by_liveness,
                  const InterruptCheck& check);
  // Whether the operation sends messages on the pair of this rank with `peer`: only messages go to
  // the own rank.
  bool usesPair(const Work& work, int peer) const {
    return peer != rank() || work.call_.op == OpCode::kPointToPoint;
  }
  bool ended(const Work& work) const {
    return work.state_ == Work::State::kDone || work.state_ == Work::State::kFailed;
  }

  std::unique_ptr<Transport> transport_;
  ScheduleCache schedules_;
  FlightRecorder recorder_;
  std::optional<DeadlockFinder> deadlocks_;
  std::thread::id submitter_;        // of the first operation
  bool several_submitters_ = false;  // no thread that waits keeps the rank from going on
  Work* blocking_ = nullptr;         // for which that thread sleeps
  double timeout_s_;
  Deadlines deadlines_;
  int pid_;
  uint32_t forks_ = forkGeneration();  // of the process that made this world
  int spins_;  // polls of the transport before the clock is read for the first time
  double spin_s_;
  double yield_s_;
  double liveness_s_;
  std::function<void()> wake_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Work>> queue_;
  int64_t next_seq_ = 0;
  std::atomic<bool> over_{false};  // relaxed: written under the lock, and nothing follows from it
  bool closed_ = false;
  std::string abort_reason_;  // not empty after abort()
  std::string first_cause_;   // the first error since this rank was last in step with all others
  HeardFailures heard_;

  OwnCounters counters_;
  std::atomic<uint64_t> fetches_{0};  // relaxed: only counted

  std::shared_ptr<WorldPart> part_;

  std::thread progress_thread_;
  std::unique_ptr<std::condition_variable> progress_wanted_ =
      std::make_unique<std::condition_variable>();
  std::atomic<int> waiters_{0};
  WaitCounts waited_;
  int background_works_ = 0;
  bool in_grace_ = false;  // the progress thread wakes soon by itself
  bool stop_ = false;
};

}  // namespace hdpcomm
