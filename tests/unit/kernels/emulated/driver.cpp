// Runs every CUDA kernel, emulated, beside its CPU twin on random sizes and alignments. Both use
// the same element functions here, so all but sums in another order must be equal to the bit.
// usage: driver [ROUNDS]; exit code 1 at the first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "device/cuda/loading.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/merge.hpp"
#include "kernels/peers.hpp"
#include "kernels/reduce.hpp"
#include "kernels/relay.hpp"
#include "kernels/rows.hpp"

using namespace hdpcomm;
using namespace hdpcomm::kernels;

// Kernels are here when the program starts.
bool hdpcomm::cuda::enterKernel(Kernel&) { return true; }

namespace {

std::mt19937_64 random_source{7};
const char* running = "";

int64_t pick(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_source);
}

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "%s: %s\n", running, what);
  std::exit(1);
}

// `count` elements that begin `offset` elements after a multiple of 256 bytes and end with their
// memory, as allocations of a GPU begin; so the sanitizer sees every access beyond either end of
// the words that hold them.
class Memory {
 public:
  Memory(int64_t count, size_t element, int64_t offset)
      : bytes_(static_cast<size_t>(count) * element),
        start_(static_cast<size_t>(offset) * element) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, std::max<size_t>(start_ + bytes_, 1)) != 0) std::abort();
    memory_.reset(static_cast<char*>(memory));
  }
  char* get() { return memory_.get() + start_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(get());
  }
  void copy(Memory& other) { std::memcpy(get(), other.get(), bytes_); }
  bool equals(Memory& other) { return std::memcmp(get(), other.get(), bytes_) == 0; }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t bytes_;
  size_t start_;
};

// Finite values of a type; bool: 0 and 1.
void randomise(Memory& memory, DType dtype) {
  const size_t element = dtypeBytes(dtype);
  for (size_t i = 0; i < memory.bytes() / element; ++i) {
    const auto bits = random_source();
    char* at = memory.get() + i * element;
    const double value = static_cast<double>(pick(-1000, 1000)) / 64;
    const auto narrow_value = static_cast<float>(value);
    switch (dtype) {
      case DType::kFloat64:
        std::memcpy(at, &value, 8);
        break;
      case DType::kFloat32:
        std::memcpy(at, &narrow_value, 4);
        break;
      case DType::kFloat16:
      case DType::kBFloat16: {
        const auto small =
            static_cast<uint16_t>(0x3c00 + bits % 0x800 + ((bits >> 20) % 2) * 0x8000);
        std::memcpy(at, &small, 2);
        break;
      }
      case DType::kBool:
        *at = static_cast<char>(bits & 1);
        break;
      default:
        std::memcpy(at, &bits, element);
    }
  }
}

Memory fresh(int64_t count, DType dtype, int64_t offset) {
  Memory memory(count, dtypeBytes(dtype), offset);
  randomise(memory, dtype);
  return memory;
}

int64_t someCount() { return pick(0, 3) == 0 ? pick(0, 40) : pick(0, 6000); }

void testReduce() {
  running = "reduce";
  const auto dtype = static_cast<DType>(pick(0, kNumDTypes - 1));
  const auto op = static_cast<RedOp>(pick(0, 3));
  const int64_t count = someCount();
  Memory a = fresh(count, dtype, pick(0, 17));
  Memory b = fresh(count, dtype, pick(0, 17));
  Memory out = fresh(count, dtype, pick(0, 17));
  Memory want = fresh(count, dtype, 0);
  reduceCpu({want.get(), a.get(), b.get(), count, dtype, op});
  Memory& target = pick(0, 2) == 0 ? a : out;
  reduceCuda({target.get(), a.get(), b.get(), count, dtype, op}, nullptr);
  expect(target.equals(want), "differs");
}

void testDivide() {
  running = "divide";
  const auto dtype = static_cast<DType>(pick(5, 8));
  const int64_t count = someCount();
  Memory x = fresh(count, dtype, pick(0, 17));
  Memory want = fresh(count, dtype, 0);
  want.copy(x);
  divideCpu({want.get(), count, 3.0, dtype});
  divideCuda({x.get(), count, 3.0, dtype}, nullptr);
  expect(x.equals(want), "differs");
}

