// What a micro-batch costs: seconds of one forward and backward pass over all layers, and the
// tokens a rank may hold. All policies, the lower bound and the simulator use this class.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace hdpcomm::planner {

// Seconds; a sequence of s tokens on d ranks has pieces of s/d tokens and d ring steps.
struct CostParams {
  double attention = 0;  // per token squared
  double piece = 0;      // per token and ring step: what short pieces lose in the attention kernel
  double linear = 0;     // per token
  double fixed = 0;      // per micro-batch and rank
  double ring_step = 0;  // per ring step after the first, never hidden
  double kv_intra = 0;   // to pass one token's KV (and its gradient) to the next rank of a node
  double kv_domain = 0;  // the same between nodes of a domain, where the cluster has domains
  double kv_inter = 0;   // the same between nodes, or between domains
  double latency_intra = 0;  // per ring step, hidden behind compute like the bytes
  double latency_domain = 0;
  double latency_inter = 0;
  double forward = 1 / 3.;           // share of the compute that is the forward pass
  double forward_transfer = 1 / 4.;  // share of the transfers
  double put_off = 0;  // of `linear`: gradients of weights, which split backward passes put off
  // Layers whose queries see at most so many keys, and their share of `attention`. The squares of
  // sequences know of it, so this is for slices alone.
  double key_limit = 0;
  double limited = 0;
};

// Memory is counted in tokens: the bytes that one token keeps on the device without offload.
struct MemoryParams {
  int64_t capacity = 0;    // tokens a rank may hold without offload
  double offloadable = 0;  // share of a token's bytes that offload can move, in [0, 1)
  double host_tokens = 0;  // tokens whose bytes a rank's host memory has room for
  double copy = 0;         // seconds to copy the offloadable part of a token one way; 0: no offload
  // Seconds to load the keys and values of a token that slices before have kept, for a forward
  // pass, and with the sums of their gradients for a backward pass.
  double kept_copy = 0;
  double kept_back = 0;
  // Share of a token's bytes that slices keep on the device, at offload ratios of 0 and 1.
  double kept = 0;
  double kept_offloaded = 0;
};

// What the ranks of a group have in common: its ring is as slow as the slowest link in it.
enum class Scope : uint8_t { kNode, kDomain, kCluster };

// What a stage of the model has of the linear layers' work, of attention with its messages, and of
// what is paid once a layer, each in that of the mean stage.
using StageWork = std::array<double, 3>;

struct Cluster {
  int ranks = 1;
  int ranks_per_node = 1;
  // Ranks of a domain: whole nodes with faster links between them than to others, as those of a
  // rack, or of one NVLink domain. 0: there are none.
  int ranks_per_domain = 0;
  int pipeline = 1;    // devices of each rank's pipeline; 1: none
  int chunks = 1;      // stages of the model on each of these
  int nics = 0;        // network interfaces that the ranks of a node share; 0: each has its own
  bool split = false;  // backward passes leave the gradients of weights to passes of their own
  // Most slices that a sequence may run in, one after the other in a pipeline; 1: none.
  int slices = 1;
  // By rank: a micro-batch takes 1 / speed times as long on a group whose slowest rank has it.
  // At most 1, which is the rank that the costs are those of; empty: all are alike.
  std::vector<double> speeds;
  std::vector<StageWork> stage_work;  // by stage of the model; empty: all are alike

  bool sharesInterfaces() const noexcept { return nics > 0 && nics < ranks_per_node; }
  // Micro-batches that a sequence runs as, at most.
  int mostSlices() const noexcept { return pipeline > 1 ? slices : 1; }
  // Full micro-batches whose tokens a device may hold at a time: as many as the first one does.
  double mostHeld() const noexcept {
    return chunks == 1 ? pipeline : pipeline + (pipeline - 1.0) / chunks;
  }

