#include "cuda_launch.cuh"
#include "hdpcomm/kernels/rows.hpp"

namespace hdpcomm::kernels {
namespace {

struct Copy {
  template <typename Word>
  __device__ static void apply(Word* dst, const Word* src) {
    *dst = *src;
  }
};

struct Add {
  template <typename Word>
  __device__ static void apply(Word* dst, const Word* src) {
    *dst = addElement(*dst, *src);
  }
  __device__ static void apply(float4* dst, const float4* src) {
    const float4 a = *dst;
    const float4 b = *src;
    *dst = make_float4(addElement(a.x, b.x), addElement(a.y, b.y), addElement(a.z, b.z),
                       addElement(a.w, b.w));
  }
  __device__ static void apply(double2* dst, const double2* src) {
    const double2 a = *dst;
    const double2 b = *src;
    *dst = make_double2(addElement(a.x, b.x), addElement(a.y, b.y));
  }
};

// One thread a word of sizeof(Word) bytes; `words` of them make a row.
template <typename Op, typename Word>
__global__ void rowsKernel(RowsArgs args, int64_t words) {
  const int64_t total = args.total_rows * words;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const int64_t index = i / words;
    const int64_t word = i % words;
    const RowSegment segment = args.segments[findSegment(args.segments, args.num_segments, index)];
    const int64_t offset = index - segment.first;
    auto* dst = static_cast<char*>(args.dst) + (segment.dst + offset) * args.dst_stride;
    const auto* src = static_cast<const char*>(args.src) + (segment.src + offset) * args.src_stride;
    Op::apply(reinterpret_cast<Word*>(dst) + word, reinterpret_cast<const Word*>(src) + word);
  }
}

template <typename Op, typename Word>
void launch(const RowsArgs& args, void* stream, const char* name) {
  const int64_t words = args.row_bytes / static_cast<int64_t>(sizeof(Word));
  if (args.total_rows == 0 || words == 0) return;
  rowsKernel<Op, Word>
      <<<blocksFor(args.total_rows * words), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          args, words);
  checkLaunch(name);
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
      return launch<Copy, int4>(args, stream, "copy_rows");
    case 8:
      return launch<Copy, int64_t>(args, stream, "copy_rows");
    case 4:
      return launch<Copy, int32_t>(args, stream, "copy_rows");
    case 2:
      return launch<Copy, int16_t>(args, stream, "copy_rows");
    default:
      return launch<Copy, int8_t>(args, stream, "copy_rows");
  }
}

void addRowsCuda(const RowsArgs& args, DType dtype, void* stream) {
  checkAddRows(args, dtype);
  const bool wide = widthOf(args) == 16;
  if (dtype == DType::kFloat32) {
    if (wide) return launch<Add, float4>(args, stream, "add_rows");
    return launch<Add, float>(args, stream, "add_rows");
  }
  if (wide) return launch<Add, double2>(args, stream, "add_rows");
  launch<Add, double>(args, stream, "add_rows");
}

}  // namespace hdpcomm::kernels
