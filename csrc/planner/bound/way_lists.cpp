#include "planner/bound/way_lists.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace hdpcomm::planner {

void WayLists::place(std::vector<Item> items, const Limits& limits) {
  limits_ = limits;
  items_ = std::move(items);
  std::sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) {
    const double of_a = wayOf(a);
    const double of_b = wayOf(b);
    return of_a != of_b ? of_a > of_b : a.seconds < b.seconds;
  });
  if (limits_.others) return;
  middle_ = orderWith(nullptr);
  first_ = orderWith(&Ends::first);
  last_ = orderWith(&Ends::last);
  only_ = orderWith(&Ends::only);
}

double WayLists::most(const std::function<double(const Item&)>& gain, double fill) {
  weight_ = 0;
  best_ = {};
  made_of_ = 0;
  cells_ = 0;
  gains_.assign(kCells + 1, 0.0);
  kept_.clear();
  of_item_.clear();
  for (const Item& item : items_) {
    if (cellsOf(item.seconds) == 0) return std::numeric_limits<double>::infinity();
    of_item_.push_back(gain(item));
  }
  limits_.others ? mostBesideOthers(fill) : mostAlone();
  return weight_ * (1 + kTiny);
}

WayLists::List WayLists::best() {
  gains_.assign(kCells + 1, 0.0);
  for (size_t i = 0; i < made_of_; ++i) take(kept_[i]);
  int x = cells_;
  for (size_t i = made_of_; i-- > 0;) {
    const Kept& kept = kept_[i];
    while (x >= kept.cells && gains_[x] > 0 &&
           gains_[x] <= (gains_[x - kept.cells] + kept.gain) * (1 + 1e-13)) {
      x -= kept.cells;
      best_.items.push_back(kept.item);
    }
  }
  return best_;
}

// Rounded down.
int WayLists::cellsOf(double seconds) const {
  return static_cast<int>(std::min(seconds / cell() * (1 - 1e-9), kCells + 1.0));
}

// No more than what the ends of a list of two or more take whose items all have this or more.
double WayLists::wayOf(const Item& item) const {
  double way = item.ends.only;
  if (limits_.forward > 0) way = std::min(way, item.ends.first / limits_.forward);
  if (limits_.forward < 1) way = std::min(way, item.ends.last / (1 - limits_.forward));
  return way;
}

WayLists::Order WayLists::orderWith(double Ends::* end) const {
  Order order;
  for (size_t i = 0; i < items_.size(); ++i) {
    const double with = end == nullptr ? 0 : items_[i].ends.*end;
    const int cells = cellsOf(items_[i].seconds + with);
    if (cells <= kCells) order.emplace_back(cells, i);
  }
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<WayLists::Kept> WayLists::rising(const Order& order) const {
  double most = 0;
  std::vector<Kept> found;
  for (const auto& [cells, item] : order) {
    const double gain = of_item_[item];
    if (gain <= most * (1 + kTiny)) continue;
    most = gain;
    found.push_back({&items_[item], gain, cells});
  }
  return found;
}

// Lists that begin and end with an item.
void WayLists::mostAlone() {
  for (const Kept& each : rising(middle_)) {
    if (each.gain <= gains_[each.cells] * (1 + kTiny)) continue;
    kept_.push_back(each);
    take(each);
  }
  const std::vector<Kept> firsts = rising(first_);
  for (const Kept& last : rising(last_)) {
    for (const Kept& first : firsts) {
      const int left = kCells - last.cells - first.cells;
      if (left < 0) break;
      const double weight = last.gain + first.gain + gains_[left];
      if (weight <= weight_) continue;
      weight_ = weight;
      made_of_ = kept_.size();
      cells_ = left;
      best_.items = {first.item, last.item};
    }
  }
  for (const Kept& only : rising(only_)) {
    if (only.gain <= weight_) continue;
    weight_ = only.gain;
    made_of_ = 0;
    best_.items = {only.item};
  }
}

// Lists with others beside them, which may begin and end them.
void WayLists::mostBesideOthers(double fill) {
  weight_ = fill * (limits_.time - limits_.idle);
  best_.beside = limits_.time - limits_.idle;
  constexpr double kForever = std::numeric_limits<double>::infinity();
  Ends least{kForever, kForever, kForever};  // of the items so far
  for (size_t begin = 0; begin < items_.size();) {
    size_t end = begin;
    const double way = wayOf(items_[begin]);
    for (; end < items_.size() && wayOf(items_[end]) >= kWayStep * way; ++end) {
      const Ends& own = items_[end].ends;
      least = {std::min(least.first, own.first), std::min(least.last, own.last),
               std::min(least.only, own.only)};
      const Kept kept{&items_[end], of_item_[end], cellsOf(items_[end].seconds)};
      if (kept.cells > kCells || kept.gain <= gains_[kept.cells] * (1 + kTiny)) continue;
      kept_.push_back(kept);
      take(kept);
    }
    const double both = std::min(least.only, least.first + least.last);
    note(std::max(both, wayOf(items_[end - 1])), fill);
    begin = end;
  }
}

// Puts it into the lists as often as that helps.
void WayLists::take(const Kept& kept) {
  for (int begin = kept.cells; begin <= kCells; begin += kept.cells) {
    const int end = std::min(begin + kept.cells, kCells + 1);
    const double* const from = gains_.data() + begin - kept.cells;
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
      best_.beside = beside;
    }
    if (fill <= 0) break;
  }
}

// The most seconds of others on a rank whose items take so many.
double WayLists::mostBeside(double seconds, double way) const {
  const double left = std::max(0.0, limits_.time - seconds - way);
  double most = std::max(0.0, limits_.time - seconds - limits_.idle);
  const double hidden = std::max(limits_.forward, 1 - limits_.forward);
  if (hidden < 1) most = std::min(most, left / (1 - hidden));
  return std::min(most, left + limits_.most_hidden);
}

}  // namespace hdpcomm::planner