  // What a group has in common whose lowest and highest rank are these.
  Scope scope(int first, int last) const noexcept {
    if (first / ranks_per_node == last / ranks_per_node) return Scope::kNode;
    const int domain = ranks_per_domain;
    return domain > 0 && first / domain == last / domain ? Scope::kDomain : Scope::kCluster;
  }
  // The best that so many ranks can have.
  Scope leastScope(int size) const noexcept {
    if (size <= ranks_per_node) return Scope::kNode;
    return size <= ranks_per_domain ? Scope::kDomain : Scope::kCluster;
  }
  // The largest groups of each scope; without domains those of the second one are no larger than
  // those of the first.
  std::array<int, 3> largestGroups() const noexcept {
    const int node = std::min(ranks_per_node, ranks);
    return {node, std::clamp(ranks_per_domain, node, ranks), ranks};
  }

  double speed(int rank) const noexcept { return speeds.empty() ? 1.0 : speeds[rank]; }
  // The least speed of `count` neighbouring ranks.
  double slowest(int first, int count) const noexcept {
    return speeds.empty()
               ? 1.0
               : *std::min_element(speeds.begin() + first, speeds.begin() + first + count);
  }
  // Least speeds of a group that are worth a try, for a few of the different ones; 0 comes last.
  static constexpr size_t kMostSpeedLimits = 9;
  std::vector<double> speedLimits() const;
};

// The sums over the sequences of a micro-batch that its cost depends on.
struct Load {
  double squares = 0;
  double tokens = 0;

  void add(int64_t length) noexcept {
    squares += static_cast<double>(length) * static_cast<double>(length);
    tokens += static_cast<double>(length);
  }
  Load& operator+=(const Load& other) noexcept {
    squares += other.squares;
    tokens += other.tokens;
    return *this;
  }
  bool operator==(const Load&) const = default;
};

class CostModel {
 public:
  CostModel(const CostParams& params, const MemoryParams& memory, const Cluster& cluster);

  const Cluster& cluster() const noexcept { return cluster_; }
  const CostParams& params() const noexcept { return params_; }
  const MemoryParams& memory() const noexcept { return memory_; }

  // These costs are those of the mean stage. Stages that have as much of the work as each other are
  // of one kind; kindOf() is by stage of the model.
  int kinds() const noexcept { return static_cast<int>(std::max<size_t>(1, kinds_.size())); }
  const std::vector<int>& kindOf() const noexcept { return kind_of_; }
  const CostModel& ofKind(int kind) const noexcept { return kinds_.empty() ? *this : kinds_[kind]; }
  // Costs of a stage with such a share of the work, on a cluster where all stages are alike.
  CostModel times(const StageWork& work) const;

  // What the queries from one token of a sequence to another cost, over a token squared.
  double squares(double first, double end) const noexcept {
    const double near = std::max(0.0, first - params_.key_limit);
    const double far = std::max(0.0, end - params_.key_limit);
    const double few = params_.limited * (far * far - near * near);
    return end * end - first * first - few;
  }

  // Compute of one ring step, and the transfer that runs beside it.
  double stepCompute(const Load& load, int size) const noexcept {
    const double inverse = 1.0 / size;
    return (params_.attention * load.squares * inverse + params_.piece * load.tokens) * inverse;
  }
  // `messages`: of the ring, for one that a link has room for (rings.hpp). `kept`: tokens that go
  // round with those of the load.
  double stepTransfer(const Load& load, int size, Scope scope, double messages = 1,
                      double kept = 0) const noexcept {
    return kv(scope) * (load.tokens + kept) / size * messages + latency(scope);
  }
  double kv(Scope scope) const noexcept {
    return scope == Scope::kNode     ? params_.kv_intra
           : scope == Scope::kDomain ? params_.kv_domain
                                     : params_.kv_inter;
  }
  double latency(Scope scope) const noexcept {
    return scope == Scope::kNode     ? params_.latency_intra
           : scope == Scope::kDomain ? params_.latency_domain
                                     : params_.latency_inter;
  }

  // How long one ring step waits for its transfer, in the forward and the backward pass.
  double forwardWait(double compute, double transfer) const noexcept {
    return std::max(0.0, params_.forward_transfer * transfer - params_.forward * compute);
  }
  double backwardWait(double compute, double transfer) const noexcept {
    return std::max(0.0,
                    (1 - params_.forward_transfer) * transfer - (1 - params_.forward) * compute);
  }

