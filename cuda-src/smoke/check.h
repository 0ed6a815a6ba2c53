// The inputs of `fi-arch smoke`, and how its outputs are held against float64: the arithmetic of src/smoke/inputs.rs and
// src/smoke/reference.rs once more, operation by operation, so that both give the same bits. What is explained there is not
// explained here again; where one changes, the other must.
//
// Plain C++17 without headers: NVRTC compiles it for the GPU (kernels.cu), and a C++ compiler compiles it for the tests, in which
// the lanes of a block take turns. No product and sum may be fused (-fmad=false, -ffp-contract=off).

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// APART: code that is large and stands in many places, so that it is compiled once.
#ifdef __CUDACC__
#define HERE __device__ __forceinline__
#define APART __device__ __noinline__
#else
#define HERE inline
#define APART inline
#endif

constexpr int LANES = 256;
constexpr int MOST_RANKS = 8;
constexpr int ARRAYS = 13;

// In the order of `Array` in src/smoke/arrays.rs.
enum Array { MAIN, RESIDUAL, GAMMA, GAMMA_PRE, BIAS, SHARED, SCALES, ROWS, SUM_OUT, RESIDUAL_OUT, NORM_OUT, QUANT_OUT, SCALES_OUT };
enum Kind { SUM_OF_RANKS, MOE_REDUCTION, MOE_FINALIZE };
enum DType { BF16, FP16, FP32 };
enum Quant { NO_QUANT, FP8, FP4, GROUP_FP8, DYNAMIC_FP8, MXFP8 };
enum Output { RIGHT, IN_SUM, IN_RESIDUAL, IN_NORM, IN_QUANT, IN_SCALES };

// A case and where its arrays lie: words of 64 bits alone, written by src/smoke/device.rs.
struct Task {
  u64 kind, dtype, ranks, tokens, hidden, calls;
  u64 experts;  // or top-k
  u64 weighted, shared;
  u64 negative_zero;  // what is reduced may hold −0.0
  u64 in_float;       // the sum is rounded once
  u64 norms, norms_first, bias;
  u64 quant, linear, group;
  u64 size[ARRAYS];   // bytes of one call; 0 of an array that is not there
  u64 guard[ARRAYS];  // bytes behind it
  u64 hosted;
  u64 rank[MOST_RANKS];
  u64 address[MOST_RANKS][ARRAYS];
};

// What was found in one row of one rank.
struct Found {
  u64 output, count, unwritten, column;
  double got, least, most, relative, of_bound;
};

// ---- numbers ----

HERE u64 bits_of(double value) {
  union { double value; u64 bits; } both;
  both.value = value;
  return both.bits;
}

HERE double of_bits(u64 bits) {
  union { u64 bits; double value; } both;
  both.bits = bits;
  return both.value;
}

HERE double power_of_two(int exponent) { return of_bits((u64)(exponent + 1023) << 52); }
HERE double magnitude(double value) { return of_bits(bits_of(value) & ~(1ull << 63)); }
HERE double larger(double one, double other) { return other > one || one != one ? other : one; }
HERE double smaller(double one, double other) { return other < one || one != one ? other : one; }
HERE double root(double value) {
#ifdef __CUDACC__
  return __dsqrt_rn(value);
#else
  return __builtin_sqrt(value);
#endif
}
HERE double whole(double value) {
#ifdef __CUDACC__
  return rint(value);
#else
  return __builtin_rint(value);
#endif
}
HERE double not_a_number() { return of_bits(0x7ffull << 52 | 1ull << 51); }

HERE int bytes_of(u64 dtype) { return dtype == FP32 ? 4 : 2; }
HERE u32 negative_zero(u64 dtype) { return dtype == FP32 ? 0x80000000u : 0x8000u; }
HERE u32 largest_subnormal(u64 dtype) { return dtype == BF16 ? 0x7fu : dtype == FP16 ? 0x3ffu : 0x7fffffu; }
HERE u32 poison(u64 dtype) { return dtype == FP32 ? 0x7fa57fa5u : 0x7fa5u; }
HERE double unit(u64 dtype) { return power_of_two(dtype == BF16 ? -8 : dtype == FP16 ? -11 : -24); }
HERE double quantum(u64 dtype) { return power_of_two(dtype == BF16 ? -134 : dtype == FP16 ? -25 : -150); }