void testFold() {
  running = "fold";
  FoldArgs args;
  args.dtype = static_cast<DType>(pick(0, kNumDTypes - 1));
  args.op = static_cast<RedOp>(pick(0, 3));
  if (args.dtype >= DType::kFloat16 && args.dtype <= DType::kFloat64 && pick(0, 2) == 0) {
    args.op = RedOp::kAvg;
  }
  args.count = someCount();
  args.num_inputs = static_cast<int>(pick(1, 19));
  args.num_outputs = static_cast<int>(pick(1, 3));
  const bool aligned = pick(0, 1) == 0;
  std::vector<Memory> buffers;
  for (int p = 0; p < args.num_inputs + 2 * args.num_outputs; ++p) {
    buffers.push_back(fresh(args.count, args.dtype, aligned ? 1 : pick(0, 17)));
  }
  FoldArgs want = args;
  for (int p = 0; p < args.num_inputs; ++p) args.inputs[p] = want.inputs[p] = buffers[p].get();
  for (int p = 0; p < args.num_outputs; ++p) {
    args.outputs[p] = buffers[args.num_inputs + 2 * p].get();
    want.outputs[p] = buffers[args.num_inputs + 2 * p + 1].get();
  }
  foldCpu(want);
  foldCuda(args, nullptr);
  for (int p = 0; p < args.num_outputs; ++p) {
    const int i = args.num_inputs + 2 * p;
    expect(buffers[i].equals(buffers[i + 1]), "differs");
  }
}

void testCollect() {
  running = "collect";
  CollectArgs args;
  args.num_inputs = static_cast<int>(pick(1, 9));
  args.first = static_cast<int>(pick(0, args.num_inputs - 1));
  args.bytes = pick(0, 1) == 0 ? pick(0, 50) : pick(0, 40000);
  args.stride = args.bytes + pick(0, 1) * pick(0, 40);
  Memory out = fresh(args.num_inputs * args.stride, DType::kUint8, pick(0, 17));
  Memory want = fresh(args.num_inputs * args.stride, DType::kUint8, 0);
  want.copy(out);
  std::vector<Memory> inputs;
  for (int p = 0; p < args.num_inputs; ++p) {
    inputs.push_back(fresh(args.bytes, DType::kUint8, pick(0, 17)));
    args.inputs[p] = inputs[p].get();
  }
  args.out = want.get();
  collectCpu(args);
  std::memcpy(out.get() + args.first * args.stride, args.inputs[args.first],
              static_cast<size_t>(args.bytes));
  args.inputs[args.first] = out.get() + args.first * args.stride;  // already in its place
  args.out = out.get();
  collectCuda(args, nullptr);
  expect(out.equals(want), "differs");
}

void testPut() {
  running = "put";
  const int64_t bytes = pick(0, 20000);
  Memory src = fresh(bytes, DType::kUint8, pick(0, 17));
  Memory dst = fresh(bytes, DType::kUint8, pick(0, 17));
  uint32_t flag = 0;
  putCuda({dst.get(), src.get(), bytes, &flag, 9}, nullptr);
  expect(dst.equals(src) && flag == 9, "differs");
}

DType anyType() {
  constexpr DType kTypes[] = {DType::kBool,    DType::kUint8,  DType::kInt8,    DType::kInt16,
                              DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBFloat16,
                              DType::kFloat32, DType::kFloat64};
  return kTypes[pick(0, 9)];
}

