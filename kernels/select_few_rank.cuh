// The second half of select_few.cuh: scores, the weakest page that is chosen, the list; and the
// kernel. Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_FEW_RANK_CUH_
#define LOCKS_KVD_KERNELS_SELECT_FEW_RANK_CUH_

#include "kernels/select_few.cuh"

namespace kvd::select {

// A thread's quad of the slice: its pages' keys, 0 for pages that may not be chosen. A pair has the
// number in the row, or in the list, in place of the page: the order is the same.
struct Keys {
  int at;     // of the first, in the slice
  int first;  // of the slice
  uint32_t key[kQuad];
  __device__ __forceinline__ uint64_t pair(int i) const { return Pair(key[i], first + at + i); }
};

// Which of the slice's pages from `at` on may be chosen, a quad.
template <bool kListed>
__device__ __forceinline__ uint32_t FewAllowed(const SelectArgs& args, const Few& few,
                                               const FewShared& shared, int at) {
  if (at >= few.own()) return 0;
  if constexpr (kListed) {
    uint32_t allowed = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (at + i >= few.own()) continue;
      const int page = few.pages[at + i];
      allowed |= (AllowedOf(few.row, page & ~(kQuad - 1)) >> (page % kQuad) & 1) << i;
    }
    return allowed;
  } else {
    const uint32_t allowed = AllowedOf(few.row, few.first + at);
    return args.max_candidates == 0 ? allowed : allowed & shared.listed[at / 32] >> (at % 32);
  }
}

// Scores the thread's pages and counts their bins.
template <bool kListed>
__device__ __forceinline__ void ScoreOwn(const SelectArgs& args, const Few& few, float zero,
                                         FewShared* shared, Keys* own) {
#pragma unroll
  for (uint32_t& key : own->key) key = 0;
  const uint32_t allowed = FewAllowed<kListed>(args, few, *shared, own->at);
  if (allowed == 0) return;
  const Scores scores = ScoresOf(args.group, shared->norm, [&](int first) {
    return ReadHeads(args.group, first, few.values + own->at, few.stride);
  });
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if ((allowed >> i & 1) == 0) continue;
    own->key[i] = OrderedKey(scores.score[i]);
    atomicAdd(&shared->counts[BinOf(scores.score[i], zero)], 1u);
  }
}

// --- the bin of the K-th -------------------------------------------------------------------------

// The sums of `num` CTAs' counts, a lane's kEach bins.
constexpr int kEach = kBins / 32;
__device__ __forceinline__ void SumCounts(const uint32_t* counts, int num, uint32_t (&sum)[kEach]) {
#pragma unroll
  for (uint32_t& s : sum) s = 0;
#pragma unroll 4
  for (int c = 0; c < num; ++c) {
    const auto* from = reinterpret_cast<const uint4*>(counts + c * kBins) +
                       static_cast<int>(threadIdx.x) % 32 * (kEach / 4);
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
      const uint4 x = from[i];
      sum[4 * i] += x.x;
      sum[4 * i + 1] += x.y;
      sum[4 * i + 2] += x.z;
      sum[4 * i + 3] += x.w;
    }
  }
}
// The sum of the lanes up to this one.
__device__ __forceinline__ uint32_t SumThrough(uint32_t x) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint32_t left = __shfl_up_sync(kAllLanes, x, i);
    x += static_cast<int>(threadIdx.x) % 32 >= i ? left : 0;
  }
  return x;
}

// Finds the page that is min(at_most, all)-th from the best among the counts of `num` CTAs, by one
// warp, into shared->found, but for the CTA's place in it.
__device__ __forceinline__ void FindBinOf(const uint32_t* counts, int num, uint32_t at_most,
                                          FewShared* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t count[kEach], sum = 0;
  SumCounts(counts, num, count);
#pragma unroll
  for (const uint32_t c : count) sum += c;
  const uint32_t through = SumThrough(sum),
                 need = min(at_most, __shfl_sync(kAllLanes, through, 31));
  if (need == 0 && lane == 0) shared->found = {-1, 0, 0, 0, 0, 0};
  if (need == 0 || need > through || need <= through - sum) return;
  Found found = {lane * kEach, need, through - sum, count[0], 0, 0};
  uint32_t before = through - sum;
#pragma unroll
  for (int i = 0; i + 1 < kEach; ++i) {
    before += count[i];
    if (before >= need) continue;
    found.bin = lane * kEach + i + 1;
    found.above = before;
    found.inside = count[i + 1];
  }
  shared->found = found;
}

