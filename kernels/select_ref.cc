// Select: norm and score of every page in one vectorised pass, then an exact top-K of (score, page)
// pairs. A bound found from the maxima of 64 pages each leaves few pairs to look at.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/check.h"
#include "kernels/select.h"
#include "kernels/simd.h"
#include "kernels/softmax.h"

namespace kvd::ref {
namespace {

constexpr int64_t kWord = 64;
int64_t NumWords(int64_t pages) { return (pages + kWord - 1) / kWord; }

// The caller's scratch, in this order; each part a multiple of 64 bytes but the last.
struct Scratch {
  uint64_t* pairs;    // [words * 64] key in the high half, ~page in the low one: larger is better
  uint32_t* keys;     // [words * 64]
  uint64_t* allowed;  // [words]
  uint32_t* best;     // [words]
  uint32_t* ranked;   // [words] copy of best, reordered
};
Scratch Carve(void* memory, int64_t lse_stride) {
  const int64_t words = NumWords(lse_stride);
  Scratch s;
  s.pairs = static_cast<uint64_t*>(memory);
  s.keys = reinterpret_cast<uint32_t*>(s.pairs + words * kWord);
  s.allowed = reinterpret_cast<uint64_t*>(s.keys + words * kWord);
  s.best = reinterpret_cast<uint32_t*>(s.allowed + words);
  s.ranked = s.best + words;
  return s;
}

uint64_t Pair(uint32_t key, int32_t page) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(page);
}
int32_t PageOf(uint64_t pair) { return static_cast<int32_t>(~static_cast<uint32_t>(pair)); }
uint32_t KeyOf(uint64_t pair) { return static_cast<uint32_t>(pair >> 32); }

// Sets or clears the bits [first, last).
void FillBits(uint64_t* bits, int64_t first, int64_t last, bool value) {
  for (int64_t p = first; p < last;) {
    const int64_t end = std::min(last, (p / kWord + 1) * kWord);
    const uint64_t mask = (~uint64_t{0} >> (kWord - (end - p))) << (p % kWord);
    uint64_t& word = bits[p / kWord];
    word = value ? word | mask : word & ~mask;
    p = end;
  }
}

// One KV head of one sequence.
struct List {
  int64_t num_pages;
  int64_t first_selectable;  // pages before it are sinks
  int64_t end_selectable;    // pages from it on are the window
  const float* lse;          // [G, lse_stride]
  const uint64_t* selectable;
  const int32_t* candidates;
  int num_candidates;  // -1: no list
};

void AllowSelectable(const List& list, uint64_t* allowed) {
  const int64_t words = NumWords(list.num_pages);
  std::fill_n(allowed, words, 0);
  FillBits(allowed, list.first_selectable, list.end_selectable, true);
  if (list.selectable == nullptr) return;
  for (int64_t w = 0; w < words; ++w) allowed[w] &= list.selectable[w];
}

// Keeps only the candidates. They ascend, so one pass over words and list does it without a second
// bitset.
void RestrictToCandidates(const List& list, uint64_t* allowed) {
  int c = 0;
  for (int64_t w = 0; w < NumWords(list.num_pages); ++w) {
    uint64_t mask = 0;
    for (; c < list.num_candidates && list.candidates[c] / kWord == w; ++c) {
      mask |= uint64_t{1} << (list.candidates[c] % kWord);
    }
    allowed[w] &= mask;
  }
  KVD_CHECK(c == list.num_candidates);
}

// Z_g of every head; returns the number of NaNs.
uint64_t LogNorms(const SelectArgs& a, const List& list, float* log_norm) {
  uint64_t num_faults = 0;
  for (int g = 0; g < a.group; ++g) {
    const float* row = list.lse + g * a.lse_stride;
    const simd::MaxResult top = simd::MaskedMax(row, list.num_pages, nullptr);
    num_faults += top.num_faults;
    log_norm[g] =
        top.max == kEmptyLse
            ? kEmptyLse
            : top.max + std::log(simd::MaskedSumExp(row, list.num_pages, nullptr, top.max));
  }
  return num_faults;
}

// `peak`: the maximum over sinks and selectable pages in place of Z.
void Peaks(const SelectArgs& a, const List& list, uint64_t* allowed, float* peaks) {
  FillBits(allowed, 0, list.first_selectable, true);
  for (int g = 0; g < a.group; ++g) {
    peaks[g] = simd::MaskedMax(list.lse + g * a.lse_stride, list.num_pages, allowed).max;
  }
  FillBits(allowed, 0, list.first_selectable, false);
}

// Pairs of all pages that can be among the best `count`; returns how many. The count-th largest of
// the words' maxima is reached by at least `count` pages, so none below it can be chosen.
int64_t CollectPairs(const List& list, int64_t count, const Scratch& s) {
  const int64_t words = NumWords(list.num_pages);
  uint32_t bound = 1;  // 0 stands for pages that are not allowed
  if (count <= words) {
    std::copy_n(s.best, words, s.ranked);
    std::nth_element(s.ranked, s.ranked + count - 1, s.ranked + words, std::greater<>());
    bound = std::max(bound, s.ranked[count - 1]);
  }
  int64_t num_pairs = 0;
  for (int64_t w = 0; w < words; ++w) {
    if (s.best[w] < bound) continue;
    const int64_t end = std::min(list.num_pages, (w + 1) * kWord);
    for (int64_t p = w * kWord; p < end; ++p) {
      s.pairs[num_pairs] = Pair(s.keys[p], static_cast<int32_t>(p));
      num_pairs += s.keys[p] >= bound;
    }
  }
  return num_pairs;
}

void SelectOne(const SelectArgs& a, const List& list, int64_t row, const Scratch& s) {
  int32_t* pages = a.pages + row * a.num_select;
  float* log_norm = a.log_norm + row * a.group;
  float peaks[simd::kMaxGroup];
  const uint64_t num_faults = LogNorms(a, list, log_norm);
  if (a.num_faults != nullptr) *a.num_faults += num_faults;
  AllowSelectable(list, s.allowed);
  if (a.rule == CombineRule::kPeak) Peaks(a, list, s.allowed, peaks);
  if (list.num_candidates >= 0) RestrictToCandidates(list, s.allowed);
  int64_t num_allowed = 0;
  for (int64_t w = 0; w < NumWords(list.num_pages); ++w) num_allowed += std::popcount(s.allowed[w]);

  const int64_t count = std::min<int64_t>(a.num_select, num_allowed);
  a.num_selected[row] = static_cast<int32_t>(count);
  a.threshold[row] = std::numeric_limits<float>::infinity();
  std::fill(pages + count, pages + a.num_select, -1);
  if (count == 0) return;
  simd::ScoreKeys(list.lse, a.lse_stride, a.group, a.rule == CombineRule::kPeak ? peaks : log_norm,
                  list.num_pages, s.allowed, s.keys, s.best);
  const int64_t num_pairs = CollectPairs(list, count, s);
  KVD_CHECK(num_pairs >= count);
  std::nth_element(s.pairs, s.pairs + count - 1, s.pairs + num_pairs, std::greater<>());
  const float weakest = simd::FromOrderedKey(KeyOf(s.pairs[count - 1]));
  const float mean = a.rule == CombineRule::kShare ? std::log(static_cast<float>(a.group)) : 0.0f;
  a.threshold[row] = weakest - mean;
  std::transform(s.pairs, s.pairs + count, pages, PageOf);
  std::sort(pages, pages + count);
}

}  // namespace
}  // namespace kvd::ref