// A narrow float as a double: exact.
HERE double widen(u32 word, int exponent_bits, int mantissa_bits) {
  u64 sign = (u64)(word >> (exponent_bits + mantissa_bits) & 1) << 63;
  int bias = (1 << (exponent_bits - 1)) - 1, highest = (1 << exponent_bits) - 1;
  int exponent = (int)(word >> mantissa_bits) & highest;
  u64 mantissa = word & ((1u << mantissa_bits) - 1);
  if (exponent == highest) return of_bits(sign | 0x7ffull << 52 | mantissa << (52 - mantissa_bits));
  if (exponent == 0) return of_bits(bits_of((double)mantissa * power_of_two(1 - bias - mantissa_bits)) | sign);
  return of_bits(sign | (u64)(exponent - bias + 1023) << 52 | mantissa << (52 - mantissa_bits));
}

HERE int exponent_bits(u64 dtype) { return dtype == FP16 ? 5 : 8; }
HERE int mantissa_bits(u64 dtype) { return dtype == BF16 ? 7 : dtype == FP16 ? 10 : 23; }
HERE double decode(u64 dtype, u32 word) { return widen(word, exponent_bits(dtype), mantissa_bits(dtype)); }

HERE u64 round_bits(u64 value, int shift) {
  if (shift > 53) return 0;
  u64 kept = value >> shift, rest = value & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
}

HERE u32 narrow(double value, int exponent_bits, int mantissa_bits) {
  u64 bits = bits_of(value);
  u32 sign = (u32)(bits >> 63) << (exponent_bits + mantissa_bits);
  u64 size = bits & ~(1ull << 63);
  u32 infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (size > 0x7ffull << 52) return sign | infinity | 1u << (mantissa_bits - 1);
  int bias = (1 << (exponent_bits - 1)) - 1;
  int exponent = (int)(size >> 52) - 1023 + bias;
  u64 rounded;
  if (exponent > 0) {
    rounded = round_bits(size - ((u64)(1023 - bias) << 52), 52 - mantissa_bits);
  } else {
    rounded = round_bits((size & ((1ull << 52) - 1)) | 1ull << 52, 53 - mantissa_bits - exponent);
  }
  return sign | (rounded < infinity ? (u32)rounded : infinity);
}

HERE u32 encode(u64 dtype, double value) { return narrow(value, exponent_bits(dtype), mantissa_bits(dtype)); }

struct Small {
  int exponent_bits, mantissa_bits, bias;
  double largest;
  bool has_nan;
};
HERE Small e4m3() { return Small{4, 3, 7, 448.0, true}; }
HERE Small e2m1() { return Small{2, 1, 1, 6.0, false}; }

HERE double decode_small(Small small, u32 code) {
  int mantissa = (int)code & ((1 << small.mantissa_bits) - 1);
  int exponent = (int)(code >> small.mantissa_bits) & ((1 << small.exponent_bits) - 1);
  bool negative = code >> (small.exponent_bits + small.mantissa_bits) & 1;
  if (small.has_nan && exponent == 15 && mantissa == 7) return not_a_number();
  double fraction = (double)mantissa / (double)(1 << small.mantissa_bits);
  double value = exponent == 0 ? fraction * power_of_two(1 - small.bias) : (1.0 + fraction) * power_of_two(exponent - small.bias);
  return negative ? -value : value;
}

APART double round_small(Small small, double value) {
  if (value != value) return value;
  double size = magnitude(value);
  int exponent = (int)(bits_of(size) >> 52) - 1023;
  int least = 1 - small.bias;
  double step = power_of_two((exponent > least ? exponent : least) - small.mantissa_bits);
  double rounded = smaller(whole(size / step) * step, small.largest);
  return of_bits(bits_of(rounded) | (bits_of(value) & 1ull << 63));
}

HERE double decode_e8m0(u32 code) { return code == 0xff ? not_a_number() : power_of_two((int)code - 127); }

