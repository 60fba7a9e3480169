// The calls of every step: blocking operations and the description of a torch tensor. Plain CPython
// functions, since pybind11's dispatch alone costs more than moving a short message.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <new>

#include "base/inline_vector.hpp"
#include "bindings/comm_py.hpp"
#include "bindings/rooms.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// --- DLPack, C exchange API 1.x: the part of the ABI that is used here
// (https://dmlc.github.io/dlpack) ---

struct DLTensorAbi {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLExchangeAbi {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensorAbi* out);
  void* current_stream;
};

constexpr int32_t kDeviceCpu = 1;

// The type codes of DLPack, by DType; its order is kUint8 ... kUint64.
constexpr uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBrain = 4, kBoolean = 6;
constexpr uint8_t kTypeCodes[kNumDTypes] = {kUnsigned, kInt,      kInt,     kInt,   kInt,
                                            kFloat,    kBrain,    kFloat,   kFloat, kBoolean,
                                            kUnsigned, kUnsigned, kUnsigned};

int dtypeCode(const DLTensorAbi& tensor) {
  if (tensor.type_lanes != 1) return -1;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (kTypeCodes[i] == tensor.type_code &&
        dtypeBytes(static_cast<DType>(i)) * 8 == tensor.type_bits) {
      return i;
    }
  }
  return -1;
}

bool contiguous(const DLTensorAbi& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// Whether the memory holds the values with the other sign (a lazy view, `z.conj().imag`). Such a
// view of more than one element is not contiguous, so only those of one are asked.
bool isNegated(PyObject* x) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* result = PyObject_CallMethodNoArgs(x, name);
  if (result == nullptr) {
    PyErr_Clear();
    return true;
  }
  Py_DECREF(result);
  return result == Py_True;
}

const DLExchangeAbi* exchange_api = nullptr;  // of torch; set once, at import
PyObject* described_types[2] = {nullptr, nullptr};

}  // namespace

bool describePlain(PyObject* x, Message* described) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  if (exchange_api == nullptr || (type != described_types[0] && type != described_types[1])) {
    return false;
  }
  DLTensorAbi tensor;
  if (exchange_api->tensor_from_object(x, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const int dtype = tensor.device_type == kDeviceCpu ? dtypeCode(tensor) : -1;
  if (dtype < 0 || !contiguous(tensor)) return false;
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  if (count == 1 && tensor.type_code == kFloat && isNegated(x)) return false;
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  described->data = count > 0 ? data : nullptr;
  described->count = static_cast<size_t>(count);
  described->dtype = static_cast<DType>(dtype);
  return true;
}

namespace {

// describe_torch(x) -> (address, elements, dtype code), or None when x is not a plain tensor: the
// caller then finds out what it is.
PyObject* describeTorch(PyObject*, PyObject* x) {
  Message tensor;
  if (!describePlain(x, &tensor)) Py_RETURN_NONE;
  PyObject* result = PyTuple_New(3);
  if (result == nullptr) return nullptr;
  PyTuple_SET_ITEM(result, 0, PyLong_FromVoidPtr(tensor.data));
  PyTuple_SET_ITEM(result, 1, PyLong_FromSize_t(tensor.count));
  PyTuple_SET_ITEM(result, 2, PyLong_FromLong(static_cast<long>(tensor.dtype)));
  return result;
}

// --- blocking operations ---

void* address(PyObject* object) {
  void* value = PyLong_AsVoidPtr(object);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

const Communicator& communicator(PyObject* object) {
  return py::cast<const Communicator&>(py::handle(object));
}

Message message(PyObject* const* parts) {
  return {address(parts[0]), static_cast<size_t>(integer(parts[1])),
          static_cast<DType>(integer(parts[2])), static_cast<int>(integer(parts[3]))};
}

// (communicator, address, count, dtype, peer)
PyObject* pointToPoint(PyObject* const* args, Py_ssize_t count, bool send) {
  return guarded([&] {
    expect(count, 5);
    const Communicator& comm = communicator(args[0]);
    const auto only = message(args + 1);
    const std::span<const Message> one(&only, 1);
    const py::gil_scoped_release release;
    send ? comm.exchange(one, {}, 0, checkSignals) : comm.exchange({}, one, 0, checkSignals);
  });
}

PyObject* runSend(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return pointToPoint(args, count, true);
}

PyObject* runRecv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return pointToPoint(args, count, false);
}

using Messages = InlineVector<Message, 8>;

void addMessages(Messages& messages, PyObject* list) {
  if (!PyList_Check(list)) throw py::type_error("expected a list of messages");
  const Py_ssize_t count = PyList_GET_SIZE(list);
  messages.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4) {
      throw py::type_error("a message is (address, count, dtype, peer)");
    }
    messages.push_back(message(&PyTuple_GET_ITEM(item, 0)));
  }
}

// (communicator, sends, recvs): lists of (address, count, dtype, peer)
PyObject* runExchange(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 3);
    const Communicator& comm = communicator(args[0]);
    Messages sends;
    Messages recvs;
    addMessages(sends, args[1]);
    addMessages(recvs, args[2]);
    const py::gil_scoped_release release;
    comm.exchange({sends.begin(), sends.size()}, {recvs.begin(), recvs.size()}, 0, checkSignals);
  });
}

