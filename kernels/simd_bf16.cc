#include "kernels/simd_bf16.h"

#include <bit>
#include <type_traits>

#include "kernels/check.h"
#include "kernels/simd_prefetch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvd::simd::bf16 {

#if defined(__x86_64__)

#define KVD_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace {

constexpr int kNumLanes = 16;
constexpr int kPairsPerWord = 4;
using Prefetcher = LanePrefetcher<kNumLanes>;

// What each nibble stands for, as bf16; twice, because a lookup reads one bit more than the nibble.
struct alignas(64) Table {
  uint16_t value[32];
};
constexpr uint16_t Bf16OfInteger(int x) {
  // |x| <= 128 has at most 8 significant bits: the upper half of its fp32 is exact.
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16);
}
template <class Meaning>
constexpr Table MakeTable(Meaning meaning) {
  Table table = {};
  for (int i = 0; i < 32; ++i) table.value[i] = Bf16OfInteger(meaning(i % 16));
  return table;
}
constexpr Table kTwosComplement =
    MakeTable([](int nibble) { return nibble < 8 ? nibble : nibble - 16; });
constexpr Table kOffsetBinary = MakeTable([](int nibble) { return nibble - 8; });
constexpr Table kSixteenTimesOffsetBinary = MakeTable([](int nibble) { return 16 * (nibble - 8); });
constexpr Table kUnsigned = MakeTable([](int nibble) { return nibble; });

KVD_BF16 inline __m512i Load(const void* at) { return _mm512_load_si512(at); }

// Nibbles `pair` and `pair + 4` of every word, looked up: codes of dims 8w + pair and 8w + pair
// + 4.
template <int kPair>
KVD_BF16 inline __m512bh Codes(__m512i word, __m512i table) {
  const __m512i at = kPair == 0 ? word : _mm512_srli_epi16(word, 4 * kPair);
  return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(at, table));
}
KVD_BF16 inline __m512bh Broadcast(uint32_t pair) {
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair)));
}

// One pair of dims of kRows rows against kHeads heads.
template <int kPair, int kRows, int kHeads>
KVD_BF16 inline void AddPair(const __m512i (&words)[kRows], const __m512i (&tables)[kRows],
                             const uint32_t* query, __m512 (&sums)[kRows][kHeads]) {
  __m512bh codes[kRows];
  KVD_UNROLL
  for (int r = 0; r < kRows; ++r) codes[r] = Codes<kPair>(words[r], tables[r]);
  KVD_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    const __m512bh components = Broadcast(query[h]);
    KVD_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r][h] = _mm512_dpbf16_ps(sums[r][h], codes[r], components);
  }
}

// kRows rows of codes, each with its table, against heads head .. head + kHeads.
template <int kRows, int kHeads>
KVD_BF16 void DotsTile(const int32_t* const* rows, const Table* const* meanings,
                       const LaneQuery& query, int head, Prefetcher* ahead,
                       __m512 (&sums)[kRows][kHeads]) {
  __m512i tables[kRows];
  KVD_UNROLL
  for (int r = 0; r < kRows; ++r) {
    tables[r] = Load(meanings[r]);
    KVD_UNROLL
    for (int h = 0; h < kHeads; ++h) sums[r][h] = _mm512_setzero_ps();
  }
  const uint32_t* pairs = query.pairs + head;
  for (int w = 0; w < query.head_dim / 8; ++w, pairs += kPairsPerWord * query.group) {
    ahead->Step();
    __m512i words[kRows];
    KVD_UNROLL
    for (int r = 0; r < kRows; ++r) words[r] = Load(rows[r] + w * kNumLanes);
    AddPair<0>(words, tables, pairs, sums);
    AddPair<1>(words, tables, pairs + query.group, sums);
    AddPair<2>(words, tables, pairs + 2 * query.group, sums);
    AddPair<3>(words, tables, pairs + 3 * query.group, sums);
  }
}

