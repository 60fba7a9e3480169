#include "testing/fuzz.hpp"

#include <locale.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "kernels/reduce.hpp"

namespace hdpcomm::testing {
namespace {

constexpr uint64_t kOdd[] = {
    0,          1,      2,          3,          7,          8,          16,         64,
    256,        767,    768,        769,        944,        4096,       8192,       32768,
    65536,      262144, 1ULL << 19, 1ULL << 20, 1ULL << 31, 1ULL << 32, 1ULL << 48, 1ULL << 62,
    1ULL << 63, ~0ULL,  ~0ULL - 63, 0x7fffffff, 0xffffffff, 0x100000000};
constexpr size_t kCounts[] = {0, 1, 4, 200, 240, 1000, 2500, 20000, 140000, 300000};
constexpr std::byte kMark{0xa5};

constexpr std::string_view kPieces[] = {"a",
                                        "rank 1",
                                        " (told by rank 3)",
                                        "\xe4\xb8\xad",
                                        "\xe4\xb8",
                                        "\xc3\xa9",
                                        "\xf0\x9f\x98\x80",
                                        "\xf0\x9f\x98",
                                        "\xed\xa0\x80",
                                        "\xed\xb3\xbf",
                                        "\x1b[31m",
                                        "\x1b]0;x\x07",
                                        {"\0", 1},
                                        "\n",
                                        "\t",
                                        "\r",
                                        "\x7f",
                                        "\xc2\x9b",
                                        "\xe2\x80\xae",
                                        "\xff",
                                        "\x80",
                                        "\xc0\x80",
                                        "\xf4\x90\x80\x80",
                                        " since: ",
                                        " called resync() after: "};

// Without what differs from case to case.
std::string shapeOf(const std::string& text) {
  std::string shape;
  for (const char each : text) {
    if (each < '0' || each > '9') shape += each;
  }
  return shape;
}

}  // namespace

uint64_t FuzzBytes::number() {
  const uint8_t way = byte();
  if (way < 128) return kOdd[way % std::size(kOdd)];
  if (way < 192) return kOdd[way % std::size(kOdd)] + (byte() % 5) - 2;
  uint64_t any = 0;
  for (int i = 0; i < 1 + way % 8; ++i) any = any << 8 | byte();
  return any;
}

std::string FuzzBytes::text(size_t most) {
  std::string made;
  for (size_t left = 1 + below(12); left > 0 && made.size() < most; --left) {
    const uint8_t way = byte();
    if (way < 16) {
      made.append(most, way < 8 ? 'x' : '\xe4');  // up to the end of the field
    } else if (way < 64) {
      made += static_cast<char>(byte());
    } else {
      made += kPieces[way % std::size(kPieces)];
    }
  }
  made.resize(std::min(made.size(), most));
  return made;
}

// By the C library's reader of UTF-8, another one than that of base/text.cpp.
void checkPlain(const std::string& text) {
  static const locale_t utf8 = ::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  if (utf8 == nullptr) throw std::runtime_error("there is no locale C.UTF-8");
  const locale_t before = ::uselocale(utf8);
  std::wstring wide(text.size() + 1, L'\0');
  const size_t count = std::mbstowcs(wide.data(), text.c_str(), wide.size());
  ::uselocale(before);
  const bool whole = count != static_cast<size_t>(-1) && text.find('\0') == std::string::npos;
  if (!whole ||
      std::any_of(wide.begin(), wide.begin() + static_cast<ptrdiff_t>(count), [](wchar_t each) {
        return (each < 0x20 && each != L'\n' && each != L'\t') || (each >= 0x7f && each < 0xa0) ||
               (each >= 0x202a && each <= 0x202e);
      })) {
    throw std::runtime_error("the text of an error is no plain text");
  }
}

FuzzedRank::Posted& FuzzedRank::post(FuzzBytes& bytes) {
  const bool receives = bytes.below(3) != 0;
  auto& posted = *(receives ? receives_ : sends_).emplace_back(std::make_unique<Posted>());
  posted.call.dtype = DType::kFloat32;
  posted.call.count = kCounts[bytes.below(std::size(kCounts))];
  posted.bytes = posted.call.count * dtypeBytes(posted.call.dtype);
  posted.memory.assign(posted.bytes + 2 * kGuard, kMark);
  posted.number = receives ? transport_.nextRecvNumber(1) : transport_.nextSendNumber(1);
  std::byte* const data = posted.memory.data() + kGuard;
  if (receives) {
    RecvRequest request{.peer = 1,
                        .data = data,
                        .bytes = posted.bytes,
                        .number = posted.number,
                        .call = posted.call,
                        .completion = &posted.completion};
    if (bytes.below(4) == 0) {
      request.reduce = reduceFunction(DType::kFloat32, RedOp::kMax);
      request.operand = data;
      request.element_bytes = 4;
    }
    transport_.postRecv(request);
  } else {
    transport_.postSend({.peer = 1,
                         .data = data,
                         .bytes = posted.bytes,
                         .number = posted.number,
                         .confirm = bytes.below(2) == 0,
                         .call = posted.call,
                         .completion = &posted.completion});
  }
  return posted;
}

FuzzedRank::FuzzedRank(Transport& transport, FuzzBytes& bytes) : transport_(transport) {
  nothing_.call.dtype = DType::kFloat32;
  const size_t count = 1 + bytes.below(4);
  for (size_t i = 0; i < count; ++i) post(bytes);
}

const FuzzedRank::Posted& FuzzedRank::expected(size_t index) const {
  return index < receives_.size() ? *receives_[index] : nothing_;
}

void FuzzedRank::call(FuzzBytes& bytes) {
  switch (bytes.below(12)) {
    case 0:
      post(bytes);
      return;
    case 1:
      transport_.checkPeers();
      return;
    case 2:
      (void)transport_.lost(1, static_cast<uint32_t>(bytes.number()),
                            static_cast<uint32_t>(bytes.number()), bytes.below(2) == 0);
      return;
    case 3:
      transport_.notifyFailure(1, Error(ErrorKind::kAborted, bytes.text(2000)), std::nullopt,
                               static_cast<uint32_t>(bytes.number()),
                               static_cast<uint32_t>(bytes.number()));
      return;
    case 4: {
      const Posted& any = expected(bytes.below(4));
      transport_.cancel(&any.completion);
      return;
    }
    case 5: {
      Completion completion;
      transport_.rejectUnexpected(1, static_cast<uint32_t>(bytes.number()), Call{}, &completion);
      return;
    }
    case 6:
      (void)transport_.departure(1);
      checkPulse();
      return;
    case 7: {
      Posted& resync = *sends_.emplace_back(std::make_unique<Posted>());
      resync.memory.assign(2 * kGuard, kMark);
      transport_.restartNumbers(1);
      transport_.postResync(1, &resync.completion);
      return;
    }
    case 8:
      if (auto fetch = transport_.startFetch(1, {0, 1, 1})) fetches_.push_back(std::move(fetch));
      return;
    default:
      transport_.progress();
  }
}

// What the peer tells of itself is in its range, whatever it wrote.
void FuzzedRank::checkPulse() {
  const auto pulse = transport_.pulse(1);
  if (!pulse) return;
  const bool printable = std::all_of(pulse->doing.begin(), pulse->doing.end(),
                                     [](char each) { return each >= ' ' && each <= '~'; });
  const auto now = Clock::now();
  if (!printable || pulse->doing.size() > kPulseText || pulse->culprit < 0 ||
      pulse->culprit >= transport_.size() || pulse->moved > now || pulse->culprit_moved > now) {
    throw std::runtime_error("a pulse is out of its range");
  }
}

std::set<std::string> FuzzedRank::end() {
  for (int i = 0; i < 4; ++i) transport_.progress();
  std::set<std::string> results;
  const auto shown = [](const Error& error) {
    checkPlain(error.what());
    return shapeOf(error.what());
  };
  if (const auto error = transport_.outOfStep(1)) results.insert(shown(*error));
  if (const auto error = transport_.departure(1)) results.insert(shown(*error));
  checkPulse();
  for (const auto& fetch : fetches_) {
    const auto result = fetch->wait({});
    results.insert("fetch: " + std::string(result ? 1 + static_cast<size_t>(result->end) : 0, '+'));
  }
  fetches_.clear();
  for (const auto* list : {&receives_, &sends_}) {
    for (const auto& each : *list) {
      const char* kind = list == &receives_ ? "receive: " : "send: ";
      const Completion& completion = each->completion;
      results.insert(kind + (completion.failure        ? shown(*completion.failure)
                             : completion.pending == 0 ? std::string("done")
                                                       : std::string("under way")));
      transport_.cancel(&completion);
    }
  }
  transport_.close("the case is over");
  for (const auto* list : {&receives_, &sends_}) {
    for (const auto& each : *list) {
      const auto marked = [](std::byte value) { return value == kMark; };
      const auto& memory = each->memory;
      if (!std::all_of(memory.begin(), memory.begin() + kGuard, marked) ||
          !std::all_of(memory.end() - kGuard, memory.end(), marked)) {
        throw std::runtime_error("memory beside a buffer has changed");
      }
    }
  }
  return results;
}

}  // namespace hdpcomm::testing
