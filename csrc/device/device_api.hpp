// The seam between this library and a GPU: streams, events, asynchronous copies, memory that other
// processes map, and flags that streams wait for. CudaDevice is the real one, SimDevice does the
// same on the CPU (docs/device.md). One object stands for one rank's device; every call may come
// from any thread.
//
// Order. Work of one stream runs in the order of submission; nothing else is ordered but by
//   - record(event, s) .. wait(t, event): work of t submitted after the wait runs after the work of
//     s submitted before the record;
//   - writeValue(s, flag, v) .. waitValue(t, flag, w): the write is a release of all earlier work
//   of
//     s, the wait an acquire for all later work of t (in any process that maps the flag);
//   - submission: what the host thread did before a call is visible to the work of that call;
//   - synchronize(..): the host goes on after the work.
// Stream{} (handle 0) is the default stream; it is not ordered with any other one (the streams made
// here are non-blocking). Events, streams and memory belong to the device that made them; memory
// may be used by the streams of other devices where canAccessPeer holds, flags likewise.
//
// Blocking. Only synchronize() waits for device work. allocate, free, allocatePinned, freePinned,
// registerPinned, unregisterPinned, importMemory and closeMemory may take long and may wait for
// unrelated work: never call them between the steps of an operation. Everything else returns at
// once and may be called while the stream is captured into a graph, except where it says otherwise.
//
// Ownership. Who makes, frees; handles.hpp has the RAII forms. Memory may be freed, overwritten or
// unmapped only after the work that uses it is done (or, for overwriting, by work ordered after
// it).
//
// Errors are thrown: InvalidUsage before anything was enqueued, Device from the driver, Timeout
// from synchronize. A device that reported an asynchronous fault reports it on every later call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
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
// that enqueues for somebody else takes a Site and passes it on.
struct Site {
  const char* file = "";  // lives forever
  const char* function = "";
  unsigned line = 0;

  constexpr Site() = default;
  constexpr Site(const char* file_name, const char* function_name, unsigned line_number)
      : file(file_name), function(function_name), line(line_number) {}
  constexpr Site(const std::source_location& place)  // NOLINT: made by the default arguments
      : file(place.file_name()), function(place.function_name()), line(place.line()) {}
};

// Bytes that name exported memory; plain data, to be sent to another process of this host.
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

// One kernel of this library. `cuda` launches it (it gets the cudaStream_t); `cpu` is its twin,
// which SimDevice runs in the stream's order on a thread of its own: it must not need the GIL and
// must not throw. Both read `reads` only and write `writes` only. A kernel that itself waits for
// flags first, or sets flags last (system scope, after its writes), lists them: the twin does
// neither, SimDevice does it for it.
struct KernelLaunch {
  const char* name = "";  // lives forever
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  std::function<void()> cpu;
  std::function<void(void* stream)> cuda;
  std::vector<FlagValue> waits = {};
  std::vector<FlagValue> signals = {};
};

class DeviceApi {
 public:
  // Called now and then by a waiting synchronize; what it throws ends the wait.
  using InterruptCheck = std::function<void()>;

  virtual ~DeviceApi() = default;
  DeviceApi(const DeviceApi&) = delete;
  DeviceApi& operator=(const DeviceApi&) = delete;

  virtual std::string name() const = 0;  // "NVIDIA H100 80GB HBM3", "sim", ...
  virtual bool isSim() const = 0;        // its device memory is host memory
  virtual int ordinal() const = 0;       // CUDA's device number; a SimDevice: the number it got
  // Can work of this device read and write memory of the device with that number?
  virtual bool canAccessPeer(int other_ordinal) const = 0;

  // --- memory ---------------------------------------------------------------------------------
  // Device memory, aligned to 512 bytes, content undefined, exportable. bytes > 0.
  virtual void* allocate(size_t bytes, Site site = std::source_location::current()) = 0;
  virtual void free(void* memory, Site site = std::source_location::current()) = 0;
  // Page-locked host memory that the device reads and writes at the same address.
  virtual void* allocatePinned(size_t bytes, Site site = std::source_location::current()) = 0;
  virtual void freePinned(void* memory, Site site = std::source_location::current()) = 0;
  // Page-locks memory that somebody else allocated (whole pages are locked; no page twice).
  virtual void registerPinned(void* memory, size_t bytes) = 0;
  virtual void unregisterPinned(void* memory) = 0;

