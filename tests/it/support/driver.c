// A driver without a GPU, for tests of `smoke`: memory is the host's, a stream does its work at once, an IPC handle names nothing.
// FAKE_SM: the target of its GPUs; FAKE_GPUS: how many there are; FAKE_VERSION: the CUDA that it speaks, 13000 for 13.0;
// FAKE_HUNG: no stream ever ends; FAKE_IPC: `refused`, or `lost` where what is mapped is other memory.
// FAKE_SHARED: a folder; memory is files in it, so that a handle names memory that another process can map.
// A graph is a list of functions, which run when it is launched. Events tell a time of its own, which each function moves on.
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#define API __attribute__((visibility("default"))) int

static long set(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

API cuInit(unsigned flags) { return set("FAKE_GPUS", 1) ? 0 : 100; }
API cuDriverGetVersion(int* version) { *version = set("FAKE_VERSION", 13000); return 0; }
API cuGetErrorName(int error, const char** name) {
  *name = error == 100 ? "CUDA_ERROR_NO_DEVICE" : error == 217 ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
API cuDeviceGetCount(int* count) { *count = set("FAKE_GPUS", 1); return 0; }
API cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
API cuDeviceGetAttribute(int* value, int which, int device) {
  long sm = set("FAKE_SM", 120);
  *value = which == 75 ? sm / 10 : which == 76 ? sm % 10 : 100;
  return 0;
}
API cuDeviceGetName(char* name, int length, int device) { strncpy(name, "No GPU", length); return 0; }
API cuDeviceGetPCIBusId(char* name, int length, int device) { strncpy(name, "0000:00:00.0", length); return 0; }
API cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)1 << 34; return 0; }
API cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)8; return 0; }
API cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
API cuCtxSetCurrent(void* context) { return 0; }
API cuCtxSynchronize(void) { return 0; }
API cuMemGetInfo_v2(size_t* left, size_t* total) { *left = *total = (size_t)1 << 34; return 0; }

static struct { uint64_t address; size_t bytes; char name[40]; } blocks[4096];
static int count;

static int map(const char* name, int how, size_t bytes, uint64_t* address) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", getenv("FAKE_SHARED"), name);
  int file = open(path, how, 0600);
  if (file < 0 || (bytes && ftruncate(file, bytes))) return 999;
  struct stat is;
  fstat(file, &is);
  void* at = mmap(NULL, is.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  *address = (uint64_t)at;
  return at == MAP_FAILED ? 999 : 0;
}

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (!getenv("FAKE_SHARED")) { *address = (uint64_t)calloc(1, bytes); return 0; }
  if (count == 4096) return 2;
  blocks[count].bytes = bytes;
  snprintf(blocks[count].name, sizeof blocks[count].name, "%d-%d", (int)getpid(), count);
  int result = map(blocks[count].name, O_RDWR | O_CREAT, bytes, address);
  blocks[count++].address = *address;
  return result;
}
API cuMemFree_v2(uint64_t address) {
  if (!getenv("FAKE_SHARED")) { free((void*)address); return 0; }
  for (int at = 0; at < count; at++) {
    if (blocks[at].address != address) continue;
    munmap((void*)address, blocks[at].bytes);
    // The next block may get the same address.
    blocks[at].address = 0;
  }
  return 0;
}
API cuMemsetD8Async(uint64_t to, unsigned char byte, size_t count, void* stream) { memset((void*)to, byte, count); return 0; }
API cuMemsetD16Async(uint64_t to, unsigned short word, size_t count, void* stream) {
  for (size_t at = 0; at < count; at++) ((unsigned short*)to)[at] = word;
  return 0;
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) { memcpy((void*)to, from, bytes); return 0; }
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) { memcpy((void*)to, (void*)from, bytes); return 0; }
API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { memcpy(to, (void*)from, bytes); return 0; }
API cuStreamCreate(void** stream, unsigned flags) { *stream = (void*)8; return 0; }
API cuStreamDestroy_v2(void* stream) { return 0; }
API cuStreamQuery(void* stream) { return getenv("FAKE_HUNG") ? 600 : 0; }

static double now;
struct step { void (*run)(void*); void* data; const char* kernel; double micros; struct step* next; };
static struct step *first, **last;
static int steps;

