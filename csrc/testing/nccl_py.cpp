// The fake NCCL, and a rank's end of a communicator of it. Buffers cross as addresses.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "bindings/rooms.hpp"
#include "testing/fake_nccl.hpp"
#include "testing/module.hpp"
#include "testing/requests.hpp"
#include "transport/stream/nccl/nccl_transfers.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

NcclUniqueId newId(const NcclApi& api) {
  NcclUniqueId id;
  ncclCheck(api, api.getUniqueId(&id), "ncclGetUniqueId", nullptr, -1);
  return id;
}

template <typename T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// An NcclWorld and the stream of its operations, which is the queue of a fake rank.
struct Member {
  std::shared_ptr<FakeNccl> fake;
  std::shared_ptr<NcclWorld> world;
  NcclStream stream;

  void collective(ScheduleRequest request, const std::vector<int>& ranks, std::byte* in,
                  std::byte* out, DType dtype, RedOp redop) const;
  void connectAhead(int max_distance) const;
};

void Member::collective(ScheduleRequest request, const std::vector<int>& ranks, std::byte* in,
                        std::byte* out, DType dtype, RedOp redop) const {
  if (request.algorithm == Algorithm::kAuto && world->hasWhole(request.op, dtype, ranks)) {
    return world->runWhole({request.op, in, out, request.count, dtype, redop, request.root},
                           stream);
  }
  const int rank = world->rank();
  const auto own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  request.group_size = static_cast<int>(ranks.size());
  request.rank = static_cast<int>(own);
  request.element_bytes = dtypeBytes(dtype);
  request.average = redop == RedOp::kAvg;
  const auto plan = std::make_shared<const nccl::GroupPlan>(
      request, std::make_shared<const Schedule>(makeSchedule(request)));
  const Call call{.op = request.op, .dtype = dtype, .redop = redop};
  std::byte* scratch = fake->allocate(rank, plan->scratchBytes());
  const DevicePtr queue = fake->queue(rank);
  ScheduleRunner runner(queue, {plan->schedule,
                                call,
                                ranks,
                                {in, out, scratch},
                                Stream{reinterpret_cast<uintptr_t>(stream)}});
  runner.add(std::make_unique<nccl::NcclTransfers>(*world, queue, plan, runner.run()));
  std::move(runner).enqueue({});
  fake->release(rank, scratch, plan->scratchBytes());
}

void Member::connectAhead(int max_distance) const {
  std::byte* bytes = fake->allocate(world->rank(), 2);
  world->connectAhead(max_distance, bytes, stream);
  fake->release(world->rank(), bytes, 2);
}

// Address, bytes, global rank.
using Message = std::tuple<uintptr_t, size_t, int>;

std::vector<NcclWorld::Message> messagesOf(const std::vector<Message>& tuples) {
  std::vector<NcclWorld::Message> messages;
  for (const auto& [address, bytes, peer] : tuples) {
    messages.push_back({pointer(address), bytes, peer});
  }
  return messages;
}

void bindMember(py::module_& module) {
  py::class_<Member>(module, "NcclMember")
      .def(
          "collective",
          [](Member& m, int op, int algorithm, const std::vector<int>& ranks, uintptr_t in,
             uintptr_t out, size_t count, int dtype, int redop, int root, std::vector<int> nodes) {
            ScheduleRequest request = requestOf(op, algorithm, 0, 0, count, 0, root);
            request.nodes = std::move(nodes);
            m.collective(std::move(request), ranks, pointer<std::byte>(in), pointer<std::byte>(out),
                         static_cast<DType>(dtype), static_cast<RedOp>(redop));
          },
          py::arg("op"), py::arg("algorithm"), py::arg("ranks"), py::arg("source"),
          py::arg("target"), py::arg("count"), py::arg("dtype"), py::arg("redop"), py::arg("root"),
          py::arg("nodes"))
      .def(
          "exchange",
          [](Member& m, const std::vector<Message>& sends, const std::vector<Message>& recvs) {
            m.world->exchange(messagesOf(sends), messagesOf(recvs), m.stream);
          },
          py::arg("sends"), py::arg("recvs"))
      .def("connect_ahead", &Member::connectAhead, py::arg("max_distance"))
      .def("check_async", [](Member& m) { m.world->checkAsync(); })
      .def("abort", [](Member& m) { m.world->abort(); })
      .def("stats", [](const Member& m) { return m.world->stats(); });
}

void bindFake(py::module_& module) {
  py::class_<FakeNccl, std::shared_ptr<FakeNccl>>(module, "FakeNccl")
      .def(py::init([](int num_ranks, int version) {
             return std::make_shared<FakeNccl>(num_ranks, version);
           }),
           py::arg("num_ranks"), py::arg("version") = 23203)
      .def("label", &FakeNccl::label, py::arg("rank"), py::arg("text"))
      .def("fail_next", &FakeNccl::failNext, py::arg("function"), py::arg("rank"), py::arg("code"))
      .def("set_async_error", &FakeNccl::setAsyncError, py::arg("rank"), py::arg("code"))
      .def("stall_init", &FakeNccl::stallInit)
      .def("stall_groups", &FakeNccl::stallGroups, py::arg("rank"))
      .def("hold_destroy", &FakeNccl::holdDestroy)
      .def("let_destroy", &FakeNccl::letDestroy)
      .def("num_in_destroy", &FakeNccl::numInDestroy)
      .def("complaints", &FakeNccl::complaints)
      // The table for a rank of an engine: its operations go to the streams of this device.
      .def(
          "library",
          [](FakeNccl& fake, int rank, const DevicePtr& device) {
            fake.attach(rank, device);
            return std::const_pointer_cast<NcclApi>(fake.api());
          },
          py::arg("rank"), py::arg("device"))
      .def(
          "join",
          [](FakeNccl& fake, int rank, double timeout_s, std::vector<int> nodes) {
            const auto api = fake.api();
            const auto size = static_cast<int>(fake.ranks().size());
            return Member{fake.shared_from_this(),
                          std::make_shared<NcclWorld>(api, newId(*api), rank, size, timeout_s,
                                                      std::move(nodes)),
                          fake.stream(rank)};
          },
          py::arg("rank"), py::arg("timeout") = 1.0, py::arg("nodes") = std::vector<int>{})
      .def("run", &FakeNccl::run, py::arg("seed"), py::call_guard<GilRelease>());
}

}  // namespace

void bindNccl(py::module_& module) {
  module.attr("OLDEST_NCCL") = kOldestNccl;
  module.def("nccl_buffer_bytes", &ncclBufferBytes, py::arg("local_peers"), py::arg("channels"));
  module.def(
      "nccl_unique_id",
      [](const NcclApi& library) {
        const NcclUniqueId id = newId(library);
        return py::bytes(id.bytes, sizeof id.bytes);
      },
      py::arg("library"));
  // Joins a world of one and leaves it: shows what NCCL says on this machine.
  module.def(
      "try_nccl",
      [](const std::shared_ptr<NcclApi>& library, double timeout_s) {
        const NcclUniqueId id = newId(*library);
        const GilRelease release;
        NcclWorld(library, id, 0, 1, timeout_s).retire();
      },
      py::arg("library"), py::arg("timeout"));
  bindMember(module);
  bindFake(module);
}

}  // namespace hdpcomm::testing