// All types; ranks that wait for each other: ranks.cpp.
void testRelay() {
  running = "relay";
  RelayArgs args;
  args.dtype = anyType();
  constexpr RedOp kOps[] = {RedOp::kSum, RedOp::kProd, RedOp::kMin, RedOp::kMax};
  args.op = pick(0, 2) == 0 ? RedOp::kNone : kOps[pick(0, 3)];
  args.num_items = static_cast<int>(pick(1, 9));
  std::vector<Memory> memories;
  std::vector<uint32_t> flags(2 * static_cast<size_t>(args.num_items), 0);
  for (int i = 0; i < args.num_items; ++i) {
    RelayItem& item = args.items[i];
    const int64_t count = pick(0, 500);
    item.bytes = count * static_cast<int64_t>(dtypeBytes(args.dtype));
    for (int m = 0; m < 4; ++m) memories.push_back(fresh(count, args.dtype, pick(0, 3)));
    item.src = memories[4 * i].get();
    item.dst = memories[4 * i + 1].get();
    if (args.op != RedOp::kNone && pick(0, 1) == 0) item.operand = memories[4 * i + 2].get();
    if (pick(0, 3) != 0) item.wait = &flags[2 * i], flags[2 * i] = 1;
    if (pick(0, 3) != 0) item.set = &flags[2 * i + 1];
  }
  relayCuda(args, nullptr);
  for (int i = 0; i < args.num_items; ++i) {
    RelayItem item = args.items[i];
    item.dst = memories[4 * i + 3].get();
    relayItemCpu(item, args.dtype, args.op);
    expect(memories[4 * i + 1].equals(memories[4 * i + 3]), "differs");
    expect(flags[2 * i] == 0 && flags[2 * i + 1] == (item.set != nullptr ? 1 : 0), "flags differ");
  }
}

void testPushFold() {
  running = "push_fold";
  PushFoldArgs args;
  args.dtype = anyType();
  constexpr RedOp kOps[] = {RedOp::kSum, RedOp::kProd, RedOp::kMin, RedOp::kMax, RedOp::kAvg};
  const bool floats = args.dtype == DType::kFloat16 || args.dtype == DType::kBFloat16 ||
                      args.dtype == DType::kFloat32 || args.dtype == DType::kFloat64;
  args.op = kOps[pick(0, floats ? 4 : 3)];
  args.count = pick(1, 600);
  args.num_inputs = static_cast<int>(pick(1, 12));
  std::vector<Memory> inputs;
  std::vector<uint32_t> flags(2 * static_cast<size_t>(args.num_inputs), 0);
  for (int p = 0; p < args.num_inputs; ++p) {
    inputs.push_back(fresh(args.count, args.dtype, pick(0, 3)));
  }
  Memory out = fresh(args.count, args.dtype, pick(0, 3));
  Memory want = fresh(args.count, args.dtype, 0);
  Memory pushed = fresh(args.count, args.dtype, pick(0, 3));
  for (int p = 0; p < args.num_inputs; ++p) {
    args.inputs[p] = inputs[p].get();
    if (p > 0) args.waits[p] = &flags[2 * p], flags[2 * p] = 1, args.sets[p] = &flags[2 * p + 1];
  }
  uint32_t credit = 1, full = 0;
  args.pushes[args.num_pushes++] = {
      pushed.get(), inputs[0].get(),
      nullptr,      args.count * static_cast<int64_t>(dtypeBytes(args.dtype)),
      &credit,      &full};
  FoldArgs fold = foldOf(args);
  fold.outputs[0] = want.get();
  foldCpu(fold);
  args.out = out.get();
  pushFoldCuda(args, nullptr);
  expect(out.equals(want) && pushed.equals(inputs[0]), "differs");
  expect(credit == 0 && full == 1, "flags of the push differ");
  for (int p = 1; p < args.num_inputs; ++p) {
    expect(flags[2 * p] == 0 && flags[2 * p + 1] == 1, "flags differ");
  }
}