  // For memory of allocate (its first byte). The handle is good while the memory is; exporting
  // twice gives the same memory.
  virtual MemoryHandle exportMemory(void* memory) = 0;
  // Maps exported memory of any process of this host, this one included, and returns the address
  // of its first byte. Each import is ended by one closeMemory, before the owner frees it (closing
  // later is safe, using it is not). Importing twice may give one address.
  virtual void* importMemory(const MemoryHandle& handle) = 0;
  virtual void closeMemory(void* memory) = 0;

  // --- streams and events -----------------------------------------------------------------------
  virtual Stream createStream(int priority = 0) = 0;  // lower numbers go first; clamped
  // Does not wait: what was enqueued still runs (SimDevice cancels what waits for a flag that
  // nobody has written when the device itself is destroyed).
  virtual void destroyStream(Stream stream) = 0;
  virtual Event createEvent() = 0;
  virtual void destroyEvent(Event event) = 0;  // waits that were enqueued are not disturbed

  // CUDA's semantics: recording again replaces the point that later calls of wait, query and
  // synchronize look at; a wait that was enqueued before keeps the older point. An event that was
  // never recorded counts as done.
  virtual void record(Event event, Stream stream, Site site = std::source_location::current()) = 0;
  virtual void wait(Stream stream, Event event, Site site = std::source_location::current()) = 0;
  // True when the work before the last record is done; then the host is ordered after it, as after
  // synchronize. Not while a stream is captured.
  virtual bool query(Event event) = 0;
  // Waits at most timeout_s seconds; throws Timeout past it (the work goes on). Not while a stream
  // is captured.
  virtual void synchronize(Event event, double timeout_s, const InterruptCheck& check = {},
                           Site site = std::source_location::current()) = 0;
  virtual void synchronize(Stream stream, double timeout_s, const InterruptCheck& check = {},
                           Site site = std::source_location::current()) = 0;
  // Is the stream being captured into a CUDA graph?
  virtual bool isCapturing(Stream stream) = 0;

  // --- work -------------------------------------------------------------------------------------
  // Copies by the copy engines (no SM is taken) between any two of: device memory, pinned host
  // memory, imported memory. No overlap. No bytes: nothing happens.
  virtual void copy(void* dst, const void* src, size_t bytes, Stream stream,
                    Site site = std::source_location::current()) = 0;
  // Sets every byte.
  virtual void fill(void* dst, unsigned char value, size_t bytes, Stream stream,
                    Site site = std::source_location::current()) = 0;
  // Stores the value when all earlier work of the stream is done and visible to whoever sees it.
  virtual void writeValue(Stream stream, uint32_t* flag, uint32_t value,
                          Site site = std::source_location::current()) = 0;
  // Later work of the stream runs once int32_t(*flag - value) >= 0: a counter may wrap. Takes no
  // SM. Nothing can take the wait back but a write to the flag (by any stream, or storeFlag).
  virtual void waitValue(Stream stream, uint32_t* flag, uint32_t value,
                         Site site = std::source_location::current()) = 0;
  virtual void launch(KernelLaunch kernel, Stream stream,
                      Site site = std::source_location::current()) = 0;

  // --- the host beside the streams --------------------------------------------------------------
  // A flag in pinned memory, or any flag of a SimDevice: release store, acquire load.
  virtual void storeFlag(uint32_t* flag, uint32_t value,
                         Site site = std::source_location::current()) = 0;
  virtual uint32_t loadFlag(const uint32_t* flag, Site site = std::source_location::current()) = 0;
  // Says what the host does itself, for SimDevice's check mode; elsewhere they do nothing. Reading
  // or writing memory that streams use too (CPU maths on a tensor of a SimDevice, the bytes of a
  // pinned buffer), now, on this thread:
  virtual void annotateRead(const void* data, size_t bytes,
                            Site site = std::source_location::current()) = 0;
  virtual void annotateWrite(void* data, size_t bytes,
                             Site site = std::source_location::current()) = 0;
  // Memory of somebody else's allocator that streams used is given back to it.
  virtual void annotateFree(const void* data, size_t bytes,
                            Site site = std::source_location::current()) = 0;
  // Host threads order themselves by means that the device does not see (a lock, a barrier, a
  // message between ranks): what was done before annotateRelease(key) is before what follows a
  // later annotateAcquire(key). Keys are one name space for all ranks of a process.
  virtual void annotateRelease(uint64_t key) = 0;
  virtual void annotateAcquire(uint64_t key) = 0;

 protected:
  DeviceApi() = default;
};

}  // namespace hdpcomm