// How many pages CTAs of lower rank have in better bins than each, by one warp.
__device__ __forceinline__ void SumLower(const uint32_t* counts, int rank, FewShared* shared) {
  const int first = static_cast<int>(threadIdx.x) % 32 * kEach;
  uint32_t count[kEach], sum = 0;
  SumCounts(counts, rank, count);
#pragma unroll
  for (const uint32_t c : count) sum += c;
  uint32_t before = SumThrough(sum) - sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    shared->lower[first + i] = before;
    before += count[i];
  }
  if (first + kEach == kBins) shared->lower[kBins] = before;
}

// REQUIRES: nobody counts or reads the counts.
__device__ __forceinline__ void ClearCounts(FewShared* shared) {
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x); b < kBins; b += static_cast<int>(blockDim.x))
    shared->counts[b] = 0;
  __syncthreads();
}

// Lets all CTAs know the slice's counts, takes theirs and finds the bin. Two buffers in turn: a CTA
// may be a count ahead of one that still waits for the last. REQUIRES: the counts are complete,
// behind a barrier.
__device__ __forceinline__ Found FindBinOfAll(const FewPlan& plan, const Few& few, uint32_t at_most,
                                              int level, FewShared* shared) {
  constexpr int kVectors = kBins / 4;
  const auto i = static_cast<int>(threadIdx.x);
  if (plan.cluster_shift == 0) {
    if (i < 32) FindBinOf(shared->counts, 1, at_most, shared);
    __syncthreads();
    return shared->found;
  }
  uint64_t* here = &shared->counts_here[level % 2];
  uint32_t* received = few.received + level % 2 * plan.cluster() * kBins;
#pragma unroll 1
  for (int v = i; v < kVectors * plan.cluster(); v += static_cast<int>(blockDim.x)) {
    auto* out = reinterpret_cast<uint4*>(received + few.rank * kBins) + v % kVectors;
    ptx::Send(v / kVectors, out, reinterpret_cast<const uint4*>(shared->counts)[v % kVectors],
              here);
  }
  if (i < 64) {
    ptx::BarrierWait(here, static_cast<uint32_t>(level / 2 % 2));
    if (i < 32) {
      FindBinOf(received, plan.cluster(), at_most, shared);
    } else {
      SumLower(received, few.rank, shared);
    }
  }
  // Armed again before this CTA sends its next count, without which no other gets so far.
  if (i == 0) ptx::BarrierExpect(here, static_cast<uint32_t>(plan.cluster()) * kBins * 4);
  __syncthreads();
  Found found = shared->found;
  if (found.bin < 0) return found;
  found.lower_above = shared->lower[found.bin];
  found.lower_inside = shared->lower[found.bin + 1] - found.lower_above;
  return found;
}

// Finds the cut from the counted scores; no page can be chosen if its count is 0.
__device__ __forceinline__ Cut FindFewCut(const SelectArgs& args, const FewPlan& plan,
                                          const Few& few, const Keys& own, FewShared* shared) {
  Found found = FindBinOfAll(plan, few, static_cast<uint32_t>(args.num_select), 0, shared);
  if (found.bin < 0) return {};
  Cut cut = CutAt(found, shared->low_keys);
#pragma unroll 1
  for (int level = 1; cut.inside > kFewContenders; ++level) {  // seldom: ties, or large K
    ClearCounts(shared);
    const int shift = FineShiftOf(cut);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const uint64_t pair = own.pair(k);
      if (pair >= cut.low && pair <= cut.high)
        atomicAdd(&shared->counts[FineBinOf(cut, shift, pair)], 1u);
    }
    __syncthreads();
    found = FindBinOfAll(plan, few, cut.count - cut.above, level, shared);
    Narrow(found, shift, &cut);
  }
  return cut;
}

// --- the weakest page chosen, and the list -------------------------------------------------------

