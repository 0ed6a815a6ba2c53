// An artifact with a kernel for its target, whose functions run on the host. FAKE_ARTIFACT: `lazy`, it does nothing; `raises`; `dies`.
// It tells of its work, as FlashInfer's does.
#include <cstdio>

#include "fake.h"

extern "C" __global__ void kernel(int* p) { p[threadIdx.x] = 1; }
extern "C" void fake_raise(const char* kind, const char* message);
struct tensor { void* data; };
struct value { int32_t index; uint32_t padding; union { int64_t number; double real; tensor* of; struct { uint8_t code, bits; uint16_t lanes; } dtype; }; };

API __tvm_ffi_trtllm_lamport_initialize(void*, const value* args, int32_t count, value*) {
  if (count != 3) {
    fake_raise("TypeError", "Mismatched number of arguments when calling: `trtllm_lamport_initialize(0: int, 1: int, 2: DataType) -> void`. Expected 3 but got 0 arguments");
    return -1;
  }
  if (is("FAKE_ARTIFACT", "raises")) { fake_raise("ValueError", "it does not like <this> & that"); return -1; }
  if (is("FAKE_ARTIFACT", "dies")) abort();
  if (is("FAKE_ARTIFACT", "lazy")) return 0;
  fprintf(stderr, "[2026-01-01 00:00:00.000] [info] lamportInitialize start: buffer: %p, size: %ld\n", (void*)args[0].number, (long)args[1].number);
  for (int64_t at = 0; at < args[1].number; at++) {
    if (args[2].dtype.bits == 16) ((uint16_t*)args[0].number)[at] = 0x8000;
    else ((uint32_t*)args[0].number)[at] = 0x80000000u;
  }
  return 0;
}

API __tvm_ffi_trtllm_custom_all_reduce(void*, const value*, int32_t, value*) {
  fake_raise("TypeError", "Mismatched number of arguments when calling: `trtllm_custom_all_reduce(0: Tensor, 1: Tensor, 2: int, 3: int, 4: int, 5: int, 6: int, 7: int, 8: bool, 9: int, 10: Tensor, 11: Tensor, 12: Tensor, 13: Optional<Tensor>, 14: Optional<Tensor>, 15: Optional<Tensor>, 16: Optional<Tensor>, 17: Optional<float>, 18: Optional<Tensor>, 19: Optional<Tensor>, 20: Optional<Tensor>, 21: Optional<Tensor>) -> void`. Expected 22 but got 0 arguments");
  return -1;
}

API __tvm_ffi_of_a_later_release(void*, const value*, int32_t, value*) { return 0; }
