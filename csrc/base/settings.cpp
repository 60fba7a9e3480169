#include "base/settings.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/error.hpp"

namespace hdpcomm {
namespace {

constexpr double kMostBytes = 1LL << 40;

#define HDP_SETTING(name, field_name) \
  .variable = name, .field = #field_name, .member = &Settings::field_name
constexpr Setting kTable[] = {
    {HDP_SETTING("HDPCOMM_TIMEOUT", timeout_s), .fallback = "60",
     .meaning = "seconds before an operation raises CommTimeout (init(timeout=) wins)",
     .least = 0.001, .most = 1e7},
    {HDP_SETTING("HDPCOMM_LONGEST_WAIT_S", longest_wait_s), .fallback = "7200",
     .meaning = "seconds before an operation raises CommTimeout though the ranks that it awaits "
                "still move, where deadlines go by liveness",
     .least = 0.001, .most = 1e7},
    {HDP_SETTING("HDPCOMM_TRANSPORT", transport), .fallback = "auto",
     .meaning = "the transport of init() where the program names none"},
    {HDP_SETTING("HDPCOMM_HOSTID", host_id), .fallback = "",
     .meaning =
         "part of this rank's host identity: ranks with different values do not share memory"},
    {HDP_SETTING("HDPCOMM_DOMAIN", domain), .fallback = "",
     .meaning =
         "name of the rack or NVLink domain of this host: plans know that links between hosts "
         "with the same name are faster than others"},
    {HDP_SETTING("HDPCOMM_SECRET", secret), .fallback = "",
     .meaning =
         "the job's secret, at least 16 characters, the same on all ranks: who does not know "
         "it cannot join; unset: this user's own (docs/security.md)",
     .hidden = true},
    {HDP_SETTING("HDPCOMM_SECRET_FILE", secret_file), .fallback = "",
     .meaning = "file with the job's secret, readable by its owner alone"},
    {HDP_SETTING("HDPCOMM_STORE", store), .fallback = "",
     .meaning = "set by hdpcomm's launcher: MASTER_PORT and the file where its ranks meet"},
    {HDP_SETTING("HDPCOMM_COSTS", costs), .fallback = "",
     .meaning = "file with the measured costs of the transports; unset: hdpcomm/costs.json in the "
                "user's cache"},
    {HDP_SETTING("HDPCOMM_SHM_EAGER_BYTES", shm_eager_bytes), .fallback = "8192",
     .meaning = "messages up to this size are copied through shared memory at once", .least = 0,
     .most = 1 << 20, .fixed = true},
    {HDP_SETTING("HDPCOMM_SHM_PAYLOAD_BYTES", shm_payload_bytes), .fallback = "262144",
     .meaning = "shared memory for eager and chunked data of an ordered pair of ranks",
     .least = 65536, .most = 1 << 28, .fixed = true},
    {HDP_SETTING("HDPCOMM_SHM_CMA", shm_cma), .fallback = "1",
     .meaning = "0: do not use process_vm_readv, send large messages in chunks", .fixed = true},
    {HDP_SETTING("HDPCOMM_DEADLOCKS", deadlocks), .fallback = "1",
     .meaning = "0: do not look for ranks of a host that wait for each other", .fixed = true},
    {HDP_SETTING("HDPCOMM_FLIGHT_RECORDS", flight_records), .fallback = "1024",
     .meaning = "flight recorder: operations of a rank that are kept for a dump; 0: none",
     .least = 0, .most = 1 << 20},
    {HDP_SETTING("HDPCOMM_FLIGHT_FOLDER", flight_folder), .fallback = "",
     .meaning = "flight recorder: folder into which each rank writes its last operations when one "
                "of them fails, and on SIGUSR1; unset: nothing is written"},
    {HDP_SETTING("HDPCOMM_SPIN_US", spin_us), .fallback = "1",
     .meaning =
         "microseconds of busy waiting before sched_yield; ranks that share cores yield at once",
     .least = 0, .most = 1e6, .fixed = true},
    {HDP_SETTING("HDPCOMM_YIELD_US", yield_us), .fallback = "200",
     .meaning = "microseconds of sched_yield after that, before sleeping on a futex", .least = 0,
     .most = 1e7, .fixed = true},
    {HDP_SETTING("HDPCOMM_LIVENESS_S", liveness_s), .fallback = "0.2",
     .meaning = "seconds between checks whether the awaited peers still live", .least = 0.01,
     .most = 1, .fixed = true},
    {HDP_SETTING("HDPCOMM_SILENCE_S", silence_s), .fallback = "20",
     .meaning =
         "seconds without a sign of life after which an awaited peer on another host is lost",
     .least = 0.1, .most = 1e7, .fixed = true},
    {HDP_SETTING("HDPCOMM_NCCL", nccl), .fallback = "",
     .meaning = "the libnccl.so.2 to use; unset: a wheel's, torch's, or the system's"},
    {HDP_SETTING("HDPCOMM_NCCL_CONNECT", nccl_connect), .fallback = "1",
     .meaning = "nccl: init() connects each rank with those up to this distance; other pairs "
                "connect at first use",
     .least = 0, .most = 1e6},
    {HDP_SETTING("HDPCOMM_DEVICE_SLOT_BYTES", device_slot_bytes), .fallback = "0",
     .meaning = "device memory of a slot, in which a piece of a message arrives, the same on all "
                "ranks; 0: 8 MiB, and down to 2 MiB where a rank's slots would exceed 256 MiB",
     .least = 0, .most = kMostBytes},
    {HDP_SETTING("HDPCOMM_DEVICE_SLOTS", device_slots), .fallback = "4",
     .meaning = "slots of an ordered pair of ranks on a device", .least = 1, .most = 1e6},
    {HDP_SETTING("HDPCOMM_DEVICE_LANES", device_lanes), .fallback = "2",
     .meaning = "streams of an ordered pair of ranks, that is, copy engines that share a message",
     .least = 1, .most = 1e6},
    {HDP_SETTING("HDPCOMM_DEVICE_LANDING_BYTES", device_landing_bytes), .fallback = "67108864",
     .meaning = "device memory of a rank in which ring attention's keys and values arrive",
     .least = 0, .most = kMostBytes},
    {HDP_SETTING("HDPCOMM_DEVICE_WINDOW_BYTES", device_window_bytes), .fallback = "33554432",
     .meaning = "device memory of a rank in which the kernels of its peers read and write",
     .least = 0, .most = kMostBytes},
    {HDP_SETTING("HDPCOMM_DEVICE_SMALL_BYTES", device_small_bytes), .fallback = "8192",
     .meaning = "messages up to this size are one kernel that waits for the peer, the same on all "
                "ranks; 0: none, as where processes share a GPU by time slices",
     .least = 0, .most = 8192},
};
#undef HDP_SETTING

std::string inWords(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g", number);
  return text;
}

[[noreturn]] void refuse(const Setting& setting, const std::string& text) {
  throwInvalidUsage(std::string(setting.variable) + "='" + text + "'; give " + setting.range() +
                    ", or unset it (" + setting.meaning + ")");
}

double number(const Setting& setting, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool in_range = value >= setting.least && value <= setting.most;  // false for NaN
  if (end == text.c_str() || *end != '\0' || !in_range) refuse(setting, text);
  return value;
}

Settings readAll() {
  Settings settings{};
  for (const Setting& setting : kTable) setting.parse(setting.text(), settings);
  return settings;
}

}  // namespace

std::string Setting::text() const {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : fallback;
}

void Setting::parse(const std::string& text, Settings& settings) const {
  if (const auto* flag = std::get_if<bool Settings::*>(&member)) {
    if (text != "0" && text != "1") refuse(*this, text);
    settings.** flag = text == "1";
  } else if (const auto* count = std::get_if<size_t Settings::*>(&member)) {
    const double value = number(*this, text);
    if (value != std::floor(value)) refuse(*this, text);
    settings.** count = static_cast<size_t>(value);
  } else if (const auto* real = std::get_if<double Settings::*>(&member)) {
    settings.** real = number(*this, text);
  } else {
    settings.*std::get<std::string Settings::*>(member) = text;
  }
}

std::string Setting::range() const {
  if (std::holds_alternative<bool Settings::*>(member)) return "0 or 1";
  if (std::holds_alternative<std::string Settings::*>(member)) return "a text";
  const bool whole = std::holds_alternative<size_t Settings::*>(member);
  return std::string(whole ? "a whole number" : "a number") + " from " + inWords(least) + " to " +
         inWords(most);
}

const Settings& Settings::get() {
  static const Settings settings = readAll();
  return settings;
}

Settings Settings::read() {
  Settings settings = readAll();
  for (const Setting& setting : kTable) {
    if (!setting.fixed) continue;
    std::visit([&](auto member) { settings.*member = get().*member; }, setting.member);
  }
  return settings;
}

std::span<const Setting> settingsTable() { return kTable; }

}  // namespace hdpcomm
