// From C++: the time of an 8-byte message between two processes, one way, and of making and first
// using a subset of 64 ranks. Prints one JSON object. Built with -DHDPCOMM_BUILD_BENCHMARKS=ON;
// run:
//   BUILD/benchmarks/latency [ROUND TRIPS [free]]
// Each process is bound to a core where there are two; with "free" it is not.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "bind.hpp"
#include "comm/host/communicator.hpp"
#include "transport/host/shm/shm.hpp"

namespace {

using namespace hdpcomm;

std::shared_ptr<World> join(const std::shared_ptr<ShmSegment>& segment, int rank) {
  auto transport = makeShmTransport(segment, rank);
  shmWaitAllReady(*transport, {.timeout_s = 10});
  return std::make_shared<World>(std::move(transport), 10);
}

void message(Communicator& comm, bool send, int64_t& value) {
  const Communicator::Message message{&value, 1, DType::kInt64, 1 - comm.rank()};
  const std::span<const Communicator::Message> one(&message, 1);
  send ? comm.exchange(one, {}, 10, nullptr) : comm.exchange({}, one, 10, nullptr);
}

// Seconds of one way: the median over rounds of half a round trip.
double pingPong(Communicator& comm, int trips) {
  std::vector<double> rounds;
  int64_t value = 0;
  for (int round = 0; round < 11; ++round) {
    const auto started = Clock::now();
    for (int i = 0; i < trips; ++i) {
      message(comm, comm.rank() == 0, value);
      message(comm, comm.rank() != 0, value);
    }
    rounds.push_back(std::chrono::duration<double>(Clock::now() - started).count() / trips / 2);
  }
  std::nth_element(rounds.begin(), rounds.begin() + 5, rounds.end());
  return rounds[5];
}

double subsetSeconds() {
  const auto segment = createShmSegment(64);
  std::vector<std::unique_ptr<Transport>> others;
  for (int rank = 1; rank < 64; ++rank) others.push_back(makeShmTransport(segment, rank));
  Communicator comm(join(segment, 0));
  std::vector<int> ranks(64);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<double> times;
  for (int i = 0; i < 1001; ++i) {
    std::rotate(ranks.begin(), ranks.begin() + 1, ranks.end());
    const auto started = Clock::now();
    const auto subset = comm.subset(ranks);
    times.push_back(std::chrono::duration<double>(Clock::now() - started).count());
  }
  std::nth_element(times.begin(), times.begin() + 500, times.end());
  return times[500];
}

}  // namespace

int main(int argc, char** argv) {
  const int trips = argc > 1 ? std::atoi(argv[1]) : 20000;
  if (trips < 1) {
    std::fprintf(stderr, "usage: %s [ROUND TRIPS [free]], 1 or more\n", argv[0]);
    return 6;
  }
  const auto segment = createShmSegment(2);
  const pid_t child = fork();
  if (child < 0) return 1;
  if (argc < 3) bind(child == 0 ? 1 : 0, 2);
  Communicator comm(join(segment, child == 0 ? 1 : 0));
  const double seconds = pingPong(comm, trips);
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  std::printf("{\"one_way_8_bytes_us\": %.3f, \"subset_of_64_us\": %.3f}\n", seconds * 1e6,
              subsetSeconds() * 1e6);
  return 0;
}
