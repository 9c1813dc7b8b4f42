// Select among few pages, or candidates: every CTA of a small cluster has a slice of the row's
// values in shared memory, and scores every page of it.
//
// A row of some thousand pages costs latency, not bytes. So there are as few steps as can be that
// wait for each other: values and states; norms; scores, counted by bins; the bin of the K-th; its
// pages; the weakest page chosen; the list. Between two of them stands one barrier, or one exchange
// between the CTAs: states, counts, the pages of that bin. States, norms and scores are those of
// the other kernels bit for bit (select_scan.cuh, select_keys.cuh). select_few_rank.cuh has the
// second half. Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_FEW_CUH_
#define LOCKS_KVD_KERNELS_SELECT_FEW_CUH_

#include "kernels/launch.cuh"
#include "kernels/select_lists.cuh"
#include "kernels/select_scan.cuh"

namespace kvd::select {

constexpr int kFewThreads = 1024;               // of a CTA at most
constexpr int kFewSlice = kFewThreads * kQuad;  // pages of a CTA at most
constexpr int kFewValues = 16384;               // of a CTA at most: 64 KiB
constexpr int kFewContenders = 1024;            // pages whose pairs all CTAs get
constexpr int kFinalists = 128;                 // of these, those that are compared with each other
constexpr int kFewCluster = 8;
constexpr int kFewPages = kMaxPieces
                          << kPieceShift;  // of a row at most, so that its pieces are the smallest

// How SelectFewKernel is laid out; made on the host.
struct FewPlan {
  int cluster_shift;  // log2 of the CTAs a row
  int most;           // pages, or candidates, of a CTA at most: whole pieces
  int guess;          // of a CTA if the row is about as long as can be: read before that is known
  // Byte offsets in shared memory:
  int received;  // uint32 [2][cluster][kBins], from all, unless a CTA is alone
  int states;    // State [G][kMaxPieces], from all
  int pages;     // int32 [most], of candidates
  int values;    // float [G][most]
  int end;
  float zero;  // of the bins' depths
  __host__ __device__ int cluster() const { return 1 << cluster_shift; }
};

// Shared memory of a CTA; SelectManyKernel's too. What the CTAs of a cluster write into each other
// is marked "from all".
struct FewShared {
  uint64_t states_here, counts_here[2], contenders_here;  // barriers of what comes from all
  alignas(16) uint32_t counts[kBins];
  uint32_t low_keys[kBins];
  uint64_t contenders[kFewContenders];  // from all
  uint64_t finalists[kFinalists];
  uint32_t listed[kFewSlice / 32];  // bitset of the slice's candidates, if there are lists
  uint32_t shares[kMaxGroup];
  alignas(16) float norm[kMaxGroup];  // what is taken off a head's lse; +inf after the last head
  uint32_t peaks[kMaxGroup];          // select_many.cuh
  uint32_t warp_count[kFewThreads / 32];
  uint32_t lower[kBins + 1];  // pages of CTAs of lower rank in better bins
  uint32_t rescan;            // bits of heads
  uint32_t num_mine;
  uint32_t num_finalists;
  uint32_t num_lower;  // select_many.cuh
  Found found;
  uint64_t weakest;  // the pair of the weakest page chosen
};

// A CTA's slice: of a row's pages, or of its list of candidates. Numbers count from the slice's
// first.
struct Few {
  Row row;
  int rank;
  int num;     // in the whole row or list
  int first;   // of the row or list
  int slice;   // of a CTA; of the last ones less, or nothing
  int stride;  // between heads in `values`
  uint32_t* received;
  State* states;
  int32_t* pages;  // of candidates
  float* values;
  __device__ __forceinline__ int own() const { return min(num - first, slice); }  // may be below 0
};

__device__ __forceinline__ Few MakeFew(const FewPlan& plan, unsigned char* memory) {
  Few few;
  few.rank = static_cast<int>(blockIdx.x);
  few.stride = plan.most;
  few.received = reinterpret_cast<uint32_t*>(memory + plan.received);
  few.states = reinterpret_cast<State*>(memory + plan.states);
  few.pages = reinterpret_cast<int32_t*>(memory + plan.pages);
  few.values = reinterpret_cast<float*>(memory + plan.values);
  return few;
}

__host__ __device__ inline int FewPieces(int num) {
  return (num + (1 << kPieceShift) - 1) >> kPieceShift;
}
// A CTA's part of so many pieces, in pages.
__host__ __device__ inline int SliceOf(int pieces, int cluster_shift) {
  return (pieces + (1 << cluster_shift) - 1) >> cluster_shift << kPieceShift;
}
__device__ __forceinline__ void SetLength(const FewPlan& plan, int num, Few* few) {
  few->num = num;
  few->slice = SliceOf(FewPieces(num), plan.cluster_shift);
  few->first = few->rank * few->slice;
}

// --- values and states ---------------------------------------------------------------------------

// A (head, piece) of the slice, a warp's work; heads run fastest, so that a short row is spread
// over all warps.
struct FewTask {
  int head, piece;
};
__device__ __forceinline__ FewTask TaskOf(uint32_t task, int group) {
  const auto heads = static_cast<uint32_t>(group);
  return {static_cast<int>(task % heads), static_cast<int>(task / heads)};
}

// The first page of a lane in a piece.
__device__ __forceinline__ int LanePage(int piece) {
  return (piece << kPieceShift) + kQuad * (static_cast<int>(threadIdx.x) % 32);
}

// A lane's quads of a piece, as far as they are before `end`.
__device__ __forceinline__ void ReadPiece(const float* values, int piece, int end,
                                          float4 (&x)[kRuns]) {
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int page = LanePage(piece) + i * kRun;
    x[i] = page < end ? *reinterpret_cast<const float4*>(values + page) : float4{0, 0, 0, 0};
  }
}

