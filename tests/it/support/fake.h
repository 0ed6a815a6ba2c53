// What the fakes of the driver, NCCL, NVRTC and the artifacts share, in C and in C++.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
#define API extern "C" __attribute__((visibility("default"))) int
#else
#define API __attribute__((visibility("default"))) int
#endif

// Puts a function with its data onto a stream, under a kernel's name, that takes so long by the clock of the driver's events.
API fake_put(void* stream, void (*run)(void*), void* data, const char* kernel, double micros);

// Whether a variable says that a fake goes wrong in this way.
static inline int is(const char* variable, const char* how) {
  const char* text = getenv(variable);
  return text && !strcmp(text, how);
}

static inline float of_bf16(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

static inline uint16_t to_bf16(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
