// As much of libtvm_ffi as `smoke` calls: an error is raised by a text, and taken as the object that tvm-ffi would give.
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define API __attribute__((visibility("default")))

struct text { const char* data; size_t size; };
static struct { uint64_t references; int32_t index; uint32_t padding; void* deleter; struct text kind, message; } error;
static int raised;

API void fake_raise(const char* kind, const char* message) {
  error.kind = (struct text){kind, strlen(kind)};
  error.message = (struct text){message, strlen(message)};
  raised = 1;
}
API void TVMFFIErrorMoveFromRaised(void** object) { *object = raised ? &error : NULL; raised = 0; }
API int TVMFFIObjectDecRef(void* object) { return 0; }
static void* current;
API int TVMFFIEnvSetStream(int kind, int id, void* stream, void** before) { current = stream; return 0; }
API void* fake_stream(void) { return current; }
API void TVMFFIGetVersion(uint32_t* version) { version[0] = 0; version[1] = 1; version[2] = 99; }

// What the start-up code of an artifact with a kernel calls in the CUDA runtime.
API void** __cudaRegisterFatBinary(void* image) { return NULL; }
API void __cudaRegisterFatBinaryEnd(void** image) {}
API void __cudaUnregisterFatBinary(void** image) {}
API void __cudaRegisterFunction(void** image, const char* host, char* device, const char* name, int limit, void* a, void* b, void* c, void* d, int* e) {}
API void __cudaInitModule(void** image) {}
API int __cudaPushCallConfiguration() { return 1; }
API int __cudaPopCallConfiguration() { return 1; }
API int __cudaLaunchKernel() { return 1; }
API int __cudaGetKernel() { return 1; }
API int cudaLaunchKernel() { return 1; }
