#include "planner/flat/wave_packer.hpp"

#include <algorithm>
#include <cstdint>

#include "planner/flat/block_list.hpp"
#include "planner/model/plan.hpp"

namespace hdpcomm::planner {

WavePacker::WavePacker(const Problem& problem, const std::vector<Job>& jobs)
    : problem_(problem), cost_(problem.cost()), jobs_(jobs), filler_(cost_, jobs) {}

template <class Use>
void WavePacker::forEachBlock(const std::vector<double>& ready, int first, int last,
                              const Use& use) const {
  while (first < last) {
    int end = first + 1;
    while (end < last && ready[end] == ready[first] &&
           cost_.cluster().speed(end) == cost_.cluster().speed(first))
      ++end;
    use(Block{ready[first], first, end - first, cost_.cluster().speed(first)});
    first = end;
  }
}

double WavePacker::runWaves(const std::vector<int>& counts, bool turned, double limit) {
  placements_.clear();
  gaps_.clear();
  std::vector<double> ready(problem_.ranks(), 0.0);
  size_t next = 0;
  bool backwards = false;
  for (const int count : counts) {
    int first = 0;
    std::vector<int> sizes = sizesOfWave(next, count);
    if (turned && &count == &counts.back())
      sizes = levelSizes(next, std::move(sizes), backwards, ready);
    for (int i = 0; i < count; ++i) {
      const int place = backwards ? count - 1 - i : i;
      const int size = sizes[place];
      const size_t job = next + place;
      const auto begin = ready.begin() + first;
      const double start = *std::max_element(begin, begin + size);
      forEachBlock(ready, first, first + size, [&](const Block& block) {
        if (block.ready >= start) return;
        gaps_.push_back({block.ready, start, block.first, block.count, block.speed});
      });
      const double slowest = cost_.cluster().slowest(first, size);
      const double end = start + cost_.secondsFrom(jobs_[job].load, first, size) / slowest;
      if (end >= limit) return limit;
      std::fill_n(begin, size, end);
      placements_.push_back({static_cast<int32_t>(job), start, {first, size}, {}});
      first += size;
    }
    next += count;
    backwards = turned && !backwards;
  }
  return fillUp(ready, next, limit);
}

double WavePacker::runPlaced(std::vector<Placement> placements, const std::vector<double>& ready,
                             size_t next) {
  placements_ = std::move(placements);
  gaps_.clear();
  return fillUp(ready, next, kNever);
}

const std::vector<int>& WavePacker::sizesOfWave(size_t next, int count) {
  std::vector<int>& sizes = wave_sizes_[{next, count}];
  if (sizes.empty()) sizes = findSizes(next, count);
  return sizes;
}

std::vector<int> WavePacker::findSizes(size_t next, int count) const {
  std::vector<int> sizes(count);  // the smallest ones, which the caller knows to fit
  double low = 0;
  double high = 0;
  int taken = 0;
  for (int i = 0; i < count; ++i) {
    sizes[i] = jobs_[next + i].min_size;
    taken += sizes[i];
    high = std::max(high, jobs_[next + i].min_size_s);
  }
  // In less time than that of `sizes`, of which no job takes fewer ranks.
  const auto fit = [&](double limit, std::vector<int>& found, int& all) {
    all = taken;
    for (int i = 0; i < count; ++i) {
      const Job& job = jobs_[next + i];
      const bool same = i > 0 && job.load.squares == jobs_[next + i - 1].load.squares;
      const int size =
          same ? found[i - 1] : cost_.sizeWithin(job.load, sizes[i], problem_.ranks(), limit);
      all += size - sizes[i];
      if (size == 0 || all > problem_.ranks()) return false;
      found[i] = size;
    }
    return true;
  };
  std::vector<int> tried(count);
  for (int step = 0, all = 0; step < 12; ++step) {
    const double middle = 0.5 * (low + high);
    if (fit(middle, tried, all)) {
      taken = all;
      high = middle;
      sizes = tried;
    } else {
      low = middle;
    }
  }
  return sizes;
}

std::vector<int> WavePacker::levelSizes(size_t next, std::vector<int> sizes, bool backwards,
                                        const std::vector<double>& ready) const {
  if (!cost_.cluster().speeds.empty()) return sizes;
  const auto count = static_cast<int>(sizes.size());
  // When the last job ends with the sizes that `choose` picks by place and first rank; never if
  // it picks 0.
  const auto run = [&](const auto& choose) {
    double last = 0;
    int first = 0;
    for (int i = 0; i < count; ++i) {
      const int place = backwards ? count - 1 - i : i;
      const int size = choose(place, first);
      if (size == 0 || first + size > problem_.ranks()) return kNever;
      last = std::max(last, endAt(jobs_[next + place], first, size, ready));
      first += size;
    }
    return last;
  };
  double high = run([&](int place, int) { return sizes[place]; });
  double low = *std::min_element(ready.begin(), ready.end());
  std::vector<int> tried(count);
  for (int step = 0; step < 14; ++step) {
    const double target = 0.5 * (low + high);
    const double last = run([&](int place, int first) {
      return tried[place] = sizeAt(jobs_[next + place], first, ready, target);
    });
    if (last < high) {
      high = last;
      sizes = tried;
    } else {
      low = target;
    }
  }
  return sizes;
}

double WavePacker::endAt(const Job& job, int first, int size,
                         const std::vector<double>& ready) const {
  const auto begin = ready.begin() + first;
  return *std::max_element(begin, begin + size) + cost_.secondsFrom(job.load, first, size);
}

int WavePacker::sizeAt(const Job& job, int first, const std::vector<double>& ready,
                       double target) const {
  constexpr int kMaxTries = 8;
  int least = job.min_size;
  for (int tried = 0; tried < kMaxTries; ++tried) {
    const int left = problem_.ranks() - first;
    if (least > left) return 0;
    const auto begin = ready.begin() + first;
    const double start = *std::max_element(begin, begin + least);
    const int size = cost_.sizeWithin(job.load, least, left, target - start);
    if (size == 0) return 0;
    if (endAt(job, first, size, ready) <= target) return size;
    least = std::max(size, least + 1);
  }
  return 0;
}

double WavePacker::fillUp(const std::vector<double>& ready, size_t next, double limit) {
  std::vector<Block> blocks;
  forEachBlock(ready, 0, problem_.ranks(), [&](const Block& block) { blocks.push_back(block); });
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const Block& a, const Block& b) { return a.ready < b.ready; });
  if (filler_.leastEnd(next, gaps_, blocks) >= limit) return limit;
  return filler_.place(next, gaps_, blocks, limit);
}

}  // namespace hdpcomm::planner
