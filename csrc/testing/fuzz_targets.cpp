// The hostile peers: one that sends frames, and one that writes into the shared segment.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/process.hpp"
#include "testing/fuzz.hpp"
#include "transport/host/framed/frame.hpp"
#include "transport/host/shm/segment.hpp"

namespace hdpcomm::testing {
namespace {

constexpr int kSteps = 24;  // of a case, at most

// A process that does nothing: the one whose memory the hostile rank says to send from.
class OtherProcess {
 public:
  OtherProcess() {
    int ends[2] = {};
    HDP_SYS(::pipe2(ends, O_CLOEXEC));
    const Fd reads(ends[0]);
    const Fd writes(ends[1]);
    pid_ = static_cast<pid_t>(HDP_SYS(::fork()));
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const uint64_t start_time = ownStartTime();
      (void)!::write(ends[1], &start_time, sizeof start_time);
      for (;;) ::pause();
    }
    if (::read(ends[0], &start_time_, sizeof start_time_) != sizeof start_time_) {
      throw std::runtime_error("the other process has not started");
    }
  }
  ~OtherProcess() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;
  pid_t pid() const { return pid_; }
  uint64_t startTime() const { return start_time_; }

 private:
  pid_t pid_ = 0;
  uint64_t start_time_ = 0;
};

// Puts a number into some bytes of an object, at a place that is one of its fields or any.
void change(void* object, size_t size, FuzzBytes& bytes) {
  const size_t at = bytes.below(size);
  const size_t width = std::min<size_t>(size_t{1} << bytes.below(4), size - at);
  const uint64_t value = bytes.number();
  std::memcpy(static_cast<std::byte*>(object) + at, &value, width);
}

// --- frames

// What an honest rank would send next.
struct Progress {
  size_t message = 0;
  uint64_t offset = 0;
  uint64_t fetch = 0;
  uint64_t answer = 0;
};

// The piece of the message that comes next, as an honest rank would send it, or a frame of another
// kind.
framed::Header nextHeader(const FuzzedRank& rank, FuzzBytes& bytes, Progress& progress) {
  auto& [message, offset, fetch, answer] = progress;
  const FuzzedRank::Posted& expected = rank.expected(message);
  framed::Header header;
  const size_t kind = bytes.below(20);
  if (kind <= static_cast<size_t>(framed::Kind::kHeardGoodbye)) {
    header.kind = static_cast<framed::Kind>(kind);
  }
  if (header.kind == framed::Kind::kFetch) {
    header.index = fetch++;
    header.number = static_cast<uint32_t>(bytes.below(kCounterWords + 1));
    header.other = static_cast<uint32_t>(bytes.below(3));
    header.bytes = bytes.below(2) == 0 ? bytes.number() : 1;
    return header;
  }
  if (header.kind == framed::Kind::kFetched) {
    header.index = answer++;
    header.detail = static_cast<uint8_t>(bytes.below(5));
    header.number = static_cast<uint32_t>(bytes.number());
    return header;
  }
  header.index = message;
  header.number = expected.number;
  header.call = expected.call;
  header.bytes = expected.bytes;
  header.offset = offset;
  header.piece = static_cast<uint32_t>(
      std::min<uint64_t>(kFrameBulkBytes, expected.bytes - std::min(offset, expected.bytes)));
  if (header.kind != framed::Kind::kData) {
    header.piece =
        static_cast<uint32_t>(bytes.below(5) == 0 ? 760 + bytes.below(16) : bytes.below(64));
  } else {
    offset += header.piece;
    if (offset >= expected.bytes) {
      ++message;
      offset = 0;
    }
  }
  if (bytes.below(3) == 0) header.flags = framed::kConfirm;
  return header;
}

// Only the counter that is open has counted.
void checkCounters(const CounterWords& words) {
  for (uint32_t i = 0; i < kCounterWords; ++i) {
    const uint64_t value = words.at[i].value.load(std::memory_order_relaxed);
    if (i == 0 ? value >> 32 != 1 : value != 0) {
      throw std::runtime_error("a counter that nobody has opened has changed");
    }
  }
}

}  // namespace

std::set<std::string> fuzzFrames(std::span<const uint8_t> data) {
  FuzzBytes bytes(data);
  const auto link = std::make_shared<FrameLink>(0, 2);
  const std::unique_ptr<Transport> transport = makeFramedTransport(link);
  FuzzedRank rank(*transport, bytes);
  const auto words = transport->counterWords(0);
  openWord(words->at[0], 1);
  Progress sent;
  size_t fetches = 0;
  for (int step = 0; step < kSteps && !bytes.empty(); ++step) {
    if (bytes.below(3) == 0) {
      rank.call(bytes);
      // The carrier takes fetches before messages, so it need not wait here.
      for (; fetches < rank.fetches(); ++fetches) (void)link->tryNext(1);
      continue;
    }
    FramePtr frame = framed::makeFrame(nextHeader(rank, bytes, sent), nullptr);
    for (size_t changes = bytes.below(3); changes > 0; --changes) {
      change(frame->head(), sizeof(framed::Header), bytes);
    }
    // What a carrier does: it reads as many bytes as the head says, or gives the head up.
    const framed::Header header = framed::readHeader(*frame);
    auto arrived = std::make_shared<Frame>();
    std::memcpy(arrived->head(), frame->head(), kFrameHeadBytes);
    if (header.magic == framed::kMagic && header.piece <= kFrameBulkBytes && bytes.below(8) != 0) {
      arrived->expectBulk();
      const std::string text = bytes.text(
          std::min(arrived->bulkBytes() > 0 ? arrived->bulkBytes() : framed::kInlineBytes,
                   framed::kTextBytes));
      std::memcpy(framed::payload(*arrived), text.data(), text.size());
    }
    link->deliver(1, arrived);
    if (bytes.below(2) == 0) transport->progress();
  }
  checkCounters(*words);
  return rank.end();
}

