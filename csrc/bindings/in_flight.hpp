// Started operations as Python holds them, each with the objects whose memory it uses.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace hdpcomm {

// A started operation and the objects whose memory it uses. They are owned from before Python sees
// the operation until it has ended or was waited for, so an exception in between (Python runs
// signal handlers after any call) frees nothing that is in flight.
class InFlight {
 public:
  explicit InFlight(pybind11::object buffers) : buffers_(std::move(buffers)) {}
  virtual ~InFlight() = default;
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Whether it has ended. Called without the GIL.
  virtual bool done() const = 0;
  // The error of an ended operation that the program has not heard of. Called without the GIL.
  virtual std::optional<std::string> unheardError() const { return std::nullopt; }

  bool holdsBuffers() const { return static_cast<bool>(buffers_); }
  // The caller has waited for it. With the GIL.
  void releaseBuffers() { pybind11::object(std::move(buffers_)); }

 private:
  pybind11::object buffers_;
};

// Deletes an operation that Python let go of, with the GIL: at once if it has ended, otherwise when
// a later operation starts or is let go of.
struct LetGo {
  void operator()(InFlight* operation) const noexcept;
};

// Deletes operations let go of that have ended since. With the GIL.
void sweepLetGo() noexcept;

template <typename Operation>
using InFlightClass = pybind11::class_<Operation, std::unique_ptr<Operation, LetGo>>;

// A new reference to the Python object of a new operation.
template <typename Operation, typename... Arguments>
PyObject* newInFlight(Arguments&&... arguments) {
  sweepLetGo();
  std::unique_ptr<Operation, LetGo> operation(new Operation(std::forward<Arguments>(arguments)...));
  return pybind11::cast(std::move(operation)).release().ptr();
}

}  // namespace hdpcomm
