// Goal: score gives the lse that a record stands for, on every geometry, and nothing but the record
// and the query decides its bits. Method: records of random codes against the double-precision
// oracle; properties; wrong inputs that the same comparison must reject.
#include "kernels/score.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <string>

#include "kernels/rotate.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"
#include "tests/support/records.h"

namespace kvd {
namespace {

using kvd::testing::LseTolerance;
using kvd::testing::MakeRandomRecords;
using kvd::testing::OracleRecordLse;
using kvd::testing::PutBf16;
using kvd::testing::RandomKv;
using kvd::testing::RandomRecords;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Geometry {
  int head_dim = 128, page_tokens = 16, rank = 8, group = 4;
  KvDtype dtype = KvDtype::kBf16;
  float softcap = 0;
};

// One batch: N sequences of different lengths, Hk heads, all records different.
class Batch {
 public:
  static constexpr int kHeads = 2;

  Batch(const Geometry& g, std::vector<int32_t> num_pages, float mode_scale = .002f)
      : geometry(g), num_pages_(std::move(num_pages)) {
    const auto n = static_cast<int>(num_pages_.size());
    for (int s = 0; s < n; ++s) {
      capacity_.push_back(num_pages_[Idx(s)] + 3 + s);
      lse_stride_ = std::max<int64_t>(lse_stride_, num_pages_[Idx(s)] + 2);
      records.push_back(
          MakeRandomRecords({g.head_dim, g.page_tokens, g.rank, kHeads * capacity_.back(), .04f,
                             mode_scale, .01f, static_cast<uint64_t>(s + 1)}));
    }
    query = RandomKv(int64_t{n} * kHeads * g.group * g.head_dim, g.dtype, 1.0f, 77);
    lse.resize(static_cast<size_t>(n * kHeads * g.group * lse_stride_));
  }

  ScoreArgs Args() {
    coarse_.clear();
    fine_.clear();
    for (RandomRecords& r : records) {
      coarse_.push_back(r.coarse.data());
      fine_.push_back(r.fine.data());
    }
    const Geometry& g = geometry;
    return {static_cast<int>(num_pages_.size()),
            kHeads,
            g.group,
            g.head_dim,
            g.page_tokens,
            g.rank,
            g.dtype,
            scale(),
            g.softcap,
            query.data(),
            coarse_.data(),
            fine_.data(),
            capacity_.data(),
            num_pages_.data(),
            lse_stride_,
            lse.data()};
  }

  float scale() const { return 1 / std::sqrt(static_cast<float>(geometry.head_dim)); }
  int64_t row(int n, int hk, int g) const {
    return (int64_t{n} * kHeads + hk) * geometry.group + g;
  }
  float& at(int n, int hk, int g, int64_t p) {
    return lse[static_cast<size_t>(row(n, hk, g) * lse_stride_ + p)];
  }
  int64_t record(int n, int hk, int64_t p) const { return hk * capacity_[Idx(n)] + p; }
  const std::vector<int32_t>& num_pages() const { return num_pages_; }
  int64_t lse_stride() const { return lse_stride_; }

  double Truth(int n, int hk, int g, int64_t p, bool full) {
    RandomRecords& r = records[Idx(n)];
    const int64_t i = record(n, hk, p);
    return OracleRecordLse(query.data() + row(n, hk, g) * geometry.head_dim, r.coarse_at(i),
                           full ? r.fine_at(i) : nullptr, geometry.head_dim, geometry.page_tokens,
                           geometry.rank, geometry.dtype, scale(), geometry.softcap);
  }

