#include "planner/pipeline/lanes.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "planner/bound/bound.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/slice_bounds.hpp"
#include "planner/simulate/finish_plan.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

// A part of a plan in slices, ranks that share no sequence with others: which ones, and what they
// run.
struct LaneJobs {
  struct Shared {
    std::vector<int32_t> ranks;
    int32_t sequence;
  };
  std::vector<int32_t> ranks;               // rising
  std::vector<Shared> shared;               // by several ranks, in their order
  std::vector<std::vector<int32_t>> alone;  // by place of the rank: sequences
};

// How the micro-batches of a lane are cut and ordered.
struct LaneForm {
  double height = 0.02;  // of micro-batches, as a share of the bound
  double before = 0;     // share of what a rank runs by itself that comes before shared sequences
  double growth = 1;     // of slices (slice_bounds.hpp)
  double ends = 0.25;  // height of the first and the last run of a rank, as a share of the others'

  bool operator==(const LaneForm&) const = default;
};

// What is tried of each choice.
constexpr double kBefore[] = {0, 0.5, 0.1, 0.25, 0.75, 1};
constexpr double kHeights[] = {0.02, 0.03, 0.01, 0.06, 0.015, 0.04, 0.005, 0.1, 0.2, 0.4};
constexpr double kHigh = 0.2;  // where keys that go round again take long
constexpr double kGrowths[] = {1, 1.05, 1.1, 1.2, 0.95};
constexpr double kEnds[] = {0.25, 0.1, 0.5, 1};
struct Choice {
  double LaneForm::* value;
  std::span<const double> values;
};
constexpr Choice kChoices[] = {{&LaneForm::before, kBefore},
                               {&LaneForm::height, kHeights},
                               {&LaneForm::growth, kGrowths},
                               {&LaneForm::ends, kEnds}};

// Makes micro-batches of a lane's jobs, and finds the form in which they end first. It has numbers
// of its own for ranks and sequences.
class Lane {
 public:
  Lane(const Problem& all, LaneJobs jobs)
      : jobs_(std::move(jobs)),
        ids_(sequencesOf(jobs_)),
        offset_(offsetOf(all, jobs_.ranks, ids_)),
        problem_(part(all)) {
    for (const int32_t rank : jobs_.ranks) ranks_.push_back(rank - offset_);
    for (const LaneJobs::Shared& each : jobs_.shared) {
      std::vector<int32_t> ranks(each.ranks);
      for (int32_t& rank : ranks) rank -= offset_;
      shared_.push_back(runOf(std::move(ranks), {numberOf(each.sequence)}));
    }
    const auto longer = [&](int32_t x, int32_t y) {
      const int64_t of_x = problem_.lengths()[x];
      const int64_t of_y = problem_.lengths()[y];
      return of_x != of_y ? of_x > of_y : x < y;
    };
    for (const std::vector<int32_t>& own : jobs_.alone) {
      alone_.emplace_back();
      for (const int32_t each : own) alone_.back().push_back(numberOf(each));
      std::sort(alone_.back().begin(), alone_.back().end(), longer);
    }
  }

  const LaneJobs& jobs() const { return jobs_; }
  // By the best form so far; infinite before settle(), and if memory holds none.
  double makespan() const { return makespan_; }

  // Tries two forms, or `all`: one choice after the other. `unit`: what heights are shares of.
  // Returns how many passes it looked at.
  double settle(double unit, bool all) {
    double passes = attempt(LaneForm{}, unit);
    passes += attempt(LaneForm{.height = kHigh}, unit);
    if (!all) return passes;
    settled_ = true;
    double before = 0;
    while (before != makespan_) {
      before = makespan_;
      for (const auto& [value, values] : kChoices) {
        LaneForm form = form_;
        for (const double each : values) {
          form.*value = each;
          passes += attempt(form, unit);
        }
      }
    }
    return passes;
  }

  bool settled() const { return settled_; }  // whether it has tried all

  // Adds the micro-batches of the best form, with the numbers that all ranks and sequences have.
  void addTo(std::vector<MicroBatch>& batches) const {
    for (MicroBatch batch : best_) {
      for (int32_t& rank : batch.ranks) rank += offset_;
      for (int32_t& sequence : batch.sequences) sequence = ids_[sequence];
      batches.push_back(std::move(batch));
    }
  }

