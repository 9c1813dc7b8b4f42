// What a step does about units that are damaged or did not come: LaunchVerifyFetched, a warp a
// unit; LaunchMaskFailed; and LaunchStepMass, one CTA a (sequence, query head) with the bitset of
// what was attended in shared memory.
//
// Repeatability: every sum is of fixed order, so equal inputs give equal bits.
#include <cmath>

#include "kernels/checksum.h"
#include "kernels/launch.cuh"
#include "kernels/softmax.h"
#include "kernels/step_fail.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr size_t kDefaultSharedBytes = 48 * 1024;

__device__ __forceinline__ void Set(uint32_t* bits, int page) {
  atomicOr(&bits[page / 32], 1u << (page % 32));
}
__device__ __forceinline__ bool Has(const uint32_t* bits, int page) {
  return (bits[page / 32] >> (page % 32) & 1) != 0;
}

// One CTA a (sequence, KV head).
__global__ void __launch_bounds__(kThreads)
    VerifyFetchedKernel(const __grid_constant__ VerifyArgs args) {
  WaitForPredecessor();
  const FetchArgs& fetch = args.fetch;
  const int r = static_cast<int>(blockIdx.x), n = r / fetch.shape.num_kv_heads,
            head = r % fetch.shape.num_kv_heads;
  const StepRow sequence = fetch.rows[n];
  const int64_t at = int64_t{r} * fetch.resolve.max_pages;
  const int num_misses = sequence.num_tokens < 0 ? 0 : fetch.resolve.num_misses[r];
  const int num_words = fetch.shape.head_dim * fetch.shape.page_tokens;
  for (int m = static_cast<int>(threadIdx.x) / 32; m < num_misses; m += kThreads / 32) {
    const int position = fetch.resolve.miss_idx[at + m], slot = fetch.resolve.slots[at + position];
    if (slot < 0) continue;
    const int page = fetch.resolve.pages[at + position];
    UnitRef& unit = fetch.units[int64_t{r} * fetch.max_units + sequence.num_sinks + position];
    const auto* words = reinterpret_cast<const uint32_t*>(unit.unit);
    uint64_t sum = 0;
    for (int w = static_cast<int>(threadIdx.x) % 32; w < num_words; w += 32)
      sum += Mix64(words[w] + static_cast<uint64_t>(w + 1) * kGolden64);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (threadIdx.x % 32 != 0) continue;
    const uint8_t* coarse =
        args.coarse[n] +
        static_cast<size_t>(head * args.page_capacity[n] + page) * args.coarse_bytes;
    if (sum == *reinterpret_cast<const uint64_t*>(coarse + args.checksum_at)) continue;
    unit.num_tokens = 0;
    atomicAdd(&fetch.figures[n].damaged, 1u);
    FailUnit(fetch, sequence, r, position, page, slot);
  }
  LetSuccessorStart();
}

// One CTA a (sequence, KV head).
__global__ void __launch_bounds__(kThreads)
    MaskFailedKernel(const __grid_constant__ MaskFailedArgs args) {
  const int r = static_cast<int>(blockIdx.x);
  const StepRow& row = args.rows[r / args.num_kv_heads];
  if (row.num_tokens < 0) return;
  const int64_t at = int64_t{r} * args.max_pages;
  for (int s = static_cast<int>(threadIdx.x); s < args.num_selected[r]; s += kThreads) {
    if (args.slots[at + s] < 0) {
      const int page = args.selected[at + s];
      atomicAnd(reinterpret_cast<uint32_t*>(row.selectable) + page / 32, ~(1u << (page % 32)));
    }
  }
}

// Pages [0, num_pages) whose unit of KV head `r` was attended.
__device__ void MarkAttended(const MassBatch& args, const StepRow& row, int r, uint32_t* attended) {
  const int i = static_cast<int>(threadIdx.x);
  for (int w = i; w < (row.num_pages + 31) / 32; w += kThreads) attended[w] = 0;
  __syncthreads();
  for (int p = i; p < min(row.num_sinks, row.num_pages); p += kThreads) Set(attended, p);
  for (int p = row.first_ring_page + i; p < row.num_pages; p += kThreads) Set(attended, p);
  const int64_t at = int64_t{r} * args.max_pages;
  for (int s = i; s < args.num_selected[r]; s += kThreads) {
    if (args.slots[at + s] >= 0) Set(attended, args.selected[at + s]);
  }
  __syncthreads();
}

// Whether a page is neither attended nor there.
__device__ bool AnyMissing(const StepRow& row, const uint32_t* attended) {
  bool any = false;
  for (int w = static_cast<int>(threadIdx.x); w < (row.num_pages + 31) / 32; w += kThreads) {
    const int left = row.num_pages - 32 * w;
    const uint32_t there = reinterpret_cast<const uint32_t*>(row.selectable)[w];
    any = any || (~attended[w] & ~there & (left >= 32 ? kAllLanes : (1u << left) - 1)) != 0;
  }
  return __syncthreads_or(any) != 0;
}

