// The twin of benchmarks/cpp on MPI: one-way time of 8 bytes, small collectives, and
// MPI_Comm_create_group with its first use. Prints one JSON object with the same keys.
// Built by benchmarks/collectives.py: mpicxx -O2 -std=c++20; run: mpirun -n RANKS ./it [ITERATIONS]
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

namespace {

constexpr int kRounds = 11;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double microseconds(int iterations, const std::function<void()>& call) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    call();
    MPI_Barrier(MPI_COMM_WORLD);
    const double started = MPI_Wtime();
    for (int i = 0; i < iterations; ++i) call();
    rounds.push_back((MPI_Wtime() - started) * 1e6 / iterations);
  }
  return median(rounds);
}

// Ranks 0 and 1; the others wait.
double oneWay(int rank, int trips) {
  double value = 0;
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double started = MPI_Wtime();
    for (int i = 0; i < trips && rank < 2; ++i) {
      if (rank == 0) MPI_Send(&value, 1, MPI_DOUBLE, 1, 0, MPI_COMM_WORLD);
      MPI_Recv(&value, 1, MPI_DOUBLE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      if (rank == 1) MPI_Send(&value, 1, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD);
    }
    rounds.push_back((MPI_Wtime() - started) * 1e6 / trips / 2);
  }
  return median(rounds);
}

struct SubsetTimes {
  double create_us;
  double create_and_use_us;
};

SubsetTimes subsetTimes(int size, int iterations) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group world;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  std::vector<double> created;
  std::vector<double> used;
  double value = 1;
  for (int i = 0; i < iterations; ++i) {
    std::next_permutation(ranks.begin(), ranks.end());
    MPI_Barrier(MPI_COMM_WORLD);
    const double started = MPI_Wtime();
    MPI_Group group;
    MPI_Comm comm;
    MPI_Group_incl(world, size, ranks.data(), &group);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm);
    const double made = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, comm);
    used.push_back((MPI_Wtime() - started) * 1e6);
    created.push_back((made - started) * 1e6);
    MPI_Comm_free(&comm);
    MPI_Group_free(&group);
  }
  MPI_Group_free(&world);
  return {median(created), median(used)};
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int iterations = argc > 1 ? std::atoi(argv[1]) : 2000;
  if (size < 2 || iterations < 1) {
    if (rank == 0) std::fprintf(stderr, "usage: mpirun -n RANKS %s [ITERATIONS]\n", argv[0]);
    MPI_Finalize();
    return 6;
  }
  std::vector<double> in(static_cast<size_t>(size), 1.0);
  std::vector<double> out(static_cast<size_t>(size));
  const double message = oneWay(rank, 5 * iterations);
  const double reduce = microseconds(iterations, [&] {
    MPI_Allreduce(in.data(), out.data(), 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  });
  const double gather = microseconds(iterations, [&] {
    MPI_Allgather(in.data(), 1, MPI_DOUBLE, out.data(), 1, MPI_DOUBLE, MPI_COMM_WORLD);
  });
  const double wait = microseconds(iterations, [] { MPI_Barrier(MPI_COMM_WORLD); });
  const SubsetTimes subset = subsetTimes(size, 500);
  if (rank == 0) {
    std::printf(
        "{\"ranks\": %d, \"one_way_8_bytes_us\": %.3f, \"all_reduce_8_bytes_us\": %.3f, "
        "\"all_gather_8_bytes_us\": %.3f, \"barrier_us\": %.3f, \"create_us\": %.3f, "
        "\"create_and_use_us\": %.3f}\n",
        size, message, reduce, gather, wait, subset.create_us, subset.create_and_use_us);
  }
  MPI_Finalize();
  return 0;
}