// Puts -inf from `end` on, leaves the values in shared memory and gives the piece's state.
__device__ __forceinline__ State KeepPiece(const SelectArgs& args, int piece, int end,
                                           float4 (&x)[kRuns], float* values) {
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int page = LanePage(piece) + i * kRun, left = end - page;
    x[i].x = left > 0 ? x[i].x : NegativeInfinity();
    x[i].y = left > 1 ? x[i].y : NegativeInfinity();
    x[i].z = left > 2 ? x[i].z : NegativeInfinity();
    x[i].w = left > 3 ? x[i].w : NegativeInfinity();
    *reinterpret_cast<float4*>(values + page) = x[i];
  }
  const State empty = {NegativeInfinity(), 0};
  State state = MergeLanes(Add(empty, x));
  if (isnan(state.sum)) {
    float4 clean[kRuns] = {x[0], x[1], x[2], x[3]};
    const int num_faults = DropNaNs(clean);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) x[i] = clean[i];
    state = MergeLanes(Add(empty, x));
    if (num_faults != 0 && args.num_faults != nullptr)
      atomicAdd(reinterpret_cast<unsigned long long*>(args.num_faults),
                static_cast<unsigned long long>(num_faults));
  }
  return state;
}

// Keeps the slice's values and sends all CTAs its states. `x`: the values of the warp's first task;
// `from`: head 0 of the slice, heads `stride` apart. REQUIRES: all CTAs of the cluster run.
__device__ __forceinline__ void KeepSlice(const SelectArgs& args, const FewPlan& plan,
                                          const Few& few, const float* from, int64_t stride,
                                          float4 (&x)[kRuns], FewShared* shared) {
  const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_piece = few.first >> kPieceShift;
  const bool alone = plan.cluster_shift == 0;
  FewTask task = TaskOf(threadIdx.x / 32, args.group);
  const FewTask step = TaskOf(static_cast<uint32_t>(warps), args.group);
  const int end = few.own();
#pragma unroll 1
  while ((task.piece << kPieceShift) < end) {
    const State state = KeepPiece(args, task.piece, end, x, few.values + task.head * few.stride);
    const uint64_t bits =
        static_cast<uint64_t>(__float_as_uint(state.sum)) << 32 | __float_as_uint(state.max);
    auto* out =
        reinterpret_cast<uint64_t*>(few.states + task.head * kMaxPieces + first_piece + task.piece);
    if (lane < plan.cluster()) SendTo(alone, lane, out, bits, &shared->states_here);
    task.head += step.head;
    task.piece += step.piece;
    if (task.head >= args.group) {
      task.head -= args.group;
      ++task.piece;
    }
    if ((task.piece << kPieceShift) < end) ReadPiece(from + task.head * stride, task.piece, end, x);
  }
}

