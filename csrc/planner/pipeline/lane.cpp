#include "planner/pipeline/lane.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <span>
#include <utility>

#include "planner/model/cost_model.hpp"
#include "planner/model/slice_bounds.hpp"
#include "planner/simulate/priority_order.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

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

}  // namespace

Lane::Lane(const Problem& all, LaneJobs jobs)
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

double Lane::settle(double unit, bool all) {
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

void Lane::addTo(std::vector<MicroBatch>& batches) const {
  for (MicroBatch batch : best_) {
    for (int32_t& rank : batch.ranks) rank += offset_;
    for (int32_t& sequence : batch.sequences) sequence = ids_[sequence];
    batches.push_back(std::move(batch));
  }
}

std::vector<int32_t> Lane::sequencesOf(const LaneJobs& jobs) {
  std::vector<int32_t> found;
  for (const LaneJobs::Shared& each : jobs.shared) found.push_back(each.sequence);
  for (const std::vector<int32_t>& own : jobs.alone) {
    found.insert(found.end(), own.begin(), own.end());
  }
  std::sort(found.begin(), found.end());
  return found;
}

int Lane::offsetOf(const Problem& all, const std::vector<int32_t>& ranks,
                   const std::vector<int32_t>& sequences) {
  const Cluster& cluster = all.cost().cluster();
  const int whole =
      ranks.size() == 1 ? 1 : std::max(cluster.ranks_per_node, cluster.ranks_per_domain);
  const int offset = ranks.front() / whole * whole;
  return offset + ranksOf(all, ranks, sequences, offset) <= cluster.ranks ? offset : 0;
}

int Lane::ranksOf(const Problem& all, const std::vector<int32_t>& ranks,
                  const std::vector<int32_t>& sequences, int offset) {
  int count = ranks.back() + 1 - offset;
  for (const int32_t each : sequences) count = std::max(count, all.minRanks(each));
  return count;
}

Problem Lane::part(const Problem& all) const {
  const CostModel& cost = all.cost();
  Cluster cluster = cost.cluster();
  cluster.ranks = ranksOf(all, jobs_.ranks, ids_, offset_);
  if (!cluster.speeds.empty()) {
    const auto first = cluster.speeds.begin() + offset_;
    cluster.speeds = std::vector<double>(first, first + cluster.ranks);
  }
  return all.part(ids_, CostModel(cost.params(), cost.memory(), cluster));
}

int32_t Lane::numberOf(int32_t sequence) const {
  return static_cast<int32_t>(std::lower_bound(ids_.begin(), ids_.end(), sequence) - ids_.begin());
}

Lane::Run Lane::runOf(std::vector<int32_t> ranks, std::vector<int32_t> sequences) const {
  Run run{std::move(ranks), std::move(sequences)};
  const Cluster& cluster = problem_.cost().cluster();
  run.seconds = problem_.cost().seconds(loadOf(run), static_cast<int>(run.ranks.size()),
                                        scopeOf(run.ranks, cluster)) /
                slowest(run.ranks, cluster);
  return run;
}

Load Lane::loadOf(const Run& run) const {
  Load load;
  for (const int32_t each : run.sequences) load += problem_.own(each);
  return load;
}

double Lane::attempt(const LaneForm& form, double unit) {
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

std::vector<Lane::Run> Lane::ordered(double height, double before) const {
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

std::vector<Lane::Run> Lane::packs(size_t place, double height) const {
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

void Lane::markEnds(std::vector<Run>& runs) const {
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

bool Lane::cut(const Run& run, double height, double growth,
               std::vector<MicroBatch>& batches) const {
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

}  // namespace hdpcomm::planner
