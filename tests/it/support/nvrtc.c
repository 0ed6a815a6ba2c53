// A libnvrtc that compiles nothing. FAKE_NVRTC: `fails`.
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default"))) int

API nvrtcVersion(int* major, int* minor) { *major = 13, *minor = 7; return 0; }
API nvrtcCreateProgram(void** program, const char* source, const char* name, int count, const char** headers, const char** names) {
  *program = (void*)8;
  return strstr(source, "fi_arch_smoke_check") ? 0 : 1;
}
API nvrtcCompileProgram(void* program, int count, const char** options) { return getenv("FAKE_NVRTC") ? 6 : 0; }
API nvrtcGetProgramLogSize(void* program, size_t* size) { *size = 14; return 0; }
API nvrtcGetProgramLog(void* program, char* log) { strcpy(log, "it is too old"); return 0; }
API nvrtcGetCUBINSize(void* program, size_t* size) { *size = 10; return 0; }
API nvrtcGetCUBIN(void* program, char* cubin) { memcpy(cubin, "fake cubin", 10); return 0; }
API nvrtcDestroyProgram(void** program) { return 0; }
const char* nvrtcGetErrorString(int error) { return error == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
