// Score, one KV head at a time, NumLanes() records at a time. The steps, in each lane
// (kernels/README.md):
//   z      = codes . q'                                      CoarseDots, ModeDots, CentroidDots
//   y_k    = scale * g_k * z_k                               FoldScales
//   center = scale * s_mu * (mu8 . q')                       FoldCentroid (coarse: 16 hi + 7.5 for
//   mu8) lse    = ln sum_t exp(f(center + sum_k C8[k][t] y_k))    PageLse (coarse: + .5 scale^2
//   |q'|^2 tau)
// Full scan, coarse scan and refinement are one loop over a list of pages: a page's bits cannot
// depend on which of them asked.
#include <algorithm>
#include <limits>

#include "kernels/check.h"
#include "kernels/rotate.h"
#include "kernels/score.h"
#include "kernels/simd.h"

namespace kvd::ref {
namespace {

constexpr int kLargestCoarseWords =
    static_cast<int>(MakeSummaryLayout(256, 32, 8).coarse_bytes) / 4;
constexpr int kLargestFineWords = static_cast<int>(MakeSummaryLayout(256, 32, 8).fine_bytes) / 4;

enum class Scan { kFull, kCoarse };

// One record in each lane.
struct Rows {
  const uint8_t* coarse[simd::kMaxLanes];
  const uint8_t* fine[simd::kMaxLanes];
};

// The working set of one KV head: 38 KiB at most, most of it in L1.
struct Workspace {
  SummaryLayout layout;
  uint16_t rotated[simd::kMaxGroup * simd::kMaxHeadDim];  // queries, where score rotates them
  simd::LaneQuery query;
  simd::LaneModes modes;
  const int32_t* bases[simd::kMaxRank];
  Rows rounds[3];
  Rows* now;    // one of them: records that are scored,
  Rows* ahead;  // and those that are scored two rounds later
  alignas(64) int32_t coarse[kLargestCoarseWords * simd::kMaxLanes];
  alignas(64) int32_t fine[kLargestFineWords * simd::kMaxLanes];
  alignas(64) float z[simd::kMaxRank * simd::kMaxGroup * simd::kMaxLanes];
  alignas(64) float lse[simd::kMaxGroup * simd::kMaxLanes];
};

void CheckArgs(const ScoreArgs& a) {
  const int d = a.head_dim;
  KVD_CHECK(d == 64 || d == 96 || d == 128 || d == 256);
  KVD_CHECK(a.page_tokens == 16 || a.page_tokens == 32);
  KVD_CHECK(a.rank == 4 || a.rank == 8);
  KVD_CHECK(a.group >= 1 && a.group <= simd::kMaxGroup);
}

// Lane array of field `f` of either part.
const int32_t* Words(const Workspace& w, CoarseField f, int num_lanes) {
  return w.coarse + static_cast<int>(w.layout.coarse[f] / 4) * num_lanes;
}
const int32_t* Words(const Workspace& w, FineField f, int num_lanes) {
  return w.fine + static_cast<int>(w.layout.fine[f] / 4) * num_lanes;
}

// Where the modes' bases and coefficients stand, the coarse ones first.
void FindModes(const ScoreArgs& a, int num_lanes, int num_modes, Workspace* w) {
  const int row = a.head_dim / 8 * num_lanes;
  const int tokens = a.page_tokens / 4 * num_lanes;
  for (int k = 0; k < num_modes; ++k) {
    const bool coarse = k < kCoarseModes;
    const int i = coarse ? k : k - kCoarseModes;
    w->bases[k] =
        (coarse ? Words(*w, kCoarseBasis, num_lanes) : Words(*w, kFineBasis, num_lanes)) + i * row;
    w->modes.coefficients[k] = (coarse ? Words(*w, kCoarseCoefficients, num_lanes)
                                       : Words(*w, kFineCoefficients, num_lanes)) +
                               i * tokens;
  }
  w->modes.num_modes = num_modes;
}

void ScoreCoarseLanes(const ScoreArgs& a, int num_lanes, Workspace* w) {
  simd::Transpose(w->now->coarse, w->layout.coarse_bytes, w->coarse);
  FindModes(a, num_lanes, kCoarseModes, w);
  const int32_t* rows[] = {Words(*w, kCentroidHigh, num_lanes), w->bases[0], w->bases[1]};
  const int32_t* scale_tau = Words(*w, kCentroidScale, num_lanes);
  simd::CoarseDots(rows, w->query, {w->ahead->coarse, w->layout.coarse_bytes}, w->z);
  simd::FoldCentroid(scale_tau, w->z, simd::CentroidCodes::kHighNibbles, w->query, &w->modes);
  simd::FoldScales(Words(*w, kCoarseScales, num_lanes), 0, kCoarseModes, w->z + a.group * num_lanes,
                   w->query, &w->modes);
  const bool with_tau = !(a.logit_softcap > 0);
  simd::PageLse(w->modes, a.logit_softcap, with_tau ? scale_tau : nullptr, w->query, w->lse);
}

void ScoreFullLanes(const ScoreArgs& a, int num_lanes, Workspace* w) {
  simd::Transpose(w->now->coarse, w->layout.coarse_bytes, w->coarse);
  simd::Transpose(w->now->fine, w->layout.fine_bytes, w->fine);
  FindModes(a, num_lanes, a.rank, w);
  simd::ModeDots(w->bases, a.rank, w->query, {w->ahead->fine, w->layout.fine_bytes}, w->z);
  simd::FoldScales(Words(*w, kCoarseScales, num_lanes), 0, kCoarseModes, w->z, w->query, &w->modes);
  simd::FoldScales(Words(*w, kFineScales, num_lanes), kCoarseModes, a.rank - kCoarseModes,
                   w->z + kCoarseModes * a.group * num_lanes, w->query, &w->modes);
  simd::CentroidDots(Words(*w, kCentroidHigh, num_lanes), Words(*w, kCentroidLow, num_lanes),
                     w->query, {w->ahead->coarse, w->layout.coarse_bytes}, w->z);
  simd::FoldCentroid(Words(*w, kCentroidScale, num_lanes), w->z, simd::CentroidCodes::kWhole,
                     w->query, &w->modes);
  simd::PageLse(w->modes, a.logit_softcap, nullptr, w->query, w->lse);
}

// One KV head of one sequence.
struct Head {
  const uint8_t* coarse;  // its first record
  const uint8_t* fine;    // null in a coarse scan
  float* lse;             // row of its first query head
};

// Prepares head hk of sequence n: its queries into `w`.
Head OpenHead(const ScoreArgs& a, Scan scan, int n, int hk, Workspace* w) {
  const int64_t record = a.page_capacity[n] * hk;
  const int64_t row = (static_cast<int64_t>(n) * a.num_kv_heads + hk) * a.group;
  const uint16_t* query = a.query + row * a.head_dim;
  if (a.rotate_query) {
    RotateQuery(query, a.group, a.head_dim, a.dtype, w->rotated);
    query = w->rotated;
  }
  simd::PrepareQuery(query, a.group, a.head_dim, a.dtype, a.softmax_scale, &w->query);
  return {a.coarse[n] + record * w->layout.coarse_bytes,
          scan == Scan::kCoarse ? nullptr : a.fine[n] + record * w->layout.fine_bytes,
          a.lse + row * a.lse_stride};
}

// Points the lanes at the entries from `first` on of a list of `count` pages (null: all pages in
// order). Lanes beyond its end repeat the last one; what they give is not used.
void PointAt(const Head& head, const SummaryLayout& layout, const int32_t* pages, int first,
             int count, int num_lanes, Rows* rows) {
  for (int i = 0; i < num_lanes; ++i) {
    const int entry = std::min(first + i, count - 1);
    const int64_t page = pages == nullptr ? entry : pages[entry];
    rows->coarse[i] = head.coarse + page * layout.coarse_bytes;
    if (head.fine != nullptr) rows->fine[i] = head.fine + page * layout.fine_bytes;
  }
}

// Touches what a full scan reads kTouchRounds later, once each 4 KiB. A prefetch that needs a page
// walk holds up the core; an early one lets those for the other lines of its page find the
// translation (8% of a full scan over 4 KiB pages). Addresses past the end are never read, so they
// do no harm.
constexpr int kTouchRounds = 24;
void TouchPages(const uint8_t* record, size_t round_bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(record) + kTouchRounds * round_bytes;
  for (uintptr_t at = start; at < start + round_bytes; at += 4096) {
    __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
  }
}

// Scores the pages of the list (null: all) into their places of the head's lse rows.
void ScoreList(const ScoreArgs& a, Scan scan, const Head& head, const int32_t* pages, int count,
               Workspace* w) {
  const int num_lanes = simd::NumLanes();
  w->modes.group = a.group;
  w->modes.page_tokens = a.page_tokens;
  for (int r = 0; r < 2 && count > 0; ++r) {
    PointAt(head, w->layout, pages, r * num_lanes, count, num_lanes, &w->rounds[r]);
  }
  for (int first = 0, round = 0; first < count; first += num_lanes, round = (round + 1) % 3) {
    w->now = &w->rounds[round];
    w->ahead = &w->rounds[(round + 2) % 3];
    PointAt(head, w->layout, pages, first + 2 * num_lanes, count, num_lanes, w->ahead);
    if (scan == Scan::kFull && pages == nullptr) {
      TouchPages(w->now->coarse[0], static_cast<size_t>(num_lanes) * w->layout.coarse_bytes);
      TouchPages(w->now->fine[0], static_cast<size_t>(num_lanes) * w->layout.fine_bytes);
    }
    if (scan == Scan::kFull) {
      ScoreFullLanes(a, num_lanes, w);
    } else {
      ScoreCoarseLanes(a, num_lanes, w);
    }
    const int used = std::min(num_lanes, count - first);
    for (int g = 0; g < a.group; ++g) {
      float* row = head.lse + g * a.lse_stride;
      const float* lanes = w->lse + g * num_lanes;
      if (pages == nullptr) {
        std::copy_n(lanes, used, row + first);
      } else {
        for (int i = 0; i < used; ++i) row[pages[first + i]] = lanes[i];
      }
    }
  }
}

void ScanAll(const ScoreArgs& a, Scan scan) {
  CheckArgs(a);
  Workspace w;
  w.layout = MakeSummaryLayout(a.head_dim, a.page_tokens, a.rank);
  for (int n = 0; n < a.num_sequences; ++n) {
    const int num_pages = a.num_pages[n];
    KVD_CHECK(num_pages <= a.lse_stride && num_pages <= a.page_capacity[n]);
    for (int hk = 0; hk < a.num_kv_heads; ++hk) {
      const Head head = OpenHead(a, scan, n, hk, &w);
      ScoreList(a, scan, head, nullptr, num_pages, &w);
      for (int g = 0; g < a.group; ++g) {
        std::fill(head.lse + g * a.lse_stride + num_pages, head.lse + (g + 1) * a.lse_stride,
                  -std::numeric_limits<float>::infinity());
      }
    }
  }
}

}  // namespace

void ScoreFull(const ScoreArgs& args) { ScanAll(args, Scan::kFull); }

void ScoreCoarse(const ScoreArgs& args) { ScanAll(args, Scan::kCoarse); }

void ScoreRefine(const RefineArgs& args) {
  const ScoreArgs& a = args.score;
  CheckArgs(a);
  Workspace w;
  w.layout = MakeSummaryLayout(a.head_dim, a.page_tokens, a.rank);
  for (int n = 0; n < a.num_sequences; ++n) {
    for (int hk = 0; hk < a.num_kv_heads; ++hk) {
      const int64_t list = static_cast<int64_t>(n) * a.num_kv_heads + hk;
      const int32_t* pages = args.candidates + list * args.max_candidates;
      const int count = args.num_candidates[list];
      KVD_CHECK(count >= 0 && count <= args.max_candidates);
      for (int i = 0; i < count; ++i) KVD_CHECK(pages[i] >= 0 && pages[i] < a.num_pages[n]);
      const Head head = OpenHead(a, Scan::kFull, n, hk, &w);
      ScoreList(a, Scan::kFull, head, pages, count, &w);
    }
  }
}

}  // namespace kvd::ref
