// The line of Python that called an operation of a device.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <type_traits>

#include "bindings/rooms.hpp"
#include "device/device_api.hpp"

namespace hdpcomm {

// The calling line of Python. Needs the GIL. Visible to hdpcomm.testing._native, so that a file has
// one name in both modules.
[[gnu::visibility("default")]] Site callSite();

// Runs `call(site)` without the GIL, with the site of the Python caller.
template <typename Call>
auto atSite(Call call) {
  const Site site = callSite();
  const GilRelease release;
  return call(site);
}

// Addresses, streams and events cross as integers.
template <typename Value>
inline constexpr bool kHandle = std::is_same_v<Value, Stream> || std::is_same_v<Value, Event>;
template <typename Value>
using PlainValue = std::conditional_t<std::is_pointer_v<Value> || kHandle<Value>, uintptr_t, Value>;

template <typename Value>
Value fromPlain(PlainValue<Value> plain) {
  if constexpr (std::is_pointer_v<Value>) {
    return reinterpret_cast<Value>(plain);
  } else {
    return Value{plain};
  }
}

template <typename Value>
PlainValue<Value> plainOf(Value value) {
  if constexpr (std::is_pointer_v<Value>) {
    return reinterpret_cast<uintptr_t>(value);
  } else if constexpr (kHandle<Value>) {
    return value.handle;
  } else {
    return value;
  }
}

// A call of the device without the GIL.
template <typename Result, typename... Args>
auto deviceCall(Result (DeviceApi::*method)(Args...)) {
  return [method](DeviceApi& device, PlainValue<Args>... args) {
    const GilRelease release;
    if constexpr (std::is_void_v<Result>) {
      (device.*method)(fromPlain<Args>(args)...);
    } else {
      return plainOf((device.*method)(fromPlain<Args>(args)...));
    }
  };
}

// The same of one that takes the line of its caller.
template <typename... Args, typename Method>
auto deviceCallAt(Method method) {
  using Result = std::invoke_result_t<Method, DeviceApi&, Args..., Site>;
  return [method](DeviceApi& device, PlainValue<Args>... args) {
    return atSite([&](Site site) {
      if constexpr (std::is_void_v<Result>) {
        (device.*method)(fromPlain<Args>(args)..., site);
      } else {
        return plainOf((device.*method)(fromPlain<Args>(args)..., site));
      }
    });
  };
}

// The handle of a device's memory. Throws InvalidUsage for other bytes. Visible as callSite() is.
[[gnu::visibility("default")]] MemoryHandle handleOf(const pybind11::bytes& bytes);

// Memory that tensors view (device_memory_py.cpp).
void bindDeviceMemory(pybind11::module_& module);

}  // namespace hdpcomm
