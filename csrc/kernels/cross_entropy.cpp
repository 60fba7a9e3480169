#include "kernels/cross_entropy.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "kernels/parallel.hpp"
#include "kernels/reduce.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/softmax_elem.hpp"
#include "kernels/vector_clones.hpp"

namespace hdpcomm::kernels {
namespace {

constexpr int64_t kChunk = 1024;  // columns whose fp32 values stay in the first-level cache
constexpr int64_t kLanes = 16;    // independent partial results, so that loops vectorise

template <typename T>
struct Row {
  // Widens a chunk to fp32 and updates the running maximum of each lane.
  HDP_VECTOR_CLONES static void widenChunk(const T* logits, int64_t count, float* wide,
                                           float* maxima) {
    for (int64_t i = 0; i < count; ++i) wide[i] = widen(logits[i]);
    for (int64_t i = count; i < (count + kLanes - 1) / kLanes * kLanes; ++i) wide[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) maxima[l] = larger(maxima[l], wide[i + l]);
    }
  }

  HDP_VECTOR_CLONES static void sumChunk(const float* wide, int64_t count, float offset,
                                         float* sums) {
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) sums[l] += expNegative(wide[i + l] - offset);
    }
  }

  HDP_VECTOR_CLONES static void gradient(const T* logits, int64_t count, TokenScale token,
                                         T* grad) {
    for (int64_t i = 0; i < count; ++i) {
      narrow(softmaxGradient(widen(logits[i]), token, false), grad[i]);
    }
  }

  static OnlineSum sum(const T* logits, int64_t columns) {
    alignas(64) float wide[kChunk];
    float max = -INFINITY;
    double total = 0.0;  // of exp(x - max)
    for (int64_t at = 0; at < columns; at += kChunk) {
      const int64_t count = std::min(kChunk, columns - at);
      float maxima[kLanes];
      float sums[kLanes] = {};
      std::fill_n(maxima, kLanes, max);
      widenChunk(logits + at, count, wide, maxima);
      const float before = max;
      for (const float lane : maxima) max = larger(max, lane);
      const float offset = offsetOf(max);
      sumChunk(wide, count, offset, sums);
      total *= expNegative(before - offset);
      for (const float lane : sums) total += static_cast<double>(lane);
    }
    return {max, static_cast<float>(total)};
  }
};

template <typename T>
void statsOfRows(const CrossEntropyStatsArgs& args, int64_t begin, int64_t end) {
  const CrossEntropyShape& shape = args.shape;
  for (int64_t i = begin; i < end; ++i) {
    const T* row = static_cast<const T*>(args.logits) + i * shape.stride;
    const LabelKind kind = kindOf(shape, args.labels[i]);
    const OnlineSum sum =
        kind == LabelKind::kIgnored ? OnlineSum{0.0f, 0.0f} : Row<T>::sum(row, shape.columns);
    args.stats[i] = sum.max;
    args.stats[shape.tokens + i] = sum.sum;
    args.stats[2 * shape.tokens + i] =
        kind == LabelKind::kHere ? widen(row[args.labels[i] - shape.first_column]) : 0.0f;
  }
}

template <typename T>
void gradOfRows(const CrossEntropyGradArgs& args, int64_t begin, int64_t end) {
  const CrossEntropyShape& shape = args.shape;
  for (int64_t i = begin; i < end; ++i) {
    const T* row = static_cast<const T*>(args.logits) + i * shape.stride;
    T* grad = static_cast<T*>(args.grad) + i * shape.stride;
    const LabelKind kind = kindOf(shape, args.labels[i]);
    if (kind == LabelKind::kIgnored) {
      std::fill_n(grad, shape.columns, T{});
      continue;
    }
    const float scale = args.upstream[i * args.upstream_stride] *
                        (args.weights == nullptr ? 1.0f : args.weights[i]);
    const int64_t label = args.labels[i] - shape.first_column;
    // Read now: the gradient may overwrite it.
    const float at_label = kind == LabelKind::kHere ? widen(row[label]) : 0.0f;
    const TokenScale token = scaleOf({args.sums[i], args.sums[shape.tokens + i]}, scale);
    Row<T>::gradient(row, shape.columns, token, grad);
    if (kind == LabelKind::kHere) {
      narrow(softmaxGradient(at_label, token, true), grad[label]);
    }
  }
}

void checkLabels(const CrossEntropyShape& shape, const int64_t* labels) {
  for (int64_t i = 0; i < shape.tokens; ++i) {
    if (kindOf(shape, labels[i]) == LabelKind::kInvalid) {
      throwInvalidUsage("label " + std::to_string(labels[i]) + " of token " + std::to_string(i) +
                        " is outside the vocabulary; expected 0 to " +
                        std::to_string(shape.total_columns - 1) + ", or ignore_index " +
                        std::to_string(shape.ignore_index));
    }
  }
}

}  // namespace

void checkCrossEntropy(const CrossEntropyShape& shape, const void* logits) {
  if (shape.dtype != DType::kFloat32 && shape.dtype != DType::kBFloat16 &&
      shape.dtype != DType::kFloat16) {
    throwInvalidUsage(std::string("no cross-entropy of logits of ") + dtypeName(shape.dtype) +
                      "; expected float32, bfloat16 or float16");
  }
  checkCount("cross-entropy", std::min({shape.tokens, shape.columns, shape.first_column}));
  if (shape.first_column + shape.columns > shape.total_columns) {
    throwInvalidUsage("columns " + std::to_string(shape.first_column) + " to " +
                      std::to_string(shape.first_column + shape.columns) + " of a vocabulary of " +
                      std::to_string(shape.total_columns) + ": the shard does not lie in it");
  }
  if (shape.tokens > 1 && shape.stride < shape.columns) {
    throwInvalidUsage("a stride of " + std::to_string(shape.stride) + " between rows of " +
                      std::to_string(shape.columns) + " logits: the rows overlap; copy them");
  }
  checkElementAddress("cross-entropy", logits, shape.dtype);
}

void checkCrossEntropyLoss(const CrossEntropyLossArgs& args) {
  checkCount("cross-entropy", std::min(args.tokens, args.shards - 1));
}

void crossEntropyStatsCpu(const CrossEntropyStatsArgs& args, int num_threads) {
  checkCrossEntropy(args.shape, args.logits);
  checkLabels(args.shape, args.labels);
  withFloat(args.shape.dtype, [&](auto value) {
    forRows(args.shape.tokens, args.shape.tokens * args.shape.columns, num_threads,
            [&](int64_t begin, int64_t end) { statsOfRows<decltype(value)>(args, begin, end); });
  });
}

void crossEntropyLossCpu(const CrossEntropyLossArgs& args) {
  checkCrossEntropyLoss(args);
  for (int64_t i = 0; i < args.tokens; ++i) writeLoss(args, i);
}

void crossEntropyGradCpu(const CrossEntropyGradArgs& args, int num_threads) {
  checkCrossEntropy(args.shape, args.logits);
  checkElementAddress("cross-entropy", args.grad, args.shape.dtype);
  withFloat(args.shape.dtype, [&](auto value) {
    forRows(args.shape.tokens, args.shape.tokens * args.shape.columns, num_threads,
            [&](int64_t begin, int64_t end) { gradOfRows<decltype(value)>(args, begin, end); });
  });
}

}  // namespace hdpcomm::kernels
