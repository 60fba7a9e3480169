// How the fake says what is wrong, and who is to blame.
#include <algorithm>
#include <set>

#include "testing/fake_nccl.hpp"

namespace hdpcomm::testing {

std::string FakeNccl::who(const Posted& posted) const {
  return "rank " + std::to_string(posted.rank->rank) + " in " +
         (posted.item->label.empty() ? "an operation" : posted.item->label);
}

// The rank whose order of operations differs from that of most ranks that share operations with it.
std::string FakeNccl::culprit() const {
  std::vector<int> disagreements(ranks_.size());
  for (size_t a = 0; a < ranks_.size(); ++a) {
    for (size_t b = a + 1; b < ranks_.size(); ++b) {
      const std::set<std::string> in_a(ranks_[a].order.begin(), ranks_[a].order.end());
      const std::set<std::string> in_b(ranks_[b].order.begin(), ranks_[b].order.end());
      std::vector<std::string> shared_a;
      std::vector<std::string> shared_b;
      for (const auto& label : ranks_[a].order) {
        if (in_b.count(label) > 0) shared_a.push_back(label);
      }
      for (const auto& label : ranks_[b].order) {
        if (in_a.count(label) > 0) shared_b.push_back(label);
      }
      if (shared_a == shared_b) continue;
      ++disagreements[a];
      ++disagreements[b];
    }
  }
  const int most = *std::max_element(disagreements.begin(), disagreements.end());
  std::string ranks;
  for (size_t i = 0; i < ranks_.size() && most > 0; ++i) {
    if (disagreements[i] == most) ranks += (ranks.empty() ? "" : ", ") + std::to_string(i);
  }
  return ranks.empty() ? "" : "; the order of rank " + ranks + " differs from the others'";
}

std::string FakeNccl::stuck() {
  std::string text = "the ranks wait for each other for ever:";
  for (const Rank& rank : ranks_) {
    if (rank.stream.empty()) continue;
    const Item& item = rank.stream.front();
    text += " rank " + std::to_string(rank.rank) + " in " +
            (item.label.empty() ? "an operation" : item.label);
    if (item.whole) text += " (" + item.whole->name + ")";
    for (const Transfer& transfer : item.group) {
      if (transfer.done) continue;
      static constexpr const char* kTexts[] = {" sends to ", " receives from ", " puts to ",
                                               " signals ", " waits for signals of "};
      text += kTexts[static_cast<int>(transfer.kind)] + std::to_string(transfer.peer);
      break;
    }
    text += ";";
  }
  return text.substr(0, text.size() - 1) + culprit();
}

}  // namespace hdpcomm::testing
