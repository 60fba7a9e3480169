// Local search on plans of few micro-batches, where packing and fixed costs matter most: simulated
// annealing over the order, the group sizes and the packs. The seed is fixed and the
// number of trials depends on the size of the plan only, so equal input gives equal plans.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/xorshift.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"
#include "planner/search/search.hpp"
#include "planner/simulate/finish_plan.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

struct Group {
  std::vector<int32_t> sequences;
  Load load;
  int size = 1;
};

using Groups = std::vector<Group>;

class Annealer {
 public:
  Annealer(const Problem& problem, double bound)
      : problem_(problem), cost_(problem.cost()), bound_(bound), ready_(problem.ranks()) {}

  // Returns the better of the given plan and the best one found.
  Plan improve(Plan plan) {
    const Groups best = anneal(groupsOf(plan));
    std::vector<MicroBatch> batches;
    decode(best, &batches);
    Plan found = finishPlan(problem_, std::move(batches));
    return found.makespan < plan.makespan ? found : plan;
  }

 private:
  Groups groupsOf(const Plan& plan) const {
    Groups groups;
    for (const MicroBatch& batch : plan.micro_batches) {
      Group group;
      group.sequences = batch.sequences;
      for (const int32_t sequence : batch.sequences) group.load += problem_.own(sequence);
      group.size = static_cast<int>(batch.ranks.size());
      groups.push_back(std::move(group));
    }
    return groups;
  }

  Groups anneal(Groups current) {
    const int stages = cost_.cluster().pipeline;
    const double work = static_cast<double>(current.size()) * problem_.ranks() + 10;
    const int trials = static_cast<int>(stages == 1 ? std::clamp(2e5 / work, 100.0, 5000.0)
                                                    : std::clamp(1e5 / work, 100.0, 2000.0));
    double current_score = score(current);
    Groups best = current;
    double best_score = current_score;
    const double first_temperature = 0.05 * current_score;
    for (int trial = 0; trial < trials; ++trial) {
      if (best_score <= bound_ * (1 + kIdleWeight) * 1.0005) break;
      Groups next = current;
      if (!mutate(next)) continue;
      const double next_score = score(next);
      const double temperature =
          first_temperature * std::pow(1e-3, static_cast<double>(trial) / trials);
      if (next_score > current_score &&
          random_.unit() >= std::exp((current_score - next_score) / temperature)) {
        continue;
      }
      current = std::move(next);
      current_score = next_score;
      if (next_score < best_score) {
        best = current;
        best_score = next_score;
      }
    }
    return best;
  }

  bool fits(const Group& group) const {
    return group.size <= problem_.ranks() && !group.sequences.empty() &&
           planner::fits(problem_, group.load, group.sequences, group.size);
  }

  bool mutate(Groups& groups) {
    const size_t i = random_.below(groups.size());
    switch (random_.below(4)) {
      case 0:
        return moveGroup(groups, i);
      case 1:
        return resize(groups[i]);
      case 2:
        return moveSequence(groups, i);
      default:
        return split(groups, i);
    }
  }

  bool moveGroup(Groups& groups, size_t from) {
    const size_t to = random_.below(groups.size());
    if (from == to) return false;
    const auto begin = groups.begin();
    const auto at = [&](size_t place) { return begin + static_cast<std::ptrdiff_t>(place); };
    if (from < to) {
      std::rotate(at(from), at(from + 1), at(to + 1));
    } else {
      std::rotate(at(to), at(from), at(from + 1));
    }
    return true;
  }

  bool resize(Group& group) {
    const int ranks = problem_.ranks();
    int size = group.size + (random_.below(2) == 0 ? 1 : -1);
    if (random_.below(3) == 0) size = 1 + static_cast<int>(random_.below(ranks));
    if (size < 1 || size > ranks || size == group.size) return false;
    group.size = size;
    return fits(group);
  }

  bool moveSequence(Groups& groups, size_t from) {
    const size_t to = random_.below(groups.size());
    if (from == to) return false;
    append(groups[to], remove(groups[from], random_.below(groups[from].sequences.size())));
    const bool fit = fits(groups[to]);
    if (groups[from].sequences.empty()) {
      groups.erase(groups.begin() + static_cast<int>(from));
      return fit;
    }
    return fit && fits(groups[from]);  // what is left has less compute to hide its copies behind
  }

  bool split(Groups& groups, size_t from) {
    if (groups[from].sequences.size() < 2) return false;
    Group alone;
    append(alone, remove(groups[from], random_.below(groups[from].sequences.size())));
    alone.size =
        random_.below(2) == 0 ? groups[from].size : problem_.minRanks(alone.sequences.front());
    const bool fit = fits(alone) && fits(groups[from]);
    groups.insert(groups.begin() + random_.below(groups.size() + 1), std::move(alone));
    return fit;
  }

  int32_t remove(Group& group, size_t place) {
    const int32_t sequence = group.sequences[place];
    group.sequences.erase(group.sequences.begin() + static_cast<std::ptrdiff_t>(place));
    const Load own = problem_.own(sequence);
    group.load.tokens -= own.tokens;
    group.load.squares -= own.squares;
    return sequence;
  }

