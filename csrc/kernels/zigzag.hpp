// Zigzag sharding of packed sequences, on the host.
#pragma once

#include <cstdint>
#include <vector>

namespace hdpcomm::kernels {

// Piece boundaries [num_sequences, 2 * ranks + 1] of a pack, row-major: bounds[s][p] is the first
// token, inside sequence s, of piece p; the last column holds the lengths.
//
// A sequence of `length` tokens over N ranks is cut in 2N pieces; rank r holds pieces r and 2N-1-r.
// length % 2N pieces are one token longer. They are dealt like cards over slots 0..2N-1, where
// slots r and N+r are the head and the tail piece of rank r. The next sequence continues where the
// dealing stopped, so that the ranks' totals over a whole pack differ by at most one token.
//
// Throws InvalidUsage for cu_seqlens that do not begin with 0 or that fall, or for ranks < 1.
std::vector<int64_t> zigzagBounds(const int64_t* cu_seqlens, int64_t num_sequences, int64_t ranks);

// The same with as many tokens on each rank, and with equal work where of the attention a share
// `limited` is over at most `key_limit` keys a query: heads and tails then differ in length.
//
// A query's work does not fall along the sequence, so some head and tail of the right number of
// tokens have the mean work of what is left, from the ends to the middle; whole tokens miss it by
// the work of one.
std::vector<int64_t> evenBounds(const int64_t* cu_seqlens, int64_t num_sequences, int64_t ranks,
                                double key_limit, double limited);

}  // namespace hdpcomm::kernels
