// Zigzag sharding of packed sequences, on the host.
#pragma once

#include <cstdint>
#include <vector>

namespace hdpcomm::kernels {

// Piece boundaries [num_sequences, 2 * ranks + 1] of a pack, row-major: bounds[s][p] is the first
// token, inside sequence s, of piece p; the last column holds the lengths.
// Throws InvalidUsage for cu_seqlens that do not begin with 0 or that fall, or for ranks < 1.
std::vector<int64_t> zigzagBounds(const int64_t* cu_seqlens, int64_t num_sequences, int64_t ranks);

}  // namespace hdpcomm::kernels
