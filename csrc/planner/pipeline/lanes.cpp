#include "planner/pipeline/lanes.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/bound/bound.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/pipeline/lane.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

// What planBalanced() is told: that a rank holds so many times its capacity, and that sequences
// take so many times longer by one slice in which a pipeline fills and drains.
constexpr int kRooms[] = {2, 4, 8, 16, 1};
constexpr double kRamps[] = {1, 2, 0};
constexpr int kFewSlices = 16;   // of more, sequences run in fewer where keys take long
constexpr double kRings = 0.25;  // of the slices, that many times keys go round
constexpr double kHopeless = 2;  // of the limit, for a first form
constexpr size_t kMostEvened = 6;
// How many passes, counted by ranks and stages, are looked at: so many, or so many a device.
constexpr double kMostPasses = 1 << 23;
constexpr double kMostOfDevice = 1 << 7;

// The step on ranks that are one device each.
Problem onOneDevice(const Problem& problem, double room, double ramps) {
  Cluster cluster = problem.cost().cluster();
  MemoryParams memory = problem.cost().memory();
  CostParams params = problem.cost().params();
  const int slices = std::min(cluster.mostSlices(), kFewSlices);
  memory.capacity = static_cast<int64_t>(static_cast<double>(memory.capacity) * room);
  memory.copy = 0;
  for (double* each : {&params.kv_intra, &params.kv_domain, &params.kv_inter, &params.latency_intra,
                       &params.latency_domain, &params.latency_inter, &params.ring_step}) {
    *each *= std::max(1.0, kRings * slices);
  }
  params.attention *= 1 + ramps * (cluster.pipeline - 1) / (slices * cluster.chunks);
  params.noise = 0;
  cluster.pipeline = cluster.chunks = cluster.slices = 1;
  cluster.split = false;
  return problem.withCosts(CostModel(params, memory, cluster));
}

std::vector<Lane> lanesOf(const Problem& problem, const Plan& flat) {
  const std::vector<int32_t> lowest = joinedRanks(flat, problem.ranks());
  std::vector<LaneJobs> jobs(problem.ranks());
  for (int32_t rank = 0; rank < problem.ranks(); ++rank) {
    jobs[lowest[rank]].ranks.push_back(rank);
    jobs[lowest[rank]].alone.emplace_back();
  }
  for (const MicroBatch& batch : flat.micro_batches) {
    LaneJobs& own = jobs[lowest[batch.ranks.front()]];
    for (const int32_t sequence : batch.sequences) {
      if (batch.ranks.size() > 1) {
        own.shared.push_back({batch.ranks, sequence});
      } else {
        const auto at = std::lower_bound(own.ranks.begin(), own.ranks.end(), batch.ranks.front());
        own.alone[at - own.ranks.begin()].push_back(sequence);
      }
    }
  }
  std::vector<Lane> lanes;
  for (LaneJobs& each : jobs) {
    if (!each.ranks.empty()) lanes.emplace_back(problem, std::move(each));
  }
  return lanes;
}

// One sequence of a lane's jobs.
struct Entry {
  int32_t* sequence;
  double seconds;               // on one rank
  std::vector<int32_t>* alone;  // that it is in, if it is not shared
};

std::vector<Entry> entriesOf(const Problem& problem, LaneJobs& jobs) {
  std::vector<Entry> found;
  const auto seconds = [&](int32_t sequence) {
    return problem.cost().seconds(problem.own(sequence), 1);
  };
  for (auto& each : jobs.shared) {
    found.push_back({&each.sequence, seconds(each.sequence), nullptr});
  }
  for (std::vector<int32_t>& own : jobs.alone) {
    for (int32_t& each : own) found.push_back({&each, seconds(each), &own});
  }
  return found;
}

// A sequence of the lane that ends last, number `given`, for another lane, which may give one back.
struct Exchange {
  double miss = 0;  // by how much it does not make them end at the same time, in seconds
  Lane* other = nullptr;
  size_t given = 0;
  std::optional<size_t> taken;
};

// The exchanges of this lane, with its entries `own`, with another one that make them end together,
// or nearly so.
void findExchanges(const Problem& problem, const Lane& lane, const std::vector<Entry>& own,
                   Lane& other, std::vector<Exchange>& found) {
  LaneJobs others = other.jobs();
  const double ranks = static_cast<double>(lane.jobs().ranks.size());
  const double other_ranks = static_cast<double>(others.ranks.size());
  const double late = lane.makespan() - other.makespan();
  const double wanted = late / (1 / ranks + 1 / other_ranks);  // seconds of a rank
  const std::vector<Entry> theirs = entriesOf(problem, others);
  const auto consider = [&](size_t given, double seconds, std::optional<size_t> taken) {
    const double miss = std::abs(seconds - wanted);
    if (miss < wanted) found.push_back({miss / ranks, &other, given, taken});
  };
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i].alone != nullptr) consider(i, own[i].seconds, {});
    for (size_t k = 0; k < theirs.size(); ++k) consider(i, own[i].seconds - theirs[k].seconds, k);
  }
}

