// As much of NVRTC as is called: it takes our own sources for sm_90, and its code is a mark that the fake driver knows.
// FAKE_NVRTC: `fails`, it compiles nothing.
#include "fake.h"

static const char CUBIN[] = "fake cubin", LOG[] = "it is too old";
enum { COMPILATION = 6, INVALID_OPTION = 5, INVALID_INPUT = 3 };

API nvrtcVersion(int* major, int* minor) { *major = 13, *minor = 0; return 0; }
API nvrtcCreateProgram(void** program, const char* source, const char* name, int count, const char** headers, const char** names) {
  *program = (void*)8;
  return strstr(source, "fi_arch_smoke_check") || strstr(source, "add_rms_norm_bf16_1") ? 0 : INVALID_INPUT;
}
API nvrtcCompileProgram(void* program, int count, const char** options) {
  if (is("FAKE_NVRTC", "fails")) return COMPILATION;
  return count > 0 && !strcmp(options[0], "--gpu-architecture=sm_90") ? 0 : INVALID_OPTION;
}
API nvrtcGetProgramLogSize(void* program, size_t* size) { *size = sizeof LOG; return 0; }
API nvrtcGetProgramLog(void* program, char* log) { memcpy(log, LOG, sizeof LOG); return 0; }
API nvrtcGetCUBINSize(void* program, size_t* size) { *size = sizeof CUBIN; return 0; }
API nvrtcGetCUBIN(void* program, char* cubin) { memcpy(cubin, CUBIN, sizeof CUBIN); return 0; }
API nvrtcDestroyProgram(void** program) { *program = NULL; return 0; }
const char* nvrtcGetErrorString(int error) { return error == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
