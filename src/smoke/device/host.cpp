// check.h on the host, for the tests: reads runs from standard input, makes inputs and checks outputs in their memory, and writes
// the memory, what was found in each row, and what changed where it must not.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.h"

static bool take(void* to, size_t bytes) { return fread(to, 1, bytes, stdin) == bytes; }
static void give(const void* from, size_t bytes) {
  if (fwrite(from, 1, bytes, stdout) != bytes) exit(2);
}

int main() {
  u64 seed, bytes;
  while (take(&seed, 8)) {
    Task task;
    if (!take(&bytes, 8) || bytes != sizeof task || !take(&task, sizeof task) || !take(&bytes, 8)) return 3;
    std::vector<u64> memory(bytes / 8 + 1);
    if (!take(memory.data(), bytes)) return 4;
    // Addresses come as offsets.
    for (u64 host = 0; host < task.hosted; host++)
      for (u64& address : task.address[host]) address += (u64)memory.data();
    std::vector<int> tables(task.calls * task.ranks * task.experts * task.tokens + 1);
    for (u64 at = 0; at < task.calls * task.ranks && task.kind == MOE_FINALIZE; at++)
      for (int lane = 0; lane < LANES; lane++) {
        u64 source = source_of(seed, at / task.ranks, at % task.ranks, ROWS);
        make_rows(task, source, lane, tables.data() + at * task.experts * task.tokens);
      }
    constexpr u64 CHUNKS = 3;
    auto each = [&](int arrays, auto does) {
      for (u64 host = 0; host < task.hosted; host++)
        for (u64 call = 0; call < task.calls; call++)
          for (int array = 0; array < arrays; array++) does(host, call, array);
    };
    each(SUM_OUT, [&](u64 host, u64 call, int array) {
      for (u64 chunk = 0; chunk < CHUNKS && task.size[array]; chunk++)
        for (int lane = 0; lane < LANES; lane++) make_input(task, seed, host, call, array, lane, chunk, CHUNKS, tables.data());
    });
    give(memory.data(), bytes);
    static Work work;
    std::vector<double> scratch(SCRATCH_ROWS * task.hidden);
    std::vector<Found> found(task.hosted);
    for (u64 row = 0; row < task.calls * task.tokens; row++) {
      check_row(task, seed, row, tables.data(), scratch.data(), work, found.data());
      give(found.data(), found.size() * sizeof(Found));
    }
    each(ARRAYS, [&](u64 host, u64 call, int array) {
      u64 count = 0;
      for (int lane = 0; lane < LANES; lane++) count += changed(task, seed, host, call, array, lane, tables.data());
      give(&count, 8);
    });
    fflush(stdout);
  }
}
