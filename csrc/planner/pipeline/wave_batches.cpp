// The micro-batches of waves.
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/rings.hpp"
#include "planner/model/slice_bounds.hpp"
#include "planner/pipeline/wave_planner.hpp"
#include "planner/simulate/pass_costs.hpp"

namespace hdpcomm::planner {

std::vector<MicroBatch> WavePlanner::plan() const {
  std::vector<size_t> first_of;  // by wave: the number of its first pack
  size_t packs = 0, wide = 0;
  for (const Wave& wave : waves_) {
    first_of.push_back(packs);
    packs += wave.packs.size();
    wide += wave.wide.size() * wave.slices;
  }
  std::vector<std::vector<int32_t>> sequences = packs_->sequences(packs);
  std::vector<MicroBatch> batches;
  batches.reserve(wide + packs);
  for (const size_t wave : order_.waves()) {
    if (!take(waves_[wave], sequences.data() + first_of[wave], batches)) return {};
  }
  return batches;
}

const LevelPasses& WavePlanner::passes() {
  passes_.clear();
  for (const size_t wave : order_.waves()) addPasses(waves_[wave]);
  return passes_;
}

bool WavePlanner::take(const Wave& wave, std::vector<int32_t>* packs,
                       std::vector<MicroBatch>& batches) const {
  const auto add = [&](int first, int size, std::vector<int32_t> sequences) {
    MicroBatch batch;
    batch.ranks = by_speed_.ranks(placeIn(wave, first, size), size);
    if (size > 1) batch.ranks = ringOrder(std::move(batch.ranks), cost_.cluster());
    batch.sequences = std::move(sequences);
    batch.start = static_cast<double>(batches.size());
    batches.push_back(std::move(batch));
  };
  int first = wave.first;
  for (const Wave::Wide& wide : wave.wide) {
    if (wide.job != Wave::kIdle) {
      const int32_t sequence = jobs_[wide.job].sequence;
      const auto bounds = sliceBounds(problem_, sequence, wide.size, wave.slices);
      if (bounds.empty()) return false;
      for (size_t k = 1; k < bounds.size(); ++k) {
        add(first, wide.size, problem_.withRiders(sequence));
        if (bounds.size() == 2) continue;  // a single one
        batches.back().slice = sliceOf(problem_, sequence, bounds, k - 1);
      }
    }
    first += wide.size;
  }
  for (size_t k = 0; k < wave.packs.size(); ++k) {
    if (!packs[k].empty()) add(wave.placeOf(k), 1, std::move(packs[k]));
  }
  return true;
}

void WavePlanner::addPasses(const Wave& wave) {
  std::vector<int32_t>& ranks = passes_.ranks;
  MicroBatch batch;
  int first = wave.first;
  for (const Wave::Wide& wide : wave.wide) {
    if (wide.job != Wave::kIdle) {
      batch.ranks = by_speed_.ranks(placeIn(wave, first, wide.size), wide.size);
      if (cost_.cluster().sharesLinks()) {  // else the order of a ring does not matter
        batch.ranks = ringOrder(std::move(batch.ranks), cost_.cluster());
      }
      batch.sequences = problem_.withRiders(jobs_[wide.job].sequence);
      const Work work = workOf(problem_, batch);
      batch.offload = cost_.offloadFor(static_cast<double>(work.held));
      ranks.insert(ranks.end(), batch.ranks.begin(), batch.ranks.end());
      passes_.add(passCosts(problem_, batch, work));
    }
    first += wide.size;
  }
  for (size_t k = 0; k < wave.packs.size(); ++k) {
    if (wave.packs[k].tokens == 0) continue;
    const int place = placeIn(wave, wave.placeOf(k), 1);
    ranks.push_back(by_speed_.rank(place));
    passes_.add(passCostsOfOne(cost_, wave.packs[k], by_speed_.speed(place)));
  }
}

}  // namespace hdpcomm::planner
