// Swaps what two micro-batches run, or moves a sequence from one to the other, groups and order
// unchanged, as long as ranks that end last end earlier. In waves of sequences that are about as
// long, each rank then gets some of the longer and some of the shorter ones.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/xorshift.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"
#include "planner/search/local_search.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kMostSteps = 1.5e7;  // micro-batches that are looked at
constexpr int kMostTrials = 40000;
constexpr size_t kMostBatches = 1 << 14;

class SequenceSwaps {
 public:
  SequenceSwaps(const Problem& problem, std::vector<MicroBatch>& batches)
      : problem_(problem),
        cost_(problem.cost()),
        batches_(batches),
        groups_(batches.size()),
        ends_(batches.size()) {
    std::vector<int> last(problem.ranks(), -1);
    for (size_t i = 0; i < batches.size(); ++i) {
      const std::vector<int32_t>& ranks = batches[i].ranks;
      Group& group = groups_[i];
      for (const int32_t rank : ranks) {
        if (last[rank] >= 0) group.before.push_back(last[rank]);
        last[rank] = static_cast<int>(i);
      }
      std::sort(group.before.begin(), group.before.end());
      group.before.erase(std::unique(group.before.begin(), group.before.end()), group.before.end());
      group.scope = scopeOf(ranks, cost_.cluster());
      group.messages = crowding(ranks, cost_.cluster());
      group.speed = slowest(ranks, cost_.cluster());
      group.load = workOf(problem, batches[i]).load;
      group.seconds = secondsOf(group, i, group.load);
      group.end = startOf(group) + group.seconds;
    }
    for (const int group : last) {
      if (group >= 0) ++groups_[group].last_of;
    }
  }

  // Returns whether anything was swapped.
  bool run() {
    const auto count = static_cast<double>(groups_.size());
    const int trials = static_cast<int>(std::min(kMostSteps / count, 1.0 * kMostTrials));
    bool changed = false;
    unit_ = 0;
    for (const Group& group : groups_) unit_ = std::max(unit_, group.end);
    double score = scoreOf();
    findCritical();
    for (int trial = 0; trial < trials; ++trial) {
      const size_t a = critical_[random_.below(critical_.size())];
      const size_t b = random_.below(groups_.size());
      if (a == b || !change(a, b)) continue;
      const double found = scoreOf();
      if (found < score) {
        score = found;
        changed = true;
        findCritical();
      } else {
        undo(a, b);
      }
    }
    return changed;
  }

 private:
  struct Group {
    std::vector<int> before;  // groups that its ranks run last before it
    int last_of = 0;          // ranks that run nothing after it
    Scope scope = Scope::kNode;
    double messages = 1;
    double speed = 1;
    Load load;
    double seconds = 0;
    double end = 0;
  };

  int sizeOf(size_t i) const { return static_cast<int>(batches_[i].ranks.size()); }

  double secondsOf(const Group& group, size_t i, const Load& load) const {
    return cost_.seconds(load, sizeOf(i), group.scope, group.messages) / group.speed;
  }

  double startOf(const Group& group) const {
    double start = 0;
    for (const int before : group.before) start = std::max(start, groups_[before].end);
    return start;
  }

  // Swaps what the micro-batches run, or moves one sequence of the first to the second one. False,
  // and nothing is changed, where that cannot make the first one quicker, or memory has no room.
  bool change(size_t a, size_t b) {
    const std::vector<int32_t>& from = batches_[a].sequences;
    const bool move = from.size() > 1 && random_.below(2) == 0;
    Load less = groups_[b].load;
    Load more = groups_[a].load;
    size_t moved = 0;
    if (move) {
      moved = random_.below(from.size());
      const Load own = problem_.own(from[moved]);
      less = {more.squares - own.squares, more.tokens - own.tokens};
      more = groups_[b].load;
      more += own;
    }
    if (secondsOf(groups_[a], a, less) >= groups_[a].seconds * (1 - 1e-9)) return false;
    was_a_ = from;
    was_b_ = batches_[b].sequences;
    load_a_ = groups_[a].load;
    load_b_ = groups_[b].load;
    if (move) {
      batches_[b].sequences.push_back(from[moved]);
      batches_[a].sequences.erase(from.begin() + static_cast<std::ptrdiff_t>(moved));
    } else {
      std::swap(batches_[a].sequences, batches_[b].sequences);
    }
    if (!fits(problem_, less, batches_[a].sequences, sizeOf(a)) ||
        !fits(problem_, more, batches_[b].sequences, sizeOf(b))) {
      batches_[a].sequences = was_a_;
      batches_[b].sequences = was_b_;
      return false;
    }
    take(a, b, less, more);
    for (size_t i = std::min(a, b); i < groups_.size(); ++i) {
      ends_[i] = groups_[i].end;
      groups_[i].end = startOf(groups_[i]) + groups_[i].seconds;
    }
    return true;
  }

  void undo(size_t a, size_t b) {
    batches_[a].sequences = was_a_;
    batches_[b].sequences = was_b_;
    take(a, b, load_a_, load_b_);
    for (size_t i = std::min(a, b); i < groups_.size(); ++i) groups_[i].end = ends_[i];
  }

  void take(size_t a, size_t b, const Load& load_a, const Load& load_b) {
    groups_[a].load = load_a;
    groups_[b].load = load_b;
    for (const size_t i : {a, b}) groups_[i].seconds = secondsOf(groups_[i], i, groups_[i].load);
  }

  // A high power of the times at which the ranks end: near the makespan, and less with each rank
  // that ends earlier.
  double scoreOf() const {
    double sum = 0;
    for (const Group& group : groups_) {
      if (group.last_of == 0) continue;
      double power = group.end / unit_;
      for (int i = 0; i < 7; ++i) power *= power;
      sum += group.last_of * power;
    }
    return sum;
  }

  // The micro-batches that the makespan waits for.
  void findCritical() {
    critical_.clear();
    size_t at = 0;
    for (size_t i = 1; i < groups_.size(); ++i) {
      if (groups_[i].end > groups_[at].end) at = i;
    }
    for (;;) {
      critical_.push_back(at);
      const Group& group = groups_[at];
      if (group.before.empty()) break;
      at = *std::max_element(group.before.begin(), group.before.end(),
                             [&](int a, int b) { return groups_[a].end < groups_[b].end; });
    }
  }

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<MicroBatch>& batches_;
  std::vector<Group> groups_;
  std::vector<size_t> critical_;
  std::vector<int32_t> was_a_, was_b_;  // before the last change
  Load load_a_, load_b_;
  std::vector<double> ends_;  // of the groups that it moved
  double unit_ = 1;           // the makespan at first
  Xorshift random_;
};

}  // namespace

Plan swapSequences(const Problem& problem, Plan plan) {
  if (plan.micro_batches.size() < 2 || plan.micro_batches.size() > kMostBatches) return plan;
  std::vector<MicroBatch> batches = plan.micro_batches;
  for (size_t i = 0; i < batches.size(); ++i) batches[i].start = static_cast<double>(i);
  if (!SequenceSwaps(problem, batches).run()) return plan;
  Plan found = finishPlan(problem, std::move(batches));
  return found.makespan < plan.makespan ? found : plan;
}

}  // namespace hdpcomm::planner
