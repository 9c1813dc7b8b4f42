// The second half of select_many.cuh: the weakest page that is chosen, the list; and the kernel.
// Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_MANY_RANK_CUH_
#define LOCKS_KVD_KERNELS_SELECT_MANY_RANK_CUH_

#include "kernels/select_many.cuh"

namespace kvd::select {

// --- the bin of the K-th -------------------------------------------------------------------------

// Lets all CTAs know the slice's counts, takes theirs and finds the bin; `level`: how many counts
// went before. REQUIRES: the counts are complete, behind a barrier.
__device__ __forceinline__ Found FindBinOfTeam(const SelectArgs& args, const ManyPlan& plan,
                                               const Many& many, uint32_t at_most, int level,
                                               FewShared* shared) {
  const auto i = static_cast<int>(threadIdx.x);
  if (plan.team == 1) {
    if (i < 32) FindBinOf(shared->counts, 1, at_most, shared);
    __syncthreads();
    return shared->found;
  }
  uint64_t* words = CountsOf(args, plan, many, level, 0);
  auto* received = reinterpret_cast<uint32_t*>(many.memory + plan.received);
  if (i < kCountWords) {
    const uint2 own = reinterpret_cast<const uint2*>(shared->counts)[i];
    PutWord(words + many.rank() * kCountWords + i,
            kCounted | static_cast<uint64_t>(own.y) << 32 | own.x);
  }
  // A thread has two bins of every kCountSums-th CTA, of which some are on their way at once.
  constexpr int kAtOnce = 4;
  const int which = i % kCountWords, part = i / kCountWords;
  uint2 all = {0, 0}, lower = {0, 0};
#pragma unroll 1
  for (int first = part; first < plan.team; first += kAtOnce * kCountSums) {
    uint64_t seen[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int rank = first + k * kCountSums;
      seen[k] = rank < plan.team ? SeeWord(words + rank * kCountWords + which) : kCounted;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int rank = first + k * kCountSums;
      const uint64_t word = AwaitWord(words + rank * kCountWords + which, seen[k]) & ~kCounted;
      const uint2 counts = {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
      all.x += counts.x;
      all.y += counts.y;
      lower.x += rank < many.rank() ? counts.x : 0;
      lower.y += rank < many.rank() ? counts.y : 0;
    }
  }
  reinterpret_cast<uint2*>(received)[part * kCountWords + which] = all;
  reinterpret_cast<uint2*>(received)[(kCountSums + part) * kCountWords + which] = lower;
  __syncthreads();
  if (i < 32) {
    FindBinOf(received, kCountSums, at_most, shared);
  } else if (i < 64) {
    SumLower(received + kCountSums * kBins, kCountSums, shared);
  }
  __syncthreads();
  Found found = shared->found;
  if (found.bin < 0) return found;
  found.lower_above = shared->lower[found.bin];
  found.lower_inside = shared->lower[found.bin + 1] - found.lower_above;
  return found;
}

// Visit(pair) for the slice's pairs from `low` on, by threads. They are few: most quads have none.
template <class Visit>
__device__ __forceinline__ void ForEachPair(const SelectArgs& args, const ManyPlan& plan,
                                            const Many& many, uint64_t low, Visit visit) {
#pragma unroll 1
  for (int offset = kQuad * static_cast<int>(threadIdx.x); offset < many.own_pages;
       offset += kQuad * kManyThreads) {
    const uint4 keys = ReadKeys(args, plan, many, offset);
    const uint32_t least = KeyOf(low);
    uint32_t left = (keys.x >= least ? 1 : 0) | (keys.y >= least ? 2 : 0) |
                    (keys.z >= least ? 4 : 0) | (keys.w >= least ? 8 : 0);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const uint32_t key = i == 0 ? keys.x : i == 1 ? keys.y : i == 2 ? keys.z : keys.w;
      const uint64_t pair = Pair(key, many.first_page + offset + i);
      if (pair >= low) visit(pair);
    }
  }
}

// Finds the cut from the counted scores; no page can be chosen if its count is 0.
__device__ __forceinline__ Cut FindManyCut(const SelectArgs& args, const ManyPlan& plan,
                                           const Many& many, FewShared* shared) {
  Cut cut = {};
  int shift = 0;
#pragma unroll 1
  for (int level = 0;; ++level) {
    const uint32_t at_most =
        level == 0 ? static_cast<uint32_t>(args.num_select) : cut.count - cut.above;
    const Found found = FindBinOfTeam(args, plan, many, at_most, level, shared);
    if (level > 0) {
      Narrow(found, shift, &cut);
    } else if (found.bin >= 0) {
      cut = CutAt(found, shared->low_keys);
    }
    if (cut.inside <= kFewContenders) return cut;
    ClearCounts(shared);  // seldom: ties, or large K
    shift = FineShiftOf(cut);
    ForEachPair(args, plan, many, cut.low, [&](uint64_t pair) {
      if (pair <= cut.high) atomicAdd(&shared->counts[FineBinOf(cut, shift, pair)], 1u);
    });
    __syncthreads();
  }
}

// --- the list ------------------------------------------------------------------------------------

// Marks a page of the slice as chosen.
__device__ __forceinline__ void Choose(const ManyPlan& plan, const Many& many, int page) {
  const int offset = page - many.first_page;
  atomicOr(ChosenOf(plan, many) + offset / 32, 1u << (offset % 32));
}

// Marks the slice's pages above the cut, hands the pairs in it to all CTAs, each in a place of its
// own, and waits for theirs.
__device__ __forceinline__ void ShareContenders(const SelectArgs& args, const ManyPlan& plan,
                                                const Many& many, const Cut& cut,
                                                FewShared* shared) {
  uint64_t* words = ContendersOf(args, plan, many);
  ForEachPair(args, plan, many, cut.low, [&](uint64_t pair) {
    if (pair > cut.high) {
      Choose(plan, many, PageOf(pair));
      return;
    }
    const uint32_t place = cut.lower_inside + atomicAdd(&shared->num_mine, 1u);
    if (plan.team == 1) {
      shared->contenders[place] = pair;
    } else {
      PutWord(words + place, pair);
    }
  });
  if (plan.team > 1) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < cut.inside; i += kManyThreads)
      shared->contenders[i] = AwaitWord(words + i, 0);
  }
  __syncthreads();
}

