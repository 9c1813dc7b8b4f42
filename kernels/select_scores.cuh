// Norms of the heads, and the scores of a slice's pages that can be among the best K.
//
// A page's score is at least its best head's share. So the K-th best share of groups' best pages bounds the K-th best
// score from below, and only groups are looked into whose best values of all heads together reach it. Device code
// only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_
#define LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_

#include "kernels/select_scan.cuh"
#include "kernels/select_slice.cuh"

namespace kvd::select {

// An unsigned integer of the same order; never 0.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const int bits = __float_as_int(x + 0.0f);  // -0 becomes 0
  return max(static_cast<uint32_t>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u))), 1u);
}
__device__ __forceinline__ float FromOrderedKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// --- norms -----------------------------------------------------------------------------------------

// A short row: makes the slice's states, for all CTAs, and its best values. REQUIRES: all CTAs of the cluster run.
__device__ inline void ScanSlice(const SelectArgs& args, const Tables& tables, const Plan& plan, const Slice& s,
                                 Shared* shared) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0)
    ExpectFromAll(plan.cluster == 1, &shared->states_here, static_cast<uint32_t>(s.row.num_pieces * args.group) * 8);
#pragma unroll 1
  for (int task = static_cast<int>(threadIdx.x) / 32; task < s.own_pieces * args.group; task += kWarps) {
    const int head = task / s.own_pieces, piece = task % s.own_pieces;
    const Piece found = ScanPiece(args, s.row, head, s.first_piece + piece);
    if (plan.heads != 0)
      PutBest(tables, found, s.best + head * plan.slice_groups + piece * tables.piece_groups());
    auto* out = reinterpret_cast<uint64_t*>(s.states + head * tables.max_pieces + s.first_piece + piece);
    const uint64_t bits =
        static_cast<uint64_t>(__float_as_uint(found.state.sum)) << 32 | __float_as_uint(found.state.max);
    if (lane < plan.cluster) SendTo(plan.cluster == 1, lane, out, bits, &shared->states_here);
  }
  WaitForAll(plan.cluster == 1, &shared->states_here, 0);
}

// Z_g from the states of all pieces, a warp a head, into shared->norm.
__device__ inline void MergeStates(const SelectArgs& args, const Tables& tables, const Plan& plan, const Slice& s,
                                   Shared* shared) {
  const int lane = threadIdx.x % 32, g = threadIdx.x / 32;
  if (g >= args.group) return;
  const State* states = plan.is_short ? s.states + g * tables.max_pieces
                                      : tables.states + (s.row.index * args.group + g) * tables.max_pieces;
  State all[kMaxPieces / 32];
  float max = NegativeInfinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxPieces / 32; ++i) {
    const int piece = 32 * i + lane;
    all[i] = piece < s.row.num_pieces ? states[piece] : State{NegativeInfinity(), 0};
  }
#pragma unroll
  for (const State& state : all) max = fmaxf(max, state.max);
  max = WarpMax(max);
  const float shift = max == NegativeInfinity() ? 0.0f : max;
#pragma unroll
  for (const State& state : all) sum += state.sum * ptx::Exp2((state.max - shift) * kLog2e);
  sum = WarpSum(sum);
  const float norm = max == NegativeInfinity() ? max : max + logf(sum);
  if (lane == 0) {
    shared->norm[g] = max == NegativeInfinity() ? -max : norm;
    if (s.rank == 0) args.log_norm[s.row.index * args.group + g] = norm;
  }
}

// kPeak: puts the maxima over sinks and selectable pages in place of the norms, a warp a head; for comparison only, so
// not tuned. REQUIRES: no short row.
__device__ __noinline__ void TakePeaks(const SelectArgs& args, const Tables& tables, const Slice& s, Shared* shared) {
  const int lane = threadIdx.x % 32, g = threadIdx.x / 32;
  if (g >= args.group) return;
  float peak = NegativeInfinity();
  const float* best = tables.best + (s.row.index * args.group + g) * s.head_stride;
#pragma unroll 1
  for (int i = lane; i < s.row.num_pieces * tables.piece_groups(); i += 32) peak = fmaxf(peak, best[i]);
#pragma unroll 1
  for (int p = lane; p < s.row.first_selectable; p += 32) peak = fmaxf(peak, s.row.lse[g * args.lse_stride + p]);
  peak = WarpMax(peak);
  if (lane == 0) shared->norm[g] = peak == NegativeInfinity() ? -peak : peak;
}

