// Descriptions of tensors: address, count and type, by torch's own C function where there is one.
#include <cstdint>

#include "bindings/comm_py.hpp"
#include "bindings/dlpack.hpp"
#include "comm/host/operations.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// DLPack's C exchange API 1.x, the part that is used here.
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

// The type codes of DLPack, by DType; its order is kUint8 ... kUint64.
using dlpack::kBoolean, dlpack::kBrain, dlpack::kFloat, dlpack::kInt, dlpack::kUnsigned;
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

// Whether it is a lazily negated view (`z.conj().imag`), whose memory holds the values with the
// opposite sign. Such a view of more than one element is not contiguous, so only those of one are
// asked.
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

bool describePlain(PyObject* x, TensorView* described, int where) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  if (exchange_api == nullptr || (type != described_types[0] && type != described_types[1])) {
    return false;
  }
  DLTensorAbi tensor;
  if (exchange_api->tensor_from_object(x, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool here = where == kHost
                        ? tensor.device_type == dlpack::kCpu
                        : tensor.device_type == dlpack::kCuda && tensor.device_id == where;
  const int dtype = here ? dtypeCode(tensor) : -1;
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

bool describeTuple(PyObject* x, TensorView* described) {
  if (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) != 3) return false;
  described->data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(x, 0));
  if (described->data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  described->count = static_cast<size_t>(integer(PyTuple_GET_ITEM(x, 1)));
  described->dtype = static_cast<DType>(integer(PyTuple_GET_ITEM(x, 2)));
  return true;
}

namespace {

// describe_torch(x) -> (address, elements, dtype code), or None when x is not a plain tensor: the
// caller then finds out what it is.
PyObject* describeTorch(PyObject*, PyObject* x) {
  TensorView tensor;
  if (!describePlain(x, &tensor)) Py_RETURN_NONE;
  PyObject* result = PyTuple_New(3);
  if (result == nullptr) return nullptr;
  PyTuple_SET_ITEM(result, 0, PyLong_FromVoidPtr(tensor.data));
  PyTuple_SET_ITEM(result, 1, PyLong_FromSize_t(tensor.count));
  PyTuple_SET_ITEM(result, 2, PyLong_FromLong(static_cast<long>(tensor.dtype)));
  return result;
}

PyMethodDef calls[] = {
    {"describe_torch", describeTorch, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bindTensors(py::module_& module) {
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