// Of (tensor, peer) pairs; false where one is anything else.
bool addPlain(Messages& messages, PyObject* pairs) {
  if (!PyList_Check(pairs) && !PyTuple_Check(pairs)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(pairs);
  messages.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* pair = PySequence_Fast_GET_ITEM(pairs, i);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) return false;
    PyObject* peer = PyTuple_GET_ITEM(pair, 1);
    Message message;
    if (!PyLong_CheckExact(peer) || !describePlain(PyTuple_GET_ITEM(pair, 0), &message)) {
      return false;
    }
    message.peer = static_cast<int>(std::clamp<int64_t>(integer(peer), -1, INT_MAX));
    messages.push_back(message);
  }
  return true;
}

// (communicator, sends, recvs): sequences of (tensor, peer). False, and nothing done, where there
// is more than plain tensors.
PyObject* exchangePlain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  bool ran = false;
  PyObject* none = guarded([&] {
    expect(count, 3);
    Messages sends;
    Messages recvs;
    if (!addPlain(sends, args[1]) || !addPlain(recvs, args[2])) return;
    const Communicator& comm = communicator(args[0]);
    const py::gil_scoped_release release;
    comm.exchange({sends.begin(), sends.size()}, {recvs.begin(), recvs.size()}, 0, checkSignals);
    ran = true;
  });
  if (none == nullptr) return nullptr;
  Py_DECREF(none);
  return PyBool_FromLong(ran);
}

// (communicator, op, in, out, count, dtype, redop, root, algorithm)
PyObject* runCollective(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 9);
    const Communicator& comm = communicator(args[0]);
    const Communicator::Operands operands{address(args[2]), address(args[3]),
                                          static_cast<size_t>(integer(args[4])),
                                          static_cast<DType>(integer(args[5]))};
    const Communicator::Options options{
        static_cast<OpCode>(integer(args[1])), static_cast<RedOp>(integer(args[6])),
        static_cast<int>(integer(args[7])), static_cast<Algorithm>(integer(args[8]))};
    const py::gil_scoped_release release;
    comm.collective(operands, options, 0, checkSignals);
  });
}

// (communicator, op, in, out, parts of in, parts of out, redop, root, algorithm): one block of the
// collective is a part of either. False, and nothing done, where the tensors are not plain, their
// sizes or types do not fit each other, or a number is None.
PyObject* collectivePlain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  bool ran = false;
  PyObject* none = guarded([&] {
    expect(count, 9);
    Message in;
    Message out;
    if (!PyLong_Check(args[6]) || !PyLong_Check(args[7]) || !PyLong_Check(args[8]) ||
        !describePlain(args[2], &in) || !describePlain(args[3], &out) || in.dtype != out.dtype) {
      return;
    }
    const auto in_parts = static_cast<size_t>(integer(args[4]));
    const auto out_parts = static_cast<size_t>(integer(args[5]));
    const size_t block = in.count / in_parts;
    if (in.count != block * in_parts || out.count != block * out_parts) return;
    const Communicator& comm = communicator(args[0]);
    const Communicator::Operands operands{in.data, out.data, block, in.dtype};
    const Communicator::Options options{
        static_cast<OpCode>(integer(args[1])), static_cast<RedOp>(integer(args[6])),
        static_cast<int>(integer(args[7])), static_cast<Algorithm>(integer(args[8]))};
    const py::gil_scoped_release release;
    comm.collective(operands, options, 0, checkSignals);
    ran = true;
  });
  if (none == nullptr) return nullptr;
  Py_DECREF(none);
  return PyBool_FromLong(ran);
}

// (communicator, positions) -> (communicator, its rank, its size), or None when this rank is not in
// it
PyObject* subset(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* result = nullptr;
  PyObject* none = guarded([&] {
    expect(count, 2);
    const py::object positions =
        py::reinterpret_steal<py::object>(PySequence_Fast(args[1], "not a sequence of ranks"));
    if (!positions) throw py::error_already_set();
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(positions.ptr());
    InlineVector<int, 64> ranks;
    ranks.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const int64_t rank = integer(PySequence_Fast_GET_ITEM(positions.ptr(), i));
      ranks.push_back(static_cast<int>(std::clamp<int64_t>(rank, -1, INT_MAX)));
    }
    const auto made = communicator(args[0]).subset({ranks.begin(), ranks.size()});
    if (made) result = py::make_tuple(made, made->rank(), made->size()).release().ptr();
  });
  if (result == nullptr) return none;
  Py_DECREF(none);
  return result;
}

PyMethodDef calls[] = {
    {"describe_torch", describeTorch, METH_O, nullptr},
    {"run_send", function(runSend), METH_FASTCALL, nullptr},
    {"run_recv", function(runRecv), METH_FASTCALL, nullptr},
    {"run_exchange", function(runExchange), METH_FASTCALL, nullptr},
    {"exchange_plain", function(exchangePlain), METH_FASTCALL, nullptr},
    {"run_collective", function(runCollective), METH_FASTCALL, nullptr},
    {"collective_plain", function(collectivePlain), METH_FASTCALL, nullptr},
    {"subset", function(subset), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void checkSignals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void bindCalls(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), calls) != 0) throw py::error_already_set();
  // Tensors of exactly these two types are described by torch itself, in C.
  module.def("use_exchange_api",
             [](const py::capsule& capsule, const py::type& tensor, const py::type& parameter) {
               const auto* api = static_cast<const DLExchangeAbi*>(
                   PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
               if (api == nullptr) throw py::error_already_set();
               if (api->major != 1) return false;
               exchange_api = api;
               described_types[0] = tensor.inc_ref().ptr();
               described_types[1] = parameter.inc_ref().ptr();
               return true;
             });
}

}  // namespace hdpcomm
