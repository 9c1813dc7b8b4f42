// Select among many pages: a team of CTAs a row, up to the whole GPU for a few rows, has the row's
// values in shared memory, scores every page and agrees on the weakest that is chosen.
//
// The steps are those of select_few.cuh, but a team is too large for a cluster: CTAs tell each
// other through memory. Each word that one writes for the others is never 0 once it is written, and
// holds all it stands for: who waits for it reads it until it is not 0, and no order between words
// matters. That takes half the time of a barrier and a read behind it. A row has two sets of such
// words, which launches use in turn: a launch clears the set that the last one used, so a set is
// all 0 when a launch begins. Whose turn it is, every CTA of a team reads before it writes any
// word, and the first changes it when it has had the counts of all. CTAs that wait for each other
// must all run: a launch with teams is cooperative. select_many_rank.cuh has the second half.
// Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_MANY_CUH_
#define LOCKS_KVD_KERNELS_SELECT_MANY_CUH_

#include "kernels/launch.cuh"
#include "kernels/select_few_rank.cuh"
#include "kernels/select_lists.cuh"
#include "kernels/select_scan.cuh"

namespace kvd::select {

constexpr int kManyThreads = 1024;
constexpr int kManyWarps = kManyThreads / 32;
constexpr int kCountWords = kBins / 2;                  // of a CTA's counts: two a word
constexpr int kCountSums = kManyThreads / kCountWords;  // sums over CTAs that are made side by side
constexpr uint64_t kCounted = uint64_t{1} << 63;        // in every word of counts
// A pair has 52 bits; the scores' bins leave them all at worst, each further count 8 fewer, and 4
// are few enough.
constexpr int kLevels = 1 + (32 + kPageBits - 4) / 8;
static_assert(1 << 4 <= kFewContenders && kMaxPages <= 1 << 30 && kManyWarps >= kMaxGroup &&
              kManyThreads >= kBins);

// How SelectManyKernel is laid out; made on the host. `values` and `keys` may be one place: a
// page's key then takes the place of its first head's value.
struct ManyPlan {
  int team;   // CTAs a row
  int guess;  // pieces of a CTA, and log2 of their pages, if a row is about as long as can be
  int guess_shift;
  int kept;       // pages of a slice whose values stay in shared memory: whole runs
  int slice;      // pages of the longest slice that lse_stride allows
  int near_keys;  // pages of a slice whose keys do: whole runs
  // Byte offsets in shared memory:
  int received;  // uint32 [2][kCountSums][kBins], unless a CTA is alone
  int states;    // State [G][kMaxPieces]
  int chosen;    // bitset over the slice's pages
  int values;    // float [G][kept]
  int keys;      // uint32 [near_keys]
  int end;
  float zero;          // of the bins' depths
  int64_t row_words;   // of a row, both sets; scratch:
  uint64_t* words;     // [rows, row_words]
  uint32_t* turns;     // [rows] which set is the next launch's
  uint32_t* far_keys;  // [rows, lse_stride] of pages whose keys find no room in shared memory
};

// A CTA's slice of a row: consecutive pieces. Offsets count pages from the slice's first. No
// function that is called gets it by reference: it would stand in memory, and be read from there
// everywhere.
struct Many {
  Row row;
  int first_piece, own_pieces;
  int first_page, own_pages;
  uint32_t turn;
  uint64_t* words;  // of this launch's set
  unsigned char* memory;
  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x); }
};

// A set's words: states [G][kMaxPieces], counts [kLevels][team][kCountWords], contenders
// [kFewContenders].
__host__ __device__ inline int NumWords(int group, int team) {
  return group * kMaxPieces + kLevels * team * kCountWords + kFewContenders;
}
__device__ __forceinline__ uint64_t* CountsOf(const SelectArgs& args, const ManyPlan& plan,
                                              const Many& many, int level, int rank) {
  return many.words + args.group * kMaxPieces + (level * plan.team + rank) * kCountWords;
}
__device__ __forceinline__ uint64_t* ContendersOf(const SelectArgs& args, const ManyPlan& plan,
                                                  const Many& many) {
  return CountsOf(args, plan, many, kLevels, 0);
}