void testRows() {
  running = "rows";
  RowsArgs args;
  const bool add = pick(0, 2) == 0;
  args.dtype = pick(0, 1) == 0 ? DType::kFloat32 : DType::kFloat64;
  const int64_t element = add ? static_cast<int64_t>(dtypeBytes(args.dtype)) : pick(1, 4);
  const int64_t elements = pick(0, 9) == 0 ? pick(20000, 60000) : pick(0, 70);
  args.row_bytes = element * elements;
  args.dst_stride = args.row_bytes + element * pick(0, 2);
  args.src_stride = args.row_bytes + element * pick(0, 2);
  std::vector<RowSegment> segments;
  int64_t dst = 0;
  int64_t src = 0;
  for (int64_t s = pick(0, 5); s > 0; --s) {
    const int64_t rows = elements > 70 ? pick(1, 2) : pick(1, 400);
    dst += pick(0, 2);
    src += pick(0, 2);
    segments.push_back({dst, src, rows, args.total_rows, pick(0, 1000)});
    args.total_rows += rows;
    dst += rows;
    src += rows;
  }
  args.segments = segments.data();
  args.num_segments = static_cast<int64_t>(segments.size());
  const DType type = add ? args.dtype : DType::kUint8;
  const auto width = static_cast<int64_t>(dtypeBytes(type));
  Memory from = fresh(src * args.src_stride / width, type, add ? pick(0, 3) : pick(0, 17));
  Memory to = fresh(dst * args.dst_stride / width, type, add ? pick(0, 3) : pick(0, 17));
  Memory want = fresh(dst * args.dst_stride / width, type, 0);
  Memory positions = fresh(dst, DType::kInt64, 1);
  Memory want_positions = fresh(dst, DType::kInt64, 0);
  want.copy(to);
  want_positions.copy(positions);
  args.src = from.get();
  args.dst = want.get();
  if (!add && pick(0, 1) == 0) args.positions = want_positions.as<int64_t>();
  add ? addRowsCpu(args) : copyRowsCpu(args);
  args.dst = to.get();
  if (args.positions != nullptr) args.positions = positions.as<int64_t>();
  add ? addRowsCuda(args, nullptr) : copyRowsCuda(args, nullptr);
  expect(to.equals(want), "differs");
  expect(positions.equals(want_positions), "positions differ");
}

