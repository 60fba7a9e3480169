// The long sequences of a step in classes of about equal length, and the numbers of ranks on which
// each may run within a time (docs/bound.md, claims 12 and 19). configurations.cpp uses it.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "planner/bound/pass_times.hpp"
#include "planner/bound/way_lists.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// What is known of plans that end within a time.
struct ConfigurationCharges {
  double held = 1;      // most tokens of a micro-batch on a rank
  double sequence = 1;  // and of a sequence, which in slices is several of them
  double idle = 0;      // least seconds in which a rank's last stage has nothing to run
  // Least rank-seconds of a sequence in a micro-batch on so many ranks, alone or with others.
  std::function<double(const Load&, int)> work;
};

class ClassSizes {
 public:
  // From `first` to `last` ranks, at least so many seconds for so many sequences together.
  struct Sizes {
    int first = 1;
    int last = 1;
    double seconds = 0;
    int together = 1;
    WayLists::Ends ends = {};  // of a pipeline
  };
  struct Class {
    Load load;  // of its shortest sequence
    double count = 0;
    std::vector<Sizes> sizes;
    double work = 0;  // least rank-seconds
    // On all ranges of ranks, with the room for tokens that find() was told of.
    std::vector<PassTimes::Job> jobs;
  };

  // `share`: of the longest sequence's length, from which on sequences are in classes. The others
  // are shorter.
  ClassSizes(const Problem& problem, double share);

  // Finds the sizes that each class may have. False if one has none within the time.
  bool find(double time, const ConfigurationCharges& charges);

  const std::vector<Class>& classes() const { return classes_; }  // by falling length
  double count() const { return count_; }                         // of their sequences
  bool hasOthers() const { return others_.tokens > 0; }
  // As find() was told: the least rank-seconds of the others, and the most seconds of what a device
  // holds of them.
  double othersWork() const;
  double othersHeld() const;

 private:
  static constexpr size_t kMaxClasses = 64;
  static constexpr int kMaxPackRanks = 16;  // of micro-batches with so many equal sequences,
  static constexpr int kMaxTogether = 128;  // which are listed one by one

  double leastWork(const Load& load, double held) const;
  void findOf(Class& each, double time, const ConfigurationCharges& charges);
  // The ways of a micro-batch that holds all of this load, in one piece.
  WayLists::Ends waysOfWhole(const Load& load, int first, int last) const;
  // How many of the long sequences a micro-batch can have for which its time is that of these
  // alone, and shorter ones add no less than their own work to it; 0 if that is not known.
  int mostTogether(const Load& load, int first, int last, double held) const;
  // Whether no other of the long sequences fits into its micro-batch, and a shorter one adds no
  // less than its own work to it.
  bool alone(const Load& load, int first, int last, double held) const;
  // Whether shorter sequences fit into its micro-batch and may add less than their own work to it.
  bool othersMayHide(const Load& load, int first, int last, double held) const;
  bool addsItsWork(const Load& other, int size, double held) const;

  const CostModel& cost_;
  const int ranks_;
  const int stages_;
  std::vector<Class> classes_;
  double count_ = 0;
  bool equal_ = false;  // the long sequences have one length
  Load shortest_;       // of these
  Load others_;         // sums over the shorter ones
  Load longest_other_, shortest_other_;
  double held_ = 1;                  // tokens of a micro-batch on a rank
  std::pair<double, double> rooms_;  // these, and those of a sequence
};

}  // namespace hdpcomm::planner
