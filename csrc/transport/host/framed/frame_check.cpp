#include "transport/host/framed/frame_check.hpp"

#include <algorithm>

#include "transport/failures.hpp"

namespace hdpcomm::framed {
namespace {

std::string bad(const char* field, uint64_t value) {
  return std::string("the ") + field + " of its frame is " + std::to_string(value) +
         ", which no rank of this version of hdpcomm sends";
}

std::optional<std::string> badFetch(const Header& header) {
  if (header.piece > 0) return bad("piece", header.piece);
  if (header.kind == Kind::kFetched) {
    if (header.detail > static_cast<uint8_t>(FetchEnd::kOwnerLeft)) {
      return bad("detail", header.detail);
    }
    return std::nullopt;
  }
  if (header.number >= kCounterWords) return bad("counter", header.number);
  if (header.bytes == 0 || header.bytes > kMaxCount) return bad("amount", header.bytes);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> badFrame(const Frame& frame, int num_ranks) {
  const Header header = readHeader(frame);
  const size_t room = frame.bulkBytes() > 0 ? frame.bulkBytes() : kInlineBytes;
  if (header.magic != kMagic) return bad("magic", header.magic);
  if (header.kind > Kind::kHeardGoodbye) return bad("kind", static_cast<uint64_t>(header.kind));
  if (header.piece > room) return bad("piece", header.piece);
  const bool text = header.kind == Kind::kFailure || header.kind == Kind::kGoodbye;
  if (text && header.piece > kTextBytes) return bad("text length", header.piece);
  if (header.kind == Kind::kFailure && !noticeFits(header.detail, header.cause, num_ranks)) {
    return bad("error kind or cause", header.detail);
  }
  if (header.kind == Kind::kPong) {
    if (header.detail > kHasPulse) return bad("detail", header.detail);
    if (header.cause < -1 || header.cause >= num_ranks) {
      return bad("rank", static_cast<uint64_t>(header.cause));
    }
    if (header.piece > kPulseText) return bad("text length", header.piece);
    const uint64_t age = std::max(header.index, header.offset);
    if (age > static_cast<uint64_t>(kOldestMoveMs)) return bad("age", age);
  }
  if (header.kind == Kind::kFetch || header.kind == Kind::kFetched) return badFetch(header);
  if (header.kind != Kind::kData) return std::nullopt;
  // In this order: the sum of offset and piece cannot wrap.
  if (header.offset > header.bytes) return bad("offset", header.offset);
  if (header.piece != std::min<uint64_t>(kFrameBulkBytes, header.bytes - header.offset)) {
    return bad("piece", header.piece);
  }
  return std::nullopt;
}

std::optional<std::string> ArrivingMessages::add(const Header& header) {
  units_ += header.piece + kPieceUnits;
  if (header.offset == 0) {
    if (header.index != next_index_) return bad("index", header.index);
    ++next_index_;
    last_ = header;
  } else if (header.index != last_.index || next_index_ == 0) {
    return bad("index", header.index);
  } else if (header.offset != last_.offset) {
    return bad("offset", header.offset);
  } else if (header.bytes != last_.bytes) {
    return bad("size", header.bytes);
  } else if (header.number != last_.number || header.call != last_.call) {
    return bad("number or call", header.number);
  }
  last_.offset = header.offset + header.piece;
  return std::nullopt;
}

}  // namespace hdpcomm::framed