namespace kvd {

size_t SelectScratchBytes(int64_t lse_stride) {
  const auto words = static_cast<size_t>((lse_stride + 63) / 64);
  return words *
         (64 * (sizeof(uint64_t) + sizeof(uint32_t)) + sizeof(uint64_t) + 2 * sizeof(uint32_t));
}

void ref::Select(const SelectArgs& a) {
  KVD_CHECK(a.group >= 1 && a.group <= simd::kMaxGroup && a.num_select >= 0);
  KVD_CHECK(a.n_sink >= 0 && a.n_win >= 0);
  const Scratch scratch = Carve(a.scratch, a.lse_stride);
  for (int n = 0; n < a.num_sequences; ++n) {
    const int64_t num_pages = a.num_pages[n];
    KVD_CHECK(num_pages >= 0 && num_pages <= a.lse_stride);
    for (int hk = 0; hk < a.num_kv_heads; ++hk) {
      const int64_t row = static_cast<int64_t>(n) * a.num_kv_heads + hk;
      List list;
      list.num_pages = num_pages;
      list.first_selectable = std::min<int64_t>(a.n_sink, num_pages);
      list.end_selectable = std::max(list.first_selectable, num_pages - a.n_win);
      list.lse = a.lse + row * a.group * a.lse_stride;
      list.selectable = a.selectable == nullptr ? nullptr : a.selectable[n];
      list.candidates = a.max_candidates > 0 ? a.candidates + row * a.max_candidates : nullptr;
      list.num_candidates = a.max_candidates > 0 ? a.num_candidates[row] : -1;
      SelectOne(a, list, row, scratch);
    }
  }
}

}  // namespace kvd
