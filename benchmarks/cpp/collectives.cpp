// From C++, on processes of this host: the time of small collectives, and of making and first using
// a subset. Prints one JSON object with the keys of benchmarks/mpi/collectives.cpp, its twin on
// MPI. Built with -DHDPCOMM_BUILD_BENCHMARKS=ON; run:
//   BUILD/benchmarks/collectives RANKS [ITERATIONS [free]]
// Each rank is bound to a core where there are enough, as mpirun does; with "free" it is not.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "bind.hpp"
#include "comm/host/communicator.hpp"
#include "transport/host/shm/shm.hpp"

namespace {

using namespace hdpcomm;

constexpr int kRounds = 11;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void collective(const Communicator& comm, OpCode op, const void* in, void* out, size_t count,
                RedOp redop) {
  comm.collective({in, out, count, DType::kFloat64}, {op, redop}, 0, nullptr);
}

void barrier(const Communicator& comm) {
  collective(comm, OpCode::kBarrier, nullptr, nullptr, 0, RedOp::kNone);
}

// Microseconds of a call: the median over rounds.
double microseconds(const Communicator& comm, int iterations, const std::function<void()>& call) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    call();
    barrier(comm);
    const auto started = Clock::now();
    for (int i = 0; i < iterations; ++i) call();
    rounds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - started).count() /
                     iterations);
  }
  return median(rounds);
}

struct SubsetTimes {
  double create_us;
  double create_and_use_us;
};

// The ranks in another order each time; all of them are members.
SubsetTimes subsetTimes(const Communicator& comm, int iterations) {
  std::vector<int> ranks(static_cast<size_t>(comm.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<double> created;
  std::vector<double> used;
  double value = 1;
  for (int i = 0; i < iterations; ++i) {
    std::next_permutation(ranks.begin(), ranks.end());
    barrier(comm);
    const auto started = Clock::now();
    const auto subset = comm.subset(ranks);
    const auto made = Clock::now();
    collective(*subset, OpCode::kAllReduce, &value, &value, 1, RedOp::kMax);
    used.push_back(std::chrono::duration<double, std::micro>(Clock::now() - started).count());
    created.push_back(std::chrono::duration<double, std::micro>(made - started).count());
  }
  return {median(created), median(used)};
}

void run(const Communicator& comm, int iterations) {
  std::vector<double> in(static_cast<size_t>(comm.size()), 1.0);
  std::vector<double> out(static_cast<size_t>(comm.size()));
  const double reduce = microseconds(comm, iterations, [&] {
    collective(comm, OpCode::kAllReduce, in.data(), out.data(), 1, RedOp::kMax);
  });
  const double gather = microseconds(comm, iterations, [&] {
    collective(comm, OpCode::kAllGather, in.data(), out.data(), 1, RedOp::kNone);
  });
  const double wait = microseconds(comm, iterations, [&] { barrier(comm); });
  const SubsetTimes subset = subsetTimes(comm, 500);
  barrier(comm);
  if (comm.rank() != 0) return;
  std::printf(
      "{\"ranks\": %d, \"all_reduce_8_bytes_us\": %.3f, \"all_gather_8_bytes_us\": %.3f, "
      "\"barrier_us\": %.3f, \"create_us\": %.3f, \"create_and_use_us\": %.3f}\n",
      comm.size(), reduce, gather, wait, subset.create_us, subset.create_and_use_us);
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 0;
  const int iterations = argc > 2 ? std::atoi(argv[2]) : 2000;
  if (ranks < 2 || ranks > 64 || iterations < 1) {
    std::fprintf(stderr, "usage: %s RANKS [ITERATIONS [free]], 2 to 64 ranks\n", argv[0]);
    return 6;
  }
  const auto segment = createShmSegment(ranks);
  std::vector<pid_t> children;
  int rank = 0;
  while (rank == 0 && static_cast<int>(children.size()) + 1 < ranks) {
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) rank = static_cast<int>(children.size()) + 1;
    children.push_back(child);
  }
  if (argc < 4) bind(rank, ranks);
  auto transport = makeShmTransport(segment, rank);
  shmWaitAllReady(*transport, {.timeout_s = 10});
  run(Communicator(std::make_shared<World>(std::move(transport), 60)), iterations);
  std::fflush(stdout);
  if (rank != 0) _exit(0);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  return 0;
}
