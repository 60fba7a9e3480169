#include "kernels/reduce.hpp"

#include <string>

#include "base/error.hpp"
#include "kernels/reduce_elem.hpp"
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
ReduceFn reducerOf(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kAvg:
      return Reducer<RedOp::kSum, T>::run;
    case RedOp::kProd:
      return Reducer<RedOp::kProd, T>::run;
    case RedOp::kMin:
      return Reducer<RedOp::kMin, T>::run;
    case RedOp::kMax:
      return Reducer<RedOp::kMax, T>::run;
    case RedOp::kNone:
      break;
  }
  return nullptr;
}

template <typename T>
struct Divider {
  HDP_VECTOR_CLONES static void run(void* data_, size_t count, double divisor) {
    auto* data = static_cast<T*>(data_);
    const auto by = static_cast<kernels::Wide<T>>(divisor);
    for (size_t i = 0; i < count; ++i) kernels::divideElement(data[i], by, data[i]);
  }
};

ReduceFn lookUp(DType dtype, RedOp op) {
  switch (dtype) {
    case DType::kUint8:
      return reducerOf<uint8_t>(op);
    case DType::kInt8:
      return reducerOf<int8_t>(op);
    case DType::kInt16:
      return reducerOf<int16_t>(op);
    case DType::kUint16:
      return reducerOf<uint16_t>(op);
    case DType::kInt32:
      return reducerOf<int32_t>(op);
    case DType::kUint32:
      return reducerOf<uint32_t>(op);
    case DType::kInt64:
      return reducerOf<int64_t>(op);
    case DType::kUint64:
      return reducerOf<uint64_t>(op);
    case DType::kFloat16:
      return reducerOf<Float16>(op);
    case DType::kBFloat16:
      return reducerOf<BFloat16>(op);
    case DType::kFloat32:
      return reducerOf<float>(op);
    case DType::kFloat64:
      return reducerOf<double>(op);
    case DType::kBool:
      // On 0/1 bytes: sum and max are "or", prod and min are "and".
      return reducerOf<uint8_t>(op == RedOp::kSum    ? RedOp::kMax
                                : op == RedOp::kProd ? RedOp::kMin
                                                     : op);
  }
  return nullptr;
}

}  // namespace

ReduceFn reduceFunction(DType dtype, RedOp op) {
  if (op == RedOp::kAvg) divideFunction(dtype);  // throws for types without division
  const ReduceFn function = lookUp(dtype, op);
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
