#include "kernels/cast.hpp"

#include <cstring>
#include <string>

#include "base/error.hpp"
#include "kernels/cast_types.hpp"
#include "kernels/reduce.hpp"
#include "kernels/vector_clones.hpp"

namespace hdpcomm::kernels {
namespace {

template <typename To, typename From>
struct Converter {
  HDP_VECTOR_CLONES static void run(const CastArgs& args) {
    auto* __restrict out = static_cast<To*>(args.out);
    const auto* __restrict in = static_cast<const From*>(args.in);
    for (int64_t i = 0; i < args.count; ++i) convertElement(in[i], out[i]);
  }
};

}  // namespace

void checkCast(const CastArgs& args) {
  for (const DType dtype : {args.from, args.to}) {
    if (!withCastType(dtype, [](auto) {})) {
      throwInvalidUsage(std::string("no conversion from ") + dtypeName(args.from) + " to " +
                        dtypeName(args.to) +
                        "; expected float16, bfloat16, float32, float64, int32 or int64");
    }
  }
  checkCount("conversion", args.count);
  checkElementAddress("conversion", args.out, args.to);
  checkElementAddress("conversion", args.in, args.from);
}

void castCpu(const CastArgs& args) {
  checkCast(args);
  if (args.count == 0) return;
  if (args.to == args.from) {
    std::memmove(args.out, args.in, static_cast<size_t>(args.count) * dtypeBytes(args.to));
    return;
  }
  withCastType(args.to, [&](auto to) {
    withCastType(args.from, [&](auto from) {
      using To = decltype(to);
      using From = decltype(from);
      if constexpr (!std::is_same_v<To, From>) Converter<To, From>::run(args);
    });
  });
}

}  // namespace hdpcomm::kernels