  // Largest error in units of the tolerance over all pages; `rms` of the absolute error where asked
  // for.
  double WorstError(bool full, double* rms = nullptr) {
    double worst = 0, squares = 0;
    int64_t count = 0;
    for (int n = 0; n < static_cast<int>(num_pages_.size()); ++n) {
      for (int hk = 0; hk < kHeads; ++hk) {
        for (int g = 0; g < geometry.group; ++g) {
          for (int64_t p = 0; p < num_pages_[Idx(n)]; ++p, ++count) {
            const double truth = Truth(n, hk, g, p, full);
            const double error = std::fabs(at(n, hk, g, p) - truth);
            EXPECT_FALSE(std::isnan(error));
            worst = std::max(worst, error / LseTolerance(truth));
            squares += error * error;
          }
        }
      }
    }
    if (rms != nullptr) *rms = std::sqrt(squares / static_cast<double>(count));
    return worst;
  }

  Geometry geometry;
  std::vector<RandomRecords> records;
  std::vector<uint16_t> query;
  std::vector<float> lse;

 private:
  static size_t Idx(int n) { return static_cast<size_t>(n); }

  std::vector<int32_t> num_pages_;
  std::vector<int64_t> capacity_;
  int64_t lse_stride_ = 0;
  std::vector<const uint8_t*> coarse_, fine_;
};

class ScoreTest : public ::testing::TestWithParam<Geometry> {};

std::string Name(const ::testing::TestParamInfo<Geometry>& info) {
  const Geometry& g = info.param;
  return "D" + std::to_string(g.head_dim) + "_B" + std::to_string(g.page_tokens) + "_R" +
         std::to_string(g.rank) + "_G" + std::to_string(g.group) +
         (g.dtype == KvDtype::kBf16 ? "_bf16" : "_fp16") + (g.softcap > 0 ? "_softcap" : "");
}

TEST_P(ScoreTest, FullAndCoarseScanAreWithinToleranceOfTheOracle) {
  Batch batch(GetParam(), {37, 0, 16, 1});
  double rms = 0;
  ref::ScoreFull(batch.Args());
  EXPECT_LE(batch.WorstError(true, &rms), 1);
  EXPECT_LE(rms, 1e-4);
  EXPECT_GT(batch.WorstError(false), 10) << "full and coarse estimates should differ";
  ref::ScoreCoarse(batch.Args());
  EXPECT_LE(batch.WorstError(false, &rms), 1);
  EXPECT_LE(rms, 1e-4);
}

TEST_P(ScoreTest, RefineEqualsTheFullScanBitForBit) {
  Batch full(GetParam(), {70, 21}), refined(GetParam(), {70, 21});
  ref::ScoreFull(full.Args());
  ref::ScoreCoarse(refined.Args());
  const Batch coarse = refined;
  // Lists of different lengths, one of them empty.
  constexpr int kMax = 24;
  std::vector<int32_t> candidates(4 * kMax, -1), count = {kMax, 1, 0, 7};
  for (size_t list = 0; list < 4; ++list) {
    for (int c = 0; c < count[list]; ++c) {
      candidates[list * kMax + static_cast<size_t>(c)] = list < 2 ? 69 - 2 * (kMax - 1 - c) : 3 * c;
    }
  }
  ref::ScoreRefine({refined.Args(), kMax, candidates.data(), count.data()});
  for (int list = 0; list < 4; ++list) {
    const int32_t* pages = candidates.data() + list * kMax;
    for (int g = 0; g < GetParam().group; ++g) {
      for (int p = 0; p < full.num_pages()[static_cast<size_t>(list / 2)]; ++p) {
        const bool is_candidate = std::find(pages, pages + count[static_cast<size_t>(list)], p) !=
                                  pages + count[static_cast<size_t>(list)];
        Batch source = is_candidate ? full : coarse;
        EXPECT_EQ(refined.at(list / 2, list % 2, g, p), source.at(list / 2, list % 2, g, p)) << p;
      }
    }
  }
}

TEST_P(ScoreTest, QueriesThatScoreRotatesGiveTheBitsOfQueriesRotatedBefore) {
  const Geometry& g = GetParam();
  const Batch plain(g, {37, 0, 5});
  Batch before = plain;
  RotateQuery(plain.query.data(), static_cast<int64_t>(plain.query.size()) / g.head_dim, g.head_dim,
              g.dtype, before.query.data());
  const std::vector<int32_t> candidates = {0, 2, 36}, count = {3, 1, 0, 0, 2, 0};
  std::vector<int32_t> lists(6 * candidates.size());
  for (size_t i = 0; i < lists.size(); ++i) lists[i] = candidates[i % 3];
  for (int scan : {0, 1, 2}) {  // full, coarse, refine
    const auto run = [&](Batch batch, bool rotate) {
      ScoreArgs args = batch.Args();
      args.rotate_query = rotate;
      if (scan == 0) ref::ScoreFull(args);
      if (scan == 1) ref::ScoreCoarse(args);
      if (scan == 2) ref::ScoreRefine({args, 3, lists.data(), count.data()});
      return batch.lse;
    };
    const std::vector<float> want = run(before, false);
    EXPECT_EQ(run(plain, true), want) << scan;
    EXPECT_NE(run(plain, false), want) << scan << ": they were not rotated";
    EXPECT_NE(run(before, true), want) << scan << ": they were rotated twice";
  }
}

std::vector<Geometry> Geometries() {
  std::vector<Geometry> all;
  for (int d : {64, 96, 128, 256}) {
    for (int b : {16, 32}) {
      for (int r : {4, 8}) all.push_back({d, b, r, 4});
    }
  }
  for (int g : {1, 2, 3, 5, 6, 7, 8, 12, 16}) all.push_back({128, 16, 8, g});
  all.push_back({256, 32, 8, 16});
  all.push_back({96, 16, 8, 7, KvDtype::kFp16});
  all.push_back({128, 16, 8, 3, KvDtype::kBf16, 10});
  all.push_back({64, 32, 4, 5, KvDtype::kFp16, 30});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Geometries, ScoreTest, ::testing::ValuesIn(Geometries()), Name);

TEST(ScorePropertiesTest, WrongInputsAreRejectedByTheSameComparison) {
  Batch batch(Geometry{}, {40});
  ref::ScoreFull(batch.Args());
  ASSERT_LE(batch.WorstError(true), 1);

  Batch swapped = batch;  // two heads of the group
  std::swap_ranges(swapped.query.begin(), swapped.query.begin() + 128, swapped.query.begin() + 128);
  EXPECT_GT(swapped.WorstError(true), 10);

  Batch shifted = batch;  // a page
  std::rotate(shifted.lse.begin(), shifted.lse.begin() + 1, shifted.lse.begin() + 40);
  EXPECT_GT(shifted.WorstError(true), 10);

  for (int k : {0, 1, 2, 7}) {  // a scale
    Batch dropped = batch;
    PutBf16(dropped.records[0].mode_scale(dropped.record(0, 1, 5), k), 0);
    EXPECT_GT(dropped.WorstError(true), 10) << k;
  }

  Batch nibble = batch;  // a low nibble of the centroid
  nibble.records[0].fine_at(nibble.record(0, 0, 3))[17] ^= 0xF;
  EXPECT_GT(nibble.WorstError(true), 3);
}

TEST(ScorePropertiesTest, EqualInputsGiveEqualBitsWhateverThePosition) {
  Batch batch(Geometry{}, {50, 50});
  RandomRecords& r = batch.records[0];
  // Page 3 of head 0 stands at every place of both sequences, beside other neighbours.
  const std::vector<uint8_t> coarse(r.coarse_at(3), r.coarse_at(4)),
      fine(r.fine_at(3), r.fine_at(4));
  for (int p = 0; p < 50; p += 3) {
    std::copy(coarse.begin(), coarse.end(), r.coarse_at(p));
    std::copy(fine.begin(), fine.end(), r.fine_at(p));
    const int64_t other = batch.record(1, 0, 49 - p);
    std::copy(coarse.begin(), coarse.end(), batch.records[1].coarse_at(other));
    std::copy(fine.begin(), fine.end(), batch.records[1].fine_at(other));
  }
  const auto queries_of_a_sequence = static_cast<std::ptrdiff_t>(batch.query.size() / 2);
  std::copy_n(batch.query.begin(), queries_of_a_sequence,
              batch.query.begin() + queries_of_a_sequence);
  for (bool full : {true, false}) {
    full ? ref::ScoreFull(batch.Args()) : ref::ScoreCoarse(batch.Args());
    for (int g = 0; g < 4; ++g) {
      for (int p = 0; p < 50; p += 3) {
        EXPECT_EQ(batch.at(0, 0, g, p), batch.at(0, 0, g, 3));
        EXPECT_EQ(batch.at(1, 0, g, 49 - p), batch.at(0, 0, g, 3));
      }
    }
  }
}

TEST(ScorePropertiesTest, PermutingPagesPermutesTheResult) {
  Batch batch(Geometry{}, {33}), reversed = batch;
  for (int hk = 0; hk < Batch::kHeads; ++hk) {
    for (int p = 0; p < 33; ++p) {
      RandomRecords &from = batch.records[0], &to = reversed.records[0];
      const int64_t i = batch.record(0, hk, p), j = batch.record(0, hk, 32 - p);
      std::copy(from.coarse_at(i), from.coarse_at(i + 1), to.coarse_at(j));
      std::copy(from.fine_at(i), from.fine_at(i + 1), to.fine_at(j));
    }
  }
  ref::ScoreFull(batch.Args());
  ref::ScoreFull(reversed.Args());
  for (int p = 0; p < 33; ++p) EXPECT_EQ(batch.at(0, 1, 2, p), reversed.at(0, 1, 2, 32 - p));
}

TEST(ScorePropertiesTest, PagesOfLargeSpreadKeepTheToleranceAndTheirNeighboursTheirBits) {
  Batch small(Geometry{}, {48});
  ref::ScoreFull(small.Args());
  Batch mixed = small;
  for (int p = 1; p < 48; p += 5) {  // needles of up to thousands of nats
    for (int k = 0; k < 8; ++k)
      PutBf16(mixed.records[0].mode_scale(p, k), .01f * static_cast<float>(p * p));
  }
  ref::ScoreFull(mixed.Args());
  EXPECT_LE(mixed.WorstError(true), 1);
  ref::ScoreCoarse(mixed.Args());
  EXPECT_LE(mixed.WorstError(false), 1);
  ref::ScoreFull(mixed.Args());
  for (int p = 0; p < 48; ++p) {
    if (p % 5 == 1) continue;
    EXPECT_EQ(mixed.at(0, 0, 0, p), small.at(0, 0, 0, p));
  }
}

TEST(ScorePropertiesTest, PagesBeyondTheLastAreMinusInfinity) {
  Batch batch(Geometry{}, {5, 0});
  for (bool full : {true, false}) {
    std::fill(batch.lse.begin(), batch.lse.end(), 1.0f);
    full ? ref::ScoreFull(batch.Args()) : ref::ScoreCoarse(batch.Args());
    for (int n = 0; n < 2; ++n) {
      for (int64_t p = n == 0 ? 5 : 0; p < batch.lse_stride(); ++p)
        EXPECT_EQ(batch.at(n, 1, 3, p), -kInfinity);
    }
  }
}

TEST(ScorePropertiesTest, TheResidualTermIsAddedToTheCoarseEstimateAlone) {
  for (float softcap : {0.0f, 20.0f}) {
    Batch batch({128, 16, 8, 4, KvDtype::kBf16, softcap}, {20}), without = batch;
    for (int p = 0; p < 20; ++p) {
      PutBf16(without.records[0].coarse_at(p) + without.records[0].layout.coarse[kTau], 0);
    }
    ref::ScoreFull(batch.Args());
    ref::ScoreFull(without.Args());
    EXPECT_EQ(batch.at(0, 0, 0, 7), without.at(0, 0, 0, 7));
    ref::ScoreCoarse(batch.Args());
    ref::ScoreCoarse(without.Args());
    if (softcap > 0) {
      EXPECT_EQ(batch.at(0, 0, 0, 7), without.at(0, 0, 0, 7));
    } else {
      EXPECT_GT(batch.at(0, 0, 0, 7), without.at(0, 0, 0, 7) + 1e-4f);
    }
  }
}

TEST(ScorePropertiesTest, ExtremeInputsSaturateAndNeverMakeANaN) {
  for (float softcap : {0.0f, 50.0f}) {
    Batch batch({128, 16, 8, 4, KvDtype::kBf16, softcap}, {64});
    RandomRecords& r = batch.records[0];
    const float scales[] = {3.3e38f, -3.3e38f, 1e-38f, 0, 1e20f, -1e20f, kInfinity, std::nanf("")};
    for (int p = 0; p < 64; ++p) {
      for (int k = 0; k < 8; ++k) PutBf16(r.mode_scale(p, k), scales[(p + k) % 8]);
      PutBf16(r.coarse_at(p) + r.layout.coarse[kCentroidScale], scales[p / 8]);
      PutBf16(r.coarse_at(p) + r.layout.coarse[kTau], scales[(p + 3) % 8]);
    }
    std::fill_n(batch.query.begin(), 128, ToBf16(3.3e38f));
    std::fill_n(batch.query.begin() + 128, 128, ToBf16(1e-39f));
    std::fill_n(batch.query.begin() + 256, 128, ToBf16(0));
    for (bool full : {true, false}) {
      full ? ref::ScoreFull(batch.Args()) : ref::ScoreCoarse(batch.Args());
      for (int g = 0; g < 4; ++g) {
        for (int p = 0; p < 64; ++p)
          EXPECT_LE(std::fabs(batch.at(0, 0, g, p)), 1e30f) << g << " " << p;
      }
    }
  }
}

// Head 8 of a mirror with a stride of kMaxPages records begins 4.4 GiB into the fine stream: an
// index of 32 bits would wrap onto other records. The mirror is address space; only what is touched
// is memory.
TEST(ScorePropertiesTest, OffsetsBeyond32BitsAreRight) {
  constexpr int kNumHeads = 9, kPages = 20;
  const SummaryLayout layout = MakeSummaryLayout(128, 16, 8);
  const auto map = [](size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
  };
  const size_t coarse_bytes = size_t{kNumHeads} * kMaxPages * layout.coarse_bytes;
  const size_t fine_bytes = size_t{kNumHeads} * kMaxPages * layout.fine_bytes;
  uint8_t* coarse = map(coarse_bytes);
  uint8_t* fine = map(fine_bytes);
  ASSERT_NE(coarse, nullptr);
  ASSERT_NE(fine, nullptr);
  RandomRecords r = MakeRandomRecords({.count = kPages});
  const size_t first = size_t{kNumHeads - 1} * kMaxPages;
  std::copy(r.coarse.begin(), r.coarse.end(), coarse + first * layout.coarse_bytes);
  std::copy(r.fine.begin(), r.fine.end(), fine + first * layout.fine_bytes);

  const std::vector<uint16_t> query = RandomKv(kNumHeads * 128, KvDtype::kBf16, 1, 3);
  std::vector<float> lse(kNumHeads * kPages);
  const uint8_t* bases[] = {coarse, fine};
  const int64_t capacity = kMaxPages;
  const int32_t num_pages = kPages;
  ref::ScoreFull({1, kNumHeads, 1, 128, 16, 8, KvDtype::kBf16, .088f, 0, query.data(), &bases[0],
                  &bases[1], &capacity, &num_pages, kPages, lse.data()});
  const uint16_t* q = query.data() + 128 * (kNumHeads - 1);
  for (int p = 0; p < kPages; ++p) {
    const double truth = OracleRecordLse(q, r.coarse_at(p), r.fine_at(p), 128, 16, 8,
                                         KvDtype::kBf16, double{.088f}, 0);
    EXPECT_NEAR(lse[static_cast<size_t>((kNumHeads - 1) * kPages + p)], truth, LseTolerance(truth));
  }
  munmap(coarse, coarse_bytes);
  munmap(fine, fine_bytes);
}

}  // namespace
}  // namespace kvd
