// The scores of a slice's pages: which pages may be chosen, and which of those can still be among the best K.
//
// A page's score lies between its best head's share, `top`, and that plus ln G: only pages whose top comes within ln
// G of the row's K-th best top get an exact score, one in a hundred as a rule. Device code only. Internal to
// select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_
#define LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_

#include "kernels/select_row.cuh"

namespace kvd::select {

// --- pages that may be chosen ----------------------------------------------------------------------

// The 32 bits from page p on (a multiple of 32) of those in [first, end).
__device__ __forceinline__ uint32_t BitsBetween(int p, int first, int end) {
  const int low = max(first - p, 0), high = min(end - p, 32);
  if (low >= high) return 0;
  return (kAllLanes >> (32 - high)) & (kAllLanes << low);
}

__device__ inline void AllowSelectable(const SelectArgs& args, const Row& row) {
  const auto* bits =
      args.selectable == nullptr ? nullptr : reinterpret_cast<const uint32_t*>(args.selectable[row.sequence]);
#pragma unroll 1
  for (int w = static_cast<int>(threadIdx.x); 32 * w < row.own_pages; w += kThreads) {
    const int p = row.first_page + 32 * w;
    const uint32_t inside = BitsBetween(p, row.first_selectable, row.end_selectable);
    row.allowed[w] = inside != 0 && bits != nullptr ? inside & bits[p / 32] : inside;
  }
}

// Marks the candidates of the slice in `chosen`, which is clear.
__device__ inline void MarkCandidates(const SelectArgs& args, const Row& row) {
  const int32_t* list = args.candidates + row.index * args.max_candidates;
  const int num = args.num_candidates[row.index];
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num; i += kThreads) {
    const int p = list[i] - row.first_page;
    if (p >= 0 && p < row.own_pages) atomicOr(&row.chosen[p / 32], 1u << (p % 32));
  }
}
__device__ inline void RestrictToCandidates(const Row& row) {
#pragma unroll 1
  for (int w = static_cast<int>(threadIdx.x); 32 * w < row.own_pages; w += kThreads) {
    row.allowed[w] &= row.chosen[w];
    row.chosen[w] = 0;
  }
}

// An unsigned integer of the same order; never 0.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const int bits = __float_as_int(x + 0.0f);  // -0 becomes 0
  return max(static_cast<uint32_t>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u))), 1u);
}
__device__ __forceinline__ float FromOrderedKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// kPeak: the maxima over sinks and selectable pages, as ordered keys; for comparison only, so not tuned.
__device__ __noinline__ void SlicePeaks(const SelectArgs& args, const Plan& plan, const Row& row, Shared* shared) {
#pragma unroll 1
  for (int g = 0; g < args.group; ++g) {
    uint32_t top = 0;
#pragma unroll 1
    for (int p = static_cast<int>(threadIdx.x); p < row.own_pages; p += kThreads) {
      if (((row.allowed[p / 32] >> (p % 32)) & 1) == 0 && row.first_page + p >= row.first_selectable) continue;
      const Place place = PlaceOf(args, row, p);
      const float x = place.value[g * place.stride];
      if (!isnan(x)) top = max(top, OrderedKey(x));
    }
    if (top != 0) atomicMax(&shared->peak[g], top);
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i < plan.cluster * kMaxGroup) {
    uint32_t* peaks = &shared->peaks[row.rank][0];
    if (plan.cluster > 1) peaks = cg::this_cluster().map_shared_rank(peaks, i / kMaxGroup);
    peaks[i % kMaxGroup] = shared->peak[i % kMaxGroup];
  }
}

// kPeak: puts the peaks in place of the norms. REQUIRES: a barrier after MergeStates.
__device__ inline void TakePeaks(const SelectArgs& args, const Plan& plan, Shared* shared) {
  const int g = static_cast<int>(threadIdx.x);
  if (g >= args.group) return;
  uint32_t top = 0;
#pragma unroll 1
  for (int c = 0; c < plan.cluster; ++c) top = max(top, shared->peaks[c][g]);
  const float peak = top == 0 ? NegativeInfinity() : FromOrderedKey(top);
  shared->norm[g] = peak == NegativeInfinity() ? -peak : peak;
}

// --- scores ----------------------------------------------------------------------------------------

// 32 bins for each octave of -score from 1 to 240, the best bin first; the last takes all that is worse.
constexpr int kBinShift = 18;
constexpr int kFirstBin = 127 << (23 - kBinShift);
constexpr int kLastBin = kNotAllowed - 1;
__device__ __forceinline__ int BinOf(float score) {
  const int depth =
      __float_as_int(score) ^ static_cast<int>(0x80000000u);  // the bits of -score; below 0 for scores above 0
  return min(max((depth >> kBinShift) - kFirstBin, 0), kLastBin);
}
// The keys of a bin's weakest and best scores.
__device__ __forceinline__ uint32_t LowKeyOf(int bin) {
  return bin == kLastBin ? 1u : 0x7FFFFFFFu - ((static_cast<uint32_t>(kFirstBin + bin + 1) << kBinShift) - 1);
}
__device__ __forceinline__ uint32_t HighKeyOf(int bin) {
  return bin == 0 ? 0xFFFFFFFFu : 0x7FFFFFFFu - (static_cast<uint32_t>(kFirstBin + bin) << kBinShift);
}

