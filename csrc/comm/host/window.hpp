// Memory of each rank that the other ranks of its host map: each reads and writes it when it likes
// (one-sided access), and sleeps on words at its beginning for what others do with it.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "base/fd.hpp"
#include "comm/host/communicator.hpp"

namespace hdpcomm {

class Window {
 public:
  // This rank's memory, `words` words of 0 and then `bytes` bytes of 0, from a multiple of 4096 on.
  // Its pages are taken when they are first touched. Throws Error when the system refuses it.
  Window(const Communicator& comm, size_t words, size_t bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Names its file in this process, for open() by the other ranks.
  int descriptor() const noexcept { return fd_.get(); }
  // Maps the memory of a rank, which has as many words and bytes. Throws Error if it cannot be
  // opened, InvalidUsage if it has another size.
  void open(int position, int pid, int descriptor);
  // Bytes of a rank, whose memory must be mapped. The mapping lives as long as any user of it.
  std::shared_ptr<std::byte> data(int position) const;
  size_t bytes() const noexcept { return bytes_; }

  // Sets a word after all that this thread has written before, and wakes who sleeps on it.
  void set(int position, size_t word, uint32_t value);
  uint32_t get(int position, size_t word) const;
  // Sleeps until the word has the value; then what was written before it was set is there.
  // `awaited`: the position of the rank that is to bring that about, or lets another one do so.
  // Throws PeerLost when a rank of the communicator has left or died, CommTimeout past the deadline
  // of operations, Aborted after stop().
  void wait(int position, size_t word, uint32_t value, int awaited,
            const World::InterruptCheck& check_interrupt);
  // Ends all wait() of this rank, now and later, until start().
  void stop() noexcept { stopped_.store(true, std::memory_order_release); }
  void start() noexcept { stopped_.store(false, std::memory_order_release); }

 private:
  std::atomic<uint32_t>& word(int position, size_t word) const;
  void checkWait(int position, size_t word, int awaited, Clock::time_point start,
                 Clock::time_point* deadline);
  ErrorContext context(int peer) const;

  std::shared_ptr<World> world_;
  Ranks ranks_;
  size_t words_;
  size_t begin_;  // of the bytes
  size_t bytes_;
  Fd fd_;
  std::vector<std::shared_ptr<Mapping>> memories_;  // by position; null: not mapped yet
  std::atomic<uint64_t> waits_{0};
  std::atomic<bool> stopped_{false};
};

}  // namespace hdpcomm
