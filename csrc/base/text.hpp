// Text for people that comes from another process, or goes to one: the reasons of failures, mostly.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hdpcomm {

// The text as UTF-8 that a terminal may show: bytes that are no UTF-8 become U+FFFD; control
// characters but newlines and tabs are left out, and so are the marks that turn the direction of
// what follows.
std::string plainText(std::string_view text);
// The same of at most `most` bytes, cut between characters.
std::string plainText(std::string_view text, size_t most);
// Writes as much of the text as fits into a field, with a NUL behind it.
void writeText(char* field, size_t field_bytes, std::string_view text);
// What a field of that size holds, which another process has written.
std::string readText(const char* field, size_t field_bytes);

}  // namespace hdpcomm
