// As much of NVRTC as `bench` calls: it takes any source for the targets that it knows. FAKE_NVRTC: `refuses`.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default"))) int

API nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
API nvrtcCreateProgram(void** program, const char* source, const char* name, int count, const char** headers, const char** names) {
  *program = (void*)8;
  return !strstr(source, "add_rms_norm_bf16_1");
}
API nvrtcCompileProgram(void* program, int count, const char** options) {
  return getenv("FAKE_NVRTC") ? 5 : count < 1 || strcmp(options[0], "--gpu-architecture=sm_90");
}
API nvrtcGetProgramLogSize(void* program, size_t* size) { *size = 12; return 0; }
API nvrtcGetProgramLog(void* program, char* log) { memcpy(log, "it says why", 12); return 0; }
API nvrtcGetCUBINSize(void* program, size_t* size) { *size = 4; return 0; }
API nvrtcGetCUBIN(void* program, char* cubin) { memcpy(cubin, "code", 4); return 0; }
API nvrtcDestroyProgram(void** program) { *program = NULL; return 0; }
__attribute__((visibility("default"))) const char* nvrtcGetErrorString(int result) { return "NVRTC_ERROR_FAKE"; }
