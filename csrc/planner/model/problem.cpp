#include "planner/model/problem.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::planner {
namespace {

[[noreturn]] void throwTooLong(const CostModel& cost, int sequence, const Load& load, int needed) {
  const auto length = static_cast<int64_t>(load.tokens);
  const int64_t capacity = cost.memory().capacity;
  const int ranks = cost.cluster().ranks;
  std::string held = std::to_string(capacity) + " tokens";
  if (cost.memory().offloadable > 0) {
    held += " (" + std::to_string(cost.tokenLimit(cost.maxOffload(load))) + " with offload)";
  }
  throwInvalidUsage("sequence " + std::to_string(sequence) + " of " + std::to_string(length) +
                    " tokens needs " + std::to_string(needed) + " ranks that hold " + held +
                    " each, and the cluster has " + std::to_string(ranks) +
                    ": raise capacity to at least " + std::to_string((length + ranks - 1) / ranks) +
                    ", or ranks to at least " + std::to_string(needed) +
                    ", or cut the sequence to the context of " + std::to_string(capacity * ranks) +
                    " tokens");
}

constexpr double kLongestS = 1e15;  // of a step: sums and ratios of such times stay finite

}  // namespace

Problem::Problem(std::vector<int64_t> lengths, const CostModel& cost, std::vector<double> squares,
                 const std::map<int32_t, Segments>& trees)
    : lengths_(std::move(lengths)), squares_(std::move(squares)), cost_(cost) {
  if (!squares_.empty() && squares_.size() != lengths_.size()) {
    throwInvalidUsage(std::to_string(squares_.size()) + " squares were given for " +
                      std::to_string(lengths_.size()) + " lengths: give one for each, or none");
  }
  min_ranks_.reserve(lengths_.size());
  for (int i = 0; i < count(); ++i) {
    const int64_t length = lengths_[i];
    if (length < 1) {
      throwInvalidUsage("sequence " + std::to_string(i) + " has " + std::to_string(length) +
                        " tokens, expected at least 1: leave empty sequences out");
    }
    min_ranks_.push_back(length <= cost_.memory().capacity ? 1 : cost_.minRanks(own(i)));
  }
  Load all;
  for (const int64_t length : lengths_) all.add(length);
  for (const int size : {1, ranks()}) {
    if (lengths_.empty() || cost_.seconds(all, size, Scope::kCluster) <= kLongestS)
      continue;  // not NaN
    throwInvalidUsage("by this profile all " + std::to_string(count()) + " sequences take " +
                      std::to_string(cost_.seconds(all, size, Scope::kCluster)) + " s on " +
                      std::to_string(size) +
                      " ranks: its coefficients are no measured ones; give seconds per token");
  }
  if (!trees.empty()) {
    std::map<int32_t, Tree> known;
    for (const auto& [item, segments] : trees) addTree(item, segments, known);
    trees_ = std::make_shared<const std::map<int32_t, Tree>>(std::move(known));
  }
  const auto fitsAlone = [this](int32_t least) { return least <= ranks(); };
  if (std::all_of(min_ranks_.begin(), min_ranks_.end(), fitsAlone)) return;
  for (const int32_t sequence : byLength()) {
    if (!fitsAlone(min_ranks_[sequence])) findHost(sequence);
  }
}

Problem Problem::part(const std::vector<int32_t>& sequences, const CostModel& cost) const {
  std::vector<int64_t> lengths;
  std::vector<double> squares;
  std::map<int32_t, Segments> trees;
  for (const int32_t each : sequences) {
    if (hasSegments(each)) trees[static_cast<int32_t>(lengths.size())] = trees_->at(each).segments;
    lengths.push_back(lengths_[each]);
    if (hasTrees()) squares.push_back(squares_[each]);
  }
  return {std::move(lengths), cost, std::move(squares), trees};
}

Problem Problem::withCosts(const CostModel& cost) const {
  std::vector<int32_t> all(lengths_.size());
  std::iota(all.begin(), all.end(), 0);
  Problem other = part(all, cost);
  other.by_length_ = by_length_;
  return other;
}

void Problem::addTree(int32_t item, const Segments& segments,
                      std::map<int32_t, Tree>& trees) const {
  const auto& [rows, starts] = segments;
  if (item < 0 || item >= count() || rows.empty() || rows.size() != starts.size() || rows[0] != 0 ||
      !std::is_sorted(rows.begin(), rows.end(), std::less_equal<>()) ||
      rows.back() >= lengths_[item]) {
    throwInvalidUsage("tree " + std::to_string(item) + " has " + std::to_string(rows.size()) +
                      " rows and " + std::to_string(starts.size()) +
                      " starts of segments: give its item, and one of each for every segment, rows "
                      "rising from 0 below its length");
  }
  Tree tree{segments, {0.0}};
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    const auto first = static_cast<double>(starts[i]);
    const auto length = static_cast<double>(rows[i + 1] - rows[i]);
    tree.squares_before.push_back(tree.squares_before[i] + cost_.squares(first, first + length));
  }
  trees.emplace(item, std::move(tree));
}

