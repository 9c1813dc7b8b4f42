// Properties of the record builder: adversarial pages, tau, repeatability, mix-ups. That it does
// what the mathematics says is in summarize_truth_test.cc, how well it estimates in
// summarize_regime_test.cc, the stored bytes in summarize_golden_test.cc.

#include "kernels/summarize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using testing::AdversarialPage;

struct Case {
  int head_dim, page_tokens, rank;
  KvDtype dtype;
};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (int d : {64, 96, 128, 256}) {
    for (int b : {16, 32}) {
      for (int r : {4, 8}) {
        for (KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) cases.push_back({d, b, r, dtype});
      }
    }
  }
  return cases;
}

std::string Name(const Case& c) {
  return "D" + std::to_string(c.head_dim) + "_B" + std::to_string(c.page_tokens) + "_R" +
         std::to_string(c.rank) + (c.dtype == KvDtype::kBf16 ? "_bf16" : "_fp16");
}

struct Record {
  std::vector<uint8_t> coarse, fine;
  friend bool operator==(const Record&, const Record&) = default;
};

Record Build(const Case& c, const std::vector<uint8_t>& unit, Encoder encoder, const float* metric,
             bool rotated = true) {
  const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
  // Not zeros: the builder must write every byte, padding included.
  Record record{std::vector<uint8_t>(layout.coarse_bytes, 0xA5),
                std::vector<uint8_t>(layout.fine_bytes, 0xA5)};
  ref::Summarize({c.head_dim, c.page_tokens, c.rank, c.dtype, rotated, encoder, unit.data(),
                  encoder == Encoder::kE1S ? metric : nullptr, record.coarse.data(),
                  record.fine.data()});
  return record;
}

std::vector<uint8_t> UnitOf(const std::vector<uint16_t>& keys) {
  std::vector<uint8_t> unit(4 * keys.size());
  std::memcpy(unit.data(), keys.data(), 2 * keys.size());
  std::memcpy(unit.data() + 2 * keys.size(), keys.data(), 2 * keys.size());
  return unit;
}

DecodedRecord Decode(const Case& c, const Record& record) {
  DecodedRecord decoded;
  DecodeRecord(record.coarse.data(), record.fine.data(), c.head_dim, c.page_tokens, c.rank,
               &decoded);
  return decoded;
}

// Some metric: of queries that do not look at all directions alike.
std::vector<float> SomeMetric(const Case& c) {
  std::vector<uint16_t> queries = testing::RandomKv(24 * c.head_dim, c.dtype, 1.0f, 77);
  return testing::MetricOfQueries(queries, c.head_dim, c.dtype, true);
}

class SummarizeTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(AllGeometries, SummarizeTest, ::testing::ValuesIn(AllCases()),
                         [](const auto& tested) { return Name(tested.param); });

// --- adversarial pages ---

int CountModes(const Case& c, const DecodedRecord& record) {
  int count = 0;
  for (int k = 0; k < c.rank; ++k) {
    float largest = 0;
    for (int t = 0; t < c.page_tokens; ++t)
      largest = std::max(largest, std::fabs(record.coefficients[k][t]));
    count += largest > 0 ? 1 : 0;
  }
  return count;
}

void ExpectFinite(const Case& c, const DecodedRecord& record) {
  EXPECT_TRUE(std::isfinite(record.tau));
  EXPECT_GE(record.tau, 0.0f);
  for (int d = 0; d < c.head_dim; ++d) EXPECT_TRUE(std::isfinite(record.centroid[d]));
  for (int k = 0; k < c.rank; ++k) {
    for (int t = 0; t < c.page_tokens; ++t) EXPECT_TRUE(std::isfinite(record.coefficients[k][t]));
  }
}

