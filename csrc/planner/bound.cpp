// The lower bound; docs/planner.md has the proof. For a time T to be possible, each sequence must
// have a group size on which it ends within T, and the rank-seconds of all sequences at their
// smallest such sizes must fit into ranks x T. The bound is the smallest T that passes both tests.
// With a pipeline, a sequence passes all stages one after the other, so it has T / stages for each.
#include <algorithm>
#include <cmath>

#include "planner/plan.hpp"

namespace hdpcomm::planner {
namespace {

struct Item {
  Load load;
  int min_size = 1;
  int fastest = 1;
  double min_size_s = 0;  // predicted time on min_size ranks
  double fastest_s = 0;   // predicted time on the fastest size
};

class Bound {
 public:
  explicit Bound(const Problem& problem) : problem_(problem), cost_(problem.cost()) {
    double longest = 0;
    for (int i = 0; i < problem.count(); ++i) {
      Load load;
      load.add(problem.lengths()[i]);
      longest = std::max(longest, load.tokens);
      max_offload_ = std::max(max_offload_, cost_.maxOffload(load));
    }
    held_ = static_cast<double>(cost_.tokenLimit(max_offload_));
    const CostParams& params = cost_.params();
    forward_from_ = firstTransferBound(longest, params.forward, params.forward_transfer);
    backward_from_ = firstTransferBound(longest, 1 - params.forward, 1 - params.forward_transfer);
    for (int i = 0; i < problem.count(); ++i) add(i);
  }

  double solve() const {
    double low = std::max(slowest_ * stages(), total_ / problem_.ranks());
    double high = low;
    while (!possible(high)) {
      low = high;
      high *= 1.25;
      if (!std::isfinite(high) || high <= 0) return low;
    }
    for (int i = 0; i < 40 && high - low > 1e-7 * high; ++i) {
      const double middle = 0.5 * (low + high);
      (possible(middle) ? high : low) = middle;
    }
    return low;
  }

 private:
  void add(int sequence) {
    Item item;
    item.load.add(problem_.lengths()[sequence]);
    item.min_size = problem_.minRanks(sequence);
    item.min_size_s = cost_.seconds(item.load, item.min_size);
    const double work = workAt(item.load, item.min_size);
    total_ += work;
    // Other sequences end sooner on one rank than slowest_, so no bound forces them to more ranks.
    if (item.min_size > 1 || item.min_size_s > slowest_) {
      item.fastest = cost_.fastestSize(item.load, item.min_size);
      item.fastest_s = cost_.seconds(item.load, item.fastest);
      slowest_ = std::max(slowest_, item.fastest_s);
    }
    items_.push_back(item);
  }

  // The smallest group size from which on every ring is bound by its transfers, in a pass with
  // these shares of compute and transfers; a size above the cluster if there is none. Compute per
  // byte grows with the sequence, so it is enough to test the longest sequence that fits.
  int firstTransferBound(double longest, double compute, double transfer) const {
    const auto bound = [&](int size) {
      Load load;
      load.tokens = std::min(longest, held_ * size);
      load.squares = load.tokens * load.tokens;
      const double bytes = kv(size) * load.tokens / size;
      return transfer * bytes >= compute * cost_.stepCompute(load, size);
    };
    int low = 2;
    int high = problem_.ranks() + 1;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (middle > problem_.ranks() || bound(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  double kv(int size) const {
    const CostParams& params = cost_.params();
    return size <= cost_.cluster().ranks_per_node ? std::min(params.kv_intra, params.kv_inter)
                                                  : params.kv_inter;
  }
  double latency(int size) const {
    const CostParams& params = cost_.params();
    return size <= cost_.cluster().ranks_per_node
               ? std::min(params.latency_intra, params.latency_inter)
               : params.latency_inter;
  }

  // Least rank-seconds of a sequence in a micro-batch on `size` ranks, alone or with others; never
  // falls as the size grows. Costs per micro-batch are charged by the sequence's share of its
  // tokens.
  double workAt(const Load& load, int size) const {
    const CostParams& params = cost_.params();
    const double share = load.tokens / held_;  // of one rank's micro-batch
    const double compute = cost_.stepCompute(load, size);
    double work = params.linear * load.tokens + params.fixed * share + size * compute +
                  (size - 1) * params.ring_step * share;
    const double transfer = kv(size) * load.tokens + latency(size) * share;
    const auto pass = [&](int transfer_from, double compute_share, double transfer_share) {
      return size >= transfer_from ? transfer_share * transfer : compute_share * size * compute;
    };
    work += (size - 1) * (pass(forward_from_, params.forward, params.forward_transfer) +
                          pass(backward_from_, 1 - params.forward, 1 - params.forward_transfer));
    return work;
  }

  bool possible(double limit) const {
    const double stage_limit = limit / stages();
    if (slowest_ > stage_limit) return false;
    double work = total_;
    const double room = limit * problem_.ranks();
    if (work > room) return false;
    for (const Item& item : items_) {
      if (item.min_size_s <= stage_limit) continue;
      const int size = cost_.sizeWithin(item.load, item.min_size, problem_.ranks(), stage_limit);
      if (size == 0) return false;
      work += workAt(item.load, size) - workAt(item.load, item.min_size);
      if (work > room) return false;
    }
    return true;
  }

  int stages() const { return cost_.cluster().pipeline; }

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<Item> items_;
  double max_offload_ = 0;
  double held_ = 1;        // most tokens that a rank can hold in one micro-batch
  int forward_from_ = 0;   // rings of at least this size are bound by transfers
  int backward_from_ = 0;  // the same in the backward pass
  double total_ = 0;       // rank-seconds at the smallest sizes
  double slowest_ = 0;     // largest fastest_s
};

}  // namespace

double lowerBound(const Problem& problem) {
  return problem.count() == 0 ? 0.0 : Bound(problem).solve();
}

}  // namespace hdpcomm::planner
