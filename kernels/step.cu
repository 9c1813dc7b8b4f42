#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/step.h"

namespace kvd {
namespace {

constexpr int kThreads = 128;

// --- begin
// -------------------------------------------------------------------------------------------------

// One CTA.
__global__ void __launch_bounds__(kThreads)
    BeginStepKernel(const __grid_constant__ BeginStepArgs args) {
  WaitForPredecessor();
  for (int d = static_cast<int>(threadIdx.x); d < args.num_arenas; d += kThreads) {
    uint32_t lost = 1;
    const PeerArena& arena = args.arenas[d];
    if (arena.headers != nullptr) {
      asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(lost) : "l"(arena.lost) : "memory");
    }
    args.arena_lost[d] = lost;
  }
  for (int n = static_cast<int>(threadIdx.x); n < args.num_rows; n += kThreads) {
    StepFigures& figures = args.figures[n];
    figures.hits = figures.misses = figures.failed = figures.damaged = figures.num_failures = 0;
  }
  if (threadIdx.x == 0) *args.step += 1;
  LetSuccessorStart();
}

// --- prompt's rest
// ---------------------------------------------------------------------------------

// One (token, KV head) a CTA.
__global__ void __launch_bounds__(kThreads) AppendTokensKernel(const AppendTokensArgs args) {
  const int words = args.head_dim / 8;
  const int64_t i = static_cast<int64_t>(blockIdx.x) / args.num_kv_heads;
  const int head = static_cast<int>(blockIdx.x) % args.num_kv_heads;
  const int64_t page = (args.token + i) / args.page_tokens,
                row = (args.token + i) % args.page_tokens;
  const int64_t unit =
      ((page % args.ring_pages) * args.num_layers + args.layer) * args.num_kv_heads + head;
  auto* out = reinterpret_cast<uint4*>(args.ring) + unit * 2 * args.page_tokens * words;
  for (int at = static_cast<int>(threadIdx.x); at < 2 * words; at += kThreads) {
    const int half = at / words, word = at % words;
    const uint8_t* source = (half == 0 ? args.kv.k : args.kv.v) + head * args.kv.head_stride +
                            (args.kv_token + i) * args.kv.token_stride;
    out[(half * args.page_tokens + row) * words + word] =
        reinterpret_cast<const uint4*>(source)[word];
  }
}

// --- what the host changed
// -------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) PageUpdatesKernel(const PageUpdateArgs args) {
  for (int u = static_cast<int>(blockIdx.x); u < args.num_updates;
       u += static_cast<int>(gridDim.x)) {
    const PageUpdate update = args.updates[u];
    for (int s = static_cast<int>(threadIdx.x); s < args.num_shards; s += kThreads) {
      args.places[int64_t{update.page} * args.num_shards + s] =
          args.new_places[int64_t{u} * args.num_shards + s];
    }
    if (threadIdx.x == 0) {
      auto* word = reinterpret_cast<unsigned long long*>(args.selectable) + update.page / 64;
      const unsigned long long bit = 1ull << (update.page % 64);
      if ((update.flags & PageUpdate::kSelectable) != 0) {
        atomicOr(word, bit);
      } else {
        atomicAnd(word, ~bit);
      }
    }
    if ((update.flags & PageUpdate::kForget) == 0) continue;
    for (int r = static_cast<int>(threadIdx.x); r < args.num_cache_rows; r += kThreads) {
      int32_t& slot = args.page_slot[r * args.page_capacity + update.page];
      if (slot < 0) continue;
      args.slot_page[int64_t{r} * args.cache_slots + slot] = -1;
      args.slot_step[int64_t{r} * args.cache_slots + slot] = 0;
      slot = -1;
    }
  }
}

}  // namespace

cudaError_t LaunchBeginStep(const BeginStepArgs& args, cudaStream_t stream) {
  if (args.num_rows < 0 || args.num_arenas < 0) return cudaErrorInvalidValue;
  return LaunchOverlapped(BeginStepKernel, 1, kThreads, 0, 0, stream, args);
}

cudaError_t LaunchAppendTokens(const AppendTokensArgs& args, cudaStream_t stream) {
  if (args.count < 0 || args.num_kv_heads < 1 || args.head_dim <= 0 || args.head_dim % 8 != 0 ||
      args.page_tokens < 1 || args.ring_pages < 1 || args.layer < 0 ||
      args.layer >= args.num_layers)
    return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>(args.count) * static_cast<unsigned>(args.num_kv_heads);
  AppendTokensKernel<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchPageUpdates(const PageUpdateArgs& args, cudaStream_t stream) {
  if (args.num_updates < 0 || args.num_shards < 1 || args.num_cache_rows < 0)
    return cudaErrorInvalidValue;
  if (args.num_updates == 0) return cudaSuccess;
  PageUpdatesKernel<<<static_cast<unsigned>(std::min(args.num_updates, 1024)), kThreads, 0,
                      stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