double Problem::squaresBefore(const Tree& tree, int64_t token) const {
  const auto& [rows, starts] = tree.segments;
  const auto after = std::upper_bound(rows.begin(), rows.end(), token);
  const auto segment = static_cast<size_t>(after - rows.begin()) - 1;
  const auto first = static_cast<double>(starts[segment]);
  const auto inside = static_cast<double>(token - rows[segment]);
  return tree.squares_before[segment] + cost_.squares(first, first + inside);
}

double Problem::squares(int32_t sequence, int64_t first, int64_t end) const {
  if (!hasSegments(sequence)) {
    return cost_.squares(static_cast<double>(first), static_cast<double>(end));
  }
  const Tree& tree = trees_->at(sequence);
  return squaresBefore(tree, end) - squaresBefore(tree, first);
}

Problem Problem::pricedBy(const CostModel& cost) const {
  Problem other = *this;
  other.cost_ = cost;
  return other;
}

Problem Problem::onCluster(const Cluster& cluster) const {
  return pricedBy(CostModel(cost_.params(), cost_.memory(), cluster));
}

Problem Problem::inSlices(int most) const {
  Cluster cluster = cost_.cluster();
  cluster.slices = most;
  return onCluster(cluster);
}

void Problem::findHost(int sequence) {
  if (cost_.memory().offloadable > 0) {
    if (host_.empty()) host_.assign(lengths_.size(), -1);
    for (const int32_t host : byLength()) {
      if (lengths_[host] <= lengths_[sequence]) break;  // a shorter one has less time for copies
      if (rides(host) || min_ranks_[host] > ranks()) continue;
      auto together = withRiders(host);
      together.push_back(sequence);
      const int least = minRanks(together);
      if (least > ranks()) continue;
      host_[sequence] = host;
      riders_.push_back(sequence);
      min_ranks_[host] = least;
      return;
    }
  }
  throwTooLong(cost_, sequence, own(sequence), min_ranks_[sequence]);
}

int Problem::minRanks(const std::vector<int32_t>& sequences) const {
  Load load;
  for (const int32_t sequence : sequences) load += own(sequence);
  const auto limit = static_cast<double>(cost_.tokenLimit(cost_.maxOffload(load)));
  int size = static_cast<int>(std::min(load.tokens / limit, ranks() + 1.0));
  for (size = std::max(size, 1); size <= ranks(); ++size) {
    if (fits(*this, load, sequences, size)) return size;
  }
  return size;
}

std::vector<int32_t> Problem::withRiders(int sequence) const {
  std::vector<int32_t> result = {sequence};
  for (const int32_t rider : riders_) {
    if (host_[rider] == sequence) result.push_back(rider);
  }
  return result;
}

Load Problem::load(int sequence) const {
  Load load = own(sequence);
  for (const int32_t rider : riders_) {
    if (host_[rider] == sequence) load += own(rider);
  }
  return load;
}

bool fits(const Problem& problem, const Load& load, const std::vector<int32_t>& sequences,
          int size) {
  const CostModel& cost = problem.cost();
  int64_t held = 0;
  for (const int32_t sequence : sequences) held += (problem.lengths()[sequence] + size - 1) / size;
  return held <= cost.memory().capacity || held <= cost.tokenLimit(cost.maxOffload(load));
}

const std::vector<int32_t>& Problem::byLength() const {
  if (!by_length_) by_length_ = std::make_shared<const std::vector<int32_t>>(sortedByLength());
  return *by_length_;
}

std::vector<int32_t> Problem::sortedByLength() const {
  std::vector<int32_t> order(lengths_.size());
  std::iota(order.begin(), order.end(), 0);
  constexpr size_t kFewForComparisons = 4096;
  if (order.size() <= kFewForComparisons) {
    std::stable_sort(order.begin(), order.end(),
                     [this](int32_t a, int32_t b) { return lengths_[a] > lengths_[b]; });
    return order;
  }
  // By digits, the lowest first; each pass keeps the order of equal ones.
  constexpr int kBits = 11;
  constexpr int64_t kDigits = 1 << kBits;
  const int64_t longest = *std::max_element(lengths_.begin(), lengths_.end());
  std::vector<int32_t> sorted(order.size());
  for (int shift = 0; shift < 63 && longest >> shift > 0; shift += kBits) {
    const auto digit = [&](int32_t i) {
      return static_cast<size_t>(kDigits - 1 - (lengths_[i] >> shift & (kDigits - 1)));
    };
    std::vector<size_t> places(kDigits + 1, 0);
    for (const int32_t i : order) ++places[digit(i) + 1];
    std::partial_sum(places.begin(), places.end(), places.begin());
    for (const int32_t i : order) sorted[places[digit(i)]++] = i;
    order.swap(sorted);
  }
  return order;
}

}  // namespace hdpcomm::planner
