// The first reading of a row's values: the states of its pieces. Device code only. Internal to
// select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_SCAN_CUH_
#define LOCKS_KVD_KERNELS_SELECT_SCAN_CUH_

#include "kernels/select_row.cuh"

namespace kvd::select {

__device__ __forceinline__ float SumExp(const float4 (&x)[kRuns], float shift) {
  float sum[kRuns];
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    sum[i] = (ptx::Exp2((x[i].x - shift) * kLog2e) + ptx::Exp2((x[i].y - shift) * kLog2e)) +
             (ptx::Exp2((x[i].z - shift) * kLog2e) + ptx::Exp2((x[i].w - shift) * kLog2e));
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Puts -inf in place of the values from `left` on; each run lies kRun pages after the last. Out of
// line, as is what follows: seldom needed.
__device__ __noinline__ void MaskFrom(int left, float4* x) {
  for (int i = 0; i < kQuad * kRuns; ++i)
    if (left - i / kQuad * kRun <= i % kQuad) (&x[i / kQuad].x)[i % kQuad] = NegativeInfinity();
}

// Replaces NaN by -inf; returns how many.
__device__ __noinline__ int DropNaNs(float4* x) {
  int num = 0;
  for (int i = 0; i < kQuad * kRuns; ++i) {
    float* f = &x[i / kQuad].x + i % kQuad;
    num += isnan(*f);
    if (isnan(*f)) *f = NegativeInfinity();
  }
  return num;
}

// A lane's quads from page `first` on, as far as they are before `end`; and -inf in place of what
// the row has not.
__device__ __forceinline__ void ReadQuads(const float* lse, int first, int end,
                                          float4 (&x)[kRuns]) {
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int page = first + i * kRun;
    x[i] = page < end ? __ldcg(reinterpret_cast<const float4*>(lse + page)) : float4{0, 0, 0, 0};
  }
}
__device__ __forceinline__ void CutQuads(int first, int num_pages, float4 (&x)[kRuns]) {
  if (first + (kRuns - 1) * kRun + kQuad <= num_pages) return;
  float4 cut[kRuns] = {x[0], x[1], x[2], x[3]};
  MaskFrom(num_pages - first, cut);
#pragma unroll
  for (int i = 0; i < kRuns; ++i) x[i] = cut[i];
}

// A lane's state after more values. NaN is left out of the maximum and makes the sum NaN.
__device__ __forceinline__ State Add(const State& before, const float4 (&x)[kRuns]) {
  float top = before.max;
#pragma unroll
  for (const float4& v : x) top = fmaxf(fmaxf(top, fmaxf(v.x, v.y)), fmaxf(v.z, v.w));
  const float shift = top == NegativeInfinity() ? 0.0f : top;
  return {top, fmaf(before.sum, ptx::Exp2((before.max - shift) * kLog2e), SumExp(x, shift))};
}

// The warp's state from its lanes'; the same in all lanes.
__device__ __forceinline__ State MergeLanes(const State& mine) {
  const float max = WarpMax(mine.max), shift = max == NegativeInfinity() ? 0.0f : max;
  return {max, WarpSum(mine.sum * ptx::Exp2((mine.max - shift) * kLog2e))};
}

// The state of a piece with NaNs among its values, which are left out and counted. Takes no row:
// one that stood in memory would be read from there everywhere.
__device__ __noinline__ State StateWithoutNaNs(int num_pages, const float* lse, int begin, int end,
                                               uint64_t* num_faults) {
  State state = {NegativeInfinity(), 0};
  int num = 0;
#pragma unroll 1
  for (int run = begin; run < end; run += kRuns * kRun) {
    const int first = run + kQuad * (static_cast<int>(threadIdx.x) % 32);
    float4 x[kRuns];
    ReadQuads(lse, first, num_pages, x);
    CutQuads(first, num_pages, x);
    float4 clean[kRuns] = {x[0], x[1], x[2], x[3]};
    num += DropNaNs(clean);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) x[i] = clean[i];
    state = Add(state, x);
  }
  if (num != 0 && num_faults != nullptr)
    atomicAdd(reinterpret_cast<unsigned long long*>(num_faults),
              static_cast<unsigned long long>(num));
  return MergeLanes(state);
}

__device__ __forceinline__ float BestOf(const float4& x, uint32_t allowed, float best) {
  best = (allowed & 1) != 0 ? fmaxf(best, x.x) : best;
  best = (allowed & 2) != 0 ? fmaxf(best, x.y) : best;
  best = (allowed & 4) != 0 ? fmaxf(best, x.z) : best;
  return (allowed & 8) != 0 ? fmaxf(best, x.w) : best;
}

// A warp's state of a head's values in a piece, of which `x` has each lane's first quads if they
// were `read` before. Keep(first, x) is told all of them, from page `first` on.
template <class Keep>
__device__ __forceinline__ State ScanPiece(const Row& row, const float* lse, int piece, bool read,
                                           float4 (&x)[kRuns], uint64_t* num_faults, Keep keep) {
  const int begin = piece << row.piece_shift, end = begin + (1 << row.piece_shift);
  State mine = {NegativeInfinity(), 0};
#pragma unroll 1
  for (int run = begin; run < end; run += kRuns * kRun) {
    const int first = run + kQuad * (static_cast<int>(threadIdx.x) % 32);
    if (!read || run != begin) ReadQuads(lse, first, row.num_pages, x);
    CutQuads(first, row.num_pages, x);
    keep(first, x);
    mine = Add(mine, x);
  }
  const State state = MergeLanes(mine);
  return isnan(state.sum) ? StateWithoutNaNs(row.num_pages, lse, begin, end, num_faults) : state;
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_SCAN_CUH_
