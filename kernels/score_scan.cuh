// The scan kernel: one body for the full, the refining and the coarse scan.
//
// How: every warp streams its run of pieces through a ring of its own (no barrier between warps),
// and scores eight records at a time. First product: the queries' digits times the int4 codes
// (rows: heads, columns: modes; integers, exact). Second product: its result, split in two fp16
// parts, times the int8 coefficients (columns: tokens). Then the log of the sum of exponentials
// over the tokens of a page.
// Repeatability: a page's result depends on its record and its queries alone, bit for bit.
// Device code only. Internal to kernels/score*.cu.

#ifndef LOCKS_KVD_KERNELS_SCORE_SCAN_CUH_
#define LOCKS_KVD_KERNELS_SCORE_SCAN_CUH_

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/built_geometries.h"
#include "kernels/launch.cuh"
#include "kernels/score_step4.cuh"

namespace kvd::score {

// What a lane keeps through all steps.
struct NoLane {};
template <class S>
using Lane = std::conditional_t<S::kOnlyCoarse && S::kPadded == 4, CoarseLane4<S>, NoLane>;

template <class S>
__device__ __forceinline__ void ScoreSteps(const Lane<S>& lane,
                                           const Records (&records)[S::kStepsAStage],
                                           const Queries<S>& q, float cap2,
                                           PerPage<S> (&lse2)[S::kStepsAStage]) {
  if constexpr (S::kOnlyCoarse && S::kPadded == 4) {
    ScoreCoarseSteps4(lane, records, q, cap2, lse2);
  } else {
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s) {
      if constexpr (S::kOnlyCoarse) {
        lse2[s] = ScoreCoarseStep(records[s], q, cap2);
      } else if constexpr (S::kPadded == 4) {
        lse2[s] = ScoreFullStep4(records[s], q, cap2);
      } else {
        lse2[s] = ScoreFullStep(records[s], q, cap2);
      }
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm)
    ScanKernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[S::kWarps * S::kStages];
  const int warp = threadIdx.x / 32;
  uint8_t* ring = shared + warp * (S::kStages * S::kStageBytes);
  uint64_t* full = barriers + warp * S::kStages;
  if (threadIdx.x % 32 == 0) {
    for (int s = 0; s < S::kStages; ++s) ptx::BarrierInit(full + s, 1);
    ptx::BarrierInitFence();
  }
  __syncwarp();
  AwaitParameters(args);
  // What a full scan reads first is older than the predecessor; a refining scan's candidates may be
  // its.
  const bool reads_ahead = !S::kOnlyCoarse && args.candidates == nullptr;
  if (!reads_ahead) WaitForPredecessor();
  Source ahead = {};
  const int run = TakeRun<S>(args, &ahead);
  Place place = ahead.place;
  if (reads_ahead) {
    if (run > 0) StartCopy<S>(args, ahead, ring, full);
    WaitForPredecessor();
  }
  QueryBits<S> bits = {};
  if (run > 0) bits = FetchQueries<S>(args.score, place.row);
  for (int i = reads_ahead ? 1 : 0; i < S::kStages && i < run; ++i) {
    if (i > 0) Advance<S>(args, S::kWarps, &ahead);
    StartCopy<S>(args, ahead, ring + i * S::kStageBytes, full + i);
  }
  if (args.candidates == nullptr)
    FillBeyondTheEnd(args.score, int64_t{blockIdx.x} * S::kWarps + warp,
                     int64_t{gridDim.x} * S::kWarps);

  const float cap2 = args.score.logit_softcap * kLog2e;
  Queries<S> q;
  Output<S> out;
  const Lane<S> lane;
  for (int i = 0, row = -1; i < run; ++i) {
    if (i > 0) Advance<S>(args, S::kWarps, &place);
    if (place.row != row) {
      row = place.row;
      if (i > 0) bits = FetchQueries<S>(args.score, row);
      q = MakeQueries<S>(args.score, bits);
      out = OutputOf<S>(args.score, row);
    }
    const int stage = i % S::kStages;
    uint8_t* base = ring + stage * S::kStageBytes;
    ptx::BarrierWait(full + stage, static_cast<uint32_t>(i / S::kStages) & 1);
    // Steps beyond the row's end score what the ring held before; nobody stores it.
    Records records[S::kStepsAStage];
    PerPage<S> lse2[S::kStepsAStage];
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s)
      records[s] = {base + s * kStep * S::kCoarseBytes,
                    base + S::kPiece * S::kCoarseBytes + s * kStep * S::kFineBytes};
    ScoreSteps<S>(lane, records, q, cap2, lse2);
    __syncwarp();
    if (i + S::kStages < run) {
      Advance<S>(args, S::kWarps, &ahead);
      StartCopy<S>(args, ahead, base, full + stage);
    }
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s)
      out.Store(args, place, place.piece * S::kPiece + s * kStep, lse2[s]);
  }
}

