// Gather: copy first, check the generation after.
#include <atomic>
#include <cstring>

#include "kernels/check.h"
#include "kernels/gather.h"

namespace kvd::ref {
namespace {

// 16 bytes; the vector type makes the copy's loads and stores explicit.
using Vector = uint64_t __attribute__((vector_size(16), aligned(1), may_alias));

// Copies a unit that its owner may overwrite meanwhile. The race is meant: the bytes are used only
// if the generation, read after them, is still the expected one (a reader of a seqlock).
// ThreadSanitizer cannot see that, so this function, and nothing but the copy, is exempt; memcpy
// would not do, since the sanitizer intercepts it. The empty asm keeps the compiler from making a
// memcpy of the loop.
// Units are scattered, so the hardware's prefetcher starts anew at each: every line of `next`, the
// unit that comes after this one, is asked for as this one's is copied (1.5 times memcpy instead of
// 1.15, bench/fetch_bench).
__attribute__((no_sanitize("thread"))) void CopyWhileOwnerMayWrite(uint8_t* to, const uint8_t* from,
                                                                   size_t bytes,
                                                                   const uint8_t* next) {
  auto* out = reinterpret_cast<Vector*>(to);
  const auto* in = reinterpret_cast<const Vector*>(from);
  for (size_t i = 0; i < bytes / sizeof(Vector); i += 4) {
    __builtin_prefetch(next + i * sizeof(Vector), 0, 2);  // into L2: L1 is full of the copy itself
    const Vector a = in[i], b = in[i + 1], c = in[i + 2], d = in[i + 3];
    out[i] = a;
    out[i + 1] = b;
    out[i + 2] = c;
    out[i + 3] = d;
    asm volatile("" ::: "memory");
  }
}

// True if the bytes copied before this call are those of the sealed page `generation`. The fence
// keeps the copy's loads from sinking below the load of the generation.
bool StillSealed(const PageHeader& header, uint64_t generation) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored \
    "-Wtsan"  // TSan does not model fences; the copy above is exempt anyway
  std::atomic_thread_fence(std::memory_order_acquire);
#pragma GCC diagnostic pop
  return header.generation.load(std::memory_order_acquire) == generation;
}

}  // namespace

int64_t GatherUnits(const GatherUnit* units, int64_t num_units, size_t unit_bytes, uint8_t* valid) {
  KVD_CHECK(unit_bytes % 64 == 0);
  int64_t num_valid = 0;
  for (int64_t i = 0; i < num_units; ++i) {
    const GatherUnit& unit = units[i];
    const uint8_t* next = units[i + 1 < num_units ? i + 1 : i].source;
    CopyWhileOwnerMayWrite(unit.destination, unit.source, unit_bytes, next);
    const bool sealed = unit.header == nullptr ||
                        (unit.generation % 2 == 0 && StillSealed(*unit.header, unit.generation));
    if (!sealed) std::memset(unit.destination, 0, unit_bytes);
    valid[i] = sealed ? 1 : 0;
    num_valid += sealed;
  }
  return num_valid;
}

void PackUnit(const EngineKv& kv, int head, int64_t first_token, int head_dim, int page_tokens,
              uint8_t* unit) {
  const size_t row_bytes = static_cast<size_t>(head_dim) * 2;
  const size_t v_offset = MakeUnitLayout(head_dim, page_tokens).k_bytes;
  for (int t = 0; t < page_tokens; ++t) {
    const int64_t from = head * kv.head_stride + (first_token + t) * kv.token_stride;
    const size_t to = static_cast<size_t>(t) * row_bytes;
    std::memcpy(unit + to, kv.k + from, row_bytes);
    std::memcpy(unit + v_offset + to, kv.v + from, row_bytes);
  }
}

}  // namespace kvd::ref
