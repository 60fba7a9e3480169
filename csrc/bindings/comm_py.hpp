// Shared by the files of the comm room's bindings.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <new>
#include <string>
#include <tuple>

#include "bindings/in_flight.hpp"
#include "bindings/rooms.hpp"
#include "comm/host/operations.hpp"
#include "comm/stream/stream_engine.hpp"

namespace hdpcomm {

// What Python holds of a started operation: the work with its world, so that either may be dropped
// first.
struct Handle final : InFlight {
  Handle(pybind11::object buffers, std::shared_ptr<World> of_world, std::shared_ptr<Work> started)
      : InFlight(std::move(buffers)), world(std::move(of_world)), work(std::move(started)) {}
  bool done() const override { return world->test(*work); }
  std::optional<std::string> unheardError() const override;

  std::shared_ptr<World> world;
  std::shared_ptr<Work> work;
};

// Python's handle of work of streams. An error ends its engine for good, so the next call tells it.
struct StreamHandle final : InFlight {
  StreamHandle(pybind11::object buffers, std::shared_ptr<StreamEngine> of_engine,
               std::shared_ptr<StreamWork> started)
      : InFlight(std::move(buffers)), engine(std::move(of_engine)), work(std::move(started)) {}
  bool done() const override { return engine->test(*work); }

  std::shared_ptr<StreamEngine> engine;
  std::shared_ptr<StreamWork> work;
};

// Memory of the core, as Python's buffer protocol gives it out.
struct Block {
  std::shared_ptr<std::byte> data;
  size_t bytes;
};

// checkSignals() in the form that operations take, made once.
extern const World::InterruptCheck kCheckSignals;

// Operations on tensors (comm_calls_py.cpp).
void bindCalls(pybind11::module_& module);
// Descriptions of tensors (comm_tensors_py.cpp).
void bindTensors(pybind11::module_& module);
// Describes a plain contiguous tensor of a known type, in host memory (kHost) or on the CUDA device
// of that ordinal; false for all else.
inline constexpr int kHost = -1;
bool describePlain(PyObject* x, TensorView* described, int where = kHost);
// The same of a description by hdpcomm/comm/tensors.py: (address, count, dtype).
bool describeTuple(PyObject* x, TensorView* described);
// Counters (comm_host_py.cpp).
void bindCounter(pybind11::module_& module);
// Memory that ranks of a host map (comm_host_py.cpp).
void bindWindow(pybind11::module_& module);
// How worlds begin and end (comm_joining_py.cpp).
void bindJoining(pybind11::module_& module);
// Operations on streams (comm_stream_py.cpp).
void bindStream(pybind11::module_& module);

using LinkCosts = std::tuple<double, double, double, double>;  // as TransportCosts

// --- for plain CPython functions -----------------------------------------------------------------

// Runs the body of one, which returns a new reference or null for None. Its exceptions become
// Python's.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    PyObject* result = function();
    if (result != nullptr) return result;
    Py_RETURN_NONE;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const Error& error) {
    setPythonError(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline void expect(Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return;
  throw pybind11::type_error("expected " + std::to_string(wanted) + " arguments, got " +
                             std::to_string(given));
}

inline std::string textOf(PyObject* object) {
  return givenText(pybind11::repr(pybind11::handle(object)));
}

// A whole number of at most 64 bits, of Python, numpy or a tensor. A bool is taken for a mistake.
inline int64_t integer(PyObject* object) {
  const long long value = PyBool_Check(object) ? -1 : PyLong_AsLongLong(object);
  if (value != -1 || (PyErr_Occurred() == nullptr && !PyBool_Check(object))) return value;
  PyErr_Clear();
  throwInvalidUsage("got " + textOf(object) + " (" + Py_TYPE(object)->tp_name +
                    ") where a whole number of at most 64 bits is expected");
}

template <typename Function>
PyCFunction function(Function* pointer) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pointer));
}

}  // namespace hdpcomm