__device__ __forceinline__ void Take(float value, SoftmaxState* state) {
  if (!(value > kEmptyLse)) return;  // NaN: a fault that select counts
  const float top = fmaxf(state->max, value);
  state->sum = state->sum * expf(state->max - top) + expf(value - top);
  state->max = top;
}
__device__ __forceinline__ SoftmaxState Merged(SoftmaxState a, SoftmaxState b) {
  const float top = fmaxf(a.max, b.max);
  if (top == kEmptyLse) return a;
  return {top, a.sum * expf(a.max - top) + b.sum * expf(b.max - top)};
}
// Of all threads, for thread 0.
__device__ float LseOfAll(SoftmaxState state, SoftmaxState* of_warps) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    state = Merged(state, {__shfl_xor_sync(kAllLanes, state.max, step),
                           __shfl_xor_sync(kAllLanes, state.sum, step)});
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = state;
  __syncthreads();
  state = {};
  for (int w = 0; w < kThreads / 32; ++w) state = Merged(state, of_warps[w]);
  return state.max == kEmptyLse ? kEmptyLse : state.max + logf(state.sum);
}

__device__ __forceinline__ float Share(float part, float whole) {
  return part == kEmptyLse ? 0 : expf(part - whole);
}

__global__ void __launch_bounds__(kThreads) StepMassKernel(const __grid_constant__ MassBatch args) {
  extern __shared__ uint32_t attended[];
  __shared__ SoftmaxState of_warps[kThreads / 32];
  WaitForPredecessor();
  const int num_q_heads = args.shape.num_kv_heads * args.shape.group;
  const int n = static_cast<int>(blockIdx.y), h = static_cast<int>(blockIdx.x);
  const int64_t q_row = int64_t{n} * num_q_heads + h;
  const StepRow row = args.rows[n];
  StepMass sum = args.layer == 0 ? StepMass{0, 0} : args.mass[q_row];
  if (row.num_tokens >= 0) {
    MarkAttended(args, row, n * args.shape.num_kv_heads + h / args.shape.group, attended);
    if (AnyMissing(row, attended) || args.always) {
      const auto* there = reinterpret_cast<const uint32_t*>(row.selectable);
      const float* lse = args.lse + q_row * args.lse_stride;
      SoftmaxState unread, lost;
      for (int p = static_cast<int>(threadIdx.x); p < row.num_pages; p += kThreads) {
        if (Has(attended, p)) continue;
        Take(lse[p], &unread);
        if (!Has(there, p)) Take(lse[p], &lost);
      }
      const float unread_lse = LseOfAll(unread, of_warps), lost_lse = LseOfAll(lost, of_warps);
      const float whole = LogAddExp(args.lse_attended[q_row], unread_lse);
      sum.unread += Share(unread_lse, whole);
      sum.lost += Share(lost_lse, whole);
    }
  }
  LetSuccessorStart();
  if (threadIdx.x == 0) args.mass[q_row] = sum;
}

}  // namespace

cudaError_t LaunchVerifyFetched(const VerifyArgs& args, cudaStream_t stream) {
  const FetchArgs& fetch = args.fetch;
  if (!fetch.fetch || fetch.shape.num_kv_heads < 1 || fetch.resolve.num_rows < 0 ||
      args.coarse_bytes % 8 != 0 || args.checksum_at % 8 != 0)
    return cudaErrorInvalidValue;
  if (fetch.resolve.num_rows == 0) return cudaSuccess;
  return LaunchOverlapped(VerifyFetchedKernel, static_cast<unsigned>(fetch.resolve.num_rows),
                          kThreads, 0, 0, stream, args);
}

cudaError_t LaunchMaskFailed(const MaskFailedArgs& args, cudaStream_t stream) {
  if (args.num_rows < 0 || args.num_kv_heads < 1 || args.max_pages < 0)
    return cudaErrorInvalidValue;
  if (args.num_rows == 0) return cudaSuccess;
  MaskFailedKernel<<<static_cast<unsigned>(args.num_rows * args.num_kv_heads), kThreads, 0,
                     stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchStepMass(const MassBatch& args, cudaStream_t stream) {
  const StepShape& shape = args.shape;
  constexpr int kMaxGrid = 65535;
  if (shape.num_rows < 0 || shape.num_rows > kMaxGrid || shape.num_kv_heads < 1 ||
      shape.group < 1 || args.max_pages < 0 || args.lse_stride < 1 || args.lse_stride > kMaxPages)
    return cudaErrorInvalidValue;
  if (shape.num_rows == 0) return cudaSuccess;
  const size_t bytes = (static_cast<size_t>(args.lse_stride) + 31) / 32 * 4;
  if (bytes > kDefaultSharedBytes) {
    const cudaError_t allowed = cudaFuncSetAttribute(
        StepMassKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (allowed != cudaSuccess) return allowed;
  }
  const dim3 grid(static_cast<unsigned>(shape.num_kv_heads * shape.group),
                  static_cast<unsigned>(shape.num_rows));
  return LaunchOverlapped(StepMassKernel, grid, kThreads, bytes, 0, stream, args);
}

}  // namespace kvd