// The slice of a row. The first values are asked for before num_pages is there: they are in memory
// up to lse_stride.
__device__ __forceinline__ void ReadPages(const SelectArgs& args, const FewPlan& plan, Few* few,
                                          FewShared* shared) {
  const auto kv_head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z);
  const int64_t index = int64_t{sequence} * args.num_kv_heads + kv_head;
  const float* lse = args.lse + index * args.group * args.lse_stride;
  const FewTask task = TaskOf(threadIdx.x / 32, args.group);
  const int guess = few->rank * plan.guess;
  WaitForPredecessor();
  float4 x[kRuns];
  ReadPiece(lse + task.head * args.lse_stride + guess, task.piece,
            min(static_cast<int>(args.lse_stride) - guess, plan.guess), x);
  few->row = MakeRow(args, sequence, kv_head, args.num_pages[sequence]);
  SetLength(plan, few->row.num_pages, few);
  lse += few->first;
  if (few->first != guess || few->slice > plan.guess)
    ReadPiece(lse + task.head * args.lse_stride, task.piece, few->own(), x);
  if (args.max_candidates > 0) {
    const int32_t* list = args.candidates + few->row.index * args.max_candidates;
    const int num = args.num_candidates[few->row.index];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < num; i += static_cast<int>(blockDim.x)) {
      const int page = list[i] - few->first;
      if (page >= 0 && page < few->slice) atomicOr(&shared->listed[page / 32], 1u << (page % 32));
    }
  }
  if (plan.cluster_shift > 0) ptx::ClusterWait();
  KeepSlice(args, plan, *few, lse, args.lse_stride, x, shared);
}

// What a warp needs of its head's norm before the candidates were refined.
struct Before {
  float norm = 0;  // what was taken off a head's lse
  float rest = 0;  // its part that is not of candidates
};

// The slice of a row's candidates, gathered, kQuad of a thread at most. Gives the warp's head's
// norm as it was. The list is asked for before its length is there.
__device__ __forceinline__ Before ReadCandidates(const SelectArgs& args, const Lists& lists,
                                                 const FewPlan& plan, Few* few, FewShared* shared) {
  const auto kv_head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z);
  const int64_t index = int64_t{sequence} * args.num_kv_heads + kv_head;
  const int32_t* list = args.candidates + index * args.max_candidates;
  const FewTask task = TaskOf(threadIdx.x / 32, args.group);
  const int guess = few->rank * plan.guess;
  int page[kQuad];
  const auto read = [&](int first) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const int i = first + static_cast<int>(threadIdx.x + k * blockDim.x);
      page[k] = i < args.max_candidates ? list[i] : 0;
    }
  };
  WaitForPredecessor();
  read(guess);
  SetLength(plan, args.num_candidates[index], few);
  few->row = MakeRow(args, sequence, kv_head, args.num_pages[sequence]);
  if (few->first != guess) read(few->first);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    const int i = static_cast<int>(threadIdx.x + k * blockDim.x);
    if (i >= few->own()) continue;
    few->pages[i] = page[k];