// --- bounds ----------------------------------------------------------------------------------------

// 32 bins for each octave of -score from 1 to 240, the best bin first; the last takes all that is worse.
constexpr int kBinShift = 18;
constexpr int kFirstBin = 127 << (23 - kBinShift);
constexpr int kLastBin = kBins - 1;
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

constexpr float kLowest = -3.402823466e38f;

// Four neighbours' best shares and scores, ln sum_g exp(x_g - norm_g) in the order of the heads.
struct Scores {
  float top[kQuad];
  float score[kQuad];
};

// `values`: of head 0, those of a head `stride` after the last's. NaN counts as -inf.
__device__ __forceinline__ Scores ScoresOf(const SelectArgs& args, const Shared& shared, const float* values,
                                           int64_t stride) {
  constexpr int kHeads = 4;  // at a time
  Scores s = {{kLowest, kLowest, kLowest, kLowest}, {0, 0, 0, 0}};
#pragma unroll 1
  for (int first = 0; first < args.group; first += kHeads) {
    float x[kHeads][kQuad];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int g = min(first + h, args.group - 1);
      const float4 v = *reinterpret_cast<const float4*>(values + g * stride);
      const float norm = first + h < args.group ? shared.norm[g] : -NegativeInfinity();
      x[h][0] = fmaxf(v.x - norm, NegativeInfinity());
      x[h][1] = fmaxf(v.y - norm, NegativeInfinity());
      x[h][2] = fmaxf(v.z - norm, NegativeInfinity());
      x[h][3] = fmaxf(v.w - norm, NegativeInfinity());
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float top = fmaxf(fmaxf(fmaxf(s.top[i], x[0][i]), fmaxf(x[1][i], x[2][i])), x[3][i]);
      s.score[i] *= ptx::Exp2((s.top[i] - top) * kLog2e);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) s.score[i] += ptx::Exp2((x[h][i] - top) * kLog2e);
      s.top[i] = top;
    }
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    // The sum is 0 or at least 1: no rounding puts a score below its top, on which the bound relies.
    const float log2 = ptx::Log2(s.score[i]);
    s.score[i] = fmaf(s.score[i] >= 1 ? fmaxf(log2, 0) : log2, kLn2, s.top[i]);
  }
  return s;
}

// Of the slice's groups: counts the bins of the best shares, which K pages reach; and leaves the bins of what no page
// of the group exceeds, the score that a page with the best values of all heads would have.
__device__ inline void BinGroups(const SelectArgs& args, const Plan& plan, const Slice& s, Shared* shared) {
  const float* values = plan.heads != 0 ? s.best : s.table;
  const int64_t stride = plan.heads != 0 ? int64_t{plan.slice_groups} : s.head_stride;
#pragma unroll 1
  for (int e = kQuad * static_cast<int>(threadIdx.x); e < s.own_groups; e += kQuad * kThreads) {
    const Scores scores = ScoresOf(args, *shared, values + e, stride);
    uint32_t bins = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      atomicAdd(&shared->counts[BinOf(scores.top[i])], 1u);
      // A little more: scores are rounded.
      const float score = fmaxf(scores.score[i], kLowest);
      bins |= static_cast<uint32_t>(BinOf(score + fmaf(fabsf(score), 1e-4f, 1e-3f))) << (8 * i);
    }
    *reinterpret_cast<uint32_t*>(s.bins + e) = bins;
  }
}

// The last bin with pages that can be chosen, when found.need pages of the row have shares, and so scores, in found.bin
// or better. Groups that hold no page that may be chosen are counted in the last bin, which bounds nothing.
__device__ __forceinline__ int LastBinThatMatters(const SelectArgs& args, const Found& found) {
  return found.bin < 0 || found.need < static_cast<uint32_t>(args.num_select) ? kLastBin : found.bin;
}