// Marks the slice's contenders that are chosen, and counts those of CTAs of lower rank. REQUIRES: a
// barrier after it.
__device__ __forceinline__ void ChooseContenders(const ManyPlan& plan, const Many& many,
                                                 const Cut& cut, FewShared* shared) {
  const uint64_t weakest = shared->weakest;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < cut.inside; i += kManyThreads) {
    const uint64_t pair = shared->contenders[i];
    if (pair < weakest) continue;
    const int page = PageOf(pair);
    if (page < many.first_page) atomicAdd(&shared->num_lower, 1u);
    if (page >= many.first_page && page < many.first_page + many.own_pages)
      Choose(plan, many, page);
  }
}

// Writes the slice's chosen pages in order, behind those of CTAs of lower rank, `lower` of which
// are known. Returns how many; their offsets are then in shared memory too, in place of keys, if
// all of them find room there.
__device__ __forceinline__ int WriteMany(const ManyPlan& plan, const Many& many, uint32_t lower,
                                         int32_t* out, FewShared* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t* chosen = ChosenOf(plan, many);
  auto* own = reinterpret_cast<int32_t*>(many.memory + plan.keys);
  const int words = (many.own_pages + 31) / 32, each = (words + kManyThreads - 1) / kManyThreads;
  const int first = static_cast<int>(threadIdx.x) * each, end = min(first + each, words);
  uint32_t num = 0;
#pragma unroll 1
  for (int w = first; w < end; ++w) num += static_cast<uint32_t>(__popc(chosen[w]));
  const uint32_t through = SumThrough(num);
  if (lane == 31) shared->warp_count[warp] = through;
  __syncthreads();
  const uint32_t count = lane < kManyWarps ? shared->warp_count[lane] : 0;
  const auto all = static_cast<int>(__reduce_add_sync(kAllLanes, count));
  auto at = static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? count : 0) + through - num);
  out += lower + shared->num_lower;
#pragma unroll 1
  for (int w = first; w < end; ++w) {
#pragma unroll 1
    for (uint32_t bits = chosen[w]; bits != 0; bits &= bits - 1) {
      const int offset = 32 * w + __ffs(static_cast<int>(bits)) - 1;
      out[at] = many.first_page + offset;
      if (all <= plan.near_keys) own[at] = offset;
      ++at;
    }
  }
  return all;
}

