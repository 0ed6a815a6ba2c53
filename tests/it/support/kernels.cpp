// Our own kernels on the host, for the driver without a GPU: those of cuda-src/smoke/kernels.cu, where the lanes of a block take
// turns, and add_rms_norm. FAKE_NORM: `wrong`, it leaves the last element of each row as it was.
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

static void add_rms_norm(const u64* arguments, unsigned rows) {
  auto array = [&](int at) { return argument<uint16_t*>(arguments, at); };
  uint16_t *in = array(0), *residual = array(1), *gamma = array(2), *residual_out = array(3), *norm_out = array(4);
  size_t hidden = argument<uint32_t>(arguments, 5) * 8, written = hidden - is("FAKE_NORM", "wrong");
  for (size_t row = 0; row < rows; row++) {
    float squares = 0;
    for (size_t at = row * hidden; at < (row + 1) * hidden; at++) {
      residual_out[at] = to_bf16(of_bf16(in[at]) + of_bf16(residual[at]));
      squares += of_bf16(residual_out[at]) * of_bf16(residual_out[at]);
    }
    float scale = 1 / std::sqrt(squares / hidden + argument<float>(arguments, 6));
    for (size_t at = 0; at < written; at++)
      norm_out[row * hidden + at] = to_bf16(of_bf16(residual_out[row * hidden + at]) * scale * of_bf16(gamma[at]));
  }
}

extern "C" void fake_kernel(const char* name, unsigned blocks, const u64* arguments) {
  auto is = [&](const char* part) { return strstr(name, part) != nullptr; };
  if (is("add_rms_norm_bf16")) return add_rms_norm(arguments, blocks);
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
