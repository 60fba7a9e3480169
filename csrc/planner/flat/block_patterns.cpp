#include "planner/flat/block_patterns.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hdpcomm::planner {

BlockTimes::BlockTimes(int max_ranks, int min_size, int grain, double limit,
                       const BlockTimes* inside, const std::function<double(int, int)>& seconds)
    : grain_(grain), inside_(inside), rows_(max_ranks / grain + 1) {
  int packed = 1;  // sequences of a micro-batch on one rank, at most
  while (packed < kMostPacked && std::isfinite(seconds(min_size, packed + 1))) ++packed;
  rows_[0].push_back({});
  double left = kMostTrials;
  for (int row = 1; row < static_cast<int>(rows_.size()); ++row) {
    const int ranks = row * grain;
    const auto most_first =
        static_cast<int>(std::min(2.0 * std::max(1, ranks / min_size) * packed, 1.0 * kMostFirst));
    std::vector<Cell>& cells = rows_[row];
    cells.push_back({});
    // Larger numbers of sequences are left out where the trials for this number of ranks are
    // over.
    double own = left / (static_cast<double>(rows_.size()) - row);
    left -= own;
    for (int count = 1; own > 0; ++count) {
      own -= std::min(most_first, count - 1) + kTrialsOfCut * row;
      Cell best = sideBySide(row, count);
      if (row == 1 && inside_ != nullptr && count < inside_->counts(grain_)) {
        best = {inside_->time(grain_, count), inside_->work(grain_, count), Kind::kInside, 0, 0};
      }
      const double together = ranks >= min_size ? seconds(ranks, count) : kNever;
      if (together < best.time) best = {together, together * ranks, Kind::kGroup, 0, 0};
      for (int first = 1; first <= std::min(most_first, count - 1); ++first) {
        const double time = cells[first].time + cells[count - first].time;
        if (time >= best.time) continue;
        best = {time, cells[first].work + cells[count - first].work, Kind::kAfter, 0, first};
      }
      if (best.time > limit) break;
      cells.push_back(best);
    }
    left += std::max(0.0, own);
  }
}

int BlockTimes::most(int ranks, double limit) const {
  const std::vector<Cell>& cells = rows_[ranks / grain_];
  const auto end = std::partition_point(cells.begin(), cells.end(), [&](const Cell& cell) {
    return cell.time <= limit * (1 + 1e-9);
  });
  return static_cast<int>(end - cells.begin()) - 1;
}

void BlockTimes::appendGroups(int ranks, int count, int first, std::vector<Group>& groups) const {
  if (count == 0) return;
  const Cell& cell = rows_[ranks / grain_][count];
  switch (cell.kind) {
    case Kind::kGroup:
      groups.push_back({first, ranks, count});
      break;
    case Kind::kInside:
      inside_->appendGroups(ranks, count, first, groups);
      break;
    case Kind::kSide:
      appendGroups(cell.ranks, cell.count, first, groups);
      appendGroups(ranks - cell.ranks, count - cell.count, first + cell.ranks, groups);
      break;
    case Kind::kAfter:
      appendGroups(ranks, cell.count, first, groups);
      appendGroups(ranks, count - cell.count, first, groups);
      break;
  }
}

