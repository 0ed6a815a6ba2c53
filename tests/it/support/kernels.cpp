// Our own kernels on the host, for the driver without a GPU: those of cuda-src/smoke/kernels.cu, where the lanes of a block take
// turns, and those that add and norm. FAKE_NORM: `wrong`, the one that does both leaves the last element of each row as it was;
// `lone`, the one that only norms does.
#include <cmath>
#include <cstring>

#include "check.h"
#include "fake.h"

// Parameters come as words, each value in the low bytes.
template <class T>
static T argument(const u64* arguments, int at) {
  T value;
  memcpy(&value, arguments + at, sizeof value);
  return value;
}

static void add(const uint16_t* in, const uint16_t* residual, uint16_t* out, size_t count) {
  for (size_t at = 0; at < count; at++) out[at] = to_bf16(of_bf16(in[at]) + of_bf16(residual[at]));
}

static void norm(const uint16_t* in, const uint16_t* gamma, uint16_t* out, size_t rows, size_t hidden, float eps, size_t written) {
  for (; rows--; in += hidden, out += hidden) {
    float squares = 0;
    for (size_t at = 0; at < hidden; at++) squares += of_bf16(in[at]) * of_bf16(in[at]);
    float scale = 1 / std::sqrt(squares / hidden + eps);
    for (size_t at = 0; at < written; at++) out[at] = to_bf16(of_bf16(in[at]) * scale * of_bf16(gamma[at]));
  }
}

static void add_and_norm(const char* name, const u64* arguments, size_t rows) {
  auto array = [&](int at) { return argument<uint16_t*>(arguments, at); };
  auto elements = [&](int at) { return size_t(argument<uint32_t>(arguments, at)) * 8; };
  if (strstr(name, "residual_add")) return add(array(0), array(1), array(2), elements(3));
  bool lone = strstr(name, "lone");
  size_t hidden = elements(lone ? 3 : 5), written = hidden - is("FAKE_NORM", lone ? "lone" : "wrong");
  if (!lone) add(array(0), array(1), array(3), rows * hidden);
  norm(array(lone ? 0 : 3), array(lone ? 1 : 2), array(lone ? 2 : 4), rows, hidden, argument<float>(arguments, lone ? 4 : 6), written);
}

extern "C" void fake_kernel(const char* name, unsigned blocks, const u64* arguments) {
  auto is = [&](const char* part) { return strstr(name, part) != nullptr; };
  if (is("rms_norm_bf16") || is("residual_add_bf16")) return add_and_norm(name, arguments, blocks);
  if (!is("fi_arch_smoke_")) abort();
  const Task& task = *argument<const Task*>(arguments, 0);
  u64 seed = argument<u64>(arguments, 1);
  for (u64 block = 0; block < blocks; block++) {
    if (is("_rows")) {
      int* table = argument<int*>(arguments, 2) + block * task.experts * task.tokens;
      u64 source = source_of(seed, block / task.ranks, block % task.ranks, ROWS);
      for (int lane = 0; lane < LANES; lane++) make_rows(task, source, lane, table);
    } else if (is("_make")) {
      u64 chunks = argument<u64>(arguments, 2), at = block / chunks;
      int array = at % SUM_OUT;
      for (int lane = 0; lane < LANES && task.size[array]; lane++)
        make_input(task, seed, at / SUM_OUT / task.calls, at / SUM_OUT % task.calls, array, lane, block % chunks, chunks,
                   argument<const int*>(arguments, 3));
    } else if (is("_held")) {
      u64& count = argument<u64*>(arguments, 3)[block] = 0;
      for (int lane = 0; lane < LANES; lane++)
        count += changed(task, seed, block / ARRAYS / task.calls, block / ARRAYS % task.calls, block % ARRAYS, lane,
                         argument<const int*>(arguments, 2));
    } else if (is("_check")) {
      static Work work;
      double* scratch = argument<double*>(arguments, 3) + block * SCRATCH_ROWS * task.hidden;
      for (u64 row = block; row < task.calls * task.tokens; row += blocks)
        check_row(task, seed, row, argument<const int*>(arguments, 2), scratch, work,
                  argument<Found*>(arguments, 4) + row * task.hosted);
    } else {
      abort();
    }
  }
}
