// PairFailures alone: one rank of a pair, whose requests wait in queues and never move.
#include <pybind11/stl.h>

#include <deque>

#include "testing/module.hpp"
#include "transport/host/pair_failures.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

struct Outgoing {
  SendRequest request;
  bool started = false;
  std::optional<OwnNotice> notice;

  bool begun() const { return notice || started; }
};

// A notice as it is sent: flags that say which numbers hold, the last send and receive that it
// ends, its text.
using Wire = std::tuple<uint32_t, uint32_t, uint32_t, std::string>;

class FailureEnd {
 public:
  FailureEnd(int rank, int peer) : rank_(rank), peer_(peer) { failures_.connect(rank, peer); }

  PairFailures& failures() { return failures_; }

  // `waits`: still queued for room, else already in flight. Returns a number for failureOf().
  size_t send(uint32_t number, bool waits, bool started) {
    Outgoing out;
    out.request.number = number;
    out.request.completion = &requests_.emplace_back();
    out.started = started;
    if (!failures_.refuses(out.request)) (waits ? queue_ : inflight_).push(std::move(out));
    return requests_.size() - 1;
  }
  size_t recv(uint32_t number) {
    RecvRequest request;
    request.number = number;
    request.completion = &requests_.emplace_back();
    if (!failures_.refuses(request)) recvs_.push(request);
    return requests_.size() - 1;
  }
  std::optional<std::string> failureOf(size_t request) const {
    return textOf(requests_.at(request).failure);
  }

  // None: the peer needs no notice.
  std::optional<Wire> giveUp(const std::string& text, std::optional<uint32_t> sends,
                             std::optional<uint32_t> recvs) {
    const auto notice = failures_.giveUp(Error(ErrorKind::kAborted, text), {sends, recvs}, sends,
                                         recvs_, inflight_, queue_);
    if (!notice) return std::nullopt;
    Outgoing out;
    out.notice = notice;
    queueNotice(queue_, std::move(out), sends);
    return Wire(notice->flags(), sends.value_or(0), recvs.value_or(0), notice->text);
  }
  void queue(const std::string& text, std::optional<uint32_t> sends) {
    Outgoing out;
    out.notice = OwnNotice{};
    out.notice->text = text;
    queueNotice(queue_, std::move(out), sends);
  }
  void hear(const Wire& wire) { failures_.receive(noticeIn(wire), recvs_, inflight_, queue_); }
  std::optional<std::string> outOfStep() const { return textOf(failures_.outOfStep()); }
  void failAll(const std::string& text) {
    failures_.failAll(Error(ErrorKind::kPeerLost, text), recvs_, inflight_, queue_);
  }
  std::optional<std::string> lost(std::optional<uint32_t> send, std::optional<uint32_t> recv,
                                  bool needed, const std::optional<std::string>& gone,
                                  const std::optional<Wire>& ahead) {
    std::optional<Error> error;
    if (gone) error = Error(ErrorKind::kPeerLost, *gone);
    return textOf(failures_.lost(send, recv, needed, error, [&]() -> std::optional<Notice> {
      if (!ahead) return std::nullopt;
      const Notice notice = noticeIn(*ahead);
      return notice.concerns(send, recv) ? std::optional<Notice>(notice) : std::nullopt;
    }));
  }
  // The queue in order: numbers of messages, texts of notices.
  py::list waiting() {
    py::list items;
    for (size_t i = 0; i < queue_.size(); ++i) {
      const Outgoing& out = queue_[i];
      out.notice ? items.append(out.notice->text) : items.append(out.request.number);
    }
    return items;
  }

 private:
  static std::optional<std::string> textOf(const std::optional<Error>& error) {
    return error ? std::optional<std::string>(error->what()) : std::nullopt;
  }
  Notice noticeIn(const Wire& wire) const {
    const auto& [flags, sends, recvs, text] = wire;
    return noticeFrom(peer_, rank_, ErrorKind::kAborted, text, -1, endsHere(flags, sends, recvs));
  }

  int rank_;
  int peer_;
  PairFailures failures_;
  RingQueue<RecvRequest> recvs_;
  RingQueue<Outgoing> inflight_;
  RingQueue<Outgoing> queue_;
  std::deque<Completion> requests_;
};

}  // namespace

void bindPairFailures(py::module_& module) {
  py::class_<FailureEnd>(module, "FailureEnd")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("peer"))
      .def("next_send", [](FailureEnd& end) { return end.failures().nextSend(); })
      .def("next_recv", [](FailureEnd& end) { return end.failures().nextRecv(); })
      .def("restart", [](FailureEnd& end) { end.failures().restart(); })
      .def("resynced", [](FailureEnd& end) { end.failures().resynced(); })
      .def("out_of_step", &FailureEnd::outOfStep)
      .def("send", &FailureEnd::send, py::arg("number"), py::arg("waits") = false,
           py::arg("started") = false)
      .def("recv", &FailureEnd::recv, py::arg("number"))
      .def("failure_of", &FailureEnd::failureOf, py::arg("request"))
      .def("give_up", &FailureEnd::giveUp, py::arg("text"), py::arg("sends"), py::arg("recvs"))
      .def("queue", &FailureEnd::queue, py::arg("text"), py::arg("sends"))
      .def("hear", &FailureEnd::hear, py::arg("notice"))
      .def("fail_all", &FailureEnd::failAll, py::arg("text"))
      .def("lost", &FailureEnd::lost, py::arg("send"), py::arg("recv"), py::arg("needed"),
           py::arg("gone"), py::arg("ahead"))
      .def("waiting", &FailureEnd::waiting);
}

}  // namespace hdpcomm::testing
