// The calls of every step: operations on tensors. Plain CPython functions, since pybind11's
// dispatch alone costs more than moving a short message.
#include <array>
#include <climits>
#include <cstdint>
#include <optional>

#include "base/inline_vector.hpp"
#include "bindings/comm_py.hpp"
#include "bindings/rooms.hpp"
#include "comm/host/overlaps.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// --- arguments -----------------------------------------------------------------------------------

const Communicator& communicator(PyObject* object) {
  return py::cast<const Communicator&>(py::handle(object));
}

int rankOf(PyObject* object) {
  const int64_t rank = integer(object);
  if (rank < INT_MIN || rank > INT_MAX) {
    throwInvalidUsage("got rank " + std::to_string(rank) + ", which no communicator has");
  }
  return static_cast<int>(rank);
}

// What hdpcomm/comm/tensors.py says of a tensor: its describe(x, name, writable=).
TensorView askedOf(PyObject* describe, PyObject* x, const std::string& name, bool writable) {
  const py::object told = py::reinterpret_borrow<py::object>(describe)(
      py::handle(x), name, py::arg("writable") = writable);
  TensorView tensor;
  if (!describeTuple(told.ptr(), &tensor)) throw py::type_error("describe() gave no description");
  return tensor;
}

// The names that Python passes are interned, so that one look at the pointer is mostly enough.
template <size_t N>
class Names {
 public:
  explicit Names(const char* (*name)(int)) {
    for (size_t i = 0; i < N; ++i)
      names_[i] = PyUnicode_InternFromString(name(static_cast<int>(i)));
  }
  // The number of a name, or -1.
  int find(PyObject* name) const {
    for (size_t i = 0; i < N; ++i) {
      if (names_[i] == name) return static_cast<int>(i);
    }
    for (size_t i = 0; i < N && PyUnicode_Check(name); ++i) {
      if (PyUnicode_Compare(names_[i], name) == 0) return static_cast<int>(i);
    }
    return -1;
  }
  std::string list() const {
    std::string text;
    for (PyObject* name : names_) {
      text += (text.empty() ? "" : ", ") + std::string(PyUnicode_AsUTF8(name));
    }
    return text;
  }

 private:
  std::array<PyObject*, N> names_;
};

RedOp reductionOf(PyObject* name, const OperationRule& rule) {
  static const Names<static_cast<size_t>(RedOp::kAvg) + 1> names(
      [](int i) { return redOpName(static_cast<RedOp>(i)); });
  if (!rule.reduces) return RedOp::kNone;
  const int found = names.find(name);
  if (found >= 0) return static_cast<RedOp>(found);
  throwInvalidUsage(std::string(opName(rule.op)) + "() got op=" + textOf(name) +
                    "; known are: " + names.list());
}

Algorithm algorithmOf(PyObject* name) {
  static const Names<kNumAlgorithms> names(
      [](int i) { return algorithmName(static_cast<Algorithm>(i)); });
  const int found = names.find(name);
  if (found >= 0) return static_cast<Algorithm>(found);
  throwInvalidUsage("algorithm " + textOf(name) + " is unknown; known are: " + names.list());
}

// A list or tuple as it is, any other iterable as a list.
py::object sequence(PyObject* object, const char* call, const char* wanted) {
  auto items = py::reinterpret_steal<py::object>(PySequence_Fast(object, ""));
  if (items) return items;
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  throwInvalidUsage(std::string(call) + " got " + textOf(object) + "; give " + wanted);
}

std::vector<int64_t> countsOf(PyObject* object) {
  const py::object items = sequence(object, "all_to_all()", "splits as a sequence of counts");
  std::vector<int64_t> counts;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    counts.push_back(integer(PySequence_Fast_GET_ITEM(items.ptr(), i)));
  }
  return counts;
}

// (out_splits, in_splits) of an all_to_all.
Splits splitsOf(PyObject* pair) {
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
    throw py::type_error("splits are a pair of sequences");
  }
  PyObject* out = PyTuple_GET_ITEM(pair, 0);
  PyObject* in = PyTuple_GET_ITEM(pair, 1);
  if (Py_IsNone(out) || Py_IsNone(in)) {
    throwInvalidUsage("all_to_all() got one of out_splits and in_splits; give both or neither");
  }
  return {countsOf(out), countsOf(in)};
}

