#include "bindings/in_flight.hpp"

#include <deque>

#include "bindings/rooms.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Owned = std::unique_ptr<InFlight>;

// Operations that Python let go of while they used their buffers. Guarded by the GIL. Never
// destroyed: what is under way when the program ends keeps its memory.
std::deque<Owned>& letGo() {
  static auto* const operations = new std::deque<Owned>;
  return *operations;
}

// One whose end cannot be known (in a forked child, say) counts as under way.
bool ended(const InFlight& operation) noexcept {
  const GilRelease release;
  try {
    return operation.done();
  } catch (...) {
    return false;
  }
}

// Warns of the error of an operation that nobody waits for any more.
void report(const InFlight& operation) {
  std::optional<std::string> error;
  {
    const GilRelease release;
    error = operation.unheardError();
  }
  if (!error) return;
  const std::string text = "an operation failed whose Work was dropped: " + *error;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) PyErr_WriteUnraisable(nullptr);
}

void end(Owned operation) {
  if (!ended(*operation)) {
    letGo().push_back(std::move(operation));
  } else if (!interpreterEnds()) {
    report(*operation);
  }
}

}  // namespace

void LetGo::operator()(InFlight* operation) const noexcept {
  Owned owned(operation);
  if (!owned->holdsBuffers()) return;
  const py::error_scope raised;  // it may go while an exception unwinds
  end(std::move(owned));
}

void sweepLetGo() noexcept {
  std::deque<Owned>& operations = letGo();
  if (operations.empty()) return;
  const py::error_scope raised;
  // Taken out one by one: other threads may sweep or add some whenever the GIL is released.
  for (size_t left = operations.size(); left > 0 && !operations.empty(); --left) {
    Owned next = std::move(operations.front());
    operations.pop_front();
    end(std::move(next));
  }
}

}  // namespace hdpcomm
