// Goal: records that the GPU builds estimate as well as the reference's. Method: the same units to
// both builders; what the records stand for is compared, keys and page lse, never codes, within the
// tolerances of kernels/README.md.

#include "tests/kernels/summarize_parity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/built_geometries.h"

namespace kvd::testing {
namespace {

constexpr Encoder kEncoders[] = {Encoder::kE0, Encoder::kE1, Encoder::kE1S};

class SummarizeParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(SummarizeParityTest, EveryRegimeIsEstimatedAsWellAsByTheReference) {
  for (const auto& [dim, group] : {std::pair(64, 3), std::pair(128, 4)}) {
    const Format f = {dim, 16, 8};
    for (const Regime regime :
         {Regime::kDiffuse, Regime::kNeedle, Regime::kOutlierToken, Regime::kOutlierChannels,
          Regime::kSink, Regime::kHeadOffset, Regime::kWalk}) {
      const Head head(regime, f, group, 64);
      for (const Encoder encoder : kEncoders) {
        SCOPED_TRACE("D" + std::to_string(dim) + " regime " +
                     std::to_string(static_cast<int>(regime)) + " E" +
                     std::to_string(static_cast<int>(encoder)));
        const Built got = BuildOnGpu(f, encoder, head.units, {head.metric});
        const std::vector<Record> want = head.Reference(f, encoder);
        EXPECT_TRUE(Compare(f, head.units, got.records, want, InMetric(head, encoder)).Close());
        const double error = LseError(f, head, group, got.records),
                     of_reference = LseError(f, head, group, want);
        EXPECT_LE(error, 1.02 * of_reference);
        int same = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          const DecodedRecord a = Decode(f, got.records[i]), b = Decode(f, want[i]);
          EXPECT_EQ(a.unit_checksum, b.unit_checksum);
          EXPECT_NEAR(a.tau, b.tau, 0.01f * b.tau);
          EXPECT_EQ(got.non_finite[i], -1);
          same += got.records[i] == want[i];
        }
        std::printf(
            "D%d regime %d E%d: lse error %.4f, reference %.4f; %d of 64 records have the "
            "reference's bytes\n",
            dim, static_cast<int>(regime), static_cast<int>(encoder), error, of_reference, same);
      }
    }
  }
}

TEST_F(SummarizeParityTest, EveryGeometryStandsForTheReferencesKeys) {
  for (const int dim : {64, 96, 128, 256}) {
    for (const int tokens : {16, 32}) {
      for (const int rank : {4, 8}) {
        if (!IsBuilt(dim, tokens, rank)) continue;
        const Format f = {dim, tokens, rank, rank == 4 ? KvDtype::kFp16 : KvDtype::kBf16,
                          dim != 96 || rank == 8};
        for (const Regime regime : {Regime::kDiffuse, Regime::kNeedle}) {
          const Head head(regime, f, 4, 11);
          for (const Encoder encoder : kEncoders) {
            const Built got = BuildOnGpu(f, encoder, head.units, {head.metric});
            const Distances d = Compare(f, head.units, got.records, head.Reference(f, encoder),
                                        InMetric(head, encoder));
            EXPECT_TRUE(d.Close())
                << "D" << dim << " B" << tokens << " R" << rank << " E" << static_cast<int>(encoder)
                << ": apart " << d.apart2 << ", rounding " << d.rounding2;
          }
        }
      }
    }
  }
}

// Modes whose coefficients are not all zero; a mode without must have no codes either.
int CountModes(const Format& f, const DecodedRecord& record) {
  int count = 0;
  for (int k = 0; k < f.rank; ++k) {
    const auto any = [](const float* x, int n) {
      return std::any_of(x, x + n, [](float v) { return v != 0; });
    };
    EXPECT_EQ(any(record.basis[k], f.head_dim), any(record.coefficients[k], f.page_tokens));
    count += any(record.coefficients[k], f.page_tokens);
    for (int t = 0; t < f.page_tokens; ++t) EXPECT_TRUE(std::isfinite(record.coefficients[k][t]));
  }
  for (int d = 0; d < f.head_dim; ++d) EXPECT_TRUE(std::isfinite(record.centroid[d]));
  EXPECT_TRUE(std::isfinite(record.tau) && record.tau >= 0);
  return count;
}

TEST_F(SummarizeParityTest, AdversarialPagesKeepTheModesAndTheErrorOfTheReference) {
  for (const Format& shape : {Format{64, 16, 8}, Format{128, 16, 8}, Format{128, 32, 4},
                              Format{256, 16, 8}, Format{96, 32, 8}}) {
    if (!IsBuilt(shape.head_dim, shape.page_tokens, shape.rank)) continue;
    for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
      for (const bool rotated : {true, false}) {
        const Format f = {shape.head_dim, shape.page_tokens, shape.rank, dtype, rotated};
        const Matrix metric =
            MetricOfQueries(RandomKv(24 * f.head_dim, dtype, 1.0f, 77), f.head_dim, dtype, rotated);
        const std::vector<AdversarialPage> pages =
            AdversarialPages(f.head_dim, f.page_tokens, f.rank, dtype);
        std::vector<Unit> units;
        for (const AdversarialPage& page : pages) {
          units.emplace_back(4 * page.keys.size());
          std::memcpy(units.back().data(), page.keys.data(), 2 * page.keys.size());
        }
        for (const Encoder encoder : kEncoders) {
          const Built got = BuildOnGpu(f, encoder, units, {metric});
          for (size_t i = 0; i < pages.size(); ++i) {
            SCOPED_TRACE(pages[i].name + " D" + std::to_string(f.head_dim) + " E" +
                         std::to_string(static_cast<int>(encoder)));
            const DecodedRecord a = Decode(f, got.records[i]),
                                b = Decode(f, BuildOnHost(f, encoder, units[i], metric));
            EXPECT_EQ(CountModes(f, a), CountModes(f, b));
            const std::vector<double> keys = TrueKeys(f, units[i]), none(keys.size());
            const double error = std::sqrt(Distance2(f, DecodedKeys(f, a), keys, nullptr));
            const double of_reference = std::sqrt(Distance2(f, DecodedKeys(f, b), keys, nullptr));
            EXPECT_LE(error,
                      1.1 * of_reference + 1e-3 * std::sqrt(Distance2(f, keys, none, nullptr)));
            EXPECT_EQ(got.non_finite[i], -1);
          }
        }
      }
    }
  }
}

