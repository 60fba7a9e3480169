// Softmax cross-entropy over logits of float32, bfloat16 or float16, computed in fp32 without an
// fp32 copy of the logits, and over shards of the vocabulary.
//
// Three launches: crossEntropyStats (one pass over the logits), crossEntropyLoss (over the shards'
// statistics; nothing of the size of the vocabulary), crossEntropyGrad (one more pass, which may
// write the gradient in place of the logits).
#pragma once

#include <cstdint>

#include "base/dtype.hpp"

namespace hdpcomm::kernels {

// This rank's columns of the logits. A label is the number of a column of the whole vocabulary.
struct CrossEntropyShape {
  int64_t tokens = 0;
  int64_t columns = 0;          // of this shard
  int64_t stride = 0;           // elements from one token's logits to the next one's
  int64_t first_column = 0;     // of this shard in the whole vocabulary
  int64_t total_columns = 0;    // of the whole vocabulary
  int64_t ignore_index = -100;  // the label of a token without a loss
  DType dtype = DType::kFloat32;
};

// stats: fp32 [3, tokens]: the largest logit of the shard (-inf for no column), the sum of
// exp(logit - largest), and the label's logit if its column is here, else 0. The statistics of a
// token that is ignored are 0.
struct CrossEntropyStatsArgs {
  CrossEntropyShape shape;
  const void* logits = nullptr;
  const int64_t* labels = nullptr;
  float* stats = nullptr;
};

// Throws InvalidUsage for a label that is neither a column nor ignore_index. Rows are independent,
// so the result does not depend on num_threads.
void crossEntropyStatsCpu(const CrossEntropyStatsArgs& args, int num_threads);
// Enqueues on `stream` (a cudaStream_t); a bad label makes the token's label logit NaN. Throws
// InvalidUsage or, when the launch fails, DeviceError.
void crossEntropyStatsCuda(const CrossEntropyStatsArgs& args, void* stream);

// Combines the statistics of all shards, in their order (so every rank gets the same bits), into
// sums [2, tokens]: the largest logit and the sum over the whole vocabulary; and into
// loss [tokens] = weight * (log(sum(exp(logits))) - label's logit), 0 where ignored.
struct CrossEntropyLossArgs {
  const float* stats = nullptr;  // [shards, 3, tokens]
  const int64_t* labels = nullptr;
  const float* weights = nullptr;  // [tokens], or null: 1
  float* sums = nullptr;
  float* loss = nullptr;
  int64_t shards = 1;
  int64_t tokens = 0;
  int64_t ignore_index = -100;
};

void crossEntropyLossCpu(const CrossEntropyLossArgs& args);
void crossEntropyLossCuda(const CrossEntropyLossArgs& args, void* stream);

// grad[i, j] = scale_i * (softmax(logits[i])[j] - [column j is the label]), with
// scale_i = upstream[i * upstream_stride] * weights[i]; 0 where ignored, whatever the logits. grad
// has the logits' type and layout, and may be the logits.
struct CrossEntropyGradArgs {
  CrossEntropyShape shape;
  const void* logits = nullptr;
  const int64_t* labels = nullptr;
  const float* sums = nullptr;     // of crossEntropyLoss
  const float* weights = nullptr;  // [tokens], or null: 1
  const float* upstream = nullptr;
  int64_t upstream_stride = 1;  // 0: one number for all tokens
  void* grad = nullptr;
};

void crossEntropyGradCpu(const CrossEntropyGradArgs& args, int num_threads);
void crossEntropyGradCuda(const CrossEntropyGradArgs& args, void* stream);

// Shared by the launchers.
void checkCrossEntropy(const CrossEntropyShape& shape, const void* logits);
void checkCrossEntropyLoss(const CrossEntropyLossArgs& args);

}  // namespace hdpcomm::kernels