BlockTimes::Cell BlockTimes::sideBySide(int row, int count) const {
  Cell best{kNever, 0, Kind::kSide, 0, 0};
  for (int one = (row + 1) / 2; one < row; ++one) {
    const std::vector<Cell>& left = rows_[one];
    const std::vector<Cell>& right = rows_[row - one];
    const auto left_time = [&](int own) {
      return own < static_cast<int>(left.size()) ? left[own].time : kNever;
    };
    const auto right_time = [&](int own) {
      return own < static_cast<int>(right.size()) ? right[own].time : kNever;
    };
    int low = 0;  // the fewest sequences with which the left part is not the first to end
    int high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (left_time(middle) >= right_time(count - middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    for (const int own : {low, low - 1}) {
      if (own < 0) continue;
      const double time = std::max(left_time(own), right_time(count - own));
      if (time >= best.time) continue;
      const double work = left[own].work + right[count - own].work;
      best = {time, work, Kind::kSide, one * grain_, own};
    }
  }
  return best;
}

BlockPatterns::BlockPatterns(const CostModel& cost, const Load& load, int min_size, int node,
                             int max_ranks, double limit, bool packed)
    : cost_(cost), load_(load), min_size_(min_size), node_(node), packed_(packed) {
  const auto most = std::min(max_ranks, mostRanks(limit));
  const bool alike = node == cost.cluster().ranks;
  most_ = most;
  const Scope widest = cost.cluster().scope(0, cost.cluster().ranks - 1);
  const auto anywhere = [&](int size) { return alike || size == 1 ? Scope::kNode : widest; };
  anywhere_ = std::make_unique<BlockTimes>(
      most, min_size, 1, limit, nullptr,
      [&](int size, int count) { return seconds(size, count, anywhere(size)); });
  if (alike) return;
  const auto inside = [&](int size, int count) { return seconds(size, count, Scope::kNode); };
  inside_ = std::make_unique<BlockTimes>(std::min(node, most), min_size, 1, limit, nullptr, inside);
  if (most < node) return;
  nodes_ = std::make_unique<BlockTimes>(
      most / node * node, min_size, node, limit, inside_.get(), [&](int size, int count) {
        return seconds(size, count, size <= node ? Scope::kNode : widest);
      });
  side_by_side_ = std::make_unique<BlockTimes>(
      most / node * node, min_size, 1, limit, nullptr, [&](int size, int count) {
        const double crossing = crossingShare(size);
        return (1 - crossing) * seconds(size, count, crossing < 1 ? Scope::kNode : widest) +
               crossing * seconds(size, count, widest);
      });
}

std::vector<BlockPattern> BlockPatterns::find(double target) const {
  std::vector<BlockPattern> found;
  for (int ranks = min_size_; ranks <= most_; ++ranks) {
    if (ranks < node_ && node_ % ranks != 0 && inside_ != nullptr) continue;
    addPatterns(timesOf(ranks), ranks, target, found);
    const bool whole_nodes = ranks > node_ && ranks % node_ == 0;
    if (whole_nodes && side_by_side_) addPatterns(*side_by_side_, ranks, target, found);
  }
  return found;
}

void BlockPatterns::addPatterns(const BlockTimes& times, int ranks, double target,
                                std::vector<BlockPattern>& found) const {
  const int most = times.most(ranks, target);
  const int least = std::max(1, most - std::max(1, ranks / min_size_));
  for (int count = most; count >= least; --count) {
    found.push_back({ranks, count, times.work(ranks, count) / ranks, &times});
  }
}

double BlockPatterns::crossingShare(int size) const {
  return size > node_ ? 1 : static_cast<double>(size - std::gcd(size, node_)) / node_;
}

const BlockTimes& BlockPatterns::timesOf(int ranks) const {
  if (inside_ == nullptr) return *anywhere_;
  if (ranks <= node_) return *inside_;
  return ranks % node_ == 0 ? *nodes_ : *anywhere_;
}

double BlockPatterns::seconds(int size, int count, Scope scope) const {
  const double pieces = std::ceil(load_.tokens / size) * count;
  if (count > 1 && (!packed_ || pieces > static_cast<double>(cost_.memory().capacity))) {
    return std::numeric_limits<double>::infinity();
  }
  return cost_.seconds({load_.squares * count, load_.tokens * count}, size, scope);
}

int BlockPatterns::mostRanks(double limit) const {
  const double of_a_rank = limit / (min_size_ * cost_.seconds(load_, min_size_));
  const double most = std::cbrt(kMostSteps / std::max(of_a_rank, 1e-6));
  return static_cast<int>(std::clamp(most, static_cast<double>(min_size_), 1.0 * kMostRanks));
}

}  // namespace hdpcomm::planner
