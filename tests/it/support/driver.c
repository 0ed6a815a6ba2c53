// A driver without a GPU: memory is the host's, a stream does its work at once, an IPC handle names nothing.
// FAKE_SM: the target of its GPUs; FAKE_GPUS: how many there are; FAKE_VERSION: the CUDA that it speaks, 13000 for 13.0;
// FAKE_HUNG: no stream ever ends; FAKE_IPC: `refused`, or `lost` where what is mapped is other memory.
// FAKE_SHARED: a folder; memory is files in it, so that a handle names memory that another process can map.
// A graph is a list of functions, which run when it is launched: those of one stream in their order, streams beside each other, since
// ranks wait for each other; a stream that was told to wait for an event waits for what stood before that. Events tell a time of its
// own, which each function moves on.
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

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
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) { memcpy(to, (void*)from, bytes); return 0; }
API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { memcpy(to, (void*)from, bytes); return 0; }
API cuStreamCreate(void** stream, unsigned flags) { *stream = malloc(1); return 0; }
API cuStreamDestroy_v2(void* stream) { free(stream); return 0; }
API cuStreamQuery(void* stream) { return getenv("FAKE_HUNG") ? 600 : 0; }

// Of a thread that runs a stream of a graph, its own.
static __thread double now;
struct step {
  void* stream;
  void (*run)(void*);
  void* data;
  const char* kernel;
  double micros;
  struct step *next, *after;
  // The launch in which it was run last, and when it ended.
  int launch;
  double ended;
};
struct graph { struct step* first; int steps, launches; };
// A time, and in a capture the last step before it.
struct event { double at; struct step* last; };
static struct graph captured;
static struct step** last;

static struct step* last_of(void* stream) {
  struct step* found = NULL;
  for (struct step* step = captured.first; step; step = step->next) if (step->stream == stream) found = step;
  return found;
}

int fake_put(void* stream, void (*run)(void*), void* data, const char* kernel, double micros) {
  if (!last) { run(data); now += micros; return 0; }
  struct step step = {stream, run, data, kernel, micros};
  *last = memcpy(malloc(sizeof step), &step, sizeof step);
  last = &(*last)->next;
  captured.steps++;
  return 0;
}
API cuStreamBeginCapture_v2(void* stream, int mode) { captured = (struct graph){NULL}; last = &captured.first; return 0; }
API cuStreamEndCapture(void* stream, struct graph** graph) {
  *graph = memcpy(malloc(sizeof captured), &captured, sizeof captured);
  last = NULL;
  return 0;
}
API cuGraphGetNodes(struct graph* graph, struct step** nodes, size_t* size) {
  if (nodes) { struct step* step = graph->first; for (size_t at = 0; at < *size; at++, step = step->next) nodes[at] = step; }
  *size = graph->steps;
  return 0;
}
API cuGraphNodeGetType(struct step* step, int* type) { *type = step->kernel ? 0 : 7; return 0; }
struct params { const char* function; unsigned grid[3], block[3], shared; void *params, *extra, *kernel, *context; };
API cuGraphKernelNodeGetParams_v2(struct step* step, struct params* params) {
  *params = (struct params){step->kernel, {1, 1, 1}, {1, 1, 1}};
  return 0;
}
API cuGraphKernelNodeGetAttribute(void* node, int which, void* value) { return 0; }
API cuFuncGetName(const char** name, const char* function) { *name = function; return 0; }
API cuOccupancyMaxActiveClusters(int* clusters, const char* function, void* config) { *clusters = 1000; return 0; }
API cuGraphInstantiateWithFlags(struct graph** exec, struct graph* graph, unsigned long long flags) { *exec = graph; return 0; }