  // Seconds of a micro-batch over `size` ranks, all of full speed, as in all that follows.
  double seconds(const Load& load, int size, Scope scope, double messages = 1,
                 double kept = 0) const noexcept {
    const double compute = stepCompute(load, size);
    double total = size * compute + params_.linear * load.tokens / size + params_.fixed;
    if (size > 1) {
      const double transfer = stepTransfer(load, size, scope, messages, kept);
      const double wait = forwardWait(compute, transfer) + backwardWait(compute, transfer);
      total += (size - 1) * (wait + params_.ring_step);
    }
    return total;
  }
  // The forward pass of that.
  double forwardSeconds(const Load& load, int size, Scope scope, double messages,
                        double kept) const noexcept {
    const double compute = stepCompute(load, size);
    const double wait = forwardWait(compute, stepTransfer(load, size, scope, messages, kept));
    const double rest = params_.linear * load.tokens / size + params_.fixed;
    return params_.forward * (size * compute + rest + (size - 1) * params_.ring_step) +
           (size - 1) * wait;
  }
  // How long the passes of a slice take to load what a share `offload` of `kept` tokens has kept. A
  // share that no offload reaches (offloadFor) loads all.
  double forwardLoad(double kept, int size, double offload) const noexcept {
    return std::min(1.0, offload) * memory_.kept_copy * kept / size;
  }
  double backwardLoad(double kept, int size, double offload) const noexcept {
    return std::min(1.0, offload) * memory_.kept_back * kept / size;
  }
  // The best that any `size` ranks can do: inside one node, or one domain, if they fit into one.
  double seconds(const Load& load, int size) const noexcept {
    return seconds(load, size, cluster_.leastScope(size));
  }

  // On the `size` neighbouring ranks from `first` on.
  double secondsFrom(const Load& load, int first, int size) const noexcept {
    return seconds(load, size, cluster_.scope(first, first + size - 1));
  }

  // Seconds of compute alone: falls as 1 / size, apart from what short pieces cost.
  double computeSeconds(const Load& load, int size) const noexcept {
    return size * stepCompute(load, size) + params_.linear * load.tokens / size;
  }

  // Rank-seconds of sequences in micro-batches of one rank that are as full as memory allows
  // without offload: no other micro-batches without offload take less.
  double leastWork(const Load& load) const noexcept {
    return params_.attention * load.squares + (params_.piece + params_.linear) * load.tokens +
           params_.fixed * load.tokens / static_cast<double>(memory_.capacity);
  }

  // Largest offload ratio whose copies hide behind the forward pass of this load. The ratio does
  // not depend on the number of ranks: compute and copies are divided alike.
  double maxOffload(const Load& load) const noexcept;
  // Smallest ratio with which a rank can hold `tokens`; above 1 if even a full offload is not
  // enough.
  double offloadFor(double tokens) const noexcept;
  // Tokens a rank can hold at an offload ratio.
  int64_t tokenLimit(double ratio) const noexcept;
  // Fewest ranks that can hold a sequence; may exceed the cluster.
  int minRanks(const Load& sequence) const noexcept;
  // The fastest group size, at least min_size.
  int fastestSize(const Load& load, int min_size) const noexcept;
  // Smallest size in [min_size, max_size] that ends within `limit` seconds; 0 if there is none.
  int sizeWithin(const Load& load, int min_size, int max_size, double limit) const noexcept;

 private:
  void normaliseSpeeds();
  void findKinds();
  int fastestIn(const Load& load, int first, int last) const noexcept;
  int searchWithin(const Load& load, int first, int last, double limit) const noexcept;

  CostParams params_;
  MemoryParams memory_;
  Cluster cluster_;
  std::vector<CostModel> kinds_;  // empty: there is one, this
  std::vector<int> kind_of_;
};

}  // namespace hdpcomm::planner
