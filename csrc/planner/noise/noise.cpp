#include "planner/noise/noise.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/noise/noise_draws.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

// Micro-batches x possible steps that are looked at, and steps.
constexpr size_t kMostDrawnTimes = 1 << 23;
constexpr int kMostDraws = 256;
constexpr int kFewestDraws = 16;
constexpr int kParts[] = {1, 2, 3, 4, 6, 8};  // micro-batches in the place of a full one
// Standard deviations of its end that a rank leaves free.
constexpr double kCautions[] = {1.5, 0, 3};

int numDraws(size_t batches) noexcept {
  return drawsFor(batches, kMostDrawnTimes, kFewestDraws, kMostDraws);
}

// Deals anew what the ranks run by themselves after the last micro-batch that they share.
class Dealer {
 public:
  Dealer(const Problem& problem, Tails tails)
      : problem_(problem),
        cost_(problem.cost()),
        shared_(std::move(tails.shared)),
        sequences_(std::move(tails.sequences)) {
    findEnds();
  }

  // `parts`: micro-batches in the place of a full one; `caution`: standard deviations of its end
  // that each rank leaves free.
  std::vector<MicroBatch> deal(int parts, double caution) const {
    const int ranks = problem_.ranks();
    const int64_t most = std::max<int64_t>(1, cost_.memory().capacity / parts);
    std::vector<double> end = end_;
    std::vector<double> variance = variance_;
    std::vector<RoundQueue::Entry> entries;
    for (int rank = 0; rank < ranks; ++rank) {
      entries.emplace_back(end[rank] + caution * std::sqrt(variance[rank]), rank);
    }
    RoundQueue free(std::move(entries));
    std::vector<std::vector<int32_t>> own(ranks);
    for (const int32_t sequence : sequences_) {
      const int32_t rank = free.top().second;
      const Load load = problem_.own(sequence);
      const double share = std::min(1.0, load.tokens / static_cast<double>(most));
      const double seconds = (cost_.seconds(load, 1) - (1 - share) * cost_.params().fixed) /
                             cost_.cluster().speed(rank);
      end[rank] += seconds;
      variance[rank] += seconds * seconds * cost_.params().noise * cost_.params().noise;
      own[rank].push_back(sequence);
      free.replaceTop({end[rank] + caution * std::sqrt(variance[rank]), rank});
    }
    std::vector<MicroBatch> batches = shared_;
    batches.reserve(shared_.size() + ranks * static_cast<size_t>(parts));
    const auto longer = [&](int32_t a, int32_t b) {
      const int64_t of_a = problem_.lengths()[a];
      const int64_t of_b = problem_.lengths()[b];
      return of_a != of_b ? of_a > of_b : a < b;
    };
    for (int rank = 0; rank < ranks; ++rank) {
      if (!std::is_sorted(own[rank].begin(), own[rank].end(), longer)) {
        std::sort(own[rank].begin(), own[rank].end(), longer);
      }
      for (auto& pack : packBestFit(problem_.lengths(), own[rank], most)) {
        MicroBatch batch;
        batch.ranks = {rank};
        batch.sequences = std::move(pack);
        batches.push_back(std::move(batch));
      }
    }
    for (size_t i = 0; i < batches.size(); ++i) batches[i].start = static_cast<double>(i);
    return batches;
  }

 private:
  // When each rank has run what it shares, and how uncertain that is.
  void findEnds() {
    end_.assign(problem_.ranks(), 0.0);
    variance_.assign(problem_.ranks(), 0.0);
    for (const MicroBatch& batch : shared_) {
      const int32_t latest =
          *std::max_element(batch.ranks.begin(), batch.ranks.end(),
                            [&](int32_t a, int32_t b) { return end_[a] < end_[b]; });
      const Certainty parts = certaintyOf(problem_, batch);
      const double deviation = parts.compute * cost_.params().noise;
      const double end = end_[latest] + parts.compute + parts.wait;
      const double variance = variance_[latest] + deviation * deviation;
      for (const int32_t rank : batch.ranks) {
        end_[rank] = end;
        variance_[rank] = variance;
      }
    }
  }

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<MicroBatch> shared_;
  std::vector<int32_t> sequences_;  // of all tails, by falling time
  std::vector<double> end_;
  std::vector<double> variance_;
};

}  // namespace

double expectedMakespan(const Problem& problem, const Plan& plan) {
  const double noise = problem.cost().params().noise;
  if (noise <= 0 || plan.micro_batches.empty()) return plan.makespan;
  if (plan.expected > 0) return plan.expected;
  const NoiseDraws draws(problem.count(), numDraws(plan.micro_batches.size()), noise);
  return DrawnEnds(problem, plan.micro_batches, draws).meanMakespan();
}

Plan planForNoise(const Problem& problem, Plan plan) {
  const double noise = problem.cost().params().noise;
  if (noise <= 0) return plan;
  const std::vector<bool> shared = sharedOnes(problem, plan);
  if (std::find(shared.begin(), shared.end(), false) == shared.end()) return plan;
  const NoiseDraws draws(problem.count(), numDraws(problem.count()), noise);
  DrawnEnds ends(problem, shared.size(), draws);
  const auto run = [&](bool those) {
    for (size_t i = 0; i < shared.size(); ++i) {
      if (shared[i] == those) ends.add(plan.micro_batches[i]);
    }
    return ends.meanMakespan();
  };
  const double least = run(true);  // no deal ends before what the ranks share
  double best = run(false);
  std::optional<Dealer> dealer;
  if (best > least) dealer.emplace(problem, takeTails(problem, plan));
  std::vector<MicroBatch> batches;
  const auto attempt = [&](int parts, double caution) {
    if (best <= least) return false;
    std::vector<MicroBatch> found = dealer->deal(parts, caution);
    const double mean = DrawnEnds(problem, found, draws, best).meanMakespan();
    if (mean >= best) return false;
    best = mean;
    batches = std::move(found);
    return true;
  };
  int parts = 1;
  for (const int tried : kParts) {
    if (attempt(tried, kCautions[0])) parts = tried;
  }
  for (const double caution : kCautions) {
    if (caution != kCautions[0]) attempt(parts, caution);
  }
  if (!batches.empty()) {
    Plan found = finishPlan(problem, std::move(batches));
    found.made_by = plan.made_by + " + noise";
    plan = std::move(found);
  }
  // By as many possible steps as expectedMakespan() would look at.
  if (draws.steps() == numDraws(plan.micro_batches.size())) plan.expected = best;
  return plan;
}

}  // namespace hdpcomm::planner