HERE double power_of_two_above(double value) {
  if (value <= 0.0) return power_of_two(-127);
  u64 bits = bits_of(value);
  int exponent = (int)(bits >> 52) - 1023 + ((bits & ((1ull << 52) - 1)) != 0 ? 1 : 0);
  return power_of_two(exponent < -127 ? -127 : exponent > 127 ? 127 : exponent);
}

// ---- inputs ----

HERE u64 mix(u64 value) {
  u64 z = value + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// The streams of inputs.rs are numbered as the arrays are, from 1.
HERE u64 source_of(u64 seed, u64 call, u64 rank, int array) {
  return mix(seed ^ mix(call << 32 | rank << 8 | (u64)(array + 1)));
}

HERE double normal(u64 hash) {
  u64 sum = 0;
  for (int part = 0; part < 4; part++) sum += hash >> (16 * part) & 0xffff;
  return ((double)sum / 65536.0 - 2.0) * of_bits(0x3ffbb67ae8584caaull);  // the root of 3
}

HERE u32 element(u64 dtype, u64 hash, double size) {
  u64 kind = mix(hash) & 63;
  if (kind < 2) return ((u32)(hash >> 8) % largest_subnormal(dtype) + 1) | (hash & 1 ? negative_zero(dtype) : 0);
  if (kind == 2) return 0;
  if (kind >= 62) return negative_zero(dtype);
  return encode(dtype, normal(hash) * size);
}

HERE double size_of_row(u64 turned) {
  u64 at = turned % 4;
  return at == 0 ? 1.0 : at == 1 ? 4e-3 : at == 2 ? 30.0 : 0.2;
}

HERE u64 rows_of(const Task& task, int array) {
  switch (array) {
    case MAIN: return task.kind == SUM_OF_RANKS ? task.tokens : task.experts * task.tokens;
    case RESIDUAL: case SHARED: return task.tokens;
    default: return 1;
  }
}

// An element of an array that has rows.
APART u32 word_at(const Task& task, u64 seed, u64 source, int array, u64 row, u64 column) {
  bool spared = !(array == MAIN || array == SHARED);
  u32 zero = negative_zero(task.dtype);
  u32 word = row == rows_of(task, array) - 1 && column < 8
                 ? zero
                 : element(task.dtype, mix(source ^ (row * task.hidden + column)), size_of_row(row + seed % 4));
  return !(task.negative_zero || spared) && word == zero ? 0 : word;
}

HERE double value_at(const Task& task, u64 seed, u64 source, int array, u64 row, u64 column) {
  return decode(task.dtype, word_at(task, seed, source, array, row, column));
}

HERE u64 scales_dtype(const Task& task) { return task.kind == MOE_REDUCTION ? (u64)FP32 : task.dtype; }

HERE u32 scale_word(const Task& task, u64 source, u64 at) {
  return encode(scales_dtype(task), 0.125 + (double)(mix(source ^ at) >> 11) / power_of_two(53));
}

// Which row a token's expert reads: the table of one rank and call. Each lane finds the places of some of the rows.
HERE void make_rows(const Task& task, u64 source, int lane, int* table) {
  u64 count = task.experts * task.tokens;
  for (u64 row = lane; row < count; row += LANES) {
    u64 key = mix(source ^ row), place = 0;
    for (u64 other = 0; other < count; other++) place += mix(source ^ other) < key ? 1 : 0;
    table[place] = (mix(source + place) & 7) == 0 ? -1 : (int)row;
  }
}

// The word of an input at an index. `table`: the rows of this rank and call.
HERE u32 input_word(const Task& task, u64 seed, u64 source, int array, u64 at, const int* table) {
  if (array == SCALES) return scale_word(task, source, at);
  if (array == ROWS) return (u32)table[at];
  return word_at(task, seed, source, array, at / task.hidden, at % task.hidden);
}

HERE int input_bytes(const Task& task, int array) {
  return array == ROWS ? 4 : bytes_of(array == SCALES ? scales_dtype(task) : task.dtype);
}

HERE u8* array_of(const Task& task, u64 host, u64 call, int array) {
  return (u8*)task.address[host][array] + call * (task.size[array] + task.guard[array]);
}

HERE const int* table_of(const Task& task, const int* tables, u64 call, u64 rank) {
  return tables + (call * task.ranks + rank) * task.experts * task.tokens;
}

// Writes the part `chunk` of `chunks` of one input of one hosted rank's call.
HERE void make_input(const Task& task, u64 seed, u64 host, u64 call, int array, int lane, u64 chunk, u64 chunks, const int* tables) {
  u64 source = source_of(seed, call, task.rank[host], array);
  int bytes = input_bytes(task, array);
  u64 count = task.size[array] / bytes;
  u8* to = array_of(task, host, call, array);
  const int* table = table_of(task, tables, call, task.rank[host]);
  for (u64 at = chunk * LANES + lane; at < count; at += chunks * LANES) {
    u32 word = input_word(task, seed, source, array, at, table);
    if (bytes == 4) ((u32*)to)[at] = word; else ((u16*)to)[at] = (u16)word;
  }
}

// How many words of an input are no longer what they were made, or how many bytes behind an output are no longer poison.
HERE u64 changed(const Task& task, u64 seed, u64 host, u64 call, int array, int lane, const int* tables) {
  u64 count = 0;
  if (task.size[array] == 0) return 0;
  const u8* held = array_of(task, host, call, array);
  if (array < SUM_OUT) {
    u64 source = source_of(seed, call, task.rank[host], array);
    int bytes = input_bytes(task, array);
    const int* table = table_of(task, tables, call, task.rank[host]);
    for (u64 at = lane; at < task.size[array] / bytes; at += LANES) {
      u32 word = bytes == 4 ? ((const u32*)held)[at] : ((const u16*)held)[at];
      count += word != input_word(task, seed, source, array, at, table) ? 1 : 0;
    }
    return count;
  }
  for (u64 at = task.size[array] + lane; at < task.size[array] + task.guard[array]; at += LANES) {
    u8 byte = held[at];
    bool kept;
    if (array == QUANT_OUT && task.quant == FP4) kept = byte == 0x55 || byte == 0xaa;
    else if (array == QUANT_OUT || array == SCALES_OUT) kept = byte == 0xff;
    else kept = byte == (u8)poison(task.dtype) || byte == (u8)(poison(task.dtype) >> 8);
    count += kept ? 0 : 1;
  }
  return count;
}

// ---- the reference ----

constexpr double EPS = 1e-5;
constexpr double FP8_SCALE = 0.25;
constexpr double FP4_SCALE = 4.0;
constexpr double FAST = 1.0 / 262144.0;
constexpr double LEAST_GROUP_SCALE = 1e-10;
constexpr double LEAST_TOKEN_SCALE = 1.0 / 512.0 / 448.0;
HERE double tiny() { return power_of_two(-120); }

// What the lanes of a block share.
struct Work {
  double partial[LANES];
  double largest[LANES], furthest[LANES], of_bound[LANES];
  double got[LANES], least[LANES], most[LANES];
  u32 count[LANES], unwritten[LANES], column[LANES];
};

HERE void barrier() {
#ifdef __CUDACC__
  __syncthreads();
#endif
}

// Every lane does it; all have when this ends.
template <class Does>
HERE void each_lane(Does does) {
#ifdef __CUDACC__
  does((int)threadIdx.x);
  __syncthreads();
#else
  for (int lane = 0; lane < LANES; lane++) does(lane);
#endif
}

struct Row {
  double* exact;
  double* bound;
};

APART double mean_of_squares(Work& work, const double* values, u64 hidden) {
  each_lane([&](int lane) {
    double sum = 0.0;
    for (u64 at = lane; at < hidden; at += LANES) sum = sum + values[at] * values[at];
    work.partial[lane] = sum;
  });
  for (int half = LANES / 2; half > 0; half /= 2) {
    each_lane([&](int lane) {
      if (lane < half) work.partial[lane] = work.partial[lane] + work.partial[lane + half];
    });
  }
  double sum = work.partial[0];
  barrier();  // Nobody writes there before all have read it.
  return sum / (double)hidden;
}

HERE double rms_of(Work& work, const double* values, u64 hidden) { return root(mean_of_squares(work, values, hidden) + EPS); }

HERE void begin_tally(Work& work, int lane) {
  work.largest[lane] = work.furthest[lane] = work.of_bound[lane] = 0.0;
  work.count[lane] = work.unwritten[lane] = 0;
}

HERE void wrong(Work& work, int lane, u64 column, double got, double least, double most, bool unwritten) {
  if (work.count[lane] == 0) {
    work.column[lane] = (u32)column;
    work.got[lane] = got;
    work.least[lane] = least;
    work.most[lane] = most;
  }
  work.count[lane]++;
  work.unwritten[lane] += unwritten ? 1 : 0;
}

// Adds the lanes up; whether nothing is wrong. What is, goes into `found`, and so does the distance.
APART bool end_tally(Work& work, u64 output, Found& found) {
  for (int half = LANES / 2; half > 0; half /= 2) {
    each_lane([&](int lane) {
      if (lane >= half) return;
      int other = lane + half;
      work.largest[lane] = larger(work.largest[lane], work.largest[other]);
      work.furthest[lane] = larger(work.furthest[lane], work.furthest[other]);
      work.of_bound[lane] = larger(work.of_bound[lane], work.of_bound[other]);
      if (work.count[other] > 0 && (work.count[lane] == 0 || work.column[other] < work.column[lane])) {
        work.column[lane] = work.column[other];
        work.got[lane] = work.got[other];
        work.least[lane] = work.least[other];
        work.most[lane] = work.most[other];
      }
      work.count[lane] += work.count[other];
      work.unwritten[lane] += work.unwritten[other];
    });
  }
  bool right = work.count[0] == 0;
  if (right) {
    double relative = work.largest[0] > 0.0 ? work.furthest[0] / work.largest[0] : 0.0;
    found.relative = larger(found.relative, relative);
    found.of_bound = larger(found.of_bound, work.of_bound[0]);
  } else {
    found.output = output;
    found.count = work.count[0];
    found.unwritten = work.unwritten[0];
    found.column = work.column[0];
    found.got = work.got[0];
    found.least = work.least[0];
    found.most = work.most[0];
  }
  barrier();
  return right;
}

// `exact`: what the reported error is relative to.
template <class Exact>
HERE bool check_elements(const Task& task, Work& work, u64 output, const u8* held, Row right, Exact exact, Found& found) {
  each_lane([&](int lane) {
    begin_tally(work, lane);
    for (u64 column = lane; column < task.hidden; column += LANES) {
      u32 word = task.dtype == FP32 ? ((const u32*)held)[column] : ((const u16*)held)[column];
      double got = decode(task.dtype, word), bound = right.bound[column];
      double error = magnitude(got - right.exact[column]);
      if (error <= bound) {
        double whole = exact(column);
        work.largest[lane] = larger(work.largest[lane], magnitude(whole));
        work.furthest[lane] = larger(work.furthest[lane], magnitude(got - whole));
        work.of_bound[lane] = larger(work.of_bound[lane], error / bound);
      } else {
        wrong(work, lane, column, got, right.exact[column] - bound, right.exact[column] + bound, word == poison(task.dtype));
      }
    }
  });
  return end_tally(work, output, found);
}

APART void add(const Task& task, Row row, u64 column, double other) {
  row.exact[column] = row.exact[column] + other;
  double size = magnitude(row.exact[column]) + row.bound[column];
  row.bound[column] = row.bound[column] + ((unit(task.dtype) + power_of_two(-23)) * size + quantum(task.dtype) + tiny());
}

// The norm of `from` by a weight of this rank's, into `to`, which may be the same.
APART void norm(const Task& task, Work& work, Row from, Row to, u64 seed, u64 source, int array) {
  double rms = rms_of(work, from.exact, task.hidden);
  double rms_error = root(mean_of_squares(work, from.bound, task.hidden)) / rms;
  each_lane([&](int lane) {
    for (u64 column = lane; column < task.hidden; column += LANES) {
      double x = from.exact[column], error = from.bound[column];
      double weight = value_at(task, seed, source, array, 0, column);
      double exact = x * weight / rms;
      double bound = magnitude(weight) / rms * (error + magnitude(x) * rms_error) / (1.0 - rms_error);
      bound = bound + FAST * magnitude(exact);
      bound = bound + (unit(task.dtype) * (magnitude(exact) + bound) + quantum(task.dtype) + tiny());
      to.exact[column] = exact;
      to.bound[column] = bound;
    }
  });
}

HERE void sum_of_ranks(const Task& task, u64 seed, const u64* sources, u64 token, u64 column, Row row) {
  double sum = 0.0, size = 0.0, bound;
  for (u64 rank = 0; rank < task.ranks; rank++) {
    double x = value_at(task, seed, sources[rank], MAIN, token, column);
    sum = sum + x;
    size = size + magnitude(x);
  }
  if (task.in_float) {
    double error = (double)task.ranks * power_of_two(-24) * size + tiny();
    bound = error + unit(task.dtype) * (magnitude(sum) + error) + quantum(task.dtype);
  } else {
    bound = ((double)task.ranks - 1.0) * (1.02 * unit(task.dtype) * size + quantum(task.dtype)) + tiny();
  }
  row.exact[column] = sum;
  row.bound[column] = bound;
}

APART void sum_of_experts(const Task& task, u64 seed, u64 call, const u64* sources, const int* tables, u64 token, u64 column, Row row) {
  double sum = 0.0, size = 0.0, bound = 0.0, each = unit(task.dtype), least = quantum(task.dtype);
  for (u64 rank = 0; rank < task.ranks; rank++) {
    double of_rank = 0.0, size_of_rank = 0.0;
    u64 count = 0, scales = source_of(seed, call, rank, SCALES);
    for (u64 expert = 0; expert < task.experts; expert++) {
      u64 at = task.kind == MOE_REDUCTION ? expert * task.tokens + token : token * task.experts + expert, from = at;
      if (task.kind == MOE_FINALIZE) {
        int entry = table_of(task, tables, call, rank)[at];
        if (entry < 0) continue;
        from = (u64)entry;
      }
      double scale = task.weighted ? decode(scales_dtype(task), scale_word(task, scales, at)) : 1.0;
      double x = value_at(task, seed, sources[rank], MAIN, from, column) * scale;
      of_rank = of_rank + x;
      size_of_rank = size_of_rank + magnitude(x);
      count++;
    }
    if (task.shared) {
      double shared = value_at(task, seed, source_of(seed, call, rank, SHARED), SHARED, token, column);
      of_rank = of_rank + shared;
      size_of_rank = size_of_rank + magnitude(shared);
    }
    double roundings = (double)count + 2.0;
    bound = bound + roundings * (1.05 * each * size_of_rank + least + tiny());
    sum = sum + of_rank;
    size = size + size_of_rank;
  }
  bound = bound + (((double)task.ranks - 1.0) * (1.1 * each * size + least) + tiny());
  row.exact[column] = sum;
  row.bound[column] = bound;
}

HERE u64 scale_offset(bool linear, u64 row, u64 column, u64 columns) {
  if (linear) return row * columns + column;
  u64 tile = row / 128 * ((columns + 3) / 4) + column / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

HERE u64 group_scale_offset(u64 token, u64 group, u64 tokens) { return (group / 4 * ((tokens + 3) / 4 * 4) + token) * 4 + group % 4; }

// How the norm was quantized.
struct Blocks {
  Small small;
  u64 block;  // values that share a scale
  const u8* scales;
};

// The scale of a block, as it was written.
HERE double scale_of(const Task& task, const Blocks& blocks, u64 token, u64 at) {
  u64 columns = task.hidden / blocks.block;
  switch (task.quant) {
    case FP4: return decode_small(e4m3(), blocks.scales[scale_offset(task.linear, token, at, columns)]);
    case GROUP_FP8: return decode_e8m0(blocks.scales[group_scale_offset(token, at, task.tokens)]);
    case DYNAMIC_FP8: return widen(((const u32*)blocks.scales)[token], 8, 23);
    case MXFP8: return decode_e8m0(blocks.scales[scale_offset(task.linear, token, at, columns)]);
    default: return FP8_SCALE;
  }
}

// What the values of a block were multiplied with.
HERE double factor_of(const Task& task, const Blocks& blocks, u64 token, u64 at) {
  double scale = scale_of(task, blocks, token, at);
  if (task.quant == FP4) return scale == 0.0 ? 0.0 : FP4_SCALE / scale;
  if (task.quant == MXFP8 && blocks.scales[scale_offset(task.linear, token, at, task.hidden / blocks.block)] == 0) return 0.0;
  return 1.0 / scale;
}

// The scale that a block whose largest magnitude is this must have.
APART double right_scale(const Task& task, double largest) {
  switch (task.quant) {
    case FP4: return round_small(e4m3(), FP4_SCALE * largest / 6.0);
    case GROUP_FP8: return power_of_two_above(larger(largest / 448.0, LEAST_GROUP_SCALE));
    case DYNAMIC_FP8: return larger(largest / 448.0, LEAST_TOKEN_SCALE);
    default: return power_of_two_above(largest / 448.0);
  }
}

HERE void check_scale(const Task& task, Work& work, const Blocks& blocks, u64 token, int lane, u64 at, double least, double most) {
  double low = right_scale(task, least * (1.0 - FAST)) * (1.0 - FAST);
  double high = right_scale(task, most * (1.0 + FAST) + tiny()) * (1.0 + FAST);
  double got = scale_of(task, blocks, token, at);
  if (!(low <= got && got <= high)) wrong(work, lane, at, got, low, high, got != got);
}

HERE bool check_scales(const Task& task, Work& work, const Blocks& blocks, u64 token, Row normed, Found& found) {
  auto widest = [&](u64 column, double& least, double& most) {
    double size = magnitude(normed.exact[column]), bound = normed.bound[column];
    least = larger(least, size - bound);
    most = larger(most, size + bound);
  };
  if (blocks.block < task.hidden) {
    each_lane([&](int lane) {
      begin_tally(work, lane);
      for (u64 at = lane; at < task.hidden / blocks.block; at += LANES) {
        double least = 0.0, most = 0.0;
        for (u64 column = at * blocks.block; column < (at + 1) * blocks.block; column++) widest(column, least, most);
        check_scale(task, work, blocks, token, lane, at, least, most);
      }
    });
    return end_tally(work, IN_SCALES, found);
  }
  // One block: the lanes look for its largest magnitude together.
  each_lane([&](int lane) {
    double least = 0.0, most = 0.0;
    for (u64 column = lane; column < task.hidden; column += LANES) widest(column, least, most);
    work.least[lane] = least;
    work.most[lane] = most;
  });
  for (int half = LANES / 2; half > 0; half /= 2) {
    each_lane([&](int lane) {
      if (lane >= half) return;
      work.least[lane] = larger(work.least[lane], work.least[lane + half]);
      work.most[lane] = larger(work.most[lane], work.most[lane + half]);
    });
  }
  double least = work.least[0], most = work.most[0];
  barrier();
  each_lane([&](int lane) {
    begin_tally(work, lane);
    if (lane == 0) check_scale(task, work, blocks, token, lane, 0, least, most);
  });
  return end_tally(work, IN_SCALES, found);
}

HERE bool check_values(const Task& task, Work& work, const Blocks& blocks, u64 token, const u8* quant, Row normed, Found& found) {
  each_lane([&](int lane) {
    begin_tally(work, lane);
    for (u64 column = lane; column < task.hidden / blocks.block * blocks.block; column += LANES) {
      double factor = factor_of(task, blocks, token, column / blocks.block);
      u64 element = token * task.hidden + column;
      u32 code = task.quant == FP4 ? quant[element / 2] >> (element % 2 * 4) & 15 : quant[element];
      double got = decode_small(blocks.small, code);
      double exact = normed.exact[column];
      double room = normed.bound[column] + FAST * magnitude(exact) + tiny();
      double least = round_small(blocks.small, (exact - room) * factor), most = round_small(blocks.small, (exact + room) * factor);
      if (!(least <= got && got <= most)) {
        wrong(work, lane, column, got, least, most, task.quant != FP4 && code == 0xff);
      }
    }
  });
  return end_tally(work, IN_QUANT, found);
}

// The double rows that a block of lanes needs.
constexpr int SCRATCH_ROWS = 6;

// Holds the outputs of one hosted rank for one token of one call against what is right. `sum` is kept for the next rank.
HERE void check_rank(const Task& task, u64 seed, u64 host, u64 call, u64 token, Row sum, Row summed, Row normed, Work& work, Found& found) {
  u64 rank = task.rank[host], hidden = task.hidden;
  int bytes = bytes_of(task.dtype);
  auto held = [&](int array) { return array_of(task, host, call, array) + token * hidden * bytes; };
  auto source = [&](int array) { return source_of(seed, call, rank, array); };
  if (task.size[SUM_OUT]) {
    auto exact = [&](u64 column) { return sum.exact[column]; };
    if (!check_elements(task, work, IN_SUM, held(SUM_OUT), sum, exact, found)) return;
  }
  if (!task.norms) return;

  each_lane([&](int lane) {
    for (u64 column = lane; column < hidden; column += LANES) {
      summed.exact[column] = sum.exact[column];
      summed.bound[column] = sum.bound[column];
      if (task.bias) add(task, summed, column, value_at(task, seed, source(BIAS), BIAS, 0, column));
    }
  });
  if (task.norms_first) norm(task, work, summed, summed, seed, source(GAMMA_PRE), GAMMA_PRE);
  each_lane([&](int lane) {
    u64 from = source(RESIDUAL);
    for (u64 column = lane; column < hidden; column += LANES) {
      add(task, summed, column, value_at(task, seed, from, RESIDUAL, token, column));
    }
  });
  auto exact = [&](u64 column) { return summed.exact[column]; };
  if (!check_elements(task, work, IN_RESIDUAL, held(RESIDUAL_OUT), summed, exact, found)) return;

  auto take = [&](Row row, const u8* from) {
    each_lane([&](int lane) {
      for (u64 column = lane; column < hidden; column += LANES) {
        u32 word = bytes == 4 ? ((const u32*)from)[column] : ((const u16*)from)[column];
        row.exact[column] = decode(task.dtype, word);
        row.bound[column] = 0.0;
      }
    });
  };
  take(normed, held(RESIDUAL_OUT));
  norm(task, work, normed, normed, seed, source(GAMMA), GAMMA);
  if (task.size[NORM_OUT]) {
    double rms = rms_of(work, summed.exact, hidden);
    u64 gamma = source(GAMMA);
    auto wholly = [&](u64 column) { return summed.exact[column] * value_at(task, seed, gamma, GAMMA, 0, column) / rms; };
    if (!check_elements(task, work, IN_NORM, held(NORM_OUT), normed, wholly, found)) return;
    take(normed, held(NORM_OUT));
  }
  if (task.quant == NO_QUANT) return;
  Blocks blocks = {task.quant == FP4 ? e2m1() : e4m3(), hidden, task.size[SCALES_OUT] ? array_of(task, host, call, SCALES_OUT) : nullptr};
  if (task.quant == FP4) blocks.block = 16;
  if (task.quant == GROUP_FP8) blocks.block = task.group;
  if (task.quant == MXFP8) blocks.block = 32;
  if (task.quant != FP8 && !check_scales(task, work, blocks, token, normed, found)) return;
  check_values(task, work, blocks, token, array_of(task, host, call, QUANT_OUT), normed, found);
}

// Checks one token of one call in all hosted ranks; `found` has a place for each.
HERE void check_row(const Task& task, u64 seed, u64 row, const int* tables, double* scratch, Work& work, Found* found) {
  u64 call = row / task.tokens, token = row % task.tokens, hidden = task.hidden;
  Row sum = {scratch, scratch + hidden}, summed = {scratch + 2 * hidden, scratch + 3 * hidden};
  Row normed = {scratch + 4 * hidden, scratch + 5 * hidden};
  each_lane([&](int lane) {
    u64 sources[MOST_RANKS];
    for (u64 rank = 0; rank < task.ranks; rank++) sources[rank] = source_of(seed, call, rank, MAIN);
    for (u64 column = lane; column < hidden; column += LANES) {
      if (task.kind == SUM_OF_RANKS) sum_of_ranks(task, seed, sources, token, column, sum);
      else sum_of_experts(task, seed, call, sources, tables, token, column, sum);
    }
  });
  for (u64 host = 0; host < task.hosted; host++) {
    Found of_rank = {};
    check_rank(task, seed, host, call, token, sum, summed, normed, work, of_rank);
    barrier();
    each_lane([&](int lane) {
      if (lane == 0) found[host] = of_rank;
    });
  }
}
