#include "base/text.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace hdpcomm {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: the text does not begin with a character of UTF-8
};

// The first character. Overlong forms, surrogates and codes beyond U+10FFFF are none (RFC 3629).
Character firstOf(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
  uint32_t code = lead & (0xFFU >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3FU);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kSmallest[bytes] || surrogate || code > 0x10FFFF) return {};
  return {code, bytes};
}

bool isControl(uint32_t code) {
  if (code == '\n' || code == '\t') return false;
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x200E || code == 0x200F ||
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

std::string plainText(std::string_view text, size_t most) {
  std::string made;
  made.reserve(std::min(text.size(), most));
  while (!text.empty()) {
    const Character next = firstOf(text);
    const size_t taken = std::max<size_t>(next.bytes, 1);
    const std::string_view shown = next.bytes > 0 ? text.substr(0, taken) : kReplacement;
    text.remove_prefix(taken);
    if (next.bytes > 0 && isControl(next.code)) continue;
    if (made.size() + shown.size() > most) break;
    made += shown;
  }
  return made;
}

std::string plainText(std::string_view text) { return plainText(text, std::string::npos); }

void writeText(char* field, size_t field_bytes, std::string_view text) {
  const std::string plain = plainText(text, field_bytes - 1);
  std::memcpy(field, plain.data(), plain.size());
  field[plain.size()] = '\0';
}

std::string readText(const char* field, size_t field_bytes) {
  return plainText({field, ::strnlen(field, field_bytes)});
}

}  // namespace hdpcomm