// Leaves the shares of the slice's candidates: the `num` pages at `out`, with those that are always
// kept the first CTA's. A warp has one head.
__device__ __forceinline__ void SumManyShares(const SelectArgs& args, const Lists& lists,
                                              const ManyPlan& plan, const Many& many,
                                              const int32_t* out, int num, FewShared* shared) {
  __syncthreads();  // the list is written
  const auto* own = reinterpret_cast<const int32_t*>(many.memory + plan.keys);
  const int warps = kManyWarps / args.group, warp = static_cast<int>(threadIdx.x) / 32;
  const int g = warp / warps, all = num + (many.rank() == 0 ? NumKept(many.row) : 0);
  if (g < args.group) {
    const float* lse = many.row.lse + g * args.lse_stride;
    const float* near = reinterpret_cast<const float*>(many.memory + plan.values) + g * plan.kept;
    const int intact =
        plan.keys == plan.values ? 0 : min(plan.kept, many.own_pages);  // a row may be short
    uint32_t sum = 0;
#pragma unroll 2
    for (int i = warp % warps * 32 + static_cast<int>(threadIdx.x) % 32; i < all; i += 32 * warps) {
      int offset = KeptPage(many.row, i - num) - many.first_page;
      if (i < num) offset = num <= plan.near_keys ? own[i] : out[i] - many.first_page;
      const bool is_near = offset >= 0 && offset < intact;
      sum += ShareOf(is_near ? near[offset] : lse[many.first_page + offset], shared->norm[g]);
    }
    AddShares(sum, &shared->shares[g]);
  }
  PutShares(args, lists, many.row, shared->norm, many.rank(), plan.team, shared->shares);
}

// Puts shared memory in order; nothing here waits for an earlier kernel.
__device__ __forceinline__ void InitialiseMany(const ManyPlan& plan, unsigned char* memory,
                                               FewShared* shared) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i < kBins) shared->counts[i] = 0;
  if (i < kMaxGroup) {
    shared->shares[i] = 0;
    shared->peaks[i] = 0;
    shared->norm[i] = -NegativeInfinity();
  }
  if (i == 0) {
    shared->num_mine = 0;
    shared->num_finalists = 0;
    shared->num_lower = 0;
  }
  auto* chosen = reinterpret_cast<uint32_t*>(memory + plan.chosen);
#pragma unroll 1
  for (int w = i; w < plan.slice / 32; w += kManyThreads) chosen[w] = 0;
}

__global__ void __launch_bounds__(kManyThreads, 1)
    SelectManyKernel(const __grid_constant__ SelectArgs args, const __grid_constant__ Lists lists,
                     const __grid_constant__ ManyPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* shared = reinterpret_cast<FewShared*>(memory);
  InitialiseMany(plan, memory, shared);
  AwaitParameters(args);
  AwaitParameters(lists);
  AwaitParameters(plan);
  const float mean = MeanOf(args);
  WaitForPredecessor();
  const Start start = ReadStart(args, plan);
  float4 x[kRuns];
  const int ahead = ReadAhead(args, plan, x);
  const Many many = MakeMany(args, plan, start, memory);
  KeepSlice(args, plan, many, ahead, x);
  if (plan.team > 1) ClearLastSet(args, plan, many);
  FindNorms(args, plan, many, shared);
  if (args.rule == CombineRule::kPeak)
    TakePeaks(args, many.row.num_pages, shared->peaks, shared->norm);
  ScoreSlice(args, plan, many, shared);
  __syncthreads();
  const Cut cut = FindManyCut(args, plan, many, shared);
  LetSuccessorStart();
  const auto thread = static_cast<int>(threadIdx.x);
  if (plan.team > 1 && many.rank() == 0 && thread == 0) plan.turns[many.row.index] = many.turn ^ 1;
  int32_t* out = OutOf(args, lists, many.row);
  int num = 0;
  if (cut.count != 0) {
    ShareContenders(args, plan, many, cut, shared);
    FindWeakest(cut, shared);
    ChooseContenders(plan, many, cut, shared);
    __syncthreads();
    num = WriteMany(plan, many, cut.lower_above, out, shared);
    out += cut.lower_above + shared->num_lower;
  }
  FinishRow(args, lists, many.row, cut.count, shared->weakest, mean,
            many.rank() * kManyThreads + thread, plan.team * kManyThreads);
  if (lists.candidates != nullptr) SumManyShares(args, lists, plan, many, out, num, shared);
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_MANY_RANK_CUH_