// --- collectives ---------------------------------------------------------------------------------

// The arguments of a collective: (communicator, describe, operation, x, out, op, root, algorithm,
// splits). Only `describe` knows all kinds of tensors; plain ones need not be asked about.
constexpr Py_ssize_t kCollectiveArguments = 9;

CollectiveCall collectiveCall(const Communicator& comm, PyObject* const* args, int where = kHost) {
  const OperationRule& rule = ruleOf(static_cast<int>(integer(args[2])));
  const Communicator::Options options{rule.op, reductionOf(args[5], rule),
                                      rule.rooted ? rankOf(args[6]) : -1, algorithmOf(args[7])};
  const bool at_root = rule.rooted && options.root == comm.rank();
  const bool takes_x = rule.takesX(at_root);
  const bool takes_out = rule.takesOut(!Py_IsNone(args[4]), at_root);
  TensorView x;
  TensorView out;
  if (takes_x && !describePlain(args[3], &x, where)) {
    x = askedOf(args[1], args[3], "x", rule.writesX(takes_out, at_root));
  }
  if (takes_out && !describePlain(args[4], &out, where)) {
    out = askedOf(args[1], args[4], "out", true);
  }
  if (!Py_IsNone(args[8])) return makeRaggedCall(options, x, out, splitsOf(args[8]), comm.size());
  return makeCall(options, takes_x ? &x : nullptr, takes_out ? &out : nullptr, comm.rank(),
                  comm.size());
}

// The objects that a collective's arguments name, (x, out).
py::object buffersOf(PyObject* const* args) {
  return py::make_tuple(py::handle(args[3]), py::handle(args[4]));
}

PyObject* run(const Communicator& comm, const CollectiveCall& call, bool in_background,
              PyObject* const* args) {
  std::shared_ptr<Work> work;
  {
    const GilRelease release;
    if (in_background) {
      work = comm.startCollective(call.operands, call.options);
    } else {
      comm.collective(call.operands, call.options, 0, kCheckSignals);
    }
  }
  if (!in_background) return nullptr;
  return newInFlight<Handle>(buffersOf(args), comm.sharedWorld(), std::move(work));
}

// collective(arguments of a collective..., async_op) -> the Work, or None: it has ended
PyObject* collective(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, kCollectiveArguments + 1);
    const Communicator& comm = communicator(args[0]);
    return run(comm, collectiveCall(comm, args), Py_IsTrue(args[9]), args);
  });
}

// --- messages ------------------------------------------------------------------------------------

using Messages = InlineVector<Message, 8>;

PyObject* run(const Communicator& comm, std::span<const Message> sends,
              std::span<const Message> recvs, bool in_background, const py::object& buffers) {
  std::shared_ptr<Work> work;
  {
    const GilRelease release;
    if (in_background) {
      work = comm.startExchange(sends, recvs);
    } else {
      comm.exchange(sends, recvs, 0, kCheckSignals);
    }
  }
  if (!in_background) return nullptr;
  return newInFlight<Handle>(buffers, comm.sharedWorld(), std::move(work));
}

template <typename Name>
Message message(PyObject* describe, PyObject* x, PyObject* peer, bool writable, Name name,
                int where = kHost) {
  TensorView tensor;
  if (!describePlain(x, &tensor, where)) tensor = askedOf(describe, x, name(), writable);
  return {tensor.data, tensor.count, tensor.dtype, rankOf(peer)};
}

// (communicator, describe, x, peer, async_op) -> as collective()
PyObject* pointToPoint(PyObject* const* args, Py_ssize_t count, bool sends) {
  return guarded([&] {
    expect(count, 5);
    const Communicator& comm = communicator(args[0]);
    const Message only =
        message(args[1], args[2], args[3], !sends, [] { return std::string("x"); });
    const std::span<const Message> one(&only, 1);
    const std::span<const Message> none;
    return run(comm, sends ? one : none, sends ? none : one, Py_IsTrue(args[4]),
               py::reinterpret_borrow<py::object>(args[2]));
  });
}

PyObject* send(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return pointToPoint(args, count, true);
}

PyObject* recv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return pointToPoint(args, count, false);
}