// What a CTA must know of its row before all else.
struct Start {
  uint32_t turn;
  int num_pages;
};
__device__ __forceinline__ Start ReadStart(const SelectArgs& args, const ManyPlan& plan) {
  Start start = {0, 0};
  if (plan.team > 1)
    start.turn = __ldcg(plan.turns + int64_t{blockIdx.z} * args.num_kv_heads + blockIdx.y);
  start.num_pages = args.num_pages[blockIdx.z];
  asm volatile("" ::: "memory");  // on their way before what is read ahead
  return start;
}

// Grid: (rank, KV head, sequence).
__device__ __forceinline__ Many MakeMany(const SelectArgs& args, const ManyPlan& plan,
                                         const Start& start, unsigned char* memory) {
  Many many;
  many.memory = memory;
  many.turn = start.turn & 1;
  many.row =
      MakeRow(args, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), start.num_pages);
  const auto each = static_cast<int>(static_cast<unsigned>(many.row.num_pieces + plan.team - 1) /
                                     static_cast<unsigned>(plan.team));
  many.first_piece = min(many.rank() * each, many.row.num_pieces);
  many.own_pieces = min(each, many.row.num_pieces - many.first_piece);
  many.first_page = many.first_piece << many.row.piece_shift;
  many.own_pages =
      max(0, min(many.own_pieces << many.row.piece_shift, many.row.num_pages - many.first_page));
  many.words = plan.words + many.row.index * plan.row_words +
               (many.turn == 0 ? 0 : NumWords(args.group, plan.team));
  return many;
}
__device__ __forceinline__ uint32_t* ChosenOf(const ManyPlan& plan, const Many& many) {
  return reinterpret_cast<uint32_t*>(many.memory + plan.chosen);
}
__device__ __forceinline__ State* StatesOf(const ManyPlan& plan, const Many& many, int head) {
  return reinterpret_cast<State*>(many.memory + plan.states) + head * kMaxPieces;
}

// --- words ---------------------------------------------------------------------------------------

__device__ __forceinline__ void PutWord(uint64_t* at, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}
__device__ __forceinline__ uint64_t SeeWord(const uint64_t* at) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}
// The word at `at`, of which `seen` was read last. A launch whose scratch was not as it must be
// ends in an error, after some ten seconds, rather than never.
__device__ __forceinline__ uint64_t AwaitWord(const uint64_t* at, uint64_t seen) {
  constexpr uint32_t kMostTries = 1u << 25;
#pragma unroll 1
  for (uint32_t tries = 0; seen == 0; ++tries) {
    if (tries == kMostTries) __trap();
    seen = SeeWord(at);
  }
  return seen;
}

// Clears the team's part of the set that the last launch used.
__device__ __forceinline__ void ClearLastSet(const SelectArgs& args, const ManyPlan& plan,
                                             const Many& many) {
  const int num = NumWords(args.group, plan.team);
  uint64_t* last = many.turn == 0 ? many.words + num : many.words - num;
#pragma unroll 1
  for (int i = many.rank() * kManyThreads + static_cast<int>(threadIdx.x); i < num;
       i += plan.team * kManyThreads)
    last[i] = 0;
}

// --- values, states, norms -----------------------------------------------------------------------

// A state as a word; not 0: a maximum of 0 comes with a sum of 1 at least.
__device__ __forceinline__ uint64_t WordOf(const State& state) {
  return static_cast<uint64_t>(__float_as_uint(state.sum)) << 32 | __float_as_uint(state.max);
}

// The first quads of the warp's first task if the row is about as long as can be: asked for before
// its length is there, they are in memory up to lse_stride. Returns the page that the slice then
// begins with.
__device__ __forceinline__ int ReadAhead(const SelectArgs& args, const ManyPlan& plan,
                                         float4 (&x)[kRuns]) {
  const int64_t index = int64_t{blockIdx.z} * args.num_kv_heads + blockIdx.y;
  const FewTask at = TaskOf(threadIdx.x / 32, args.group);
  const auto first = static_cast<int>(blockIdx.x) * plan.guess << plan.guess_shift;
  ReadQuads(args.lse + (index * args.group + at.head) * args.lse_stride,
            first + (at.piece << plan.guess_shift) + kQuad * static_cast<int>(threadIdx.x % 32),
            at.piece < plan.guess ? static_cast<int>(args.lse_stride) : 0, x);
  return first;
}

