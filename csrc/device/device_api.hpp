// The interface between this library and a GPU: streams, events, asynchronous copies, memory that
// other processes map, and flags that streams wait for. CudaDevice drives a real GPU, SimDevice
// does the same on the CPU (docs/device.md). One object stands for one rank's device. Thread-safe.
//
// Order. Work of one stream runs in the order of submission. Otherwise only these calls order work:
//   - record(event, s) .. wait(t, event): work of t submitted after the wait runs after the work of
//     s submitted before the record;
//   - writeValue(s, flag, v) .. waitValue(t, flag, w): the write releases all earlier work of s,
//     the wait acquires it for all later work of t (in any process that maps the flag);
//   - submission: what the host thread did before a call is visible to the work of that call;
//   - synchronize(..): the host continues after the work.
// Stream{} (handle 0) is the default stream; it is not ordered with any other (streams made here
// are non-blocking). Events, streams and memory belong to the device that made them; memory and
// flags may be used by the streams of other devices where canAccessPeer holds.
//
// Blocking. Only synchronize() waits for device work. allocate, free, allocatePinned, freePinned,
// registerPinned, unregisterPinned, importMemory and closeMemory may take long and may wait for
// unrelated work: never call them between the steps of an operation. Everything else returns at
// once and may be called while the stream is captured into a graph, except where it says otherwise.
//
// Ownership. The creator of a handle frees it; handles.hpp has the RAII forms. Memory may be freed,
// overwritten or unmapped only after the work that uses it is done (or overwritten by work that is
// ordered after it).
//
// Errors are thrown: InvalidUsage before anything is enqueued, Device from the driver, Timeout from
// synchronize. A device that reported an asynchronous fault reports it again on every later call,
// and runs nothing more. query() and synchronize() of an event report it only when no work before
// the event runs any more: then its memory may be freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

namespace hdpcomm {

struct Stream {
  uintptr_t handle = 0;  // cudaStream_t; 0: the default stream
  friend bool operator==(const Stream&, const Stream&) = default;
};

struct Event {
  uintptr_t handle = 0;  // cudaEvent_t
  friend bool operator==(const Event&, const Event&) = default;
};

// Where an operation was called; every operation takes one, so that SimDevice can name it. A helper
// that enqueues on behalf of its caller takes a Site and passes it on.
struct Site {
  const char* file = "";  // a string literal
  const char* function = "";
  unsigned line = 0;

  constexpr Site() = default;
  constexpr Site(const char* file_name, const char* function_name, unsigned line_number)
      : file(file_name), function(function_name), line(line_number) {}
  constexpr Site(const std::source_location& place)  // NOLINT: made by the default arguments
      : file(place.file_name()), function(place.function_name()), line(place.line()) {}
};

// Names exported memory: plain bytes that can be sent to another process of this host.
struct MemoryHandle {
  static constexpr size_t kBytes = 128;
  unsigned char bytes[kBytes] = {};
};

struct MemoryRange {
  const void* data = nullptr;
  size_t bytes = 0;
};

// A flag is an aligned uint32_t in memory of allocate, importMemory or allocatePinned.
struct FlagValue {
  uint32_t* flag = nullptr;
  uint32_t value = 0;
};

// A flag that a stream waits for, or writes.
struct FlagOp {
  bool waits = false;
  FlagValue target;
  Site site;

  static FlagOp wait(uint32_t* flag, uint32_t value, Site site = std::source_location::current()) {
    return {true, {flag, value}, site};
  }
  static FlagOp write(uint32_t* flag, uint32_t value, Site site = std::source_location::current()) {
    return {false, {flag, value}, site};
  }
};

// One kernel of this library. `cuda` launches it on a cudaStream_t; `cpu` is its CPU twin, which
// SimDevice runs in the stream's order on a thread of its own: it must not need the GIL and must
// not throw. Both read only `reads` and write only `writes`. A kernel that first waits for flags,
// or at its end sets flags (system scope, after its writes), lists them; for the twin SimDevice
// waits for them and sets them.
struct KernelLaunch {
  const char* name = "";  // a string literal
  std::vector<MemoryRange> reads = {};
  std::vector<MemoryRange> writes = {};
  std::function<void()> cpu = {};
  std::function<void(void* stream)> cuda = {};
  std::vector<FlagValue> waits = {};
  std::vector<FlagValue> signals = {};
};

class DeviceApi {
 public:
  // Called from time to time while synchronize() waits; an exception from it ends the wait.
  using InterruptCheck = std::function<void()>;

  virtual ~DeviceApi() = default;
  DeviceApi(const DeviceApi&) = delete;
  DeviceApi& operator=(const DeviceApi&) = delete;

  virtual std::string name() const = 0;  // "NVIDIA H100 80GB HBM3", "sim", ...
  virtual bool isSim() const = 0;        // its device memory is host memory
  virtual int ordinal() const = 0;       // CUDA's device number, or the number given to a SimDevice
  // Names the device among those of its host, whatever number a process gives it; empty: no other
  // process has it.
  virtual std::string identity() const { return {}; }
  // Do the kernels of processes that share the device run at the same time? Else they take turns of
  // milliseconds.
  virtual bool runsProcessesTogether() const { return true; }
  // Can work of this device read and write memory of the device with that number?
  virtual bool canAccessPeer(int other_ordinal) const = 0;

