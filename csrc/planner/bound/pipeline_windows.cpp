#include "planner/bound/pipeline_windows.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hdpcomm::planner {

PipelineWindows::PipelineWindows(const Problem& problem, double filling)
    : problem_(problem),
      cost_(problem.cost()),
      filling_(filling),
      others_(cost_.cluster().pipeline - 1) {
  for (std::vector<double>* each : {&tokens_, &squares_}) {
    each->reserve(problem.count() + 1);
    each->push_back(0);
  }
  for (const int32_t sequence : problem.byLength()) {
    const Load load = problem.own(sequence);
    tokens_.push_back(tokens_.back() + load.tokens);
    squares_.push_back(squares_.back() + load.squares);
  }
  const CostParams& params = cost_.params();
  forward_ = params.forward;
  backward_ = 1 - params.forward;
  if (params.kv_inter > 0 || params.latency_inter > 0) {  // the larger shares of both
    forward_ = std::max(forward_, params.forward_transfer);
    backward_ = std::max(backward_, 1 - params.forward_transfer);
  }
  for (size_t count = 1; count < tokens_.size(); count += 1 + count / 4) counts_.push_back(count);
}

bool PipelineWindows::fit(double time, int least, const Charges& charges) {
  beyond_.assign(1, 0.0);
  for (const double more : charges.beyond_one) beyond_.push_back(beyond_.back() + more);
  held_ = charges.held;
  sequence_ = charges.sequence;
  beside_ = charges.beside;
  all_ = charges.all;
  time_ = time;
  const int ranks = cost_.cluster().ranks;
  for (const size_t count : counts_) {
    const Load shortest = problem_.own(problem_.byLength()[count - 1]);
    const PassTimes times(cost_, shortest, leastRanks(shortest), ranks);
    const double way = others_ * times.within(ranks);
    if (way <= filling_) break;  // and all shorter ones
    const double fastest =
        cost_.seconds(shortest, cost_.fastestSize(shortest, leastRanks(shortest)));
    // A rank that runs some of these micro-batches has so many seconds for all of them,
    const double between = (time - way) * (1 + 1e-9);
    // and as many follow each other on it. So they lie on so many ranks.
    const double stack = std::floor(between / fastest);
    if (stack < 1) return false;
    const double spread =
        std::max(tokens_[count] / (sequence_ * stack), workOf(count) / between) * (1 - 1e-9);
    if (spread > ranks) return false;
    if (!fitsOn(count, std::max(least, static_cast<int>(std::ceil(spread))), ranks, times)) {
      return false;
    }
  }
  return true;
}

int PipelineWindows::leastRanks(const Load& load) const {
  return std::max(1, static_cast<int>(std::ceil(load.tokens / sequence_ * (1 - 1e-9))));
}

bool PipelineWindows::fitsOn(size_t count, int low, int high, const PassTimes& times) const {
  if (!mayFit(count, low, high, times)) return false;
  if (high - low <= low / 512) return true;
  const int middle = low + (high - low) / 2;
  return fitsOn(count, low, middle, times) || fitsOn(count, middle + 1, high, times);
}

bool PipelineWindows::mayFit(size_t count, int low, int high, const PassTimes& times) const {
  const double pass = times.within(high);
  const double longest = workOf(count);
  // What these ranks can do beside J, outside of the windows.
  const double beside = high * (time_ - others_ * pass) - longest;
  // What they have to do beside J, as the other ranks cannot do more.
  const double others = (cost_.cluster().ranks - low) * (time_ - filling_);
  const double left = std::max(0.0, all_ - longest - others);
  return left - hidden(count, high, left) <= beside * (1 + 1e-9);
}

double PipelineWindows::hidden(size_t count, int ranks, double work) const {
  const double tokens = beside_ * ranks;
  const double before = workOfTokens(tokens_[count]);
  const double first = std::min(work, workOfTokens(tokens_[count] + tokens) - before);
  const double both = std::min(work, workOfTokens(tokens_[count] + 2 * tokens) - before);
  const auto [less, more] = std::minmax(forward_, backward_);
  return more * first + less * (both - first);
}

double PipelineWindows::workOfTokens(double tokens) const {
  const size_t end = std::upper_bound(tokens_.begin(), tokens_.end(), tokens) - tokens_.begin() - 1;
  const double whole = workOf(end);
  if (end + 1 == tokens_.size()) return whole;
  const double share = (tokens - tokens_[end]) / (tokens_[end + 1] - tokens_[end]);
  return whole + share * (workOf(end + 1) - whole);
}

double PipelineWindows::workOf(size_t count) const {
  const CostParams& params = cost_.params();
  return params.attention * squares_[count] +
         (params.piece + params.linear + params.fixed / held_) * tokens_[count] +
         beyond_[std::min(count, beyond_.size() - 1)];
}

}  // namespace hdpcomm::planner