void ExpectDroppedModesAreAllZeros(const Case& c, const DecodedRecord& record) {
  for (int k = 0; k < c.rank; ++k) {
    bool any_code = false, any_coefficient = false;
    for (int d = 0; d < c.head_dim; ++d) any_code |= record.basis[k][d] != 0.0f;
    for (int t = 0; t < c.page_tokens; ++t) any_coefficient |= record.coefficients[k][t] != 0.0f;
    EXPECT_EQ(any_code, any_coefficient) << "mode " << k;
  }
}

// For E0 the error of one element of K^ is bounded by the roundings that made it: half a step of
// the centroid's code, half a step of each basis code times the coefficient (at most |C8| + 1/2 of
// g), half a step of each coefficient times the code. 2^-8 for the rounding of the scales
// themselves.
double PlainBound(const Case& c, const DecodedRecord& record, float centroid_step, int t, int d) {
  double bound = 0.5 * static_cast<double>(centroid_step);
  for (int k = 0; k < c.rank; ++k) {
    float largest = 0;
    for (int s = 0; s < c.page_tokens; ++s)
      largest = std::max(largest, std::fabs(record.coefficients[k][s]));
    const double g = static_cast<double>(largest) / 126.5;
    const double coefficient = std::fabs(static_cast<double>(record.coefficients[k][t])) + 0.5 * g;
    bound += 0.5 * coefficient + 0.5 * g * std::fabs(static_cast<double>(record.basis[k][d]));
  }
  return bound * (1 + 0x1p-8);
}

struct Errors {
  double excess = 0;    // largest error over PlainBound, as a share of the largest key
  double relative = 0;  // Frobenius, over that of the keys
};

// The record with all scales times 2^-16: that of the keys times 2^-16. So the truth of the largest
// keys can be had in fp32.
constexpr int kLowered = 16;
Record Lowered(const Case& c, Record record) {
  const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
  const auto lower = [](uint8_t* at, int count) {
    for (int i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, at + 2 * i, 2);
      if (bits == 0) continue;
      bits = static_cast<uint16_t>(bits - (kLowered << 7));
      std::memcpy(at + 2 * i, &bits, 2);
    }
  };
  lower(record.coarse.data() + layout.coarse[kCoarseScales], kCoarseModes + 1);
  lower(record.fine.data() + layout.fine[kFineScales], c.rank - kCoarseModes);
  return record;
}

Errors Compare(const Case& c, const std::vector<uint16_t>& keys, const Record& stored) {
  const Record bytes = Lowered(c, stored);
  const DecodedRecord record = Decode(c, bytes);
  std::vector<float> rows;
  for (uint16_t bits : keys) rows.push_back(std::ldexp(FromKv(c.dtype, bits), -kLowered));
  Rotate(rows.data(), c.page_tokens, c.head_dim);
  uint16_t scale_bits;
  const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
  std::memcpy(&scale_bits, bytes.coarse.data() + layout.coarse[kCentroidScale], 2);
  Errors errors;
  double error2 = 0, norm2 = 0, largest = 0;
  for (int t = 0; t < c.page_tokens; ++t) {
    for (int d = 0; d < c.head_dim; ++d) {
      double key = static_cast<double>(record.centroid[d]);
      for (int k = 0; k < c.rank; ++k)
        key += static_cast<double>(record.coefficients[k][t]) *
               static_cast<double>(record.basis[k][d]);
      const auto truth = static_cast<double>(rows[static_cast<size_t>(t * c.head_dim + d)]);
      const double error = std::fabs(key - truth);
      errors.excess =
          std::max(errors.excess, error - PlainBound(c, record, FromBf16(scale_bits), t, d));
      error2 += error * error;
      norm2 += truth * truth;
      largest = std::max(largest, std::fabs(truth));
    }
  }
  if (norm2 == 0) return errors;
  errors.excess /= largest;
  errors.relative = std::sqrt(error2 / norm2);
  return errors;
}