// What an artifact and NCCL put onto a stream: a function with its data, under a kernel's name, that takes so long.
API fake_put(void (*run)(void*), void* data, const char* kernel, double micros) {
  struct step step = {run, data, kernel, micros, NULL};
  if (!last) { run(data); now += micros; return 0; }
  *last = memcpy(malloc(sizeof step), &step, sizeof step);
  last = &(*last)->next;
  steps++;
  return 0;
}
API cuStreamBeginCapture_v2(void* stream, int mode) { first = NULL; last = &first; steps = 0; return 0; }
struct graph { struct step* first; int steps; };
API cuStreamEndCapture(void* stream, struct graph** graph) {
  *graph = malloc(sizeof **graph);
  **graph = (struct graph){first, steps};
  last = NULL;
  return 0;
}
API cuGraphGetNodes(struct graph* graph, struct step** nodes, size_t* size) {
  if (nodes) { struct step* step = graph->first; for (size_t at = 0; at < *size; at++, step = step->next) nodes[at] = step; }
  *size = graph->steps;
  return 0;
}
API cuGraphNodeGetType(struct step* step, int* type) { *type = step->kernel ? 0 : 7; return 0; }
API cuGraphKernelNodeGetParams_v2(struct step* step, void** params) { params[0] = &step->kernel; return 0; }
API cuFuncGetName(const char** name, const char** function) { *name = *function; return 0; }
API cuGraphInstantiateWithFlags(struct graph** exec, struct graph* graph, unsigned long long flags) { *exec = graph; return 0; }
API cuGraphLaunch(struct graph* graph, void* stream) {
  for (struct step* step = graph->first; step; step = step->next) { step->run(step->data); now += step->micros; }
  return 0;
}
API cuGraphDestroy(void* graph) { return 0; }
API cuGraphExecDestroy(void* exec) { return 0; }
API cuEventCreate(double** event, unsigned flags) { *event = malloc(sizeof **event); return 0; }
API cuEventDestroy_v2(void* event) { return 0; }
static void record(void* event) { *(double*)event = now; }
API cuEventRecord(void* event, void* stream) { record(event); return 0; }
API cuEventRecordWithFlags(void* event, void* stream, unsigned flags) { return fake_put(record, event, NULL, 0); }
API cuEventElapsedTime_v2(float* millis, double* start, double* end) { *millis = (*end - *start) / 1e3; return 0; }
API cuDeviceGetP2PAttribute(int* value, int which, int one, int other) { *value = which != 1; return 0; }

// Our own norm, as its kernel computes it. FAKE_NORM: `wrong`, it leaves its last element as it was.
static float bf16(uint16_t bits) { uint32_t word = (uint32_t)bits << 16; float value; memcpy(&value, &word, 4); return value; }
static uint16_t to_bf16(float value) { uint32_t word; memcpy(&word, &value, 4); return (word + 0x7fff + (word >> 16 & 1)) >> 16; }
struct norm { uint16_t *in, *residual, *gamma, *residual_out, *norm_out; uint32_t vectors; float eps; uint32_t rows; };
static float root(float x) { float y = x > 1 ? x : 1; for (int i = 0; i < 60; i++) y = 0.5f * (y + x / y); return y; }
static void norm(void* data) {
  struct norm* n = data;
  size_t hidden = n->vectors * 8;
  const char* how = getenv("FAKE_NORM");
  for (size_t row = 0; row < n->rows; row++) {
    float squares = 0;
    for (size_t at = row * hidden; at < (row + 1) * hidden; at++) {
      n->residual_out[at] = to_bf16(bf16(n->in[at]) + bf16(n->residual[at]));
      squares += bf16(n->residual_out[at]) * bf16(n->residual_out[at]);
    }
    float scale = 1 / root(squares / hidden + n->eps);
    for (size_t at = 0; at < hidden - (how && !strcmp(how, "wrong")); at++) {
      n->norm_out[row * hidden + at] = to_bf16(bf16(n->residual_out[row * hidden + at]) * scale * bf16(n->gamma[at]));
    }
  }
}
API cuModuleLoadData(void** module, const void* image) { *module = (void*)8; return 0; }
API cuModuleUnload(void* module) { return 0; }
API cuModuleGetFunction(char** function, void* module, const char* name) { *function = strdup(name); return 0; }
API cuFuncGetParamInfo(void* function, size_t at, size_t* offset, size_t* size) { *size = at < 5 ? 8 : 4; return at < 7 ? 0 : 1; }
API cuLaunchKernelEx(const unsigned* config, const char* function, void** params, void** extra) {
  struct norm n = {0};
  for (int at = 0; at < 5; at++) ((uint64_t*)&n)[at] = *(uint64_t*)params[at];
  n.vectors = *(uint32_t*)params[5];
  n.eps = *(float*)params[6];
  n.rows = config[0];
  return fake_put(norm, memcpy(malloc(sizeof n), &n, sizeof n), function, 2);
}

API cuIpcGetMemHandle(unsigned char* handle, uint64_t address) {
  memset(handle, 7, 64);
  for (int at = 0; at < count; at++) if (blocks[at].address == address) memcpy(handle, blocks[at].name, sizeof blocks[at].name);
  return 0;
}
struct handle { unsigned char bytes[64]; };
API cuIpcOpenMemHandle_v2(uint64_t* address, struct handle handle, unsigned flags) {
  const char* how = getenv("FAKE_IPC");
  if (how && !strcmp(how, "refused")) return 217;
  if (getenv("FAKE_SHARED")) return map((const char*)handle.bytes, O_RDWR, 0, address);
  *address = (uint64_t)calloc(1, 1 << 27);
  return 0;
}
API cuIpcCloseMemHandle(uint64_t address) { if (!getenv("FAKE_SHARED")) free((void*)address); return 0; }
