#include "kernels/reduce.hpp"

#include <string>

#include "base/error.hpp"
#include "kernels/reduce_elem.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/vector_clones.hpp"

namespace hdpcomm {
namespace {

using kernels::BFloat16;
using kernels::Float16;

template <RedOp op, typename T>
struct Reducer {
  HDP_VECTOR_CLONES static void run(void* out_, const void* a_, const void* b_, size_t count) {
    auto* out = static_cast<T*>(out_);
    const auto* a = static_cast<const T*>(a_);
    const auto* b = static_cast<const T*>(b_);
    for (size_t i = 0; i < count; ++i) kernels::reduceElement<op>(a[i], b[i], out[i]);
  }
};

template <typename T>
struct Divider {
  HDP_VECTOR_CLONES static void run(void* data_, size_t count, double divisor) {
    auto* data = static_cast<T*>(data_);
    const auto by = static_cast<kernels::Wide<T>>(divisor);
    for (size_t i = 0; i < count; ++i) kernels::divideElement(data[i], by, data[i]);
  }
};

}  // namespace

ReduceFn reduceFunction(DType dtype, RedOp op) {
  if (op == RedOp::kAvg) divideFunction(dtype);  // throws for types without division
  ReduceFn function = nullptr;
  if (op != RedOp::kNone) {
    kernels::withReduction(dtype, op, [&](auto value, auto tag) {
      function = Reducer<decltype(tag)::kOp, decltype(value)>::run;
    });
  }
  if (function == nullptr) {
    throwInvalidUsage(std::string("no reduction '") + redOpName(op) + "' for " + dtypeName(dtype));
  }
  return function;
}

DivideFn divideFunction(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Divider<Float16>::run;
    case DType::kBFloat16:
      return Divider<BFloat16>::run;
    case DType::kFloat32:
      return Divider<float>::run;
    case DType::kFloat64:
      return Divider<double>::run;
    default:
      throwInvalidUsage(std::string("op 'avg' needs a floating type, not ") + dtypeName(dtype) +
                        "; use 'sum' and divide");
  }
}

namespace kernels {

void checkCount(const char* kernel, int64_t count) {
  if (count < 0) {
    throwInvalidUsage(std::string("the size of a ") + kernel + " must not be negative; got " +
                      std::to_string(count));
  }
}

void checkElementAddress(const char* kernel, const void* address, DType dtype) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at % dtypeBytes(dtype) != 0) {
    throwInvalidUsage(std::string("a buffer of a ") + kernel + " begins " +
                      std::to_string(at % dtypeBytes(dtype)) + " bytes after a multiple of " +
                      std::to_string(dtypeBytes(dtype)) + ", where no " + dtypeName(dtype) +
                      " can lie; copy it to memory that is aligned to its elements");
  }
}

void checkReduce(const ReduceArgs& args) {
  reduceFunction(args.dtype, args.op);
  checkCount("reduction", args.count);
  for (const void* address : {static_cast<const void*>(args.out), args.a, args.b}) {
    checkElementAddress("reduction", address, args.dtype);
  }
}

void reduceCpu(const ReduceArgs& args) {
  checkReduce(args);
  reduceFunction(args.dtype, args.op)(args.out, args.a, args.b, static_cast<size_t>(args.count));
}

void checkDivide(const DivideArgs& args) {
  divideFunction(args.dtype);
  checkCount("division", args.count);
  checkElementAddress("division", args.data, args.dtype);
}

void divideCpu(const DivideArgs& args) {
  checkDivide(args);
  divideFunction(args.dtype)(args.data, static_cast<size_t>(args.count), args.divisor);
}

}  // namespace kernels
}  // namespace hdpcomm