// Makes an exchange if both lanes then end before the first of them did. `passes` is raised by
// those that it looked at.
bool make(const Problem& problem, Lane& lane, const Exchange& exchange, double unit,
          double& passes) {
  LaneJobs jobs = lane.jobs();
  LaneJobs others = exchange.other->jobs();
  const Entry given = entriesOf(problem, jobs)[exchange.given];
  if (exchange.taken) {
    std::swap(*given.sequence, *entriesOf(problem, others)[*exchange.taken].sequence);
  } else {
    const auto tokens = [&](const std::vector<int32_t>& sequences) {
      int64_t sum = 0;
      for (const int32_t each : sequences) sum += problem.lengths()[each];
      return sum;
    };
    std::min_element(others.alone.begin(), others.alone.end(), [&](const auto& a, const auto& b) {
      return tokens(a) < tokens(b);
    })->push_back(*given.sequence);
    given.alone->erase(given.alone->begin() + (given.sequence - given.alone->data()));
  }
  Lane less(problem, std::move(jobs));
  Lane more(problem, std::move(others));
  passes += less.settle(unit, true);
  if (less.makespan() >= lane.makespan()) return false;
  passes += more.settle(unit, true);
  if (more.makespan() >= lane.makespan()) return false;
  lane = std::move(less);
  *exchange.other = std::move(more);
  return true;
}

// When the lanes would end if all ended together: exchanges hardly change that, and those that are
// not settled become shorter by a quarter at most, almost always.
double hoped(const std::vector<Lane>& lanes) {
  constexpr double kSettled = 0.75;
  double sum = 0;
  double ranks = 0;
  for (const Lane& lane : lanes) {
    const auto own = static_cast<double>(lane.jobs().ranks.size());
    sum += (lane.settled() ? 1 : kSettled) * lane.makespan() * own;
    ranks += own;
  }
  return sum / ranks;
}

// Settles the lane that ends last, and exchanges its sequences with lanes that end first, as long
// as that helps, may make them end before `limit`, and looks at no more than `most` passes.
void even(const Problem& problem, std::vector<Lane>& lanes, double unit, double limit,
          double most) {
  constexpr size_t kOthers = 16;  // lanes that exchanges are looked for with
  constexpr size_t kTries = 24;
  const auto earlier = [](const Lane* a, const Lane* b) { return a->makespan() < b->makespan(); };
  std::vector<Lane*> order;
  for (Lane& lane : lanes) order.push_back(&lane);
  for (double passes = 0; passes < most && hoped(lanes) < limit;) {
    Lane& last = **std::max_element(order.begin(), order.end(), earlier);
    if (!last.settled()) {
      passes += last.settle(unit, true);
      continue;
    }
    const size_t others = std::min(kOthers, order.size() - 1);
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(others),
                      order.end(), earlier);
    LaneJobs jobs = last.jobs();
    const std::vector<Entry> own = entriesOf(problem, jobs);
    std::vector<Exchange> found;
    for (size_t i = 0; i < others; ++i) findExchanges(problem, last, own, *order[i], found);
    // Sequences for the first lane before all exchanges.
    const auto rank = [&](const Exchange& each) {
      return std::pair{each.taken.has_value() || each.other != order.front(), each.miss};
    };
    const size_t tries = std::min(found.size(), kTries);
    std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(tries),
                      found.end(),
                      [&](const Exchange& a, const Exchange& b) { return rank(a) < rank(b); });
    found.resize(tries);
    const bool made = std::any_of(found.begin(), found.end(), [&](const Exchange& each) {
      return make(problem, last, each, unit, passes);
    });
    if (!made) return;
  }
}

double latest(const std::vector<Lane>& lanes) {
  double makespan = 0;
  for (const Lane& lane : lanes) makespan = std::max(makespan, lane.makespan());
  return makespan;
}

}  // namespace

std::optional<Plan> planLanes(const Problem& problem, double lower_bound, double limit) {
  const Cluster& cluster = problem.cost().cluster();
  const int most = std::min(cluster.pipeline, cluster.mostSlices());
  const int64_t longest = *std::max_element(problem.lengths().begin(), problem.lengths().end());
  PolicyOptions options;
  options.baselines = false;
  const double all_passes =
      std::max(kMostPasses, kMostOfDevice * problem.ranks() * cluster.pipeline);
  double passes = 0;
  std::vector<std::pair<double, std::vector<Lane>>> found;  // by makespan
  for (const int room : kRooms) {
    const auto capacity = static_cast<double>(problem.cost().memory().capacity);
    if (room > most || capacity * room * problem.ranks() < static_cast<double>(longest)) continue;
    for (const double ramps : kRamps) {
      if (passes > all_passes / 2) break;
      const Problem device = onOneDevice(problem, room, ramps);
      std::vector<Lane> lanes = lanesOf(problem, planBalanced(device, options, lowerBound(device)));
      for (Lane& lane : lanes) passes += lane.settle(lower_bound, false);
      const double makespan = latest(lanes);
      const auto same = [&](const auto& other) { return other.first == makespan; };
      if (makespan > kHopeless * limit || std::any_of(found.begin(), found.end(), same)) continue;
      found.emplace_back(makespan, std::move(lanes));
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  if (found.size() > kMostEvened) found.resize(kMostEvened);
  std::vector<MicroBatch> best;
  const double left = (all_passes - passes) / static_cast<double>(found.size());
  for (auto& [unused, lanes] : found) {
    even(problem, lanes, lower_bound, limit, left);
    if (latest(lanes) >= limit) continue;
    limit = latest(lanes);
    best.clear();
    for (const Lane& lane : lanes) lane.addTo(best);
  }
  if (best.empty()) return {};
  for (size_t i = 0; i < best.size(); ++i) best[i].start = static_cast<double>(i);
  return finishPlan(problem, std::move(best));
}

}  // namespace hdpcomm::planner
