// Decoding of records that are written here by hand, and the search for NaN and Inf.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "kernels/quant.h"
#include "kernels/summarize.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"

namespace kvd {
namespace {

TEST(RecordTest, NibblesAndSignsStandAsTheFormatSays) {
  constexpr int kDim = 64, kTokens = 16, kRank = 4;
  const SummaryLayout layout = MakeSummaryLayout(kDim, kTokens, kRank);
  std::vector<uint8_t> coarse(layout.coarse_bytes), fine(layout.fine_bytes);
  coarse[1] = 0x0F;         // dims 2 and 3: hi nibbles 15 and 0, so floor(mu8 / 16) = 7 and -8
  fine[1] = 0x1E;           // lo nibbles 14 and 1
  coarse[32 + 2] = 0x8F;    // mode 0, dims 4 and 5: -1 and -8
  coarse[64 + 31] = 0x70;   // mode 1, dims 62 and 63: 0 and 7
  coarse[96 + 5] = 0x81;    // mode 0, token 5: -127
  coarse[112 + 15] = 0x7F;  // mode 1, token 15: 127
  fine[32 + 0] = 0x52;      // mode 2, dims 0 and 1: 2 and 5
  fine[96 + 3] = 0xFF;      // mode 2, token 3: -1
  fine[112 + 0] = 0x02;     // mode 3, token 0: 2
  const uint8_t scales[] = {0x80, 0x3F, 0x00, 0x40,
                            0x00, 0x3F, 0x40, 0x40};  // 1, 2, s_mu .5, tau 3
  std::memcpy(coarse.data() + 128, scales, sizeof(scales));
  const uint8_t fine_scales[] = {0x00, 0x41, 0x80, 0xBF};  // 8, -1
  std::memcpy(fine.data() + 128, fine_scales, sizeof(fine_scales));
  for (uint8_t i = 0; i < 8; ++i) coarse[136 + i] = static_cast<uint8_t>(i + 1);

  DecodedRecord record;
  DecodeRecord(coarse.data(), fine.data(), kDim, kTokens, kRank, &record);
  EXPECT_EQ(record.centroid[2], 0.5f * 126);
  EXPECT_EQ(record.centroid[3], 0.5f * -127);
  EXPECT_EQ(record.centroid[0], 0.5f * -128) << "a zero byte is hi -8, lo 0";
  EXPECT_EQ(record.basis[0][4], -1.0f);
  EXPECT_EQ(record.basis[0][5], -8.0f);
  EXPECT_EQ(record.basis[1][62], 0.0f);
  EXPECT_EQ(record.basis[1][63], 7.0f);
  EXPECT_EQ(record.basis[2][0], 2.0f);
  EXPECT_EQ(record.basis[2][1], 5.0f);
  EXPECT_EQ(record.coefficients[0][5], -127.0f);
  EXPECT_EQ(record.coefficients[1][15], 254.0f);
  EXPECT_EQ(record.coefficients[2][3], -8.0f);
  EXPECT_EQ(record.coefficients[3][0], -2.0f);
  EXPECT_EQ(record.tau, 3.0f);
  EXPECT_EQ(record.unit_checksum, 0x0807060504030201ull);
}

TEST(RecordTest, DecodedLogitsEqualTheOraclesOnAnyBytes) {
  for (int dim : {64, 96, 128, 256}) {
    for (int tokens : {16, 32}) {
      for (int rank : {4, 8}) {
        const SummaryLayout layout = MakeSummaryLayout(dim, tokens, rank);
        std::vector<uint8_t> coarse(layout.coarse_bytes), fine(layout.fine_bytes);
        for (size_t i = 0; i < coarse.size(); ++i) coarse[i] = static_cast<uint8_t>(Mix64(i) >> 40);
        for (size_t i = 0; i < fine.size(); ++i)
          fine[i] = static_cast<uint8_t>(Mix64(i + 5000) >> 40);
        const auto set_scales = [](uint8_t* at, int count) {
          for (int i = 0; i < count; ++i) {
            const auto bits = static_cast<uint16_t>(0x3F80 + 16 * i);
            std::memcpy(at + 2 * i, &bits, 2);
          }
        };
        set_scales(coarse.data() + layout.coarse[kCoarseScales], 4);
        set_scales(fine.data() + layout.fine[kFineScales], rank - 2);
        const std::vector<uint16_t> q = testing::RandomKv(dim, KvDtype::kBf16, 0.1f, 3);
        const std::vector<double> truth = testing::OracleRecordLogits(
            q.data(), coarse.data(), fine.data(), dim, tokens, rank, KvDtype::kBf16, 1.0, 0.0);
        DecodedRecord record;
        DecodeRecord(coarse.data(), fine.data(), dim, tokens, rank, &record);
        for (int t = 0; t < tokens; ++t) {
          double logit = 0;
          for (int d = 0; d < dim; ++d) {
            double key = static_cast<double>(record.centroid[d]);
            for (int k = 0; k < rank; ++k)
              key += static_cast<double>(record.coefficients[k][t]) *
                     static_cast<double>(record.basis[k][d]);
            logit += key * static_cast<double>(FromBf16(q[static_cast<size_t>(d)]));
          }
          ASSERT_NEAR(logit, truth[static_cast<size_t>(t)], 1e-6 * (1 + std::fabs(logit)));
        }
      }
    }
  }
}

TEST(RecordTest, CoarseCentroidIsTheMiddleOfItsSixteenCodes) {
  for (int mu8 = -128; mu8 <= 127; ++mu8) {
    const int high = CentroidHighNibble(mu8), low = CentroidLowNibble(mu8);
    EXPECT_EQ(CentroidCode(high, low), mu8);
    EXPECT_EQ(high - 8, static_cast<int>(std::floor(mu8 / 16.0)));
    EXPECT_LE(std::fabs(CoarseCentroidCode(high) - static_cast<float>(mu8)), 7.5f);
  }
}

TEST(FirstNonFiniteTest, FindsTheFirstNanOrInfAtAnyPlace) {
  for (KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    const auto infinite = static_cast<uint16_t>(dtype == KvDtype::kBf16 ? 0x7F80 : 0x7C00);
    const uint16_t bad[] = {infinite, static_cast<uint16_t>(infinite | 0x8000),
                            static_cast<uint16_t>(infinite | 1), 0x7FFF, 0xFFFF};
    for (int64_t count : {1, 7, 511, 512, 513, 4096}) {
      std::vector<uint16_t> values = testing::RandomKv(count, dtype, 1.0f, 1);
      EXPECT_EQ(FirstNonFinite(values.data(), count, dtype), -1);
      for (int64_t at : {int64_t{0}, count / 2, count - 1}) {
        for (uint16_t bits : bad) {
          std::vector<uint16_t> damaged = values;
          damaged[static_cast<size_t>(at)] = bits;
          damaged[static_cast<size_t>(count - 1)] = bits;
          EXPECT_EQ(FirstNonFinite(damaged.data(), count, dtype), at);
          EXPECT_EQ(FirstNonFinite(damaged.data(), at, dtype), -1) << "the count bounds the search";
        }
      }
    }
  }
}

TEST(FirstNonFiniteTest, TheLargestFiniteValuesPass) {
  const uint16_t bf16[] = {0x7F7F, 0xFF7F, 0x0001, 0x8000};
  const uint16_t fp16[] = {0x7BFF, 0xFBFF, 0x0001, 0x8000};
  EXPECT_EQ(FirstNonFinite(bf16, 4, KvDtype::kBf16), -1);
  EXPECT_EQ(FirstNonFinite(fp16, 4, KvDtype::kFp16), -1);
  EXPECT_EQ(FirstNonFinite(bf16, 4, KvDtype::kFp16), 0) << "the dtype matters";
}

}  // namespace
}  // namespace kvd