// The exact score of a page, ln sum_g exp(lse - norm).
__device__ __forceinline__ float ScoreOf(const SelectArgs& args, const Row& row, const Shared& shared, int p) {
  constexpr int kHeads = 4;  // at a time
  const Place place = PlaceOf(args, row, p);
  float top = -3.402823466e38f, sum = 0;
#pragma unroll 1
  for (int first = 0; first < args.group; first += kHeads) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int g = min(first + i, args.group - 1);
      top = fmaxf(top, place.value[g * place.stride] - shared.norm[g]);
    }
  }
#pragma unroll 1
  for (int first = 0; first < args.group; first += kHeads) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int g = min(first + i, args.group - 1);
      const float x = fmaxf(place.value[g * place.stride] - shared.norm[g], NegativeInfinity());  // NaN: -inf
      sum += first + i < args.group ? ptx::Exp2((x - top) * kLog2e) : 0.0f;
    }
  }
  return fmaf(ptx::Log2(sum), kLn2, top);
}

// Bins of the tops of the slice's pages. Counted are the best bins of groups of pages, which is enough for a bound:
// of what a thread looks at, or, where K needs more groups, of every four pages.
__device__ inline void BinTops(const SelectArgs& args, const Row& row, Shared* shared) {
  const bool of_threads = args.num_select <= kThreads / 2;
  int best = kNotAllowed;
#pragma unroll 1
  for (int p = 4 * static_cast<int>(threadIdx.x); p < row.own_pages; p += 4 * kThreads) {
    const float none = NegativeInfinity();
    float top[4] = {none, none, none, none};
    const Place place = PlaceOf(args, row, p);
#pragma unroll 4
    for (int g = 0; g < args.group; ++g) {
      const float4 x = *reinterpret_cast<const float4*>(place.value + g * place.stride);
      const float norm = shared->norm[g];
      top[0] = fmaxf(top[0], x.x - norm);
      top[1] = fmaxf(top[1], x.y - norm);
      top[2] = fmaxf(top[2], x.z - norm);
      top[3] = fmaxf(top[3], x.w - norm);
    }
    const uint32_t allowed = row.allowed[p / 32] >> (p % 32);
    uint32_t bins = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bin = ((allowed >> i) & 1) != 0 ? BinOf(top[i]) : kNotAllowed;
      best = min(best, bin);
      bins |= static_cast<uint32_t>(bin) << (8 * i);
    }
    *reinterpret_cast<uint32_t*>(row.bins + p) = bins;
    if (!of_threads) {
      if (best != kNotAllowed) atomicAdd(&shared->counts[best], 1u);
      best = kNotAllowed;
    }
  }
  if (best != kNotAllowed) atomicAdd(&shared->counts[best], 1u);
}

// The bin up to which a page can be among the best when found.need pages of the row have tops in found.bin or better.
__device__ __forceinline__ int LastBinThatMatters(const SelectArgs& args, const Found& found) {
  if (found.bin < 0 || found.need < static_cast<uint32_t>(args.num_select) || found.bin == kLastBin) return kLastBin;
  // A thousandth more than ln G: scores are rounded.
  return BinOf(FromOrderedKey(LowKeyOf(found.bin)) - (logf(static_cast<float>(args.group)) + 1e-3f) * 1.0001f);
}

// Lists the pages whose bin is at most `last`.
__device__ inline void ListPages(const Plan& plan, const Row& row, int last, Shared* shared) {
  const int lane = threadIdx.x % 32;
  uint32_t num = 0;
#pragma unroll 4
  for (int p = 4 * static_cast<int>(threadIdx.x); p < row.own_pages; p += 4 * kThreads) {
    const uint32_t bins = *reinterpret_cast<const uint32_t*>(row.bins + p);
#pragma unroll
    for (int i = 0; i < 4; ++i) num += static_cast<int>((bins >> (8 * i)) & 255) <= last;
  }
  uint32_t at = num;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint32_t left = __shfl_up_sync(kAllLanes, at, i);
    if (lane >= i) at += left;
  }
  uint32_t base = 0;
  if (lane == 31 && at != 0) base = atomicAdd(&shared->num_listed, at);
  at += __shfl_sync(kAllLanes, base, 31) - num;
  if (num == 0) return;
#pragma unroll 1
  for (int p = 4 * static_cast<int>(threadIdx.x); p < row.own_pages; p += 4 * kThreads) {
    const uint32_t bins = *reinterpret_cast<const uint32_t*>(row.bins + p);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (static_cast<int>((bins >> (8 * i)) & 255) > last) continue;
      if (at < static_cast<uint32_t>(plan.list_size)) row.list[at] = static_cast<uint16_t>(p + i);
      ++at;
    }
  }
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_
