// An artifact whose fused all-reduce runs on the host, on the fake driver, with the parameters of FlashInfer 0.6.4.
// FAKE_ONESHOT_US: what a one-shot call takes. FAKE_ARTIFACT: `wrong`, two-shot forgets the residual.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#define API extern "C" __attribute__((visibility("default"))) int

namespace fake {
enum class AllReduceFusionPattern { allreduce, norm };
}
using fake::AllReduceFusionPattern;
template <AllReduceFusionPattern Pattern>
__global__ void allreduce_fusion_kernel_oneshot_lamport(int* p) { p[threadIdx.x] = 1; }
template __global__ void allreduce_fusion_kernel_oneshot_lamport<AllReduceFusionPattern::norm>(int*);

extern "C" void fake_raise(const char* kind, const char* message);
extern "C" int fake_put(void (*run)(void*), void* data, const char* kernel, double micros);
struct tensor { void* data; };
struct value { int32_t index; uint32_t padding; union { int64_t number; double real; tensor* of; struct { uint8_t code, bits; uint16_t lanes; } dtype; }; };

static float from(uint16_t bits) { uint32_t word = uint32_t(bits) << 16; float value; memcpy(&value, &word, 4); return value; }
static uint16_t bf16(float value) { uint32_t word; memcpy(&word, &value, 4); return (word + 0x7fff + (word >> 16 & 1)) >> 16; }
static bool fails(const char* how) { const char* text = getenv("FAKE_ARTIFACT"); return text && !strcmp(text, how); }

API __tvm_ffi_trtllm_lamport_initialize(void*, const value* args, int32_t count, value*) {
  if (count != 3) {
    fake_raise("TypeError", "Mismatched number of arguments when calling: `trtllm_lamport_initialize(0: int, 1: int, 2: DataType) -> void`. Expected 3 but got 0 arguments");
    return -1;
  }
  for (int64_t at = 0; at < args[1].number; at++) reinterpret_cast<uint16_t*>(args[0].number)[at] = 0x8000;
  return 0;
}

struct call {
  int64_t ranks, rank, tokens, hidden;
  uint64_t table[25];
  const uint16_t *in, *residual, *gamma;
  uint16_t *residual_out, *norm_out;
  double eps;
  bool oneshot;
};

// Flags of rank R lie behind its data in the table.
static void meet(const call& c) {
  auto flag = [&](int64_t rank) { return reinterpret_cast<uint32_t*>(c.table[c.ranks + rank]); };
  uint32_t mine = __atomic_add_fetch(flag(c.rank), 1, __ATOMIC_SEQ_CST);
  for (int64_t rank = 0; rank < c.ranks; rank++)
    while (__atomic_load_n(flag(rank), __ATOMIC_SEQ_CST) < mine) usleep(20);
}

static void run(void* data) {
  const call& c = *static_cast<call*>(data);
  memcpy(reinterpret_cast<void*>(c.table[c.rank]), c.in, c.tokens * c.hidden * 2);
  meet(c);
  for (int64_t token = 0; token < c.tokens; token++) {
    double squares = 0;
    for (int64_t at = token * c.hidden; at < (token + 1) * c.hidden; at++) {
      float sum = !c.oneshot && fails("wrong") ? 0 : from(c.residual[at]);
      for (int64_t rank = 0; rank < c.ranks; rank++) sum += from(reinterpret_cast<uint16_t*>(c.table[rank])[at]);
      c.residual_out[at] = bf16(sum);
      squares += from(bf16(sum)) * from(bf16(sum));
    }
    float scale = 1 / std::sqrt(squares / c.hidden + c.eps);
    for (int64_t at = 0; at < c.hidden; at++)
      c.norm_out[token * c.hidden + at] = bf16(from(c.residual_out[token * c.hidden + at]) * scale * from(c.gamma[at]));
  }
  meet(c);
}

API __tvm_ffi_trtllm_allreduce_fusion(void*, const value* args, int32_t count, value*) {
  if (count != 21) {
    fake_raise("TypeError", "Mismatched number of arguments when calling: `trtllm_allreduce_fusion(0: Tensor, 1: int, 2: int, 3: int, 4: int, 5: Tensor, 6: bool, 7: bool, 8: bool, 9: bool, 10: int, 11: Optional<Tensor>, 12: Optional<Tensor>, 13: Optional<Tensor>, 14: Optional<Tensor>, 15: Optional<Tensor>, 16: Optional<Tensor>, 17: Optional<Tensor>, 18: Optional<float>, 19: Optional<Tensor>, 20: Optional<int>) -> void`. Expected 21 but got 0 arguments");
    return -1;
  }
  auto* c = new call{args[1].number, args[2].number, args[3].number, args[4].number};
  memcpy(c->table, args[5].of->data, (3 * c->ranks + 1) * 8);
  auto data = [&](int at) { return static_cast<uint16_t*>(args[at].of->data); };
  c->in = data(0);
  c->residual = data(12);
  c->residual_out = data(13);
  c->norm_out = data(14);
  c->gamma = data(17);
  c->eps = args[18].real;
  c->oneshot = args[7].number & 1;
  if (!c->oneshot && c->tokens <= c->ranks) { fake_raise("ValueError", "too few tokens"); return -1; }
  const char* micros = getenv("FAKE_ONESHOT_US");
  return c->oneshot ? fake_put(run, c, "_Z39allreduce_fusion_kernel_oneshot_lamportIL22AllReduceFusionPatternE1EEvPi", micros ? atof(micros) : 5)
                    : fake_put(run, c, "_Z36allreduce_fusion_kernel_twoshot_syncIL22AllReduceFusionPatternE1EEvPi", 70);
}