// Reads the slice: keeps what there is room for, and gives the team its pieces' states. `x`: what
// was read ahead, of a slice that begins with page `ahead`.
__device__ __forceinline__ void KeepSlice(const SelectArgs& args, const ManyPlan& plan,
                                          const Many& many, int ahead, float4 (&x)[kRuns]) {
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const bool right = many.first_page == ahead && many.row.piece_shift == plan.guess_shift;
#pragma unroll 1
  for (int task = warp; task < many.own_pieces * args.group; task += kManyWarps) {
    const FewTask at = TaskOf(static_cast<uint32_t>(task), args.group);
    const int piece = many.first_piece + at.piece;
    const bool read = right && task == warp && at.piece < plan.guess;
    float* values = reinterpret_cast<float*>(many.memory + plan.values) + at.head * plan.kept;
    const auto keep = [&](int first, const float4(&quads)[kRuns]) {
      const int offset = first - many.first_page;
#pragma unroll
      for (int i = 0; i < kRuns; ++i)
        if (offset + i * kRun < plan.kept)
          *reinterpret_cast<float4*>(values + offset + i * kRun) = quads[i];
    };
    const State state = ScanPiece(many.row, many.row.lse + at.head * args.lse_stride, piece, read,
                                  x, args.num_faults, keep);
    if (threadIdx.x % 32 != 0) continue;
    if (plan.team == 1) {
      StatesOf(plan, many, at.head)[piece] = state;
    } else {
      PutWord(many.words + at.head * kMaxPieces + piece, WordOf(state));
    }
  }
}

// Z_g from the states of all pieces, a warp a head, into shared->norm.
__device__ __forceinline__ void FindNorms(const SelectArgs& args, const ManyPlan& plan,
                                          const Many& many, FewShared* shared) {
  __syncthreads();  // the slice's values, and states of a CTA alone
  FindLowKeys(args.group, plan.zero, shared);
  const int g = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (g < args.group) {
    State* states = StatesOf(plan, many, g);
    if (plan.team > 1) {
      constexpr int kEachLane = kMaxPieces / 32;
      const uint64_t* from = many.words + g * kMaxPieces + lane;
      uint64_t word[kEachLane];
#pragma unroll
      for (int i = 0; i < kEachLane; ++i)
        word[i] = 32 * i + lane < many.row.num_pieces ? SeeWord(from + 32 * i) : 1;
#pragma unroll
      for (int i = 0; i < kEachLane; ++i) {
        word[i] = AwaitWord(from + 32 * i, word[i]);
        states[32 * i + lane] = {__uint_as_float(static_cast<uint32_t>(word[i])),
                                 __uint_as_float(static_cast<uint32_t>(word[i] >> 32))};
      }
      __syncwarp();
    }
    const float norm = NormOf(MergePieces(states, many.row.num_pieces));
    if (lane == 0) {
      shared->norm[g] = Offset(norm);
      if (many.rank() == 0) args.log_norm[many.row.index * args.group + g] = norm;
    }
  }
  __syncthreads();
}

// kPeak: puts the maxima over sinks and selectable pages in place of the norms. Every CTA reads the
// whole row: for comparison only, so not tuned.
__device__ __noinline__ void TakePeaks(const SelectArgs& args, int num_pages, uint32_t* peaks,
                                       float* norm) {
  const Row row =
      MakeRow(args, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), num_pages);
#pragma unroll 1
  for (int g = 0; g < args.group; ++g) {
    const float* lse = row.lse + g * args.lse_stride;
    float peak = NegativeInfinity();
#pragma unroll 2
    for (int page = kQuad * static_cast<int>(threadIdx.x); page < row.num_pages;
         page += kQuad * kManyThreads) {
      const uint32_t sinks = (1u << min(max(row.first_selectable - page, 0), kQuad)) - 1;
      peak = BestOf(__ldcg(reinterpret_cast<const float4*>(lse + page)),
                    AllowedOf(row, page) | sinks, peak);
    }
    peak = WarpMax(peak);
    if (threadIdx.x % 32 == 0) atomicMax(&peaks[g], OrderedKey(peak));
  }
  __syncthreads();
  const auto g = static_cast<int>(threadIdx.x);
  if (g < args.group) norm[g] = Offset(FromOrderedKey(peaks[g]));
  __syncthreads();
}

