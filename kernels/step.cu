#include <algorithm>
#include <cmath>

#include "kernels/launch.cuh"
#include "kernels/rotate.cuh"
#include "kernels/step.h"

namespace kvd {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ int64_t UnitIndex(const StepShape& shape, int64_t place, int layer,
                                             int head) {
  return (place * shape.num_layers + layer) * shape.num_kv_heads + head;
}

__device__ __forceinline__ size_t UnitBytes(const StepShape& shape) {
  return static_cast<size_t>(shape.head_dim) * static_cast<size_t>(shape.page_tokens) * 4;
}

// --- append and rotate
// -----------------------------------------------------------------------------

// Once a step: nothing else reads these before this kernel has ended.
__device__ void BeginStep(const BeginLayerArgs& args) {
  for (int d = static_cast<int>(threadIdx.x); d < args.shape.num_arenas; d += kThreads) {
    uint32_t lost = 1;
    const PeerArena& arena = args.arenas[d];
    if (arena.headers != nullptr) {
      asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(lost) : "l"(arena.lost) : "memory");
    }
    args.arena_lost[d] = lost;
  }
  if (threadIdx.x == 0) *args.step += 1;
}

// One (row, KV head) a CTA.
template <int D>
__global__ void __launch_bounds__(kThreads)
    BeginLayerKernel(const __grid_constant__ BeginLayerArgs args, float norm) {
  constexpr int kWords = D / 8;
  const StepShape& shape = args.shape;
  WaitForPredecessor();
  if (args.layer == 0 && blockIdx.x == 0) BeginStep(args);
  const int n = static_cast<int>(blockIdx.x) / shape.num_kv_heads,
            head = static_cast<int>(blockIdx.x) % shape.num_kv_heads;
  const StepRow& row = args.rows[n];
  const bool is_padding = row.num_tokens < 0;
  if (args.layer == 0 && head == 0 && threadIdx.x == 0) {
    StepFigures& figures = args.figures[n];
    figures.hits = figures.misses = figures.failed = figures.damaged = figures.num_failures = 0;
  }
  const int64_t kv_row = blockIdx.x;
  if (!is_padding) {
    const int64_t tail_page = row.num_tokens / shape.page_tokens;
    const int token = static_cast<int>(row.num_tokens % shape.page_tokens);
    auto* unit = reinterpret_cast<uint4*>(
        row.ring + UnitBytes(shape) * static_cast<size_t>(UnitIndex(
                                          shape, tail_page % row.ring_pages, args.layer, head)));
    for (int at = static_cast<int>(threadIdx.x); at < 2 * kWords; at += kThreads) {
      const int half = at / kWords, word = at % kWords;
      const auto* source =
          reinterpret_cast<const uint4*>(half == 0 ? args.k : args.v) + kv_row * kWords;
      unit[(half * shape.page_tokens + token) * kWords + word] = source[word];
    }
  }
  LetSuccessorStart();
  if (!shape.rotated) return;
  for (int g = static_cast<int>(threadIdx.x) / 32; g < shape.group; g += kThreads / 32) {
    const int64_t at = (kv_row * shape.group + g) * D;
    if (!is_padding) {
      rotation::RotateRow<D>(args.query + at, shape.dtype, norm, args.rotated_query + at);
    } else {
      for (int d = static_cast<int>(threadIdx.x) % 32; d < D; d += 32)
        args.rotated_query[at + d] = 0;
    }
  }
}

bool IsValid(const StepShape& shape) {
  const bool has_dim = shape.head_dim == 64 || shape.head_dim == 96 || shape.head_dim == 128 ||
                       shape.head_dim == 256;
  return has_dim && (shape.page_tokens == 16 || shape.page_tokens == 32) && shape.num_rows >= 0 &&
         shape.num_kv_heads > 0 && shape.shard_heads > 0 &&
         shape.num_kv_heads % shape.shard_heads == 0 && shape.group >= 1 && shape.group <= 16 &&
         shape.num_layers > 0 && shape.num_arenas >= 0;
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

// --- candidates
// ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    ListCandidatesKernel(const __grid_constant__ CandidateArgs args) {
  WaitForPredecessor();
  const int64_t at = blockIdx.x;
  const StepRow& row = args.rows[at / args.num_kv_heads];
  const bool is_padding = row.num_tokens < 0;
  const int sinks = is_padding ? 0 : row.num_sinks;
  const int window = is_padding ? 0 : max(sinks, row.num_pages - args.n_win);
  const int chosen = is_padding ? 0 : args.num_chosen[at];
  const int total = is_padding ? 0 : sinks + chosen + row.num_pages - window;
  int32_t* out = args.candidates + at * args.max_candidates;
  for (int i = static_cast<int>(threadIdx.x); i < total; i += kThreads) {
    out[i] = i < sinks            ? i
             : i < sinks + chosen ? args.chosen[at * args.max_chosen + i - sinks]
                                  : window + i - sinks - chosen;
  }
  if (threadIdx.x == 0) args.num_candidates[at] = total;
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

cudaError_t LaunchBeginLayer(const BeginLayerArgs& args, cudaStream_t stream) {
  const StepShape& shape = args.shape;
  if (!IsValid(shape) || args.layer < 0 || args.layer >= shape.num_layers)
    return cudaErrorInvalidValue;
  if (shape.num_rows == 0) return cudaSuccess;
  const auto grid =
      static_cast<unsigned>(shape.num_rows) * static_cast<unsigned>(shape.num_kv_heads);
  const float norm = rotation::Norm(shape.head_dim);
  switch (shape.head_dim) {
    case 64:
      return LaunchOverlapped(BeginLayerKernel<64>, grid, kThreads, 0, 0, stream, args, norm);
    case 96:
      return LaunchOverlapped(BeginLayerKernel<96>, grid, kThreads, 0, 0, stream, args, norm);
    case 128:
      return LaunchOverlapped(BeginLayerKernel<128>, grid, kThreads, 0, 0, stream, args, norm);
    default:
      return LaunchOverlapped(BeginLayerKernel<256>, grid, kThreads, 0, 0, stream, args, norm);
  }
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

cudaError_t LaunchListCandidates(const CandidateArgs& args, cudaStream_t stream) {
  if (args.num_rows < 0 || args.num_kv_heads < 1 || args.n_win < 0 || args.max_chosen < 0 ||
      args.max_candidates < args.max_chosen)
    return cudaErrorInvalidValue;
  if (args.num_rows == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>(args.num_rows) * static_cast<unsigned>(args.num_kv_heads);
  return LaunchOverlapped(ListCandidatesKernel, grid, kThreads, 0, 0, stream, args);
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