TEST_P(SummarizeTest, AdversarialPagesStayFiniteDropModesAndAreExactWhereTheyCanBe) {
  const Case c = GetParam();
  const std::vector<float> metric = SomeMetric(c);
  for (const AdversarialPage& page :
       testing::AdversarialPages(c.head_dim, c.page_tokens, c.rank, c.dtype)) {
    for (Encoder encoder : {Encoder::kE0, Encoder::kE1, Encoder::kE1S}) {
      for (bool rotated : {true, false}) {
        SCOPED_TRACE(page.name + " E" + std::to_string(static_cast<int>(encoder)) +
                     (rotated ? " rotated" : ""));
        const Record bytes = Build(c, UnitOf(page.keys), encoder, metric.data(), rotated);
        const DecodedRecord record = Decode(c, bytes);
        ExpectFinite(c, record);
        ExpectDroppedModesAreAllZeros(c, record);
        EXPECT_LE(CountModes(c, record), page.max_modes < 0 ? c.rank : page.max_modes);
        if (!page.exact || !rotated) continue;
        const Errors errors = Compare(c, page.keys, bytes);
        EXPECT_LE(encoder == Encoder::kE0 ? errors.excess : 0.0, 1e-6);
        // An int4 step is a seventh of the largest component: .3 of that, rms, for each direction.
        EXPECT_LE(errors.relative, page.max_modes == 0 ? 0.02 : 0.15);
      }
    }
  }
}

// --- the rest ---

struct Unit {
  std::vector<uint16_t> keys;
  std::vector<uint8_t> bytes;
};
Unit SomeUnit(const Case& c, uint64_t seed) {
  std::vector<uint16_t> keys = testing::RandomKv(c.page_tokens * c.head_dim, c.dtype, 1.0f, seed);
  std::vector<uint8_t> bytes = UnitOf(keys);
  return {std::move(keys), std::move(bytes)};
}

TEST_P(SummarizeTest, EqualInputsGiveEqualBytesAndEveryByteIsWritten) {
  const Case c = GetParam();
  const std::vector<float> metric = SomeMetric(c);
  const Unit unit = SomeUnit(c, 1), other = SomeUnit(c, 2);
  for (Encoder encoder : {Encoder::kE0, Encoder::kE1, Encoder::kE1S}) {
    const Record first = Build(c, unit.bytes, encoder, metric.data());
    Build(c, other.bytes, encoder, metric.data());  // leaves other contents on the stack
    EXPECT_EQ(Build(c, unit.bytes, encoder, metric.data()), first);
    const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
    for (size_t i = layout.coarse[kUnitChecksum] + 8; i < layout.coarse_bytes; ++i)
      EXPECT_EQ(first.coarse[i], 0);
    for (size_t i = layout.fine[kFineScales] + 2 * static_cast<size_t>(c.rank - 2);
         i < layout.fine_bytes; ++i)
      EXPECT_EQ(first.fine[i], 0);
  }
}

TEST_P(SummarizeTest, TauIsZeroWithoutAMetricAndTheChecksumCoversKeysAndValues) {
  const Case c = GetParam();
  const std::vector<float> metric = SomeMetric(c);
  Unit unit = SomeUnit(c, 3);
  EXPECT_EQ(Decode(c, Build(c, unit.bytes, Encoder::kE0, nullptr)).tau, 0.0f);
  EXPECT_EQ(Decode(c, Build(c, unit.bytes, Encoder::kE1, nullptr)).tau, 0.0f);
  EXPECT_GT(Decode(c, Build(c, unit.bytes, Encoder::kE1S, metric.data())).tau, 0.0f);
  const Record before = Build(c, unit.bytes, Encoder::kE1, nullptr);
  EXPECT_EQ(Decode(c, before).unit_checksum, Checksum64(unit.bytes.data(), unit.bytes.size()));
  unit.bytes.back() ^= 1;  // a value
  Record after = Build(c, unit.bytes, Encoder::kE1, nullptr);
  EXPECT_NE(Decode(c, after).unit_checksum, Decode(c, before).unit_checksum);
  const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
  std::copy_n(before.coarse.begin() + layout.coarse[kUnitChecksum], 8,
              after.coarse.begin() + layout.coarse[kUnitChecksum]);
  EXPECT_EQ(after, before) << "values leave the codes alone";
}