// --- the shared segment

namespace {

using shm::Channel;
using shm::Control;
using shm::Kind;
using shm::Slot;

void writeOver(void* place, const std::string& text) {
  std::memcpy(place, text.data(), text.size());
}

void writeSlot(const FuzzedRank& rank, shm::Segment& segment, FuzzBytes& bytes, size_t message) {
  const FuzzedRank::Posted& expected = rank.expected(message);
  Slot& slot = segment.channel(1, 0).slots[message % shm::kSlots];
  slot.call = expected.call;
  slot.bytes = expected.bytes;
  slot.number = expected.number;
  slot.kind = static_cast<Kind>(bytes.below(static_cast<size_t>(Kind::kMarker) + 1));
  slot.detail = 0;
  slot.at.address = bytes.below(3) == 0 ? bytes.number() : 0;
  slot.at.fragment = expected.bytes;
  if (slot.kind == Kind::kFailure) {
    slot.at.fragment = bytes.below(4) == 0 ? bytes.number() : bytes.below(200);
    writeOver(segment.payload(1, 0), bytes.text(shm::kFailureText));
  }
  slot.state.store(shm::SlotState::kPosted, std::memory_order_relaxed);
  for (size_t changes = bytes.below(3); changes > 0; --changes) {
    change(reinterpret_cast<std::byte*>(&slot) + 8, sizeof slot - 8, bytes);
  }
  slot.stamp.store(message + 1, std::memory_order_release);
}

// What the rank reads of its peer beside messages: counts, and the peer's description of itself.
// Not the peer's process, to which the system's own rules apply.
void writeBeside(shm::Segment& segment, FuzzBytes& bytes) {
  Channel& out = segment.channel(0, 1);
  Channel& in = segment.channel(1, 0);
  Control& control = segment.control(1);
  switch (bytes.below(9)) {
    case 0:
      return out.consumed.store(bytes.number());
    case 1:
      return out.payload_consumed.store(bytes.number());
    case 2:
      return out.direct_allowed.store(static_cast<uint32_t>(bytes.number()));
    case 3:
      return change(&out.slots[bytes.below(4)], sizeof(Slot), bytes);
    case 4:
      return control.heap_descriptor.store(static_cast<int32_t>(bytes.number()));
    case 5:
      control.heap_base = bytes.number();
      return;
    case 6:
      std::memset(control.reason, static_cast<int>(1 + bytes.below(200)), sizeof control.reason);
      writeOver(control.reason, bytes.text(sizeof control.reason));
      control.reason_ready.store(1);
      if (bytes.below(2) == 0) control.state.store(shm::RankState::kClosed);
      return;
    case 7:
      if (bytes.below(2) == 0) return change(&control.pulse, sizeof control.pulse, bytes);
      return change(&control.wait, sizeof control.wait, bytes);
    default:
      return change(&in.slots[bytes.below(4)], sizeof(Slot), bytes);
  }
}

}  // namespace

std::set<std::string> fuzzSlots(std::span<const uint8_t> data) {
  static const OtherProcess other;
  FuzzBytes bytes(data);
  const auto segment = std::dynamic_pointer_cast<shm::Segment>(createShmSegment(2));
  Control& control = segment->control(1);
  control.pid = other.pid();
  control.start_time = other.startTime();
  control.heap_descriptor.store(-1);
  control.state.store(shm::RankState::kReady, std::memory_order_release);
  const std::unique_ptr<Transport> transport = makeShmTransport(segment, 0);
  shmWaitAllReady(*transport, {.timeout_s = 5});
  segment->channel(0, 1).direct_allowed.store(static_cast<uint32_t>(bytes.below(2)));
  FuzzedRank rank(*transport, bytes);
  size_t message = 0;
  for (int step = 0; step < kSteps && !bytes.empty(); ++step) {
    const size_t way = bytes.below(4);
    if (way == 0) {
      rank.call(bytes);
    } else if (way == 1) {
      writeBeside(*segment, bytes);
    } else {
      writeSlot(rank, *segment, bytes, message++);
    }
    if (bytes.below(2) == 0) transport->progress();
  }
  return rank.end();
}

// --- texts

std::set<std::string> fuzzTexts(std::span<const uint8_t> data) {
  FuzzBytes bytes(data);
  std::set<std::string> shown;
  while (!bytes.empty()) {
    const std::string text = bytes.text(1 + bytes.below(64) * 16);
    const size_t most = 1 + bytes.below(64) * 16;
    const std::string cut = plainText(text, most);
    checkPlain(cut);
    if (cut.size() > most || plainText(cut) != cut || !plainText(text).starts_with(cut)) {
      throw std::runtime_error("a text is cut at the wrong place");
    }
    const Error error(ErrorKind::kAborted, text);
    checkPlain(error.what());
    std::vector<char> field(most + 2, '#');
    writeText(field.data() + 1, most, text);
    if (field.front() != '#' || field.back() != '#') {
      throw std::runtime_error("memory beside a field has changed");
    }
    std::memcpy(field.data() + 1, text.data(), std::min(text.size(), most));
    checkPlain(readText(field.data() + 1, most));
    shown.insert(std::to_string(cut.size() / 16));
  }
  return shown;
}

}  // namespace hdpcomm::testing
