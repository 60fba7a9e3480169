#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "planner/bound/bound.hpp"

namespace hdpcomm::planner {
namespace {

// By the work of each device: as if the first and the last one that have so much of it had no more.
CountedStages countedStages(const Cluster& cluster, const std::vector<StageWork>& devices,
                            const StageWork& work) {
  const auto has = [&](const StageWork& own) {
    return std::equal(own.begin(), own.end(), work.begin(), std::greater_equal<>());
  };
  const auto first = std::find_if(devices.begin(), devices.end(), has) - devices.begin();
  const auto last = devices.rend() - std::find_if(devices.rbegin(), devices.rend(), has) - 1;
  CountedStages found{work, StagesInPasses(cluster), first, last};
  auto& [all, before, between, micro_batches] = found.stages;
  all = before = between = 0;
  micro_batches = cluster.pipeline - 1 - static_cast<int>(first);
  for (int stage = 0; stage < std::ssize(cluster.stage_work); ++stage) {
    double passes = std::numeric_limits<double>::infinity();  // at least
    for (size_t kind = 0; kind < work.size(); ++kind) {
      if (work[kind] > 0) passes = std::min(passes, cluster.stage_work[stage][kind] / work[kind]);
    }
    all += passes / cluster.chunks;
    if (stage < last) before += passes / cluster.chunks;
    if (first <= stage && stage < last) between += passes;
  }
  // Some slices of a sequence run on the first device before the longest one goes on.
  if (cluster.mostSlices() > 1) before = cluster.chunks > 1 ? 0 : between;
  return found;
}

}  // namespace

std::vector<CountedStages> countedStages(const Problem& problem) {
  constexpr size_t kMost = 3;
  const Cluster& cluster = problem.cost().cluster();
  const CostParams& params = problem.cost().params();
  const auto capacity = static_cast<double>(problem.cost().memory().capacity);
  Load all;
  for (int i = 0; i < problem.count(); ++i) all += problem.own(i);
  const StageWork seconds = {params.linear * all.tokens,
                             params.attention * all.squares + params.piece * all.tokens,
                             params.fixed * all.tokens / capacity};
  const double waves = std::max(1.0, all.tokens / capacity / problem.ranks());
  std::vector<StageWork> devices(cluster.pipeline, StageWork{});
  for (size_t stage = 0; stage < cluster.stage_work.size(); ++stage) {
    for (size_t kind = 0; kind < seconds.size(); ++kind) {
      devices[stage % devices.size()][kind] += cluster.stage_work[stage][kind] / cluster.chunks;
    }
  }
  std::vector<CountedStages> found;
  for (const StageWork& one : devices) {
    for (const StageWork& other : devices) {
      StageWork work = one;
      for (size_t kind = 0; kind < work.size(); ++kind)
        work[kind] = std::min(one[kind], other[kind]);
      const double sum = std::inner_product(work.begin(), work.end(), seconds.begin(), 0.0);
      if (sum <= 0) continue;
      found.push_back(countedStages(cluster, devices, work));
      const StagesInPasses& stages = found.back().stages;
      found.back().bound = sum * (1 + 0.5 * std::max(stages.before, stages.between) / waves);
    }
  }
  std::sort(found.begin(), found.end(),
            [](const CountedStages& a, const CountedStages& b) { return a.bound > b.bound; });
  std::vector<CountedStages> chosen = {{.stages = StagesInPasses(cluster)}};
  chosen[0].stages.before = chosen[0].stages.between = 0;
  for (const CountedStages& each : found) {
    const auto same = [&](const CountedStages& other) {
      return each.first == other.first && each.last == other.last;
    };
    if (chosen.size() > kMost || std::any_of(chosen.begin() + 1, chosen.end(), same)) continue;
    chosen.push_back(each);
  }
  return chosen;
}

}  // namespace hdpcomm::planner