// --- scores --------------------------------------------------------------------------------------

// The keys of the quad at `offset` of the slice, in shared memory or not. The two ways part as
// branches, so that each uses its own kind of address; so below.
__device__ __forceinline__ uint32_t* FarKeys(const SelectArgs& args, const ManyPlan& plan,
                                             const Many& many) {
  return plan.far_keys + many.row.index * args.lse_stride + many.first_page;
}
__device__ __forceinline__ uint4 ReadKeys(const SelectArgs& args, const ManyPlan& plan,
                                          const Many& many, int offset) {
  if (offset < plan.near_keys)
    return *reinterpret_cast<const uint4*>(many.memory + plan.keys + offset * 4);
  return *reinterpret_cast<const uint4*>(FarKeys(args, plan, many) + offset);
}
__device__ __forceinline__ void PutKeys(const SelectArgs& args, const ManyPlan& plan,
                                        const Many& many, int offset, const uint4& keys) {
  if (offset < plan.near_keys) {
    *reinterpret_cast<uint4*>(many.memory + plan.keys + offset * 4) = keys;
  } else {
    *reinterpret_cast<uint4*>(FarKeys(args, plan, many) + offset) = keys;
  }
}

// The keys of the quad at `offset`, 0 for pages that are not `allowed`; counts the others' bins.
__device__ __forceinline__ uint4 ScoreQuad(const SelectArgs& args, const ManyPlan& plan,
                                           const Many& many, int offset, uint32_t allowed,
                                           FewShared* shared) {
  if (allowed == 0) return {0, 0, 0, 0};
  const Scores scores = ScoresOf(args.group, shared->norm, [&](int first) {
    if (offset < plan.kept)
      return ReadHeads(args.group, first,
                       reinterpret_cast<const float*>(many.memory + plan.values) + offset,
                       plan.kept);
    return ReadHeads(args.group, first, many.row.lse + many.first_page + offset, args.lse_stride);
  });
  uint32_t key[kQuad], *count[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    key[i] = OrderedKey(scores.score[i]);
    count[i] = &shared->counts[BinOf(scores.score[i], plan.zero)];
  }
  if (allowed == 15) {
#pragma unroll
    for (uint32_t* c : count) atomicAdd(c, 1u);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if ((allowed >> i & 1) != 0) {
        atomicAdd(count[i], 1u);
      } else {
        key[i] = 0;
      }
    }
  }
  return {key[0], key[1], key[2], key[3]};
}

// Gives the slice's pages their keys: all pages, or those of the list.
__device__ __forceinline__ void ScoreSlice(const SelectArgs& args, const ManyPlan& plan,
                                           const Many& many, FewShared* shared) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool listed = args.max_candidates > 0;
#pragma unroll 1
  for (int offset = kQuad * thread; offset < many.own_pages; offset += kQuad * kManyThreads) {
    const uint32_t allowed = listed ? 0 : AllowedOf(many.row, many.first_page + offset);
    PutKeys(args, plan, many, offset, ScoreQuad(args, plan, many, offset, allowed, shared));
  }
  if (!listed) return;
  __syncthreads();
  const int32_t* list = args.candidates + many.row.index * args.max_candidates;
  const int num = args.num_candidates[many.row.index];
#pragma unroll 1
  for (int i = thread; i < num; i += kManyThreads) {
    const int offset = list[i] - many.first_page, which = offset & (kQuad - 1),
              quad = offset - which;
    if (offset < 0 || offset >= many.own_pages) continue;
    const uint32_t allowed = AllowedOf(many.row, many.first_page + quad) & (1u << which);
    const uint4 keys = ScoreQuad(args, plan, many, quad, allowed, shared);  // all but one are 0
    const uint32_t key = keys.x | keys.y | keys.z | keys.w;
    if (quad < plan.near_keys) {
      reinterpret_cast<uint32_t*>(many.memory + plan.keys)[offset] = key;
    } else {
      FarKeys(args, plan, many)[offset] = key;
    }
  }
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_MANY_CUH_