TEST_F(SummarizeParityTest, WrongAnswersAreRejected) {
  const Format f = {128, 16, 8};
  const Head head(Regime::kDiffuse, f, 4, 40), other(Regime::kDiffuse, f, 4, 40, 2);
  for (const Encoder encoder : kEncoders) {
    const Matrix* metric = InMetric(head, encoder);
    const std::vector<Record> want = head.Reference(f, encoder);
    std::vector<Record> got = BuildOnGpu(f, encoder, head.units, {head.metric}).records;
    ASSERT_TRUE(Compare(f, head.units, got, want, metric).Close());
    if (encoder == Encoder::kE1S) {
      const std::vector<Record> swapped =
          BuildOnGpu(f, encoder, head.units, {other.metric}).records;
      EXPECT_FALSE(Compare(f, head.units, swapped, want, metric).Close())
          << "another head's metric";
    }
    const Encoder another = encoder == Encoder::kE0 ? Encoder::kE1 : Encoder::kE0;
    EXPECT_FALSE(Compare(f, head.units, BuildOnGpu(f, another, head.units, {head.metric}).records,
                         want, metric)
                     .Close());
    Format plain = f;
    plain.rotated = false;
    EXPECT_FALSE(Compare(f, head.units,
                         BuildOnGpu(plain, Encoder::kE1, head.units, {head.metric}).records, want,
                         metric)
                     .Close());
    std::vector<Record> dropped = got;
    for (Record& record : dropped)
      std::fill_n(record.fine.begin() + MakeSummaryLayout(128, 16, 8).fine[kFineScales], 2,
                  uint8_t{0});
    EXPECT_FALSE(Compare(f, head.units, dropped, want, metric).Close()) << "a scale was dropped";
    std::rotate(got.begin(), got.begin() + 1, got.end());
    EXPECT_FALSE(Compare(f, head.units, got, want, metric).Close()) << "pages are shifted";
  }
}

