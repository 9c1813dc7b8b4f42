// The first reading of a row's values: states and best values (select_row.cuh), and the kernel that makes them of long
// rows, on all SMs. Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_SCAN_CUH_
#define LOCKS_KVD_KERNELS_SELECT_SCAN_CUH_

#include "kernels/launch.cuh"
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

// Puts -inf in place of the values from `left` on; each run lies kRun pages after the last. Out of line, as is what
// follows: seldom needed.
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

// A lane's quads from page `first` on; -inf where the row has ended.
__device__ __forceinline__ void ReadQuads(const Row& row, const float* lse, int first, float4 (&x)[kRuns]) {
  const bool whole = first + (kRuns - 1) * kRun + kQuad <= row.num_pages;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    x[i] = float4{0, 0, 0, 0};
    const int page = first + i * kRun;
    if (whole || page < row.num_pages) x[i] = __ldcg(reinterpret_cast<const float4*>(lse + page));
  }
  if (whole) return;
  float4 cut[kRuns] = {x[0], x[1], x[2], x[3]};
  MaskFrom(row.num_pages - first, cut);
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

// The state of a piece with NaNs among its values, which are left out and counted.
__device__ __noinline__ State StateWithoutNaNs(const Row& row, const float* lse, int begin, int* num_faults) {
  State state = {NegativeInfinity(), 0};
#pragma unroll 1
  for (int run = begin; run < begin + (1 << row.piece_shift); run += kRuns * kRun) {
    float4 x[kRuns];
    ReadQuads(row, lse, run + kQuad * (static_cast<int>(threadIdx.x) % 32), x);
    float4 clean[kRuns] = {x[0], x[1], x[2], x[3]};
    *num_faults += DropNaNs(clean);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) x[i] = clean[i];
    state = Add(state, x);
  }
  return MergeLanes(state);
}

__device__ __forceinline__ float BestOf(const float4& x, uint32_t allowed, float best) {
  best = (allowed & 1) != 0 ? fmaxf(best, x.x) : best;
  best = (allowed & 2) != 0 ? fmaxf(best, x.y) : best;
  best = (allowed & 4) != 0 ? fmaxf(best, x.z) : best;
  return (allowed & 8) != 0 ? fmaxf(best, x.w) : best;
}

// What a warp finds in a piece: the head's state, and each lane's best values of pages that may be chosen, for every
// run of a quad a lane.
struct Piece {
  State state;
  float best[kRuns];
};
__device__ __forceinline__ Piece ScanPiece(const SelectArgs& args, const Row& row, int head, int piece) {
  const int lane = static_cast<int>(threadIdx.x) % 32, begin = piece << row.piece_shift;
  const float* lse = row.lse + head * args.lse_stride;
  State mine = {NegativeInfinity(), 0};
  Piece out;
#pragma unroll
  for (float& b : out.best) b = NegativeInfinity();
#pragma unroll 1
  for (int run = begin; run < begin + (1 << row.piece_shift); run += kRuns * kRun) {
    const int first = run + kQuad * lane;
    float4 x[kRuns];
    ReadQuads(row, lse, first, x);
    mine = Add(mine, x);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) out.best[i] = BestOf(x[i], AllowedOf(row, first + i * kRun), out.best[i]);
  }
  out.state = MergeLanes(mine);
  if (isnan(out.state.sum)) {
    int num_faults = 0;
    out.state = StateWithoutNaNs(row, lse, begin, &num_faults);
    if (num_faults != 0 && args.num_faults != nullptr)
      atomicAdd(reinterpret_cast<unsigned long long*>(args.num_faults), static_cast<unsigned long long>(num_faults));
  }
  return out;
}

// Writes the best values of a piece's groups.
__device__ __forceinline__ void PutBest(const Tables& tables, const Piece& piece, float* groups) {
  float* out = groups + threadIdx.x % 32;
  if (tables.is_fine()) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) out[32 * i] = piece.best[i];
  } else {
    *out = fmaxf(fmaxf(piece.best[0], piece.best[1]), fmaxf(piece.best[2], piece.best[3]));
  }
}

// A warp for each (row, head, piece).
__global__ void __launch_bounds__(kThreads, 2)
    ScanKernel(const __grid_constant__ SelectArgs args, const __grid_constant__ Tables tables) {
  WaitForPredecessor();
  const auto task = blockIdx.x * static_cast<uint32_t>(kWarps) + threadIdx.x / 32;
  const auto heads = static_cast<uint32_t>(args.group), pieces = static_cast<uint32_t>(tables.max_pieces);
  const auto piece = static_cast<int>(task % pieces), head = static_cast<int>(task / pieces % heads);
  const auto index = static_cast<int>(task / pieces / heads);
  const int sequence = index / args.num_kv_heads;
  if (sequence < args.num_sequences) {
    const Row row = MakeRow(args, sequence, index % args.num_kv_heads, args.num_pages[sequence]);
    if (piece < row.num_pieces) {
      const Piece found = ScanPiece(args, row, head, piece);
      const int64_t at = (row.index * args.group + head) * tables.max_pieces + piece;
      if (threadIdx.x % 32 == 0) tables.states[at] = found.state;
      PutBest(tables, found, tables.best + at * tables.piece_groups());
    }
  }
  LetSuccessorStart();
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_SCAN_CUH_
