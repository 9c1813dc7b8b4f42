// Norms of the heads, and the scores of a slice's pages that can be among the best K.
//
// A page's score is at least its best head's share. So the K-th best share of groups' best pages bounds the K-th best
// score from below, and only groups are looked into whose best values of all heads together reach it. Device code
// only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_
#define LOCKS_KVD_KERNELS_SELECT_SCORES_CUH_

#include "kernels/select_keys.cuh"
#include "kernels/select_scan.cuh"
#include "kernels/select_slice.cuh"

namespace kvd::select {

// --- norms -----------------------------------------------------------------------------------------

// Z_g from the states of all pieces, a warp a head, into shared->norm.
__device__ inline void FindNorms(const SelectArgs& args, const Tables& tables, const Slice& s, Shared* shared) {
  const int lane = threadIdx.x % 32, g = threadIdx.x / 32;
  if (g >= args.group) return;
  const State* states = tables.states + (s.row.index * args.group + g) * tables.max_pieces;
  const float norm = NormOf(MergePieces(states, s.row.num_pieces));
  if (lane == 0) {
    shared->norm[g] = Offset(norm);
    if (s.rank == 0) args.log_norm[s.row.index * args.group + g] = norm;
  }
}

// kPeak: puts the maxima over sinks and selectable pages in place of the norms, a warp a head; for comparison only, so
// not tuned.
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
  if (lane == 0) shared->norm[g] = Offset(peak);
}

// --- bounds ----------------------------------------------------------------------------------------

// Of the slice's groups: counts the bins of the best shares, which K pages reach; and leaves the bins of what no page
// of the group exceeds, the score that a page with the best values of all heads would have.
__device__ inline void BinGroups(const SelectArgs& args, const Plan& plan, const Slice& s, Shared* shared) {
  const float* values = plan.heads != 0 ? s.best : s.table;
  const int64_t stride = plan.heads != 0 ? int64_t{plan.slice_groups} : s.head_stride;
#pragma unroll 1
  for (int e = kQuad * static_cast<int>(threadIdx.x); e < s.own_groups; e += kQuad * kThreads) {
    const Scores scores = ScoresOf(args.group, shared->norm, values + e, stride);
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
    const Scores scores = ScoresOf(args.group, shared.norm, s.row.lse + quad.page, args.lse_stride);
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