[[noreturn]] void throwNoMessage(const char* name, Py_ssize_t i, PyObject* item) {
  PyErr_Clear();
  throwInvalidUsage("exchange() got " + std::string(name) + "[" + std::to_string(i) +
                    "] = " + textOf(item) + "; give (tensor, peer)");
}

constexpr const char* kWanted = "sequences of (tensor, peer)";

// Calls `each(message, landing)` for every (tensor, peer) or (tensor, peer, landing place) of a
// sequence, whose landing place may be null; `name` is the argument that errors name. The tensors
// are added to `buffers`: others may change the sequence while the call runs.
template <typename Each>
void forMessages(PyObject* describe, PyObject* pairs, bool writable, const char* name, int where,
                 py::list& buffers, Each each) {
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(pairs); ++i) {
    auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(pairs, i));
    if (!PyTuple_Check(item.ptr())) {
      auto sequence = py::reinterpret_steal<py::object>(PySequence_Tuple(item.ptr()));
      if (!sequence) throwNoMessage(name, i, item.ptr());
      item = std::move(sequence);
    }
    const Py_ssize_t size = PyTuple_GET_SIZE(item.ptr());
    if (size != 2 && size != 3) throwNoMessage(name, i, item.ptr());
    PyObject* x = PyTuple_GET_ITEM(item.ptr(), 0);
    buffers.append(py::handle(x));
    const auto named = [&] { return std::string(name) + "[" + std::to_string(i) + "]"; };
    each(message(describe, x, PyTuple_GET_ITEM(item.ptr(), 1), writable, named, where),
         size == 3 ? PyTuple_GET_ITEM(item.ptr(), 2) : nullptr);
  }
}

void addMessages(Messages& messages, PyObject* describe, PyObject* pairs, bool writable,
                 const char* name, py::list& buffers) {
  messages.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(pairs)));
  const auto add = [&](const Message& each, PyObject* landing) {
    if (landing != nullptr) {
      throwInvalidUsage(
          "exchange() got a landing place for host memory; only device messages have one");
    }
    messages.push_back(each);
  };
  forMessages(describe, pairs, writable, name, kHost, buffers, add);
}

// exchange(communicator, describe, sends, recvs, async_op) -> as collective(). Sequences of
// (tensor, peer).
PyObject* exchange(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 5);
    const Communicator& comm = communicator(args[0]);
    const py::object outgoing = sequence(args[2], "exchange()", kWanted);
    const py::object incoming = sequence(args[3], "exchange()", kWanted);
    Messages sends;
    Messages recvs;
    py::list buffers;
    addMessages(sends, args[1], outgoing.ptr(), false, "sends", buffers);
    addMessages(recvs, args[1], incoming.ptr(), true, "recvs", buffers);
    checkOverlaps({sends.begin(), sends.size()}, {recvs.begin(), recvs.size()});
    return run(comm, {sends.begin(), sends.size()}, {recvs.begin(), recvs.size()},
               Py_IsTrue(args[4]), buffers);
  });
}

// --- work of streams ---------------------------------------------------------------------------

// Where the plain tensors of an engine lie.
int placeOf(const StreamEngine& engine) {
  return engine.device()->isSim() ? kHost : engine.device()->ordinal();
}

std::shared_ptr<StreamEngine> engineOf(PyObject* object) {
  return py::cast<std::shared_ptr<StreamEngine>>(py::handle(object));
}

uintptr_t streamOf(PyObject* object) {
  const auto stream = reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(object));
  if (stream == 0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return stream;
}

// What is given back for an operation; null: the caller's stream waits for its end, and nobody
// else has to. Where tensors have no streams the host has to.
PyObject* handOver(const std::shared_ptr<StreamEngine>& engine, std::shared_ptr<StreamWork> work,
                   bool background, py::object buffers) {
  if (!background && !engine->device()->isSim()) {
    const GilRelease release;
    if (!engine->failed(*work)) return nullptr;
  }
  return newInFlight<StreamHandle>(std::move(buffers), engine, std::move(work));
}

using StreamMessages = std::vector<StreamEngine::Message>;

