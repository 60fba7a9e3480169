// A CUDA driver that does everything at once in host memory: enough to test the calls that CudaDevice makes.
// fake_fail(name, code): the next call of that function returns the code. fake_calls(name): how often it was called.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
typedef uint64_t P;
typedef struct { char bytes[64]; } Ipc;

static char failing[64];
static R failure;
static struct { const char* name; int count; } calls[64];
static int depth;  // of pushed contexts
static void* registered;

void fake_fail(const char* name, R code) { strncpy(failing, name, 63); failure = code; }
int fake_depth(void) { return depth; }
int fake_calls(const char* name) {
  for (int i = 0; i < 64 && calls[i].name; ++i)
    if (!strcmp(calls[i].name, name)) return calls[i].count;
  return 0;
}
static R enter(const char* name) {
  int i = 0;
  while (calls[i].name && strcmp(calls[i].name, name)) ++i;
  calls[i].name = name;
  ++calls[i].count;
  if (strcmp(failing, name)) return 0;
  failing[0] = 0;
  return failure;
}
#define ENTER R result_ = enter(__func__); if (result_) return result_

R cuInit(unsigned f) { ENTER; return f ? 1 : 0; }
R cuDriverGetVersion(int* n) { ENTER; *n = 13000; return 0; }
R cuDeviceGetCount(int* n) { ENTER; *n = 3; return 0; }
R cuDeviceGet(int* d, int i) { ENTER; *d = i; return 0; }
R cuDeviceGetName(char* s, int n, int d) { ENTER; strncpy(s, d ? "Fake 1" : "Fake 0", n); return 0; }
R cuDeviceGetPCIBusId(char* s, int n, int d) { ENTER; strncpy(s, d ? "0000:01:00.0" : "0000:00:00.0", n); return 0; }
R cuDeviceCanAccessPeer(int* can, int a, int b) { ENTER; *can = a + b == 1; return 0; }  // not device 2
R cuDevicePrimaryCtxRetain(void** c, int d) { ENTER; *c = (void*)(intptr_t)(d + 1); return 0; }
R cuDevicePrimaryCtxRelease_v2(int d) { ENTER; (void)d; return 0; }
R cuCtxPushCurrent_v2(void* c) { ENTER; (void)c; ++depth; return 0; }
R cuCtxPopCurrent_v2(void** c) { ENTER; *c = 0; --depth; return 0; }
R cuCtxEnablePeerAccess(void* c, unsigned f) { ENTER; (void)c; (void)f; return 0; }
R cuCtxGetStreamPriorityRange(int* low, int* high) { ENTER; *low = 0; *high = -5; return 0; }
int capture_mode = 0;
R cuMemAlloc_v2(P* p, size_t n) {
  ENTER;
  if (capture_mode != 2) return 900;  // as if a stream of the process was captured
  if (n % (2 << 20)) return 1;
  *p = (P)aligned_alloc(4096, n);
  return *p ? 0 : 2;
}
R cuMemFree_v2(P p) { ENTER; free((void*)p); return 0; }
R cuMemHostAlloc(void** p, size_t n, unsigned f) { ENTER; *p = malloc(n); return f == 3 ? 0 : 1; }
R cuMemFreeHost(void* p) { ENTER; free(p); return 0; }
R cuMemHostRegister_v2(void* p, size_t n, unsigned f) {
  ENTER;
  (void)n;
  if (registered == p) return 712;
  registered = p;
  return f == 3 ? 0 : 1;
}
R cuMemHostUnregister(void* p) { ENTER; if (registered != p) return 713; registered = 0; return 0; }
R cuIpcGetMemHandle(Ipc* h, P p) { ENTER; memset(h, 0, sizeof *h); memcpy(h, &p, sizeof p); return 0; }
R cuIpcOpenMemHandle_v2(P* p, Ipc h, unsigned f) { ENTER; memcpy(p, &h, sizeof *p); return f == 1 ? 0 : 1; }
R cuIpcCloseMemHandle(P p) { ENTER; (void)p; return 0; }
R cuStreamCreateWithPriority(void** s, unsigned f, int priority) {
  ENTER;
  *s = malloc(1);
  return f == 1 && priority >= -5 && priority <= 0 ? 0 : 1;
}
R cuStreamDestroy_v2(void* s) { ENTER; free(s); return 0; }
R cuStreamIsCapturing(void* s, int* status) { ENTER; *status = s != 0; return 0; }
R cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER;
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
R cuStreamWaitEvent(void* s, void* e, unsigned f) { ENTER; (void)s; (void)e; return f ? 1 : 0; }
R cuEventCreate(void** e, unsigned f) { ENTER; *e = malloc(1); return f == 2 ? 0 : 1; }
R cuEventDestroy_v2(void* e) { ENTER; free(e); return 0; }
R cuEventRecord(void* e, void* s) { ENTER; (void)e; (void)s; return 0; }
R cuEventQuery(void* e) { ENTER; (void)e; return 0; }
R cuMemcpyAsync(P d, P s, size_t n, void* t) { ENTER; (void)t; memcpy((void*)d, (void*)s, n); return 0; }
R cuMemsetD8Async(P d, unsigned char v, size_t n, void* s) { ENTER; (void)s; memset((void*)d, v, n); return 0; }
struct op { uint32_t operation; P address; uint64_t value; uint32_t flags; P alias; uint64_t unused; };
R cuStreamWriteValue32_v2(void* s, P p, uint32_t v, unsigned f) {
  ENTER;
  (void)s;
  *(uint32_t*)p = v;
  return f ? 1 : 0;
}
R cuStreamWaitValue32_v2(void* s, P p, uint32_t v, unsigned f) {
  ENTER;
  (void)s;
  return f || (int32_t)(*(uint32_t*)p - v) < 0 ? 1 : 0;
}
R cuStreamBatchMemOp_v2(void* s, unsigned n, struct op* ops, unsigned f) {
  ENTER;
  for (unsigned i = 0; i < n; ++i) {
    R r = ops[i].operation == 1 ? cuStreamWaitValue32_v2(s, ops[i].address, (uint32_t)ops[i].value, ops[i].flags)
                                : cuStreamWriteValue32_v2(s, ops[i].address, (uint32_t)ops[i].value, ops[i].flags);
    if (r) return r;
  }
  return f || n > 256 ? 1 : 0;
}
R cuLaunchKernel(void* k, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared, void* s,
                 void** arguments, void** extra) {
  ENTER;
  (void)k, (void)x, (void)y, (void)z, (void)a, (void)b, (void)c, (void)shared, (void)s, (void)arguments, (void)extra;
  return 0;
}
R cuGetErrorName(R r, const char** s) { *s = r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE"; return 0; }
R cuGetErrorString(R r, const char** s) { *s = r == 2 ? "out of memory" : "made up"; return 0; }
