// How the CTAs of a cluster agree on the weakest page that is chosen, and write the list: counts by bins, narrowed
// down to a bin of few pages, which all of them then rank. Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_RANK_CUH_
#define LOCKS_KVD_KERNELS_SELECT_RANK_CUH_

#include "kernels/select_lists.cuh"
#include "kernels/select_scores.cuh"

namespace kvd::select {

// The pairs of the slice's pages that matter, by threads: Visit(pair) for each. Where they are more than the list
// holds, scores are computed again.
template <class Visit>
__device__ __forceinline__ void ForEachPair(const SelectArgs& args, const Tables& tables, const Plan& plan,
                                            const Slice& s, const Shared& shared, int last, Visit visit) {
  if (static_cast<int>(shared.num_listed) > plan.list_size) {
    ForEachScore(args, tables, s, shared, last, [&](int page, uint32_t which, const Scores& scores) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        if ((which >> k & 1) != 0) visit(Pair(OrderedKey(scores.score[k]), page + k));
    });
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(shared.num_listed); i += kThreads)
    visit(Pair(s.keys[i], s.first_page + s.list[i]));
}

// Finds the page that is min(at_most, all)-th from the best among `counted` pages a bin, thread b's being bin b,
// `lower` of them in CTAs of lower rank. The result is the same in all threads.
__device__ __forceinline__ Found FindBin(uint32_t counted, uint32_t lower, uint32_t at_most, Shared* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t above = counted, lower_above = lower;  // with the lane's own, until below
  if (threadIdx.x < kBins) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const uint32_t left = __shfl_up_sync(kAllLanes, above, i),
                     lower_left = __shfl_up_sync(kAllLanes, lower_above, i);
      above += lane >= i ? left : 0;
      lower_above += lane >= i ? lower_left : 0;
    }
    if (lane == 31) shared->scan[warp] = {above, lower_above};
  }
  __syncthreads();
  if (threadIdx.x < kBins) {
    uint32_t all = 0;
    above -= counted;
    lower_above -= lower;
#pragma unroll
    for (int w = 0; w < kBins / 32; ++w) {
      const uint2 sum = shared->scan[w];
      above += w < warp ? sum.x : 0;
      lower_above += w < warp ? sum.y : 0;
      all += sum.x;
    }
    const uint32_t need = min(at_most, all);
    if (need == 0) {
      if (threadIdx.x == 0) shared->found = {-1, 0, 0, 0, 0, 0};
    } else if (above < need && need - above <= counted) {
      shared->found = {static_cast<int>(threadIdx.x), need, above, counted, lower_above, lower};
    }
  }
  __syncthreads();
  return shared->found;
}

// Lets all CTAs know the slice's counts, takes theirs, clears the slice's, and finds the bin as above. Two buffers in
// turn: a CTA may be a count ahead of one that still waits for the last.
__device__ __noinline__ Found ExchangeCounts(const Plan& plan, const Slice& s, uint32_t at_most, int level,
                                             Shared* shared) {
  constexpr int kVectors = kBins / 4;
  uint64_t* here = &shared->counts_here[level % 2];
  uint32_t* received = s.received + level % 2 * plan.cluster * kBins;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kVectors * plan.cluster; i += kThreads) {
    auto* out = reinterpret_cast<uint4*>(received + s.rank * kBins) + i % kVectors;
    SendTo(plan.cluster == 1, i / kVectors, out, reinterpret_cast<const uint4*>(shared->counts)[i % kVectors], here);
  }
  WaitForAll(plan.cluster == 1, here, static_cast<uint32_t>(level / 2 % 2));
  const int b = static_cast<int>(threadIdx.x);
  uint32_t counted = 0, lower = 0;
  __syncthreads();  // the counts have been sent
  // Armed again before this CTA sends its next count, without which no other gets so far.
  if (b == 0) ExpectFromAll(plan.cluster == 1, here, static_cast<uint32_t>(plan.cluster) * kBins * 4);
  if (b < kBins) {
#pragma unroll 4
    for (int c = 0; c < plan.cluster; ++c) {
      const uint32_t n = received[c * kBins + b];
      counted += n;
      lower += c < s.rank ? n : 0;
    }
    shared->counts[b] = 0;
  }
  return FindBin(counted, lower, at_most, shared);
}

// Finds the cut from the counted scores; `level`: how many counts have been exchanged. One is enough but for large K
// and for ties of many pages.
__device__ inline Cut FindCut(const SelectArgs& args, const Tables& tables, const Plan& plan, const Slice& s,
                              int last_bin, int level, Shared* shared) {
  Found found = ExchangeCounts(plan, s, static_cast<uint32_t>(args.num_select), level, shared);
  Cut cut = {};
  if (found.bin < 0) return cut;
  cut = CutAt(found);
#pragma unroll 1
  while (cut.inside > kContenders) {
    const int shift = FineShiftOf(cut);
    ForEachPair(args, tables, plan, s, *shared, last_bin, [&](uint64_t pair) {
      if (pair >= cut.low && pair <= cut.high) atomicAdd(&shared->counts[FineBinOf(cut, shift, pair)], 1u);
    });
    __syncthreads();
    found = ExchangeCounts(plan, s, cut.count - cut.above, ++level, shared);
    Narrow(found, shift, &cut);
  }
  return cut;
}

