// The lists of micro-batches that a rank of a pipeline can run one after the other within a time,
// where the first one goes down all stages and the last one comes back (docs/bound.md, claim 19).
// configurations.cpp uses it.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace hdpcomm::planner {

class WayLists {
 public:
  // Seconds that a rank is idle, or computes more in shorter slices, where an item is the first one
  // of its list, the last one, or the only one.
  struct Ends {
    double first = 0, last = 0, only = 0;
  };
  struct Item {
    double seconds = 0;
    Ends ends;
    size_t in_class = 0;
    size_t size = 0;

    bool noLongerThan(const Item& other) const {
      return seconds <= other.seconds && ends.first <= other.ends.first &&
             ends.last <= other.ends.last && ends.only <= other.ends.only;
    }
  };
  struct Limits {
    double time = 0;
    double idle = 0;     // seconds of a rank whatever it runs
    double forward = 0;  // share of forward passes
    // Seconds of other micro-batches that can run in the ways of a list, at most.
    double most_hidden = 0;
    bool others = false;  // whether a list may begin and end with others
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
    int cells = 0;
  };

  double cell() const { return limits_.time / kCells; }
  int cellsOf(double seconds) const;
  double wayOf(const Item& item) const;
  using Order = std::vector<std::pair<int, size_t>>;  // cells of items, rising

  Order orderWith(double Ends::* end) const;
  // Those that gain more than all before them.
  std::vector<Kept> rising(const Order& order) const;
  void mostAlone();
  void mostBesideOthers(double fill);
  void take(const Kept& kept);
  void note(double way, double fill);
  double mostBeside(double seconds, double way) const;

  Limits limits_;
  std::vector<Item> items_;      // by falling way
  std::vector<double> of_item_;  // their gains
  // Where a list begins and ends with items: in its middle, and as an end of it.
  Order middle_, first_, last_, only_;
  std::vector<double> gains_;  // by cells, of the lists of kept_
  std::vector<Kept> kept_;
  double weight_ = 0;
  // The best list: of the first ones of kept_, in so many cells.
  size_t made_of_ = 0;
  int cells_ = 0;
  List best_;
};

}  // namespace hdpcomm::planner
