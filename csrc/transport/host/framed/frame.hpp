// The header of a frame. Both ends run the same build of the core (the magic number says which
// layout), so plain structs are sent.
#pragma once

#include <cstring>

#include "transport/host/framed/frame_link.hpp"

namespace hdpcomm::framed {

inline constexpr uint32_t kMagic = 0x6864'6604;  // the last byte is the layout's version

enum class Kind : uint8_t {
  kData,      // a piece of a message
  kAccepted,  // the receiver accepted message `index`, whose sender had asked for confirmation
  kRejected,  // the receiver called something else: `call`, `bytes` are its own
  kFailure,   // the sender gave up an operation: its sends up to `number`, its receives up to
              // `other`, as the flags say (failures.hpp). `index` - 1: its first send; 0: it has
              // none
  kCredit,    // carries only `consumed`
  kPing,      // `number`: counts them
  kPong,  // `number` is that of the ping. With kHasPulse also the sender's Pulse: the ages of its
          // last moves in milliseconds in `index` and `offset`, `cause`, and the text
  kGoodbye,  // the last frame; the text says why
  kMarker,   // of resync(): `number` is the sender's attempt, `other` the receiver's last one
  // FetchRequest: `number` is the word, `other` the generation, `bytes` the amount. `index` counts
  // those of the sender, from 0
  kFetch,
  kFetched,  // the answer to number `index`: `detail` is the FetchEnd, `number` the count before
  kHeardGoodbye,  // all frames of the receiver have come, up to its goodbye
};

inline constexpr uint32_t kConfirm = 1;  // kData: the sender wants a kAccepted
inline constexpr uint8_t kHasPulse = 1;  // `detail` of a kPong
inline constexpr uint32_t kDropped = 2;  // kRejected: no operation received it; there is no call

struct Header {
  uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  uint8_t detail = 0;     // kFailure: ErrorKind
  int16_t cause = -1;     // kFailure: the rank that the error concerns
  uint64_t consumed = 0;  // window units that this rank has consumed of the peer's messages
  uint64_t index = 0;     // of the message on its ordered pair
  uint64_t bytes = 0;     // of the whole message
  uint64_t offset = 0;    // of this piece
  uint32_t piece = 0;     // bytes of payload (kFailure, kGoodbye: of text) in this frame
  uint32_t flags = 0;
  uint32_t number = 0;
  uint32_t other = 0;
  Call call;
};
static_assert(sizeof(Header) == 80);

inline constexpr size_t kInlineBytes = kFrameHeadBytes - sizeof(Header);
inline constexpr size_t kTextBytes = 768;
// A send up to this size ends when the link has its pieces; a larger one, or one with `confirm`,
// when the receiver has accepted it, so that a rank does not run far ahead of one that gave up.
inline constexpr size_t kEagerBytes = 128 * 1024;
// Most units of a pair in flight that the receiver has not consumed; bounds the receiver's memory.
// A piece counts its bytes plus kPieceUnits, the memory of a frame without any.
inline constexpr uint64_t kWindow = 16 * kFrameBulkBytes;
inline constexpr uint64_t kPieceUnits = sizeof(Frame) + 64;
// Most frames beside the pieces that wait for a rank: notices, markers, answers. A rank sends one
// for an operation or a message under way.
inline constexpr uint64_t kControlFrames = kWindow / kPieceUnits;
// Most fetches of a pair in one direction that have no answer.
inline constexpr size_t kFetches = 64;
inline constexpr size_t kOutboxFrames = 8;  // most frames that wait for the carrier

inline Header readHeader(const Frame& frame) {
  Header header;
  std::memcpy(&header, frame.head(), sizeof header);
  return header;
}

inline void writeHeader(Frame& frame, const Header& header) {
  std::memcpy(frame.head(), &header, sizeof header);
}

inline std::byte* payload(Frame& frame) {
  return frame.bulkBytes() > 0 ? frame.bulk() : frame.head() + sizeof(Header);
}

inline FramePtr makeFrame(const Header& header, const void* data) {
  auto frame = std::make_shared<Frame>();
  if (header.piece > kInlineBytes) frame->allocate(header.piece);
  writeHeader(*frame, header);
  if (data != nullptr && header.piece > 0) std::memcpy(payload(*frame), data, header.piece);
  return frame;
}

}  // namespace hdpcomm::framed