// Marks the slice's pages above the cut as chosen, and hands those in it to all CTAs, each in a place of its own.
__device__ inline void SpreadContenders(const SelectArgs& args, const Tables& tables, const Plan& plan,
                                        const Slice& s, const Cut& cut, int last_bin, Shared* shared) {
  ForEachPair(args, tables, plan, s, *shared, last_bin, [&](uint64_t pair) {
    if (pair < cut.low) return;
    if (pair <= cut.high) {
      shared->mine[atomicAdd(&shared->num_mine, 1u)] = pair;
    } else {
      const int p = PageOf(pair) - s.first_page;
      atomicOr(&s.chosen[p / 32], 1u << (p % 32));
    }
  });
  if (threadIdx.x == 0) ExpectFromAll(plan.cluster == 1, &shared->contenders_here, cut.inside * 8);
  __syncthreads();
  const auto num = static_cast<int>(shared->num_mine);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(kMaxCluster <= kWarps);
  if (warp < plan.cluster) {
#pragma unroll 1
    for (int i = lane; i < num; i += 32)
      SendTo(plan.cluster == 1, warp, &shared->contenders[cut.lower_inside + static_cast<uint32_t>(i)],
             shared->mine[i], &shared->contenders_here);
  }
  WaitForAll(plan.cluster == 1, &shared->contenders_here, 0);
}

// Finds the weakest page chosen, into shared->weakest, and marks the slice's own contenders that are chosen. Returns
// how many pages CTAs of lower rank write.
__device__ inline int RankContenders(const Slice& s, const Cut& cut, Shared* shared) {
  const auto i = threadIdx.x;
  const uint32_t need = cut.count - cut.above;
  bool lower = false;
  if (i < cut.inside) {
    const uint64_t pair = shared->contenders[i];
    uint32_t better = 0;
#pragma unroll 8
    for (uint32_t k = 0; k < cut.inside; ++k) better += shared->contenders[k] > pair;
    if (better == need - 1) shared->weakest = pair;
    if (better < need) {
      const int p = PageOf(pair) - s.first_page;
      lower = p < 0;
      if (p >= 0 && p < s.own_pages) atomicOr(&s.chosen[p / 32], 1u << (p % 32));
    }
  }
  return static_cast<int>(cut.lower_above) + __syncthreads_count(lower);
}

// Writes the slice's chosen pages in order, from place `at` of `out` on; returns how many.
__device__ inline int WritePages(const Slice& s, int at, int32_t* out, Shared* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int words = (s.own_pages + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const int first = static_cast<int>(threadIdx.x) * each, end = min(first + each, words);
  int num = 0;
#pragma unroll 1
  for (int w = first; w < end; ++w) num += __popc(s.chosen[w]);
  int through = num;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int left = __shfl_up_sync(kAllLanes, through, i);
    if (lane >= i) through += left;
  }
  if (lane == 31) shared->scan[warp].x = static_cast<uint32_t>(through);
  __syncthreads();
  const uint32_t sum = lane < kWarps ? shared->scan[lane].x : 0;
  out += at + through - num + static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? sum : 0));
#pragma unroll 1
  for (int w = first; w < end; ++w)
#pragma unroll 1
    for (uint32_t bits = s.chosen[w]; bits != 0; bits &= bits - 1)
      *out++ = s.first_page + 32 * w + __ffs(static_cast<int>(bits)) - 1;
  return static_cast<int>(__reduce_add_sync(kAllLanes, sum));
}

// Leaves the shares of the CTA's candidates: the `num` pages at `own`, with those that are always kept the first CTA's.
__device__ inline void SumShares(const SelectArgs& args, const Plan& plan, const Slice& s, const Lists& lists,
                                 const int32_t* own, int num, Shared* shared) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int all = num + (s.rank == 0 ? NumKept(s.row) : 0);
  __syncthreads();  // the list is written
#pragma unroll 1
  for (int g = 0; g < args.group; ++g) {
    uint32_t sum = 0;
#pragma unroll 2
    for (int i = thread; i < all; i += kThreads) {
      const int page = i < num ? own[i] : KeptPage(s.row, i - num);
      sum += ShareOf(s.row.lse[g * args.lse_stride + page], shared->norm[g]);
    }
    AddShares(sum, &shared->shares[g]);
  }
  PutShares(args, lists, s.row, shared->norm, s.rank, plan.cluster, shared->shares);
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_RANK_CUH_