// z[r][g] of kRows rows.
template <int kRows, int kHeads>
KVD_BF16 void RowsTile(const int32_t* const* rows, const Table* const* meanings,
                       const LaneQuery& query, int head, Prefetcher* ahead, float* z) {
  __m512 sums[kRows][kHeads];
  DotsTile(rows, meanings, query, head, ahead, sums);
  KVD_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVD_UNROLL
    for (int h = 0; h < kHeads; ++h)
      _mm512_store_ps(z + (r * query.group + head + h) * kNumLanes, sums[r][h]);
  }
}

// z[g] of one row whose codes are the sums of two: the centroid's high and low nibbles.
template <int kHeads>
KVD_BF16 void SumTile(const int32_t* const* rows, const Table* const* meanings,
                      const LaneQuery& query, int head, Prefetcher* ahead, float* z) {
  __m512 sums[2][kHeads];
  DotsTile(rows, meanings, query, head, ahead, sums);
  KVD_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    _mm512_store_ps(z + (head + h) * kNumLanes, _mm512_add_ps(sums[0][h], sums[1][h]));
  }
}

// Calls tile(heads, head) for runs of up to four heads; heads.value is a constant.
template <class Tile>
void ForTiles(int group, Tile tile) {
  for (int head = 0; head < group; head += kTileHeads) {
    switch (group - head) {
      case 1:
        tile(std::integral_constant<int, 1>(), head);
        break;
      case 2:
        tile(std::integral_constant<int, 2>(), head);
        break;
      case 3:
        tile(std::integral_constant<int, 3>(), head);
        break;
      default:
        tile(std::integral_constant<int, kTileHeads>(), head);
        break;
    }
  }
}

}  // namespace

bool Supported() {
  static const bool supported = __builtin_cpu_supports("avx512bf16") &&
                                __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512vl");
  return supported;
}

void CoarseDots(const int32_t* const* rows, const LaneQuery& query, const Prefetch& ahead,
                float* z) {
  constexpr int kRows = 1 + kCoarseModes;
  const Table* const meanings[kRows] = {&kOffsetBinary, &kTwosComplement, &kTwosComplement};
  Prefetcher prefetcher(ahead, query.head_dim / 8 * NumHeadTiles(query.group));
  ForTiles(query.group, [&](auto heads, int head) {
    RowsTile<kRows, heads.value>(rows, meanings, query, head, &prefetcher, z);
  });
}

void ModeDots(const int32_t* const* rows, int num_rows, const LaneQuery& query,
              const Prefetch& ahead, float* z) {
  constexpr int kRows = 4;
  const Table* const meanings[kRows] = {&kTwosComplement, &kTwosComplement, &kTwosComplement,
                                        &kTwosComplement};
  Prefetcher prefetcher(ahead, query.head_dim / 8 * NumHeadTiles(query.group) * (num_rows / kRows));
  for (int r = 0; r < num_rows; r += kRows) {
    ForTiles(query.group, [&](auto heads, int head) {
      RowsTile<kRows, heads.value>(rows + r, meanings, query, head, &prefetcher,
                                   z + r * query.group * kNumLanes);
    });
  }
}

void CentroidDots(const int32_t* high, const int32_t* low, const LaneQuery& query,
                  const Prefetch& ahead, float* z) {
  const int32_t* const rows[2] = {high, low};
  const Table* const meanings[2] = {&kSixteenTimesOffsetBinary, &kUnsigned};
  Prefetcher prefetcher(ahead, query.head_dim / 8 * NumHeadTiles(query.group));
  ForTiles(query.group, [&](auto heads, int head) {
    SumTile<heads.value>(rows, meanings, query, head, &prefetcher, z);
  });
}

#undef KVD_BF16

#else  // no such instruction

bool Supported() { return false; }
void CoarseDots(const int32_t* const*, const LaneQuery&, const Prefetch&, float*) {
  KVD_CHECK(false);
}
void ModeDots(const int32_t* const*, int, const LaneQuery&, const Prefetch&, float*) {
  KVD_CHECK(false);
}
void CentroidDots(const int32_t*, const int32_t*, const LaneQuery&, const Prefetch&, float*) {
  KVD_CHECK(false);
}

#endif

}  // namespace kvd::simd::bf16