// Hands the pairs in the cut to all CTAs, each in a place of its own, and waits for theirs.
__device__ __forceinline__ void SpreadContenders(const FewPlan& plan, const Keys& own,
                                                 const Cut& cut, FewShared* shared) {
  const bool alone = plan.cluster_shift == 0;
  if (threadIdx.x == 0) ExpectFromAll(alone, &shared->contenders_here, cut.inside * 8);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    const uint64_t pair = own.pair(k);
    if (pair < cut.low || pair > cut.high) continue;
    uint64_t* place = &shared->contenders[cut.lower_inside + atomicAdd(&shared->num_mine, 1u)];
#pragma unroll 1
    for (int c = 0; c < plan.cluster(); ++c)
      SendTo(alone, c, place, pair, &shared->contenders_here);
  }
  WaitForAll(alone, &shared->contenders_here, 0);
}

// Cuts the contenders, which every CTA has, to at most kFinalists, and lists these.
__device__ __forceinline__ Cut FindFinalists(const Cut& cut, FewShared* shared) {
  const uint32_t first = threadIdx.x, threads = blockDim.x;
  Cut fine = cut;
#pragma unroll 1
  while (fine.inside > kFinalists) {
    ClearCounts(shared);
    const int shift = FineShiftOf(fine);
#pragma unroll 1
    for (uint32_t i = first; i < cut.inside; i += threads) {
      const uint64_t pair = shared->contenders[i];
      if (pair >= fine.low && pair <= fine.high)
        atomicAdd(&shared->counts[FineBinOf(fine, shift, pair)], 1u);
    }
    __syncthreads();
    if (first < 32) FindBinOf(shared->counts, 1, fine.count - fine.above, shared);
    __syncthreads();
    Narrow(shared->found, shift, &fine);
  }
#pragma unroll 1
  for (uint32_t i = first; i < cut.inside; i += threads) {
    const uint64_t pair = shared->contenders[i];
    if (pair >= fine.low && pair <= fine.high)
      shared->finalists[atomicAdd(&shared->num_finalists, 1u)] = pair;
  }
  __syncthreads();
  return fine;
}

// Finds the weakest page chosen among the contenders, into shared->weakest: a warp takes one of the
// finalists, and compares all the others with it.
__device__ __forceinline__ void FindWeakest(const Cut& cut, FewShared* shared) {
  const uint32_t lane = threadIdx.x % 32;
  const bool few = cut.inside <= kFinalists;
  const Cut fine = few ? cut : FindFinalists(cut, shared);
  const uint64_t* list = few ? shared->contenders : shared->finalists;
  uint64_t own[kFinalists / 32];
#pragma unroll
  for (uint32_t k = 0; k < kFinalists / 32; ++k)
    own[k] = lane + 32 * k < fine.inside ? list[lane + 32 * k] : 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < fine.inside; i += blockDim.x / 32) {
    const uint64_t pair = list[i];
    uint32_t better = 0;
#pragma unroll
    for (const uint64_t other : own) better += other > pair ? 1 : 0;
    better = __reduce_add_sync(kAllLanes, better);
    if (lane == 0 && better == fine.count - fine.above - 1) shared->weakest = pair;
  }
  __syncthreads();
}

// A warp's count of the chosen pages of CTAs of lower rank: those above the cut, and of the
// contenders, in which theirs stand first, those that are no weaker than the weakest.
__device__ __forceinline__ int NumLower(const Cut& cut, const FewShared& shared) {
  uint32_t num = 0;
#pragma unroll 1
  for (uint32_t k = threadIdx.x % 32; k < cut.lower_inside; k += 32)
    num += shared.contenders[k] >= shared.weakest;
  return static_cast<int>(cut.lower_above + __reduce_add_sync(kAllLanes, num));
}

// Writes the slice's pages whose pairs are no less than the weakest's, in order, from place `at` of
// `out` on; returns the thread's, as bits.
template <bool kListed>
__device__ __forceinline__ uint32_t WriteFew(const Few& few, const Keys& own, int at, int32_t* out,
                                             FewShared* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint64_t weakest = shared->weakest;
  uint32_t mine = 0;
  int before = 0, all = 0;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    const bool chosen = own.pair(k) >= weakest;
    const uint32_t votes = __ballot_sync(kAllLanes, chosen);
    mine |= static_cast<uint32_t>(chosen) << k;
    before += __popc(votes & ((1u << lane) - 1));
    all += __popc(votes);
  }
  if (lane == 0) shared->warp_count[warp] = static_cast<uint32_t>(all);
  __syncthreads();
  const uint32_t count = lane < static_cast<int>(blockDim.x) / 32 ? shared->warp_count[lane] : 0;
  out += at + before + static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? count : 0));
