#include "planner/bound/way_lists.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace hdpcomm::planner {

void WayLists::place(std::vector<Item> items, const Limits& limits) {
  limits_ = limits;
  items_ = std::move(items);
  for (Item& item : items_) item.cells = static_cast<int>(item.seconds / cell() * (1 - 1e-9));
  std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return a.way != b.way ? a.way > b.way : a.cells < b.cells;
  });
}

double WayLists::most(const std::function<double(const Item&)>& gain, double fill) {
  weight_ = fill * (limits_.time - limits_.idle);
  beside_ = limits_.time - limits_.idle;
  made_of_ = 0;
  cells_ = 0;
  gains_.assign(kCells + 1, 0.0);
  kept_.clear();
  for (size_t begin = 0; begin < items_.size();) {
    size_t end = begin;
    for (; end < items_.size() && items_[end].way >= kWayStep * items_[begin].way; ++end) {
      const Item& item = items_[end];
      if (item.cells == 0) return std::numeric_limits<double>::infinity();
      if (item.cells > kCells) continue;
      const Kept kept{&item, gain(item)};
      if (kept.gain <= gains_[item.cells] * (1 + kTiny)) continue;
      kept_.push_back(kept);
      take(kept);
    }
    note(items_[end - 1].way, fill);
    begin = end;
  }
  return weight_ * (1 + kTiny);
}

WayLists::List WayLists::best() {
  List list{{}, beside_};
  gains_.assign(kCells + 1, 0.0);
  for (size_t i = 0; i < made_of_; ++i) take(kept_[i]);
  int x = cells_;
  for (size_t i = made_of_; i-- > 0;) {
    const auto& [item, gain] = kept_[i];
    while (x >= item->cells && gains_[x] > 0 &&
           gains_[x] <= (gains_[x - item->cells] + gain) * (1 + 1e-13)) {
      x -= item->cells;
      list.items.push_back(item);
    }
  }
  return list;
}

// Puts it into the lists as often as that helps.
void WayLists::take(const Kept& kept) {
  const int cells = kept.item->cells;
  for (int begin = cells; begin <= kCells; begin += cells) {
    const int end = std::min(begin + cells, kCells + 1);
    const double* const from = gains_.data() + begin - cells;
    double* const to = gains_.data() + begin;
    for (int x = 0; x < end - begin; ++x) to[x] = std::max(to[x], from[x] + kept.gain);
  }
}

// Looks for the best one of the lists so far, whose ways are no shorter.
void WayLists::note(double way, double fill) {
  const double room = limits_.time - std::max(way, limits_.idle);
  for (int x = std::min(kCells, static_cast<int>(room / cell() * (1 + 1e-9))); x >= 0; --x) {
    const double beside = fill > 0 ? mostBeside(x * cell(), way) : 0;
    const double weight = gains_[x] + fill * beside;
    if (weight > weight_) {
      weight_ = weight;
      made_of_ = kept_.size();
      cells_ = x;
      beside_ = beside;
    }
    if (fill <= 0) break;
  }
}

// The most seconds of others on a rank whose items take so many.
double WayLists::mostBeside(double seconds, double way) const {
  const double left = std::max(0.0, limits_.time - seconds - way);
  double most = std::max(0.0, limits_.time - seconds - limits_.idle);
  if (limits_.hidden_share < 1) most = std::min(most, left / (1 - limits_.hidden_share));
  return std::min(most, left + limits_.most_hidden);
}

}  // namespace hdpcomm::planner