 private:
  // What runs without a break on the same ranks: a sequence, in slices or not, or a pack.
  struct Run {
    std::vector<int32_t> ranks;
    std::vector<int32_t> sequences;
    double seconds = 0;
    bool at_end = false;  // first or last on one of its ranks
  };

  static std::vector<int32_t> sequencesOf(const LaneJobs& jobs) {
    std::vector<int32_t> found;
    for (const LaneJobs::Shared& each : jobs.shared) found.push_back(each.sequence);
    for (const std::vector<int32_t>& own : jobs.alone) {
      found.insert(found.end(), own.begin(), own.end());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  // The first rank of the part: it begins with a node and with a domain.
  static int offsetOf(const Problem& all, const std::vector<int32_t>& ranks,
                      const std::vector<int32_t>& sequences) {
    const Cluster& cluster = all.cost().cluster();
    const int whole =
        ranks.size() == 1 ? 1 : std::max(cluster.ranks_per_node, cluster.ranks_per_domain);
    const int offset = ranks.front() / whole * whole;
    return offset + ranksOf(all, ranks, sequences, offset) <= cluster.ranks ? offset : 0;
  }

  // Ranks of the part: as many as hold each sequence as a whole, at least.
  static int ranksOf(const Problem& all, const std::vector<int32_t>& ranks,
                     const std::vector<int32_t>& sequences, int offset) {
    int count = ranks.back() + 1 - offset;
    for (const int32_t each : sequences) count = std::max(count, all.minRanks(each));
    return count;
  }

  Problem part(const Problem& all) const {
    const CostModel& cost = all.cost();
    Cluster cluster = cost.cluster();
    cluster.ranks = ranksOf(all, jobs_.ranks, ids_, offset_);
    if (!cluster.speeds.empty()) {
      const auto first = cluster.speeds.begin() + offset_;
      cluster.speeds = std::vector<double>(first, first + cluster.ranks);
    }
    return all.part(ids_, CostModel(cost.params(), cost.memory(), cluster));
  }

  int32_t numberOf(int32_t sequence) const {
    return static_cast<int32_t>(std::lower_bound(ids_.begin(), ids_.end(), sequence) -
                                ids_.begin());
  }

  Run runOf(std::vector<int32_t> ranks, std::vector<int32_t> sequences) const {
    Run run{std::move(ranks), std::move(sequences)};
    const Cluster& cluster = problem_.cost().cluster();
    run.seconds = problem_.cost().seconds(loadOf(run), static_cast<int>(run.ranks.size()),
                                          scopeOf(run.ranks, cluster)) /
                  slowest(run.ranks, cluster);
    return run;
  }

  Load loadOf(const Run& run) const {
    Load load;
    for (const int32_t each : run.sequences) load += problem_.own(each);
    return load;
  }

  // Keeps the micro-batches of a form if they end earlier than those so far; 0 if it was tried.
  double attempt(const LaneForm& form, double unit) {
    if (std::find(tried_.begin(), tried_.end(), form) != tried_.end()) return 0;
    tried_.push_back(form);
    const double height = form.height * unit;
    Plan plan;
    std::vector<Run> runs = ordered(height, form.before);
    markEnds(runs);
    double passes = 0;
    for (const Run& run : runs) {
      const double own = height * (run.at_end ? form.ends : 1);
      if (!cut(run, own, form.growth, plan.micro_batches)) return passes;
    }
    const Cluster& cluster = problem_.cost().cluster();
    std::vector<int64_t> numbers;
    for (const MicroBatch& batch : plan.micro_batches) {
      passes += 2.0 * cluster.pipeline * static_cast<double>(batch.ranks.size());
      numbers.insert(numbers.end(), batch.ranks.begin(), batch.ranks.end());
      numbers.insert(numbers.end(), batch.sequences.begin(), batch.sequences.end());
      numbers.push_back(-batch.slice.end - 1);
    }
    if (!plans_.insert(std::move(numbers)).second) return passes;
    for (MicroBatch& batch : plan.micro_batches) price(problem_, batch);
    const double makespan = cluster.split ? simulatedMakespan(problem_, plan, makespan_)
                                          : makespanByPriorities(problem_, plan, makespan_);
    if (makespan < makespan_) {
      makespan_ = makespan;
      form_ = form;
      best_ = std::move(plan.micro_batches);
    }
    return passes;
  }

  // The runs in their order, packs of at most this height.
  std::vector<Run> ordered(double height, double before) const {
    std::vector<Run> first;
    std::vector<Run> last;
    for (size_t place = 0; place < ranks_.size(); ++place) {
      std::vector<Run> own = packs(place, height);
      double all = 0;
      for (const Run& run : own) all += run.seconds;
      double sum = 0;
      for (Run& run : own) {
        sum += run.seconds;
        (sum <= before * all ? first : last).push_back(std::move(run));
      }
    }
    const auto shorter = [](const Run& a, const Run& b) { return a.seconds < b.seconds; };
    std::stable_sort(first.begin(), first.end(), shorter);
    std::stable_sort(last.begin(), last.end(),
                     [&](const Run& a, const Run& b) { return shorter(b, a); });
    first.insert(first.end(), shared_.begin(), shared_.end());
    first.insert(first.end(), std::make_move_iterator(last.begin()),
                 std::make_move_iterator(last.end()));
    return first;
  }

  // What a rank runs by itself, in packs of at most this height, the shortest ones first.
  std::vector<Run> packs(size_t place, double height) const {
    const CostModel& cost = problem_.cost();
    std::vector<Run> found;
    std::vector<int32_t> shorts;
    for (const int32_t each : alone_[place]) {
      Run run = runOf({ranks_[place]}, {each});
      if (run.seconds > height) {
        found.push_back(std::move(run));
      } else {
        shorts.push_back(each);
      }
    }
    // As many tokens as so long a sequence has where attention costs nothing.
    const double token = cost.params().linear + cost.params().piece;
    const auto capacity = static_cast<double>(cost.memory().capacity);
    const double most = token > 0 ? std::clamp(height / token, 1.0, capacity) : capacity;
    for (auto& pack : packBestFit(problem_.lengths(), shorts, static_cast<int64_t>(most))) {
      found.push_back(runOf({ranks_[place]}, std::move(pack)));
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
    return found;
  }

  void markEnds(std::vector<Run>& runs) const {
    std::vector<Run*> last(problem_.ranks(), nullptr);
    for (Run& run : runs) {
      for (const int32_t rank : run.ranks) {
        run.at_end = run.at_end || last[rank] == nullptr;
        last[rank] = &run;
      }
    }
    for (Run* run : last) {
      if (run != nullptr) run->at_end = true;
    }
  }

  // Adds the micro-batches of a run, in slices of this height. False where memory does not hold
  // them.
  bool cut(const Run& run, double height, double growth, std::vector<MicroBatch>& batches) const {
    MicroBatch batch;
    batch.ranks = run.ranks;
    batch.sequences = run.sequences;
    const auto size = static_cast<int>(run.ranks.size());
    const int32_t sequence = run.sequences.front();
    const bool whole = fits(problem_, loadOf(run), run.sequences, size);
    const int most = problem_.cost().cluster().mostSlices();
    int slices = 1;
    if (run.sequences.size() == 1 && sliceable(problem_, sequence)) {
      const auto tokens = static_cast<double>(problem_.lengths()[sequence]);
      const double wanted = std::max(std::ceil(run.seconds / height), whole ? 1.0 : 2.0);
      slices = static_cast<int>(std::min({wanted, tokens, static_cast<double>(most)}));
    }
    if (slices == 1) {
      if (whole) batches.push_back(std::move(batch));
      return whole;
    }
    const std::vector<int64_t> bounds = sliceBounds(problem_, sequence, size, slices, growth);
    for (size_t k = 0; k + 1 < bounds.size(); ++k) {
      batch.slice = sliceOf(problem_, sequence, bounds, k);
      batches.push_back(batch);
    }
    return !bounds.empty();
  }

  LaneJobs jobs_;
  std::vector<int32_t> ids_;  // of all sequences, by own number
  int offset_;
  Problem problem_;
  std::vector<int32_t> ranks_;               // by place
  std::vector<Run> shared_;                  // in their order
  std::vector<std::vector<int32_t>> alone_;  // by place: sequences, by falling length
  std::vector<LaneForm> tried_;
  std::set<std::vector<int64_t>> plans_;  // of these: many forms have the same one
  LaneForm form_;                         // that ends first so far
  std::vector<MicroBatch> best_;
  double makespan_ = std::numeric_limits<double>::infinity();
  bool settled_ = false;
};

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

  cluster.pipeline = cluster.chunks = cluster.slices = 1;
  cluster.stage_work.clear();
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