template <class S>
cudaError_t LaunchScan(const KernelArgs& args, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  if (const cudaError_t e = cudaFuncSetAttribute(
          ScanKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
      e != cudaSuccess)
    return e;
  const int64_t pages = args.candidates != nullptr ? args.max_candidates : args.score.lse_stride;
  const int64_t pieces =
      (pages + S::kPiece - 1) / S::kPiece * args.score.num_sequences * args.score.num_kv_heads;
  if (pieces > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  // At least a warp for every piece, up to what fits on the device at once.
  const int64_t ctas =
      std::clamp<int64_t>((pieces + S::kWarps - 1) / S::kWarps, 1, num_sms * S::kCtasPerSm);
  // A coarse scan does not start early: runs are dealt evenly, so of its two CTAs an SM the late
  // one would be alone at the end.
  if constexpr (S::kOnlyCoarse) {
    ScanKernel<S><<<static_cast<unsigned>(ctas), S::kThreads, S::kSharedBytes, stream>>>(args);
    return cudaGetLastError();
  } else {
    return LaunchOverlapped(ScanKernel<S>, static_cast<unsigned>(ctas), S::kThreads,
                            S::kSharedBytes, 0, stream, args);
  }
}

template <int D, int B, int R, bool kCoarse>
cudaError_t LaunchForGroup(const KernelArgs& args, cudaStream_t stream) {
  constexpr int kSteps = kCoarse ? 4 : 1;
  if (args.score.group <= 4) return LaunchScan<Shape<D, B, R, 4, kSteps, kCoarse>>(args, stream);
  if (args.score.group <= 8) return LaunchScan<Shape<D, B, R, 8, kSteps, kCoarse>>(args, stream);
  return LaunchScan<Shape<D, B, R, 16, kSteps, kCoarse>>(args, stream);
}

// Rank matters only to the full scan: the coarse part is the same for all.
template <int D, bool kCoarse>
cudaError_t LaunchForDim(const KernelArgs& args, cudaStream_t stream) {
#if KVD_ALL_GEOMETRIES
  constexpr int kLowRank = kCoarse ? 8 : 4;
  if (args.score.page_tokens == 32) {
    if (args.score.rank == 4) return LaunchForGroup<D, 32, kLowRank, kCoarse>(args, stream);
    return LaunchForGroup<D, 32, 8, kCoarse>(args, stream);
  }
  if (args.score.rank == 4) return LaunchForGroup<D, 16, kLowRank, kCoarse>(args, stream);
#endif
  return LaunchForGroup<D, 16, 8, kCoarse>(args, stream);
}

inline bool IsValid(const ScoreArgs& a) {
  return a.num_sequences >= 0 && a.num_kv_heads >= 1 && a.group >= 1 && a.group <= 16 &&
         a.lse_stride >= 0 && a.lse_stride <= kMaxPages &&
         (a.dtype == KvDtype::kBf16 || a.dtype == KvDtype::kFp16) &&
         (a.head_dim == 64 || a.head_dim == 96 || a.head_dim == 128 || a.head_dim == 256) &&
         (a.page_tokens == 16 || a.page_tokens == 32) && (a.rank == 4 || a.rank == 8);
}

template <bool kCoarse>
cudaError_t Launch(const KernelArgs& args, cudaStream_t stream) {
  const ScoreArgs& score = args.score;
  if (!IsValid(score)) return cudaErrorInvalidValue;
  if (!IsBuilt(score.head_dim, score.page_tokens, score.rank)) return cudaErrorNotSupported;
  if (score.num_sequences == 0 || score.lse_stride == 0) return cudaSuccess;
  switch (score.head_dim) {
    case 64:
      return LaunchForDim<64, kCoarse>(args, stream);
    case 128:
      return LaunchForDim<128, kCoarse>(args, stream);
#if KVD_ALL_GEOMETRIES
    case 96:
      return LaunchForDim<96, kCoarse>(args, stream);
    case 256:
      return LaunchForDim<256, kCoarse>(args, stream);
#endif
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_SCAN_CUH_