// The steps of one stream, from its first on.
struct branch { struct step* first; int launch; double now; };
static void* run_branch(void* data) {
  struct branch* branch = data;
  now = branch->now;
  for (struct step* step = branch->first; step; step = step->next) {
    if (step->stream != branch->first->stream) continue;
    if (step->after) {
      while (__atomic_load_n(&step->after->launch, __ATOMIC_ACQUIRE) != branch->launch) usleep(20);
      now = step->after->ended > now ? step->after->ended : now;
    }
    if (step->run) step->run(step->data);
    now += step->micros;
    step->ended = now;
    __atomic_store_n(&step->launch, branch->launch, __ATOMIC_RELEASE);
  }
  branch->now = now;
  return NULL;
}
API cuGraphLaunch(struct graph* graph, void* stream) {
  enum { MOST = 16 };
  struct branch branches[MOST];
  int count = 0;
  graph->launches++;
  for (struct step* step = graph->first; step; step = step->next) {
    int at = 0;
    while (at < count && branches[at].first->stream != step->stream) at++;
    if (at == MOST) return 999;
    if (at == count) branches[count++] = (struct branch){step, graph->launches, now};
  }
  pthread_t threads[MOST];
  for (int at = 1; at < count; at++) if (pthread_create(&threads[at], NULL, run_branch, &branches[at])) return 999;
  if (count) run_branch(&branches[0]);
  for (int at = 1; at < count; at++) {
    pthread_join(threads[at], NULL);
    now = branches[at].now > now ? branches[at].now : now;
  }
  return 0;
}
API cuGraphDestroy(void* graph) { return 0; }
API cuGraphExecDestroy(void* exec) { return 0; }

API cuEventCreate(struct event** event, unsigned flags) { *event = calloc(1, sizeof **event); return 0; }
API cuEventDestroy_v2(void* event) { free(event); return 0; }
static void record(void* event) { ((struct event*)event)->at = now; }
API cuEventRecord(struct event* event, void* stream) {
  if (last) event->last = last_of(stream); else record(event);
  return 0;
}
API cuEventRecordWithFlags(void* event, void* stream, unsigned flags) { return fake_put(stream, record, event, NULL, 0); }
API cuStreamWaitEvent(void* stream, struct event* event, unsigned flags) {
  // Outside of a capture all that was put onto a stream is done.
  if (!last || !event->last) return 0;
  int result = fake_put(stream, NULL, NULL, NULL, 0);
  last_of(stream)->after = event->last;
  return result;
}
API cuEventQuery(void* event) { return cuStreamQuery(NULL); }
API cuEventElapsedTime_v2(float* millis, struct event* start, struct event* end) { *millis = (end->at - start->at) / 1e3; return 0; }
API cuDeviceGetP2PAttribute(int* value, int which, int one, int other) { *value = which != 1; return 0; }

// Kernels of our own run on the host (kernels.cpp), each within two microseconds.
void fake_kernel(const char* name, unsigned blocks, const uint64_t* arguments);
struct launch { const char* kernel; unsigned blocks; uint64_t arguments[8]; };
static void run_kernel(void* data) {
  struct launch* launch = data;
  fake_kernel(launch->kernel, launch->blocks, launch->arguments);
}
// The bytes of a parameter; 0 where there is none.
static size_t parameter(const char* kernel, size_t at) {
  if (strstr(kernel, "add_rms_norm")) return at < 5 ? 8 : at < 7 ? 4 : 0;
  if (strstr(kernel, "residual_add")) return at < 3 ? 8 : at < 4 ? 4 : 0;
  if (strstr(kernel, "lone_rms_norm")) return at < 3 ? 8 : at < 5 ? 4 : 0;
  return at < (strstr(kernel, "rows") ? 3 : strstr(kernel, "check") ? 5 : 4) ? 8 : 0;
}
API cuModuleLoadData(void** module, const char* image) { *module = (void*)8; return strncmp(image, "fake cubin", 10) ? 200 : 0; }
API cuModuleUnload(void* module) { return 0; }
API cuModuleGetFunction(char** function, void* module, const char* name) { *function = strdup(name); return 0; }
API cuFuncGetParamInfo(const char* function, size_t at, size_t* offset, size_t* size) {
  *offset = at * 8;
  *size = parameter(function, at);
  return *size ? 0 : 1;
}
struct config { unsigned grid[3], block[3], shared; void* stream; };
API cuLaunchKernelEx(const struct config* config, const char* function, void** arguments, void** extra) {
  struct launch launch = {function, config->grid[0], {0}};
  for (size_t at = 0; parameter(function, at); at++) memcpy(&launch.arguments[at], arguments[at], parameter(function, at));
  struct launch* kept = memcpy(malloc(sizeof launch), &launch, sizeof launch);
  return fake_put(config->stream, run_kernel, kept, function, 2);
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