TEST_F(SummarizeParityTest, AUnitHasTheSameBytesWhereverItStandsAndEachHasItsOwnMetric) {
  for (const Format& f : {Format{128, 16, 8}, Format{64, 16, 8}, Format{64, 32, 8}}) {
    if (!IsBuilt(f.head_dim, f.page_tokens, f.rank)) continue;
    const Head a(Regime::kWalk, f, 4, 37), b(Regime::kNeedle, f, 4, 37, 2);
    std::vector<Unit> mixed;
    std::vector<size_t> metric_of;
    for (size_t i = 37; i-- > 0;) {
      mixed.push_back(a.units[i]);
      mixed.push_back(b.units[i]);
      metric_of.insert(metric_of.end(), {0, 1});
    }
    for (const Encoder encoder : kEncoders) {
      const std::vector<Record> alone = BuildOnGpu(f, encoder, a.units, {a.metric}).records;
      const std::vector<Record> other = BuildOnGpu(f, encoder, b.units, {b.metric}).records;
      const std::vector<Record> got =
          BuildOnGpu(f, encoder, mixed, {a.metric, b.metric}, metric_of).records;
      EXPECT_TRUE(BuildOnGpu(f, encoder, a.units, {a.metric}).records == alone);
      for (size_t i = 0; i < 37; ++i) {
        EXPECT_TRUE(got[2 * i] == alone[36 - i]);
        EXPECT_TRUE(got[2 * i + 1] == other[36 - i]);
      }
    }
  }
}

TEST_F(SummarizeParityTest, NonFiniteKeysAndValuesAreNamedAndLeaveTheOtherUnitsAlone) {
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    const Format f = {128, 16, 8, dtype};
    const Head head(Regime::kDiffuse, f, 4, 12);
    constexpr size_t kValues = 2 * 128 * 16;
    const uint16_t infinity = dtype == KvDtype::kBf16 ? 0x7F80 : 0x7C00;
    std::vector<Unit> units = head.units;
    const auto put = [&](size_t unit, size_t value, int bits) {
      const auto word = static_cast<uint16_t>(bits);
      std::memcpy(units[unit].data() + 2 * value, &word, 2);
    };
    put(1, 0, infinity);
    put(3, kValues - 1, infinity | 0x8001);  // a NaN among the values
    put(4, 777, infinity | 1);
    put(4, 776, infinity);
    put(4, 3000, infinity);
    put(6, 2048, infinity | 0x8000);
    for (const Encoder encoder : kEncoders) {
      const Built plain = BuildOnGpu(f, encoder, head.units, {head.metric}),
                  got = BuildOnGpu(f, encoder, units, {head.metric});
      for (size_t i = 0; i < units.size(); ++i) {
        EXPECT_EQ(got.non_finite[i], FirstNonFinite(units[i].data(), kValues, dtype)) << i;
        if (got.non_finite[i] < 0) {
          EXPECT_TRUE(got.records[i] == plain.records[i]) << i;
        } else {
          const auto zero = [](uint8_t byte) { return byte == 0; };
          EXPECT_TRUE(std::all_of(got.records[i].coarse.begin(), got.records[i].coarse.end(), zero))
              << i;
          EXPECT_TRUE(std::all_of(got.records[i].fine.begin(), got.records[i].fine.end(), zero))
              << i;
        }
      }
      EXPECT_EQ(std::count_if(got.non_finite.begin(), got.non_finite.end(),
                              [](int at) { return at >= 0; }),
                4);
    }
  }
}

TEST_F(SummarizeParityTest, ArgumentsBeyondTheLimitsAreRefused) {
  const SummarizeUnitsArgs good = {128, 16,      8,       KvDtype::kBf16, true,    Encoder::kE1,
                                   0,   nullptr, nullptr, nullptr,        nullptr, nullptr};
  EXPECT_EQ(LaunchSummarize(good, nullptr), cudaSuccess);
  const auto refused = [&](auto change) {
    SummarizeUnitsArgs bad = good;
    bad.num_units = 1;
    change(&bad);
    return LaunchSummarize(bad, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](SummarizeUnitsArgs* a) { a->head_dim = 80; }));
  EXPECT_TRUE(refused([](SummarizeUnitsArgs* a) { a->page_tokens = 8; }));
  EXPECT_TRUE(refused([](SummarizeUnitsArgs* a) { a->rank = 12; }));
  EXPECT_TRUE(refused([](SummarizeUnitsArgs* a) { a->dtype = static_cast<KvDtype>(3); }));
  EXPECT_TRUE(refused([](SummarizeUnitsArgs* a) { a->encoder = Encoder::kE1S; })) << "no metric";
  EXPECT_TRUE(refused([](SummarizeUnitsArgs* a) { a->num_units = -1; }));
  EXPECT_EQ(LaunchPackMetrics(nullptr, 1, 80, nullptr, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvd::testing