TEST_P(SummarizeTest, KeysTimesAPowerOfTwoGiveTheSameCodes) {
  const Case c = GetParam();
  const std::vector<float> metric = SomeMetric(c);
  const Unit unit = SomeUnit(c, 4);
  std::vector<uint16_t> scaled;
  for (uint16_t bits : unit.keys)  // fp16 has little room: keys of deviation 1 times 2^6 still fit
    scaled.push_back(ToKv(c.dtype, 64.0f * FromKv(c.dtype, bits)));
  for (Encoder encoder : {Encoder::kE0, Encoder::kE1, Encoder::kE1S}) {
    const DecodedRecord a = Decode(c, Build(c, unit.bytes, encoder, metric.data()));
    const DecodedRecord b = Decode(c, Build(c, UnitOf(scaled), encoder, metric.data()));
    for (int d = 0; d < c.head_dim; ++d) ASSERT_EQ(b.centroid[d], 64.0f * a.centroid[d]);
    for (int k = 0; k < c.rank; ++k) {
      for (int d = 0; d < c.head_dim; ++d) ASSERT_EQ(b.basis[k][d], a.basis[k][d]);
      for (int t = 0; t < c.page_tokens; ++t)
        ASSERT_EQ(b.coefficients[k][t], 64.0f * a.coefficients[k][t]);
    }
    EXPECT_EQ(b.tau, 4096.0f * a.tau);
  }
}

// The modes come in falling order of what they explain, so that the coarse part holds the
// strongest.
TEST_P(SummarizeTest, CoarsePartHoldsTheTwoStrongestModes) {
  const Case c = GetParam();
  const DecodedRecord record = Decode(c, Build(c, SomeUnit(c, 5).bytes, Encoder::kE0, nullptr));
  double last = INFINITY;
  for (int k = 0; k < c.rank; ++k) {
    double energy = 0, norm2 = 0;
    for (int t = 0; t < c.page_tokens; ++t)
      energy += std::pow(static_cast<double>(record.coefficients[k][t]), 2);
    for (int d = 0; d < c.head_dim; ++d)
      norm2 += std::pow(static_cast<double>(record.basis[k][d]), 2);
    EXPECT_LE(energy * norm2, 1.1 * last) << "mode " << k;
    last = energy * norm2;
  }
}

// On a page that a record can hold almost exactly, every mix-up shows: another page's record, a
// dropped scale, a swap of the modes' coefficients, a record of the other space.
TEST_P(SummarizeTest, MixedUpRecordsAreFarOff) {
  const Case c = GetParam();
  std::vector<uint16_t> keys, other;
  for (const AdversarialPage& page :
       testing::AdversarialPages(c.head_dim, c.page_tokens, c.rank, c.dtype)) {
    if (page.name == "RankExactlyR") keys = page.keys;
    if (page.name == "RankOneMoreThanR") other = page.keys;
  }
  const Record right = Build(c, UnitOf(keys), Encoder::kE1, nullptr);
  const double error = Compare(c, keys, right).relative;
  EXPECT_GT(Compare(c, keys, Build(c, UnitOf(other), Encoder::kE1, nullptr)).relative, 2 * error);
  EXPECT_GT(Compare(c, keys, Build(c, UnitOf(keys), Encoder::kE1, nullptr, false)).relative,
            2 * error);
  const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
  Record dropped = right;
  std::fill_n(dropped.coarse.begin() + layout.coarse[kCoarseScales], 2, uint8_t{0});
  EXPECT_GT(Compare(c, keys, dropped).relative, 2 * error);
  Record swapped = right;
  const auto coefficients = swapped.coarse.begin() + layout.coarse[kCoarseCoefficients];
  std::swap_ranges(coefficients, coefficients + c.page_tokens, coefficients + c.page_tokens);
  EXPECT_GT(Compare(c, keys, swapped).relative, 2 * error);
}

}  // namespace
}  // namespace kvd