void testMerge() {
  running = "merge";
  MergeArgs args;
  constexpr DType kBlocks[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  args.block = kBlocks[pick(0, 3)];
  args.acc = args.block == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  args.tokens = pick(0, 60);
  args.heads = pick(1, 4);
  args.dim = pick(0, 2) == 0 ? pick(0, 300) : 8 * pick(1, 32);
  args.block_lse_token_stride = 1;
  args.block_lse_head_stride = args.tokens;
  const int64_t lses = args.tokens * args.heads;
  Memory out = fresh(lses * args.dim, args.acc, pick(0, 1) * pick(0, 5));
  Memory want = fresh(lses * args.dim, args.acc, 0);
  Memory lse = fresh(lses, args.acc, pick(0, 5));
  Memory want_lse = fresh(lses, args.acc, 0);
  Memory block = fresh(lses * args.dim, args.block, pick(0, 1) * pick(0, 5));
  Memory block_lse = fresh(lses, args.acc, 0);
  for (int64_t i = 0; i < lses; ++i) {
    for (Memory* memory : {&lse, &block_lse}) {
      if (pick(0, 3) != 0) continue;
      if (args.acc == DType::kFloat64) memory->as<double>()[i] = -INFINITY;
      if (args.acc == DType::kFloat32) memory->as<float>()[i] = -INFINITY;
    }
  }
  std::vector<int64_t> rows(static_cast<size_t>(args.tokens));
  for (int64_t i = 0; i < args.tokens; ++i) rows[i] = i;
  std::shuffle(rows.begin(), rows.end(), random_source);
  if (pick(0, 1) == 0) args.rows = rows.data();
  want.copy(out);
  want_lse.copy(lse);
  args.block_out = block.get();
  args.block_lse = block_lse.get();
  args.out = want.get();
  args.lse = want_lse.get();
  mergeCpu(args, 1);
  args.out = out.get();
  args.lse = lse.get();
  mergeCuda(args, nullptr);
  expect(lse.equals(want_lse), "lse differs");
  expect(out.equals(want), "out differs");
}

bool close(const float* a, const float* b, int64_t count, double tolerance) {
  for (int64_t i = 0; i < count; ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    if (!(std::fabs(a[i] - b[i]) <= tolerance * std::max(1.0F, std::fabs(b[i])))) return false;
  }
  return true;
}

void testCrossEntropy() {
  running = "cross-entropy";
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  CrossEntropyShape shape;
  shape.dtype = kTypes[pick(0, 2)];
  shape.tokens = pick(0, 40);
  shape.columns = pick(0, 2) == 0 ? pick(2049, 40000) : pick(1, 2048);
  if (shape.columns > 2048) shape.tokens = pick(0, 3);
  shape.stride = shape.columns + pick(0, 3);
  shape.first_column = pick(0, 1) * 100;
  shape.total_columns = shape.first_column + shape.columns + pick(0, 1) * 100;
  const int64_t logits_count =
      shape.tokens == 0 ? 0 : (shape.tokens - 1) * shape.stride + shape.columns;
  Memory logits = fresh(logits_count, shape.dtype, pick(0, 17));
  Memory labels = fresh(shape.tokens, DType::kInt64, 0);
  for (int64_t i = 0; i < shape.tokens; ++i) {
    labels.as<int64_t>()[i] =
        pick(0, 3) == 0 ? shape.ignore_index : pick(0, shape.total_columns - 1);
  }
  Memory stats = fresh(3 * shape.tokens, DType::kFloat32, 0);
  Memory want_stats = fresh(3 * shape.tokens, DType::kFloat32, 0);
  crossEntropyStatsCpu({shape, logits.get(), labels.as<int64_t>(), want_stats.as<float>()}, 1);
  crossEntropyStatsCuda({shape, logits.get(), labels.as<int64_t>(), stats.as<float>()}, nullptr);
  expect(close(stats.as<float>(), want_stats.as<float>(), 3 * shape.tokens, 2e-6), "stats differ");

  Memory weights = fresh(shape.tokens, DType::kFloat32, 0);
  Memory sums = fresh(2 * shape.tokens, DType::kFloat32, 0);
  Memory want_sums = fresh(2 * shape.tokens, DType::kFloat32, 0);
  Memory loss = fresh(shape.tokens, DType::kFloat32, 0);
  Memory want_loss = fresh(shape.tokens, DType::kFloat32, 0);
  CrossEntropyLossArgs args{.stats = stats.as<float>(),
                            .labels = labels.as<int64_t>(),
                            .weights = pick(0, 1) == 0 ? nullptr : weights.as<float>(),
                            .sums = want_sums.as<float>(),
                            .loss = want_loss.as<float>(),
                            .shards = 1,
                            .tokens = shape.tokens,
                            .ignore_index = shape.ignore_index};
  crossEntropyLossCpu(args);
  args.sums = sums.as<float>();
  args.loss = loss.as<float>();
  crossEntropyLossCuda(args, nullptr);
  expect(sums.equals(want_sums) && loss.equals(want_loss), "losses differ");

  Memory upstream = fresh(shape.tokens + 1, DType::kFloat32, 0);
  Memory grad = fresh(logits_count, shape.dtype, pick(0, 17));
  Memory want_grad = fresh(logits_count, shape.dtype, 0);
  const bool in_place = pick(0, 1) == 0;
  want_grad.copy(in_place ? logits : grad);  // what lies between the rows stays
  CrossEntropyGradArgs grads{.shape = shape,
                             .logits = logits.get(),
                             .labels = labels.as<int64_t>(),
                             .sums = sums.as<float>(),
                             .weights = args.weights,
                             .upstream = upstream.as<float>(),
                             .upstream_stride = pick(0, 1),
                             .grad = want_grad.get()};
  crossEntropyGradCpu(grads, 1);
  grads.grad = in_place ? logits.get() : grad.get();
  crossEntropyGradCuda(grads, nullptr);
  expect((in_place ? logits : grad).equals(want_grad), "gradients differ");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  for (int i = 0; i < rounds; ++i) {
    for (void (*test)() : {testReduce, testDivide, testFold, testCollect, testPut, testRelay,
                           testPushFold, testRows, testMerge, testCrossEntropy}) {
      test();
    }
  }
  std::printf("%d rounds equal\n", rounds);
  return 0;
}
