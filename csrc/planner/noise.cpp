#include "planner/noise.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "base/xorshift.hpp"

namespace hdpcomm::planner {
namespace {

constexpr int kMostDraws = 256;  // possible steps that are looked at
constexpr int kFewestDraws = 16;
constexpr size_t kMostDrawnTimes = 1 << 23;   // micro-batches x steps
constexpr int kParts[] = {1, 2, 3, 4, 6, 8};  // micro-batches in the place of a full one
// Standard deviations of its end that a rank leaves free.
constexpr double kCautions[] = {1.5, 0, 3};

int drawsFor(size_t batches) {
  const size_t most = kMostDrawnTimes / std::max<size_t>(batches, 1) / 2 * 2;
  return static_cast<int>(std::clamp<size_t>(most, kFewestDraws, kMostDraws));
}

// Random factors of the micro-batch that each sequence is the first of, in a number of possible
// steps: half of these mirror the others, and the deviation over all of them is exact.
class Luck {
 public:
  Luck(size_t sequences, int steps, double noise) : steps_(steps), factors_(sequences * steps) {
    const size_t half = steps / 2;
    Xorshift random;
    std::vector<double> normal(half);
    float* next = factors_.data();
    for (size_t i = 0; i < sequences; ++i, next += steps) {
      double squares = 0;
      for (double& value : normal) {
        value = -6;  // a sum of twelve uniform numbers: nearly normal, and the same on any machine
        for (int term = 0; term < 12; ++term) value += random.unit();
        squares += value * value;
      }
      const double scale = noise / std::sqrt(squares / static_cast<double>(half));
      for (size_t k = 0; k < half; ++k) {
        next[k] = static_cast<float>(std::max(0.0, 1 + scale * normal[k]));
        next[half + k] = static_cast<float>(std::max(0.0, 1 - scale * normal[k]));
      }
    }
  }

  int steps() const noexcept { return steps_; }
  const float* of(int32_t sequence) const noexcept {
    return factors_.data() + static_cast<size_t>(sequence) * steps_;
  }

 private:
  int steps_;
  std::vector<float> factors_;
};

// Seconds of a micro-batch that vary, and those that do not.
struct Certainty {
  double compute = 0;
  double wait = 0;
};

Certainty certaintyOf(const Problem& problem, const MicroBatch& batch) {
  const CostModel& cost = problem.cost();
  const CostParams& params = cost.params();
  const int size = static_cast<int>(batch.ranks.size());
  const Load load = workOf(problem, batch).load;
  const double compute =
      cost.computeSeconds(load, size) + params.fixed + (size - 1) * params.ring_step;
  const double all = cost.seconds(load, size, scopeOf(batch.ranks, cost.cluster()),
                                  crowding(batch.ranks, cost.cluster()));
  const double speed = slowest(batch.ranks, cost.cluster());
  return {compute / speed, std::max(0.0, all - compute) / speed};
}

double meanMakespan(const Problem& problem, const std::vector<MicroBatch>& batches,
                    const Luck& luck) {
  const size_t steps = luck.steps();
  std::vector<float> ends(batches.size() * steps);
  std::vector<float> makespans(steps, 0.0F);
  std::vector<int64_t> last(problem.ranks(), -1);
  std::vector<int64_t> before;
  for (size_t i = 0; i < batches.size(); ++i) {
    float* const end = ends.data() + i * steps;
    before.clear();
    for (const int32_t rank : batches[i].ranks) {
      if (last[rank] >= 0) before.push_back(last[rank]);
      last[rank] = static_cast<int64_t>(i);
    }
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    for (const int64_t other : before) {
      const float* const ready = ends.data() + static_cast<size_t>(other) * steps;
      for (size_t k = 0; k < steps; ++k) end[k] = std::max(end[k], ready[k]);
    }
    const Certainty parts = certaintyOf(problem, batches[i]);
    const auto compute = static_cast<float>(parts.compute);
    const auto wait = static_cast<float>(parts.wait);
    const float* const factors = luck.of(batches[i].sequences.front());
    for (size_t k = 0; k < steps; ++k) {
      end[k] += wait + compute * factors[k];
      makespans[k] = std::max(makespans[k], end[k]);
    }
  }
  double sum = 0;
  for (const float makespan : makespans) sum += makespan;
  return sum / static_cast<double>(steps);
}

// Deals anew what the ranks run by themselves after the last micro-batch that they share.
class Tails {
 public:
  Tails(const Problem& problem, const Plan& plan) : problem_(problem), cost_(problem.cost()) {
    std::vector<bool> alone(problem.ranks(), true);
    for (auto batch = plan.micro_batches.rbegin(); batch != plan.micro_batches.rend(); ++batch) {
      const int32_t rank = batch->ranks.front();
      if (batch->ranks.size() == 1 && batch->offload == 0 && alone[rank]) {
        sequences_.insert(sequences_.end(), batch->sequences.begin(), batch->sequences.end());
        continue;
      }
      for (const int32_t member : batch->ranks) alone[member] = false;
      shared_.push_back(*batch);
    }
    std::reverse(shared_.begin(), shared_.end());
    std::sort(sequences_.begin(), sequences_.end(), [&](int32_t a, int32_t b) {
      const double of_a = cost_.seconds(problem_.own(a), 1);
      const double of_b = cost_.seconds(problem_.own(b), 1);
      return of_a != of_b ? of_a > of_b : a < b;
    });
    findEnds();
  }