  void append(Group& group, int32_t sequence) {
    group.sequences.push_back(sequence);
    group.load += problem_.own(sequence);
  }

  // What the search makes smaller: decode()'s score, with a pipeline the simulated makespan and a
  // small weight on that score.
  double score(const Groups& groups) {
    if (cost_.cluster().pipeline == 1) return decode(groups, nullptr);
    Plan plan;
    const double flat = decode(groups, &plan.micro_batches);
    if (cost_.cluster().chunks > 1) {
      return simulatePriorities(problem_, plan).makespan + kIdleWeight * flat;
    }
    for (MicroBatch& batch : plan.micro_batches) price(problem_, batch);
    const double makespan = cost_.cluster().split ? simulate(problem_, plan).makespan
                                                  : makespanByLevels(problem_, plan);
    return makespan + kIdleWeight * flat;
  }

  // Places the groups in order, each on the ranks on which it ends first, and returns the score:
  // the makespan, plus a small weight on the mean end time so that improvements of any rank count.
  double decode(const Groups& groups, std::vector<MicroBatch>* batches) {
    for (int rank = 0; rank < problem_.ranks(); ++rank) ready_[rank] = {0.0, rank};
    double makespan = 0;
    for (const Group& group : groups) {
      const double end = place(group);
      if (batches != nullptr) add(group, *batches);
      for (int i = 0; i < group.size; ++i) ready_[i].first = end;
      makespan = std::max(makespan, end);
    }
    double sum = 0;
    for (const auto& [time, rank] : ready_) sum += time;
    return makespan + kIdleWeight * sum / problem_.ranks();
  }

  // The micro-batch of a group that was placed.
  void add(const Group& group, std::vector<MicroBatch>& batches) const {
    MicroBatch batch;
    for (int i = 0; i < group.size; ++i) batch.ranks.push_back(ready_[i].second);
    std::sort(batch.ranks.begin(), batch.ranks.end());
    batch.ranks = ringOrder(std::move(batch.ranks), cost_.cluster());
    batch.sequences = group.sequences;
    batch.start = static_cast<double>(batches.size());
    batches.push_back(std::move(batch));
  }

  // Moves the ranks chosen for the group to the front of ready_ and returns the group's end time:
  // those that are free first, all of them or those of one node or domain, and where speeds differ
  // only those that are fast enough.
  double place(const Group& group) {
    const Cluster& cluster = cost_.cluster();
    std::sort(ready_.begin(), ready_.end());
    double best = std::numeric_limits<double>::infinity();
    double best_limit = 0;
    int best_block = -1;  // the node or domain; of several ones
    int block_ranks = 1;
    struct Blocks {  // nodes or domains
      int ranks;
      Scope scope;
      std::vector<int> members = {};
    };
    std::vector<Blocks> blocks = {{cluster.ranks_per_node, Scope::kNode}};
    if (cluster.ranks_per_domain > 0) blocks.push_back({cluster.ranks_per_domain, Scope::kDomain});
    for (const double limit : speedLimits()) {
      for (Blocks& each : blocks) each.members.assign(problem_.ranks() / each.ranks + 1, 0);
      int count = 0;
      double slowest = 1;
      for (const auto& [time, rank] : ready_) {
        if (cluster.speed(rank) < limit) continue;
        slowest = std::min(slowest, cluster.speed(rank));
        const auto consider = [&](Scope scope, int block, int ranks) {
          const double end = time + cost_.seconds(group.load, group.size, scope) / slowest;
          if (end >= best) return;
          best = end;
          best_limit = limit;
          best_block = block;
          block_ranks = ranks;
        };
        ++count;
        Scope scope = Scope::kCluster;  // of all ranks so far
        bool more = count < group.size;
        for (Blocks& each : blocks) {
          const int block = rank / each.ranks;
          int& members = each.members[block];
          if (++members == group.size) consider(each.scope, block, each.ranks);
          if (members == count) scope = std::min(scope, each.scope);
          more = more || (group.size <= each.ranks && members < group.size);
        }
        if (count == group.size) consider(scope, -1, 1);
        if (!more) break;
      }
    }
    std::stable_partition(ready_.begin(), ready_.end(), [&](const auto& entry) {
      return cluster.speed(entry.second) >= best_limit &&
             (best_block < 0 || entry.second / block_ranks == best_block);
    });
    return best;
  }

  const std::vector<double>& speedLimits() {
    if (speed_limits_.empty()) speed_limits_ = cost_.cluster().speedLimits();
    return speed_limits_;
  }

  static constexpr double kIdleWeight = 0.02;

  const Problem& problem_;
  const CostModel& cost_;
  double bound_;
  Xorshift random_;
  std::vector<std::pair<double, int>> ready_;  // (time, rank)
  std::vector<double> speed_limits_;
};

}  // namespace

Plan refine(const Problem& problem, Plan plan, double lower_bound) {
  return Annealer(problem, lower_bound).improve(std::move(plan));
}

}  // namespace hdpcomm::planner