  // --- memory ---------------------------------------------------------------------------------
  // Device memory, aligned to 512 bytes, content undefined, exportable. bytes > 0.
  virtual void* allocate(size_t bytes, Site site = std::source_location::current()) = 0;
  virtual void free(void* memory, Site site = std::source_location::current()) = 0;
  // Page-locked host memory that the device reads and writes at the same address.
  virtual void* allocatePinned(size_t bytes, Site site = std::source_location::current()) = 0;
  virtual void freePinned(void* memory, Site site = std::source_location::current()) = 0;
  // Page-locks memory that was allocated elsewhere: whole pages, and no page twice.
  virtual void registerPinned(void* memory, size_t bytes) = 0;
  virtual void unregisterPinned(void* memory) = 0;

  // Takes the first byte of memory from allocate. The handle is valid as long as the memory;
  // exporting twice names the same memory.
  virtual MemoryHandle exportMemory(void* memory) = 0;
  // Maps exported memory of any process of this host, this one included, and returns the address
  // of its first byte. Each import needs one closeMemory, before the owner frees the memory
  // (closing later is safe, using it is not). Importing twice may return the same address.
  virtual void* importMemory(const MemoryHandle& handle) = 0;
  virtual void closeMemory(void* memory) = 0;

  // --- streams and events -----------------------------------------------------------------------
  virtual Stream createStream(int priority = 0) = 0;  // lower numbers run first; clamped
  // Does not wait: enqueued work still runs. (Destroying a SimDevice cancels its waits for flags
  // that nobody has written.)
  virtual void destroyStream(Stream stream) = 0;
  virtual Event createEvent() = 0;
  virtual void destroyEvent(Event event) = 0;  // waits that are already enqueued stay valid

  // As in CUDA: recording again moves the point that later calls of wait, query and synchronize
  // refer to; a wait that is already enqueued keeps the older point. An event that was never
  // recorded counts as done.
  virtual void record(Event event, Stream stream, Site site = std::source_location::current()) = 0;
  virtual void wait(Stream stream, Event event, Site site = std::source_location::current()) = 0;
  // True when the work before the last record is done; the host is then ordered after it, as after
  // synchronize. Not allowed while a stream is captured.
  virtual bool query(Event event) = 0;
  // Waits at most timeout_s seconds, then throws Timeout; the work continues. Not allowed while a
  // stream is captured.
  virtual void synchronize(Event event, double timeout_s, const InterruptCheck& check = {},
                           Site site = std::source_location::current()) = 0;
  virtual void synchronize(Stream stream, double timeout_s, const InterruptCheck& check = {},
                           Site site = std::source_location::current()) = 0;
  // Is the stream being captured into a CUDA graph?
  virtual bool isCapturing(Stream stream) = 0;

  // --- work -------------------------------------------------------------------------------------
  // Copies by the copy engines (no SM is used) between any two of device memory, pinned host memory
  // and imported memory, without overlap. Copying 0 bytes does nothing.
  virtual void copy(void* dst, const void* src, size_t bytes, Stream stream,
                    Site site = std::source_location::current()) = 0;
  // Sets every byte.
  virtual void fill(void* dst, unsigned char value, size_t bytes, Stream stream,
                    Site site = std::source_location::current()) = 0;
  // Stores the value once all earlier work of the stream is done; a reader of the value sees it.
  virtual void writeValue(Stream stream, uint32_t* flag, uint32_t value,
                          Site site = std::source_location::current()) = 0;
  // Later work of the stream runs once int32_t(*flag - value) >= 0: a counter may wrap. Uses no SM.
  // Only a write to the flag (by any stream, or storeFlag) ends the wait.
  virtual void waitValue(Stream stream, uint32_t* flag, uint32_t value,
                         Site site = std::source_location::current()) = 0;
  // waitValue and writeValue for each, in order, in one call of the driver: calls are what small
  // operations cost.
  virtual void flagOps(Stream stream, std::span<const FlagOp> ops) {
    for (const FlagOp& op : ops) {
      op.waits ? waitValue(stream, op.target.flag, op.target.value, op.site)
               : writeValue(stream, op.target.flag, op.target.value, op.site);
    }
  }
  virtual void launch(KernelLaunch kernel, Stream stream,
                      Site site = std::source_location::current()) = 0;
  // What stands, where a device is simulated, for one kernel that waits for flags itself: kernels
  // that do its parts one after the other.
  virtual void launchParts(std::vector<KernelLaunch> parts, Stream stream,
                           Site site = std::source_location::current()) {
    for (KernelLaunch& part : parts) launch(std::move(part), stream, site);
  }
  // Makes all kernels of this library ready, so that no first launch waits for work of the streams.
  // Call it before the first waitValue.
  virtual void loadKernels() {}

  // --- the host beside the streams --------------------------------------------------------------
  // Release store of a flag in pinned memory, or of any flag of a SimDevice.
  virtual void storeFlag(uint32_t* flag, uint32_t value,
                         Site site = std::source_location::current()) = 0;
  // Tells SimDevice's check mode what the host does itself; no-ops elsewhere. The calling thread
  // reads or writes, now, memory that streams use too (CPU maths on a tensor of a SimDevice, the
  // bytes of a pinned buffer):
  virtual void annotateRead(const void*, size_t, Site = std::source_location::current()) {}
  virtual void annotateWrite(void*, size_t, Site = std::source_location::current()) {}
  // Memory that streams used goes back to another allocator (torch's, say).
  virtual void annotateFree(const void*, size_t, Site = std::source_location::current()) {}
  // Host threads are ordered by means that the device does not see (a lock, a barrier, a message
  // between ranks): work before annotateRelease(key) happens before work after a later
  // annotateAcquire(key). All ranks of a process share the keys.
  virtual void annotateRelease(uint64_t) {}
  virtual void annotateAcquire(uint64_t) {}

 protected:
  DeviceApi() = default;
};

}  // namespace hdpcomm
