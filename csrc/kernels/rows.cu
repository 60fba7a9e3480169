#include "kernels/rows.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

constexpr int64_t kTileBytes = 1 << 16;
constexpr int kTileRows = kThreads;

// A tile is what a block copies at a time: `rows` whole rows, or one of `chunks` pieces of a row.
struct Tiles {
  int64_t words;  // of a row
  int64_t rows;
  int64_t chunks;
  int64_t count;
};

struct Copy {
  static constexpr bool kReadsTarget = false;
  template <typename Word>
  __device__ static Word apply(const Word&, const Word& from) {
    return from;
  }
};

struct Add {
  static constexpr bool kReadsTarget = true;
  template <typename Word>
  __device__ static Word apply(Word to, const Word& from) {
#pragma unroll
    for (int i = 0; i < Word::kCount; ++i) to.values[i] += from.values[i];
    return to;
  }
};

// The rows of a tile, found by one binary search each.
struct TileRows {
  char* dst[kTileRows];
  const char* src[kTileRows];
};

__device__ void findRows(const RowsArgs& args, int64_t first, int rows, bool write_positions,
                         TileRows& tile) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= rows) return;
  const int64_t index = first + i;
  const RowSegment& segment = args.segments[findSegment(args.segments, args.num_segments, index)];
  const int64_t offset = index - segment.first;
  tile.dst[i] = static_cast<char*>(args.dst) + (segment.dst + offset) * args.dst_stride;
  tile.src[i] = static_cast<const char*>(args.src) + (segment.src + offset) * args.src_stride;
  if (write_positions) args.positions[segment.dst + offset] = segment.position + offset;
}

// kGroup words from word `first` of the tile on, kThreads apart, loads before stores. A tile of
// several rows has at most kTileBytes words, so a 32-bit division finds the row.
template <typename Op, typename Word, int kGroup>
__device__ __forceinline__ void moveWords(const TileRows& tile, const Tiles& tiles, int64_t first) {
  Word from[kGroup];
  Word to[kGroup];
  char* places[kGroup];
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    int64_t word = first + j * kThreads;
    uint32_t row = 0;
    if (tiles.rows > 1) {
      row = static_cast<uint32_t>(word) / static_cast<uint32_t>(tiles.words);
      word -= row * tiles.words;
    }
    const int64_t offset = word * static_cast<int64_t>(sizeof(Word));
    places[j] = tile.dst[row] + offset;
    from[j] = Word::load(tile.src[row] + offset);
    if constexpr (Op::kReadsTarget) to[j] = Word::load(places[j]);
  }
#pragma unroll
  for (int j = 0; j < kGroup; ++j) Op::apply(to[j], from[j]).store(places[j]);
}

template <typename Op, typename Word>
__global__ void __launch_bounds__(kThreads)
    rowsKernel(const __grid_constant__ RowsArgs args, Tiles tiles) {
  __shared__ TileRows tile;
  for (int64_t t = blockIdx.x; t < tiles.count; t += gridDim.x) {
    const int64_t group = tiles.chunks == 1 ? t : t / tiles.chunks;
    const int64_t chunk = tiles.chunks == 1 ? 0 : t % tiles.chunks;
    const int64_t first_row = group * tiles.rows;
    const int64_t left = args.total_rows - first_row;
    const int rows = static_cast<int>(left < tiles.rows ? left : tiles.rows);
    findRows(args, first_row, rows, args.positions != nullptr && chunk == 0, tile);
    __syncthreads();
    int64_t word = tiles.words * chunk / tiles.chunks + threadIdx.x;
    const int64_t end =
        tiles.chunks == 1 ? tiles.words * rows : tiles.words * (chunk + 1) / tiles.chunks;
    for (; word + (kUnroll - 1) * kThreads < end; word += kUnroll * kThreads) {
      moveWords<Op, Word, kUnroll>(tile, tiles, word);
    }
    for (; word < end; word += kThreads) moveWords<Op, Word, 1>(tile, tiles, word);
    __syncthreads();  // `tile` is written again
  }
}

template <typename Op, typename Word>
void launch(const RowsArgs& args, void* stream, const char* name) {
  if (args.total_rows == 0 || (args.row_bytes == 0 && args.positions == nullptr)) return;
  Tiles tiles{};
  tiles.words = args.row_bytes / static_cast<int64_t>(sizeof(Word));
  tiles.rows = std::clamp<int64_t>(kTileBytes / std::max<int64_t>(args.row_bytes, 1), 1, kTileRows);
  tiles.chunks = std::max<int64_t>((args.row_bytes + kTileBytes - 1) / kTileBytes, 1);
  tiles.count = (args.total_rows + tiles.rows - 1) / tiles.rows * tiles.chunks;
  launchKernel<rowsKernel<Op, Word>>(name, blocksFor(tiles.count * kThreads), kThreads, stream,
                                     args, tiles);
}

int64_t widthOf(const RowsArgs& args) {
  return commonWidth(reinterpret_cast<uintptr_t>(args.dst), reinterpret_cast<uintptr_t>(args.src),
                     args.dst_stride, args.src_stride, args.row_bytes);
}

}  // namespace

void copyRowsCuda(const RowsArgs& args, void* stream) {
  checkRows(args);
  switch (widthOf(args)) {
    case 16:
      return launch<Copy, Pack<uint32_t, 4>>(args, stream, "copy_rows");
    case 8:
      return launch<Copy, Pack<uint32_t, 2>>(args, stream, "copy_rows");
    case 4:
      return launch<Copy, Pack<uint32_t, 1>>(args, stream, "copy_rows");
    case 2:
      return launch<Copy, Pack<uint16_t, 1>>(args, stream, "copy_rows");
    default:
      return launch<Copy, Pack<uint8_t, 1>>(args, stream, "copy_rows");
  }
}

void addRowsCuda(const RowsArgs& args, void* stream) {
  checkAddRows(args);
  if (args.row_bytes == 0) return;
  const bool wide = widthOf(args) == 16;
  if (args.dtype == DType::kFloat32) {
    if (wide) return launch<Add, Pack<float, 4>>(args, stream, "add_rows");
    return launch<Add, Pack<float, 1>>(args, stream, "add_rows");
  }
  if (wide) return launch<Add, Pack<double, 2>>(args, stream, "add_rows");
  launch<Add, Pack<double, 1>>(args, stream, "add_rows");
}

}  // namespace hdpcomm::kernels