void addMessages(StreamMessages& messages, std::vector<Message>& views, const Communicator& comm,
                 PyObject* describe, PyObject* pairs, const char* name, int where,
                 py::list& buffers) {
  const bool received = *name == 'r';
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(pairs));
  messages.reserve(count);
  views.reserve(count);
  const auto add = [&](const Message& each, PyObject* landing) {
    const bool lands = landing != nullptr && !Py_IsNone(landing);
    messages.push_back(
        {.peer = comm.globalRank(each.peer, received ? "recv" : "send"),
         .data = static_cast<std::byte*>(each.data),
         .count = each.count,
         .dtype = each.dtype,
         .landing = lands ? static_cast<uint64_t>(integer(landing)) : StreamEngine::kNoLanding});
    views.push_back(each);
  };
  forMessages(describe, pairs, received, name, where, buffers, add);
}

// stream_exchange(engine, communicator, describe, sends, recvs, stream, async_op) -> the
// StreamWork, or None: see handOver(). Sequences of (tensor, peer) or (tensor, peer, landing
// place).
PyObject* streamExchange(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 7);
    const std::shared_ptr<StreamEngine> engine = engineOf(args[0]);
    const Communicator& comm = communicator(args[1]);
    const py::object outgoing = sequence(args[3], "exchange()", kWanted);
    const py::object incoming = sequence(args[4], "exchange()", kWanted);
    StreamMessages sends;
    StreamMessages recvs;
    std::vector<Message> out;
    std::vector<Message> in;
    py::list buffers;
    addMessages(sends, out, comm, args[2], outgoing.ptr(), "sends", placeOf(*engine), buffers);
    addMessages(recvs, in, comm, args[2], incoming.ptr(), "recvs", placeOf(*engine), buffers);
    const Stream stream{streamOf(args[5])};
    const bool background = Py_IsTrue(args[6]);
    std::shared_ptr<StreamWork> work;
    {
      const GilRelease release;
      checkOverlaps(out, in);
      work = engine->exchange(comm.callOfMessages(), comm.sharedRanks(), sends, recvs, stream,
                              background);
    }
    return handOver(engine, std::move(work), background, std::move(buffers));
  });
}

// stream_collective(engine, arguments of a collective..., stream, async_op) -> as stream_exchange()
PyObject* streamCollective(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect(count, kCollectiveArguments + 3);
    const std::shared_ptr<StreamEngine> engine = engineOf(args[0]);
    const Communicator& comm = communicator(args[1]);
    const CollectiveCall call = collectiveCall(comm, args + 1, placeOf(*engine));
    const Stream stream{streamOf(args[kCollectiveArguments + 1])};
    const bool background = Py_IsTrue(args[kCollectiveArguments + 2]);
    std::shared_ptr<StreamWork> work;
    {
      const GilRelease release;
      const CollectivePlan plan =
          comm.plan(call.operands, call.options, engine->planning(comm.ranks()));
      work = engine->collective(plan, comm.sharedRanks(), call.operands.in, call.operands.out,
                                stream, background);
    }
    return handOver(engine, std::move(work), background, buffersOf(args + 1));
  });
}

// subset(communicator, positions) -> (communicator, its rank, its size), or None when this rank is
// not in it
PyObject* subset(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    expect(count, 2);
    const py::object positions = sequence(args[1], "subset()", "a sequence of ranks");
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(positions.ptr());
    InlineVector<int, 64> ranks;
    ranks.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      ranks.push_back(rankOf(PySequence_Fast_GET_ITEM(positions.ptr(), i)));
    }
    const auto made = communicator(args[0]).subset({ranks.begin(), ranks.size()});
    if (!made) return nullptr;
    return py::make_tuple(made, made->rank(), made->size()).release().ptr();
  });
}

PyMethodDef calls[] = {
    {"send", function(send), METH_FASTCALL, nullptr},
    {"recv", function(recv), METH_FASTCALL, nullptr},
    {"exchange", function(exchange), METH_FASTCALL, nullptr},
    {"collective", function(collective), METH_FASTCALL, nullptr},
    {"stream_exchange", function(streamExchange), METH_FASTCALL, nullptr},
    {"stream_collective", function(streamCollective), METH_FASTCALL, nullptr},
    {"subset", function(subset), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void checkSignals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

const World::InterruptCheck kCheckSignals = checkSignals;

void bindCalls(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), calls) != 0) throw py::error_already_set();
}

}  // namespace hdpcomm