  bool empty() const noexcept { return sequences_.empty(); }

  // `parts`: micro-batches in the place of a full one; `caution`: standard deviations of its end
  // that each rank leaves free.
  std::vector<MicroBatch> deal(int parts, double caution) const {
    const int ranks = problem_.ranks();
    const int64_t most = std::max<int64_t>(1, cost_.memory().capacity / parts);
    std::vector<double> end = end_;
    std::vector<double> variance = variance_;
    using Entry = std::pair<double, int>;
    std::vector<Entry> entries;
    for (int rank = 0; rank < ranks; ++rank) {
      entries.push_back({end[rank] + caution * std::sqrt(variance[rank]), rank});
    }
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue(std::greater<>(),
                                                                         std::move(entries));
    std::vector<std::vector<int32_t>> own(ranks);
    for (const int32_t sequence : sequences_) {
      const int rank = queue.top().second;
      queue.pop();
      const Load load = problem_.own(sequence);
      const double share = std::min(1.0, load.tokens / static_cast<double>(most));
      const double seconds = (cost_.seconds(load, 1) - (1 - share) * cost_.params().fixed) /
                             cost_.cluster().speed(rank);
      end[rank] += seconds;
      variance[rank] += seconds * seconds * cost_.params().noise * cost_.params().noise;
      own[rank].push_back(sequence);
      queue.push({end[rank] + caution * std::sqrt(variance[rank]), rank});
    }
    std::vector<MicroBatch> batches = shared_;
    for (int rank = 0; rank < ranks; ++rank) {
      std::sort(own[rank].begin(), own[rank].end(), [&](int32_t a, int32_t b) {
        const int64_t of_a = problem_.lengths()[a];
        const int64_t of_b = problem_.lengths()[b];
        return of_a != of_b ? of_a > of_b : a < b;
      });
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
  const Luck luck(problem.count(), drawsFor(plan.micro_batches.size()), noise);
  return meanMakespan(problem, plan.micro_batches, luck);
}

Plan planForNoise(const Problem& problem, Plan plan) {
  const double noise = problem.cost().params().noise;
  if (noise <= 0) return plan;
  const Tails tails(problem, plan);
  if (tails.empty()) return plan;
  const Luck luck(problem.count(), drawsFor(problem.count()), noise);
  double best = meanMakespan(problem, plan.micro_batches, luck);
  std::vector<MicroBatch> batches;
  const auto attempt = [&](int parts, double caution) {
    std::vector<MicroBatch> found = tails.deal(parts, caution);
    const double mean = meanMakespan(problem, found, luck);
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
  return batches.empty() ? plan : finishPlan(problem, std::move(batches));
}

}  // namespace hdpcomm::planner
