// The lists of micro-batches that a rank of a pipeline can run one after the other within a time,
// where the first one goes down all stages and the last one comes back (docs/bound.md, claim 19).
// configurations.cpp uses it.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace hdpcomm::planner {

class WayLists {
 public:
  struct Item {
    double way = 0;  // seconds that a list is idle whose ways are no shorter than this
    double seconds = 0;
    size_t in_class = 0;
    size_t size = 0;
    int cells = 0;  // of the time
  };
  struct Limits {
    double time = 0;
    double idle = 0;  // seconds of a rank whatever it runs
    // How much of other micro-batches can run in the ways: a share of them, and seconds.
    double hidden_share = 1;
    double most_hidden = 0;
  };
  struct List {
    std::vector<const Item*> items;
    double beside = 0;  // seconds of others
  };

  void place(std::vector<Item> items, const Limits& limits);

  // The most that a list gains, with `fill` for each second of others beside it.
  double most(const std::function<double(const Item&)>& gain, double fill);

  // The list that most() found.
  List best();

 private:
  static constexpr int kCells = 1024;       // of the time
  static constexpr double kWayStep = 0.98;  // of a way: items above it are as if they had it
  static constexpr double kTiny = 1e-4;     // of a gain
  struct Kept {
    const Item* item = nullptr;
    double gain = 0;
  };

  double cell() const { return limits_.time / kCells; }
  void take(const Kept& kept);
  void note(double way, double fill);
  double mostBeside(double seconds, double way) const;

  Limits limits_;
  std::vector<Item> items_;    // by falling way
  std::vector<double> gains_;  // by cells, of the lists of kept_
  std::vector<Kept> kept_;
  // The best list: of the first ones of kept_, in so many cells.
  double weight_ = 0;
  size_t made_of_ = 0;
  int cells_ = 0;
  double beside_ = 0;
};

}  // namespace hdpcomm::planner
