#include "kernels/zigzag.hpp"

#include <string>

#include "base/error.hpp"

namespace hdpcomm::kernels {

std::vector<int64_t> zigzagBounds(const int64_t* cu_seqlens, int64_t num_sequences, int64_t ranks) {
  if (ranks < 1) {
    throwInvalidUsage("size is " + std::to_string(ranks) + "; expected at least 1 rank");
  }
  if (num_sequences < 0 || cu_seqlens[0] != 0) {
    throwInvalidUsage("cu_seqlens must begin with 0; it begins with " +
                      (num_sequences < 0 ? "nothing" : std::to_string(cu_seqlens[0])));
  }
  const int64_t pieces = 2 * ranks;
  std::vector<int64_t> bounds(static_cast<size_t>(num_sequences * (pieces + 1)));
  int64_t cursor = 0;
  int64_t* row = bounds.data();
  for (int64_t s = 0; s < num_sequences; ++s, row += pieces + 1) {
    const int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    if (length < 0) {
      throwInvalidUsage("cu_seqlens falls from " + std::to_string(cu_seqlens[s]) + " to " +
                        std::to_string(cu_seqlens[s + 1]) + " at sequence " + std::to_string(s) +
                        "; it must be the running sum of lengths");
    }
    const int64_t least = length / pieces;
    const int64_t longer = length % pieces;
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t turn = (p < ranks ? p : 3 * ranks - 1 - p) - cursor;  // of its slot
      const bool dealt = (turn < 0 ? turn + pieces : turn) < longer;
      row[p + 1] = row[p] + least + static_cast<int64_t>(dealt);
    }
    cursor = (cursor + longer) % pieces;
  }
  return bounds;
}

std::vector<int64_t> evenBounds(const int64_t* cu_seqlens, int64_t num_sequences, int64_t ranks,
                                double key_limit, double limited) {
  if (!(key_limit >= 1) || !(limited >= 0 && limited <= 1)) {
    throwInvalidUsage("key_limit is " + std::to_string(key_limit) + " and limited " +
                      std::to_string(limited) + "; expected at least 1 key, and a share");
  }
  std::vector<int64_t> bounds = zigzagBounds(cu_seqlens, num_sequences, ranks);
  // Twice the keys that the queries before a position see, as what they cost.
  const auto work = [=](int64_t stop) {
    const auto x = static_cast<double>(stop);
    const double few = x <= key_limit ? x * x : key_limit * (2 * x - key_limit);
    return (1 - limited) * x * x + limited * few;
  };
  const int64_t pieces = 2 * ranks;
  int64_t* row = bounds.data();
  for (int64_t s = 0; s < num_sequences; ++s, row += pieces + 1) {
    const std::vector<int64_t> plain(row, row + pieces + 1);
    int64_t first = 0;
    int64_t last = row[pieces];
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t tail = pieces - 1 - r;
      const int64_t count = plain[r + 1] - plain[r] + plain[tail + 1] - plain[tail];
      const double mean = (work(last) - work(first)) / static_cast<double>(ranks - r);
      const auto excess = [&](int64_t head) {
        return work(first + head) - work(first) + work(last) - work(last - count + head) - mean;
      };
      int64_t low = 0;
      int64_t high = count;
      while (low < high) {  // the shortest head without too much work, which falls with the head
        const int64_t middle = low + (high - low) / 2;
        if (excess(middle) <= 0) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      if (low > 0 && excess(low - 1) < -excess(low)) --low;
      first += low;
      last -= count - low;
      row[r + 1] = first;
      row[tail] = last;
    }
  }
  return bounds;
}

}  // namespace hdpcomm::kernels
