#include "planner/pipeline/zone_shapes.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <numeric>

#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/pipeline/single_pipeline.hpp"

namespace hdpcomm::planner {
namespace {

class ZoneShapes {
 public:
  // `work`: rank-seconds of all sequences; `share`: of forward passes.
  ZoneShapes(const Problem& problem, double work, double share)
      : cost_(problem.cost()),
        ranks_(problem.ranks()),
        share_(share),
        work_(kRoom * work),
        ramps_(cost_, share, share, 0) {
    const std::vector<int32_t> by_length = problem.byLength();
    for (const Kind& kind : kKinds) {
      while (longest_.size() < std::min(kind.leaders, by_length.size())) {
        longest_.push_back(problem.own(by_length[longest_.size()]));
      }
    }
  }

  // Those that may be shorter than a plan of so many seconds.
  std::vector<Shape> beside(double seconds) const {
    std::vector<Shape> shapes;
    const int least = cost_.minRanks(longest_.front());
    if (least >= ranks_) return shapes;
    for (const Kind& kind : kKinds) {
      const double top = kind.top * seconds / cost_.cluster().pipeline;
      const int size = cost_.sizeWithin(longest_.front(), least, ranks_ - 1, top);
      if (size == 0 || kind.leaders > longest_.size()) continue;
      Shape shape;
      shape.given = heights(kind, size, kPromise * seconds);
      if (shape.given.others.empty()) continue;
      shape.top = secondsOn(size, longest_.front());
      shape.own = 1;
      shape.spread = true;
      shapes.push_back(std::move(shape));
    }
    return shapes;
  }

 private:
  struct Kind {
    double top;      // most seconds of the longest sequence in all stages, over those of a plan
    size_t leaders;  // how many of the longest sequences have a wave each
    int tail;        // lower waves on the same ranks
    int others;      // waves on the other ranks
    int later;       // by how many places their highest one comes later
  };
  // What was best for byted and GitHub steps on 256 ranks of 4 and 8 stages.
  static constexpr std::array kKinds{
      Kind{0.88, 5, 2, 10, -3}, Kind{0.88, 3, 8, 12, 0},  Kind{0.88, 4, 4, 12, 0},
      Kind{0.88, 4, 8, 12, -3}, Kind{0.88, 4, 2, 16, 0},  Kind{0.88, 7, 2, 8, 0},
      Kind{0.65, 1, 4, 12, 0},  Kind{0.65, 5, 4, 12, -3}, Kind{0.65, 2, 4, 10, 0},
      Kind{0.70, 4, 4, 10, -3}, Kind{0.70, 5, 8, 10, 0},  Kind{0.88, 5, 4, 10, -3}};

  // With a little for the rounding of a height that is to be that of this size.
  double secondsOn(int size, const Load& load) const {
    return cost_.seconds(load, size) * (1 + 1e-9);
  }

  // Those of both parts of the ranks, whose pipelines take as long; none if they take more than
  // `most`.
  Heights heights(const Kind& kind, int size, double most) const {
    std::vector<double> leaders;
    for (size_t i = 0; i < kind.leaders; ++i) leaders.push_back(secondsOn(size, longest_[i]));
    std::sort(leaders.begin(), leaders.end(), std::greater<>());
    const std::vector<double> tail = ramp(kind.tail, kind.later);
    const std::vector<double> others = ramp(kind.others, kind.later);
    const double others_busy = sum(others);
    const double others_end = makespan(others);
    std::vector<double> zone;
    double unit = 0;  // of the heights of the others
    double low = 0;   // of those of the tail
    double high = leaders.back();
    for (int i = 0; i < kHalvings; ++i) {
      const double middle = 0.5 * (low + high);
      zone = leaders;
      for (const double height : tail) zone.push_back(middle * height);
      unit = (work_ - size * sum(zone)) / ((ranks_ - size) * others_busy);
      (makespan(zone) < unit * others_end ? low : high) = middle;
    }
    if (unit <= 0 || std::max(unit * others_end, makespan(zone)) > most) return {};
    Heights found;
    found.reserved.assign(zone.begin() + 1, zone.end());  // beside the top
    for (const double height : others) found.others.push_back(unit * height);
    return found;
  }

  // By falling height, relative to the highest one.
  std::vector<double> ramp(int count, int later) const {
    std::vector<double> heights = ramps_.heights(count, later);
    std::sort(heights.begin(), heights.end(), std::greater<>());
    const double highest = heights.front();
    for (double& height : heights) height /= highest;
    return heights;
  }

  // Makespan of a pipeline with waves of these heights, the highest one first: each goes to the end
  // where it costs less.
  double makespan(const std::vector<double>& heights) const {
    SinglePipeline pipeline(cost_.cluster().pipeline, share_);
    std::deque<double> times;
    double seconds = 0;
    for (const double height : heights) {
      times.push_front(height);
      const double front = pipeline.run(times);
      times.pop_front();
      times.push_back(height);
      const double back = pipeline.run(times);
      seconds = std::min(front, back);
      if (front < back) {
        times.pop_back();
        times.push_front(height);
      }
    }
    return seconds;
  }

  static double sum(const std::vector<double>& heights) {
    return std::accumulate(heights.begin(), heights.end(), 0.0);
  }

  static constexpr int kHalvings = 8;
  static constexpr double kRoom = 1.06;     // of the heights for the work
  static constexpr double kPromise = 1.07;  // plans are shorter than that room promises

  const CostModel& cost_;
  const int ranks_;
  const double share_;
  const double work_;
  const PipelineRamps ramps_;
  std::vector<Load> longest_;  // sequences
};

}  // namespace

std::vector<Shape> zoneShapes(const Problem& problem, double work, double share, double seconds) {
  return ZoneShapes(problem, work, share).beside(seconds);
}

}  // namespace hdpcomm::planner