#pragma unroll 1
    for (int g = 0; g < args.group; ++g)
      ptx::AsyncCopy4(ptx::SharedAddress(few->values + g * few->stride + i),
                      few->row.lse + g * args.lse_stride + page[k]);
  }
  ptx::AsyncCommit();
  Before before;
  if (const auto g = static_cast<int>(threadIdx.x) / 32; g < args.group)
    before = {lists.norms[index * args.group + g], RestOf(lists, index * args.group + g)};
  ptx::AsyncWait<0>();
  if (plan.cluster_shift > 0) ptx::ClusterWait();
  __syncthreads();
  float4 x[kRuns];
  ReadPiece(few->values + task.head * few->stride, task.piece, few->own(), x);
  KeepSlice(args, plan, *few, few->values, few->stride, x, shared);
  return before;
}

// --- norms ---------------------------------------------------------------------------------------

// Z_g of a row of which only the candidates' values have changed, from their state; notes the head
// where too little is left of what it was.
__device__ __forceinline__ float NormAfterRefine(const Before& before, const State& state, int g,
                                                 FewShared* shared) {
  if (before.norm == -NegativeInfinity()) return NormOf(state);
  const float max = fmaxf(before.norm, state.max), whole = ptx::Exp2((before.norm - max) * kLog2e);
  const float sum = fmaf(state.sum, ptx::Exp2((state.max - max) * kLog2e), before.rest * whole);
  if (sum < kLeastKept * whole && threadIdx.x % 32 == 0) atomicOr(&shared->rescan, 1u << g);
  return max + logf(sum);
}

__device__ __forceinline__ void SetNorm(const SelectArgs& args, const Few& few, int g, float norm,
                                        FewShared* shared) {
  if (threadIdx.x % 32 != 0) return;
  shared->norm[g] = Offset(norm);
  if (few.rank == 0) args.log_norm[few.row.index * args.group + g] = norm;
}

// Reads the whole row of the heads that were noted, by every CTA for itself.
__device__ __forceinline__ void Rescan(const SelectArgs& args, const Few& few, FewShared* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int g = 0; g < args.group; ++g) {
    if ((shared->rescan >> g & 1) == 0) continue;
#pragma unroll 1
    for (int piece = warp; piece < few.row.num_pieces; piece += static_cast<int>(blockDim.x) / 32) {
      float4 x[kRuns];
      few.states[piece] =
          ScanPiece(few.row, few.row.lse + g * args.lse_stride, piece, false, x,
                    nullptr /* NaNs were counted */, [](int, const float4(&)[kRuns]) {});
    }
    __syncthreads();
    if (warp == 0)
      SetNorm(args, few, g, NormOf(MergePieces(few.states, few.row.num_pieces)), shared);
    __syncthreads();
  }
}

// The weakest keys of all bins, by the warps that have no head's norm to find, if there are any.
__device__ __forceinline__ void FindLowKeys(int group, float zero, FewShared* shared) {
  const auto threads = static_cast<int>(blockDim.x), busy = threads > 32 * group ? 32 * group : 0;
  if (static_cast<int>(threadIdx.x) < busy) return;
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x) - busy; b < kBins; b += threads - busy)
    shared->low_keys[b] = LowKeyOf(b, zero);
}

// Norms of the heads, a warp each.
template <bool kListed>
__device__ __forceinline__ void FindNorms(const SelectArgs& args, const FewPlan& plan,
                                          const Few& few, const Before& before, FewShared* shared) {
  const int num_pieces = FewPieces(few.num), g = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0)
    ExpectFromAll(plan.cluster_shift == 0, &shared->states_here,
                  static_cast<uint32_t>(num_pieces * args.group) * 8);
  WaitForAll(plan.cluster_shift == 0, &shared->states_here, 0);
  FindLowKeys(args.group, plan.zero, shared);
  if (g < args.group) {
    const State state = MergePieces(few.states + g * kMaxPieces, num_pieces);
    SetNorm(args, few, g, kListed ? NormAfterRefine(before, state, g, shared) : NormOf(state),
            shared);
  }
  __syncthreads();
  if constexpr (kListed)
    if (shared->rescan != 0) Rescan(args, few, shared);
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_FEW_CUH_
