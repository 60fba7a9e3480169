// The environment variables that hdpcomm reads, in one table: of the core and of the package.
// `hdpcomm doctor --all` prints it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <variant>

namespace hdpcomm {

struct Settings {
  double timeout_s;
  double longest_wait_s;
  std::string transport;
  std::string host_id;
  std::string domain;
  std::string secret;
  std::string secret_file;
  std::string store;
  std::string costs;
  size_t shm_eager_bytes;
  size_t shm_payload_bytes;
  bool shm_cma;
  bool deadlocks;
  size_t flight_records;
  std::string flight_folder;
  double spin_us;
  double yield_us;
  double liveness_s;
  double silence_s;
  std::string nccl;
  size_t nccl_connect;
  size_t device_slot_bytes;
  size_t device_slots;
  size_t device_lanes;
  size_t device_landing_bytes;
  size_t device_window_bytes;
  size_t device_small_bytes;

  // As they were when this process asked for the first time. Throws InvalidUsage where a variable
  // has a value that it cannot have; names both, and what it can have.
  static const Settings& get();
  // As they are now, but for those that are fixed for the life of a process (Setting::fixed).
  static Settings read();
};

// A row of the table.
struct Setting {
  using Field = std::variant<bool Settings::*, size_t Settings::*, double Settings::*,
                             std::string Settings::*>;

  const char* variable;
  const char* field;
  Field member;
  const char* fallback;
  const char* meaning;
  double least = 0;  // of numbers
  double most = 0;
  bool hidden = false;  // reports do not show its value
  bool fixed = false;   // read once a process, else at each init()

  // What the variable is set to, or the default where it is unset or empty.
  std::string text() const;
  // Sets the field to what the text says. Throws InvalidUsage.
  void parse(const std::string& text, Settings& settings) const;
  // "a number from 0 to 1000000"
  std::string range() const;
};

std::span<const Setting> settingsTable();

}  // namespace hdpcomm
