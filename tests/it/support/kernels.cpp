// The kernels of cuda-src/smoke/kernels.cu on the host, for the driver without a GPU: the lanes of a block take turns.
#include <cstring>
#include <vector>

#include "check.h"

template <class T>
static T argument(void** arguments, int at) {
  T value;
  memcpy(&value, arguments[at], sizeof value);
  return value;
}

extern "C" int fake_kernel(const char* name, unsigned blocks, void** arguments) {
  const Task& task = *argument<const Task*>(arguments, 0);
  u64 seed = argument<u64>(arguments, 1);
  auto is = [&](const char* end) { return strcmp(name + strlen(name) - strlen(end), end) == 0; };
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
      return 1;
    }
  }
  return 0;
}
