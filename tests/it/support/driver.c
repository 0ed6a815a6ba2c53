// A driver without a GPU, for tests of `smoke`: memory is the host's, a stream does its work at once, an IPC handle names nothing.
// FAKE_SM: the target of its GPUs; FAKE_GPUS: how many there are; FAKE_VERSION: the CUDA that it speaks, 13000 for 13.0;
// FAKE_HUNG: no stream ever ends; FAKE_IPC: `refused`, or `lost` where what is mapped is other memory.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
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
API cuMemAlloc_v2(uint64_t* address, size_t bytes) { *address = (uint64_t)calloc(1, bytes); return 0; }
API cuMemFree_v2(uint64_t address) { free((void*)address); return 0; }
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
API cuEventCreate(void** event, unsigned flags) { *event = (void*)8; return 0; }
API cuEventDestroy_v2(void* event) { return 0; }
API cuIpcGetMemHandle(unsigned char* handle, uint64_t address) { memset(handle, 7, 64); return 0; }
struct handle { unsigned char bytes[64]; };
API cuIpcOpenMemHandle_v2(uint64_t* address, struct handle handle, unsigned flags) {
  const char* how = getenv("FAKE_IPC");
  if (how && !strcmp(how, "refused")) return 217;
  *address = (uint64_t)calloc(1, 1 << 27);
  return 0;
}
API cuIpcCloseMemHandle(uint64_t address) { free((void*)address); return 0; }

// Graphs: what the fake artifact puts into a capture runs at each launch.
typedef void (*work)(void** all, int count, int at);
static work recorded[64];
static void* graph_data[64];
static int count;
API fake_record(work does, void* data) {
  recorded[count] = does;
  graph_data[count++] = data;
  return 0;
}
API cuStreamBeginCapture_v2(void* stream, int mode) { count = 0; return 0; }
API cuStreamEndCapture(void* stream, void** graph) { *graph = (void*)8; return 0; }
API cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return 0; }
API cuEventRecord(void* event, void* stream) { return 0; }
API cuEventQuery(void* event) { return getenv("FAKE_HUNG") ? 600 : 0; }
API cuEventElapsedTime_v2(float* millis, void* from, void* to) { *millis = 0.25f; return 0; }
API cuGraphGetNodes(void* graph, void** nodes, size_t* number) { *number = count; return 0; }
API cuGraphNodeGetType(void* node, int* type) { *type = 0; return 0; }
struct params { const char* function; unsigned grid[3], block[3], shared; void *params, *extra, *kernel, *context; };
API cuGraphKernelNodeGetParams_v2(void* node, struct params* params) {
  *params = (struct params){"_Z39allreduce_fusion_kernel_oneshot_lamportv", {1, 1, 1}, {1, 1, 1}};
  return 0;
}
API cuGraphKernelNodeGetAttribute(void* node, int which, void* value) { return 0; }
API cuFuncGetName(const char** name, const char* function) { *name = function; return 0; }
API cuOccupancyMaxActiveClusters(int* clusters, const char* function, void* config) { *clusters = 1000; return 0; }
API cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) { *executable = (void*)8; return 0; }
API cuGraphLaunch(void* executable, void* stream) {
  for (int at = 0; at < count; at++) recorded[at](graph_data, count, at);
  return 0;
}
API cuGraphDestroy(void* graph) { return 0; }
API cuGraphExecDestroy(void* executable) { return 0; }

// Kernels of fi-arch's own run on the host (kernels.cpp).
int fake_kernel(const char* name, unsigned blocks, void** arguments);
API cuModuleLoadData(void** module, const char* image) { *module = (void*)8; return strncmp(image, "fake cubin", 10) ? 200 : 0; }
API cuModuleUnload(void* module) { return 0; }
API cuModuleGetFunction(char** function, void* module, const char* name) { *function = strdup(name); return 0; }
API cuFuncGetParamInfo(const char* function, size_t at, size_t* offset, size_t* size) {
  size_t parameters = strstr(function, "rows") ? 3 : strstr(function, "check") ? 5 : 4;
  *offset = at * 8;
  *size = 8;
  return at < parameters ? 0 : 1;
}
API cuLaunchKernelEx(const unsigned* config, const char* function, void** arguments, void** extra) {
  return fake_kernel(function, config[0], arguments);
}
