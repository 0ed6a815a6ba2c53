// The kernels that make and check on the GPU, one block of `LANES` threads a piece of work. NVRTC compiles this behind check.h.

constexpr u64 INPUTS = SUM_OUT;

// One block a rank and call. Needed where there is a table of rows.
extern "C" __global__ void __launch_bounds__(LANES) fi_arch_smoke_rows(const Task* task, u64 seed, int* tables) {
  u64 call = blockIdx.x / task->ranks, rank = blockIdx.x % task->ranks;
  int* table = tables + blockIdx.x * task->experts * task->tokens;
  make_rows(*task, source_of(seed, call, rank, ROWS), threadIdx.x, table);
}

// `chunks` blocks for each input of each call of each hosted rank.
extern "C" __global__ void __launch_bounds__(LANES) fi_arch_smoke_make(const Task* task, u64 seed, u64 chunks, const int* tables) {
  u64 at = blockIdx.x / chunks;
  u64 call = at / INPUTS % task->calls, host = at / INPUTS / task->calls;
  int array = at % INPUTS;
  if (task->size[array]) make_input(*task, seed, host, call, array, threadIdx.x, blockIdx.x % chunks, chunks, tables);
}

// One block for each array of each call of each hosted rank.
extern "C" __global__ void __launch_bounds__(LANES) fi_arch_smoke_held(const Task* task, u64 seed, const int* tables, u64* counts) {
  __shared__ u64 of_lane[LANES];
  u64 at = blockIdx.x;
  u64 call = at / ARRAYS % task->calls, host = at / ARRAYS / task->calls;
  of_lane[threadIdx.x] = changed(*task, seed, host, call, at % ARRAYS, threadIdx.x, tables);
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 count = 0;
    for (int lane = 0; lane < LANES; lane++) count += of_lane[lane];
    counts[at] = count;
  }
}

// Any number of blocks, which take the rows (tokens of calls) in turn. `scratch` has SCRATCH_ROWS rows of doubles a block.
extern "C" __global__ void __launch_bounds__(LANES)
    fi_arch_smoke_check(const Task* task, u64 seed, const int* tables, double* scratch, Found* found) {
  __shared__ Work work;
  double* mine = scratch + blockIdx.x * SCRATCH_ROWS * task->hidden;
  for (u64 row = blockIdx.x; row < task->calls * task->tokens; row += gridDim.x) {
    check_row(*task, seed, row, tables, mine, work, found + row * task->hosted);
  }
}