// --- scores ----------------------------------------------------------------------------------------

// A quad of the passing groups: a lane's quads of a piece are one group, a run of 128 pages after the other, or four.
struct Quad {
  int page = 0;
  uint32_t allowed = 0;
};
__device__ __forceinline__ Quad QuadAt(const Tables& tables, const Slice& s, int shift, int i) {
  const int group = s.passing[i >> shift], part = i & ((1 << shift) - 1);
  const int piece = group >> tables.group_shift, lane = group % 32;
  const int run = tables.is_fine() ? part * kRuns + (group & (tables.piece_groups() - 1)) / 32 : part;
  Quad quad;
  quad.page = ((s.first_piece + piece) << s.row.piece_shift) + run * kRun + lane * kQuad;
  quad.allowed = AllowedOf(s.row, quad.page);
  return quad;
}

// Visit(page, which, scores) for all quads with pages of scores in bin `last` or better, those that are bits of
// `which`, by threads: of the candidates, or of the passing groups. `page`: the quad's first.
template <class Visit>
__device__ __forceinline__ void ForEachScore(const SelectArgs& args, const Tables& tables, const Slice& s,
                                             const Shared& shared, int last, Visit visit) {
  const bool listed = args.max_candidates > 0;
  const int32_t* list = args.candidates + s.row.index * args.max_candidates;
  const int shift = s.row.piece_shift - kPieceShift + (tables.is_fine() ? 0 : 2);
  const int num = listed ? args.num_candidates[s.row.index] : static_cast<int>(shared.num_passing) << shift;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num; i += kThreads) {
    Quad quad;
    if (listed) {
      const int page = list[i];
      if (page < s.first_page || page >= s.first_page + s.own_pages) continue;
      quad.page = page & ~(kQuad - 1);
      quad.allowed = AllowedOf(s.row, quad.page) & (1u << (page % kQuad));
    } else {
      quad = QuadAt(tables, s, shift, i);
    }
    if (quad.allowed == 0) continue;
    const Scores scores = ScoresOf(args, shared, s.row.lse + quad.page, args.lse_stride);
    uint32_t which = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) which |= BinOf(scores.score[k]) <= last ? 1u << k : 0;
    which &= quad.allowed;
    if (which != 0) visit(quad.page, which, scores);
  }
}

// Lists the groups whose bin is at most `last`.
__device__ inline void ListPassing(const Slice& s, int last, Shared* shared) {
  const uint32_t all_last = static_cast<uint32_t>(last) * 0x01010101u;
#pragma unroll 1
  for (int e = 4 * static_cast<int>(threadIdx.x); e < s.own_groups; e += 4 * kThreads) {
    uint32_t left = __vcmpleu4(*reinterpret_cast<const uint32_t*>(s.bins + e), all_last);
    if (left == 0) continue;
    uint32_t at = atomicAdd(&shared->num_passing, static_cast<uint32_t>(__popc(left)) / 8);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if ((left >> (8 * i) & 1) != 0) s.passing[at++] = static_cast<uint16_t>(e + i);
  }
}

// Gives the pages that matter their scores: lists them with their keys, in any order and as far as the list goes, and
// counts the scores' bins.
__device__ inline void ScorePages(const SelectArgs& args, const Tables& tables, const Plan& plan, const Slice& s,
                                  int last, Shared* shared) {
  ForEachScore(args, tables, s, *shared, last, [&](int page, uint32_t which, const Scores& scores) {
    uint32_t at = atomicAdd(&shared->num_listed, static_cast<uint32_t>(__popc(which)));
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      if ((which >> k & 1) == 0) continue;
      atomicAdd(&shared->counts[BinOf(scores.score[k])], 1u);
      if (at < static_cast<uint32_t>(plan.list_size)) {
        s.list[at] = static_cast<uint16_t>(page + k - s.first_page);
        s.keys[at] = OrderedKey(scores.score[k]);
      }
      ++at;
    }
  });
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_