#pragma unroll
  for (int k = 0; k < kQuad; ++k)
    if ((mine >> k & 1) != 0) *out++ = kListed ? few.pages[own.at + k] : own.first + own.at + k;
  return mine;
}

// Leaves the shares of the slice's candidates: the thread's chosen pages, and those that are always
// kept.
__device__ __forceinline__ void SumShares(const SelectArgs& args, const Lists& lists,
                                          const FewPlan& plan, const Few& few, const Keys& own,
                                          uint32_t chosen, FewShared* shared) {
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    const int page = own.first + own.at + k;
    const bool kept =
        page < few.row.first_selectable || (page >= few.row.end_selectable && page < few.num);
    if (own.at + k < few.own() && kept) chosen |= 1u << k;
  }
#pragma unroll 1
  for (int g = 0; g < args.group; ++g) {
    uint32_t sum = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
      if ((chosen >> k & 1) != 0)
        sum += ShareOf(few.values[g * few.stride + own.at + k], shared->norm[g]);
    AddShares(sum, &shared->shares[g]);
  }
  PutShares(args, lists, few.row, shared->norm, few.rank, plan.cluster(), shared->shares);
}

// Puts shared memory in order; nothing here waits for an earlier kernel.
__device__ __forceinline__ void InitialiseFew(const FewPlan& plan, FewShared* shared) {
  const int i = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int b = i; b < kBins; b += threads) shared->counts[b] = 0;
#pragma unroll 1
  for (int w = i; w < kFewSlice / 32; w += threads) shared->listed[w] = 0;
  if (i < kMaxGroup) {
    shared->shares[i] = 0;
    shared->norm[i] = -NegativeInfinity();
  }
  if (i == 0) {
    shared->num_mine = 0;
    shared->num_finalists = 0;
    shared->rescan = 0;
    if (plan.cluster_shift > 0) {
      ptx::BarrierInit(&shared->states_here, 1);
      ptx::BarrierInit(&shared->counts_here[0], 1);
      ptx::BarrierInit(&shared->counts_here[1], 1);
      ptx::BarrierInit(&shared->contenders_here, 1);
      ptx::BarrierInitFence();
      for (uint64_t& here : shared->counts_here)
        ptx::BarrierExpect(&here, static_cast<uint32_t>(plan.cluster()) * kBins * 4);
    }
  }
  __syncthreads();
  if (plan.cluster_shift > 0) ptx::ClusterArrive();
}

// Grid: (rank, KV head, sequence). kListed: `args` has the candidates that the first select listed,
// and `lists` their shares.
template <bool kListed>
__global__ void __launch_bounds__(kFewThreads, 1)
    SelectFewKernel(const __grid_constant__ SelectArgs args, const __grid_constant__ Lists lists,
                    const __grid_constant__ FewPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* shared = reinterpret_cast<FewShared*>(memory);
  InitialiseFew(plan, shared);
  AwaitParameters(args);
  AwaitParameters(lists);
  AwaitParameters(plan);
  const float mean = MeanOf(args);
  Few few = MakeFew(plan, memory);
  Before before;
  if constexpr (kListed) {
    before = ReadCandidates(args, lists, plan, &few, shared);
  } else {
    ReadPages(args, plan, &few, shared);
  }
  Keys own;
  own.first = few.first;
  own.at = static_cast<int>(threadIdx.x) * kQuad;
  LetSuccessorStart();  // attend asks for what is older before it waits
  FindNorms<kListed>(args, plan, few, before, shared);
  ScoreOwn<kListed>(args, few, plan.zero, shared, &own);
  __syncthreads();
  const Cut cut = FindFewCut(args, plan, few, own, shared);
  uint32_t chosen = 0;
  if (cut.count != 0) {
    SpreadContenders(plan, own, cut, shared);
    FindWeakest(cut, shared);
    chosen =
        WriteFew<kListed>(few, own, NumLower(cut, *shared), OutOf(args, lists, few.row), shared);
  }
  FinishRow(args, lists, few.row, cut.count, shared->weakest, mean,
            few.rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x),
            plan.cluster() * static_cast<int>(blockDim.x));
  if (!kListed && lists.candidates != nullptr)
    SumShares(args, lists, plan, few, own, chosen, shared);
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_FEW_RANK_CUH_
