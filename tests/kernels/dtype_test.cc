#include "kernels/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/checksum.h"

namespace kvd {
namespace {

struct Format {
  KvDtype dtype;
  int mantissa_bits;
  int min_exponent;  // of the smallest normal value
  float largest;
};
constexpr Format kFormats[] = {{KvDtype::kBf16, 7, -126, 0x1.FEp127f},
                               {KvDtype::kFp16, 10, -14, 65504.0f}};

// The nearest value of the format, ties to even, in double. Beyond the largest: infinite from half
// a step.
double Nearest(const Format& format, float x) {
  if (x == 0 || std::isinf(x)) return static_cast<double>(x);
  const int exponent = std::max(std::ilogb(x), format.min_exponent);
  const double step = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double rounded = std::nearbyint(static_cast<double>(x) / step) * step;
  return std::fabs(rounded) > static_cast<double>(format.largest)
             ? std::copysign(std::numeric_limits<double>::infinity(), rounded)
             : rounded;
}

TEST(DtypeTest, EveryBitPatternSurvivesTheRoundTrip) {
  for (const Format& format : kFormats) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float x = FromKv(format.dtype, static_cast<uint16_t>(bits));
      const uint16_t back = ToKv(format.dtype, x);
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(FromKv(format.dtype, back))) << bits;
      } else {
        ASSERT_EQ(back, bits);
      }
    }
  }
}

TEST(DtypeTest, RoundsToTheNearestValueTiesToEven) {
  for (const Format& format : kFormats) {
    for (uint64_t i = 0; i < 200000; ++i) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(Mix64(i) >> 32));
      if (std::isnan(x)) continue;
      ASSERT_EQ(static_cast<double>(FromKv(format.dtype, ToKv(format.dtype, x))),
                Nearest(format, x))
          << x;
    }
  }
}

TEST(DtypeTest, HalfWayPointsGoToTheEvenNeighbour) {
  for (const Format& format : kFormats) {
    for (uint32_t bits = 0; bits < 0x7000; ++bits) {
      const float low = FromKv(format.dtype, static_cast<uint16_t>(bits));
      const float high = FromKv(format.dtype, static_cast<uint16_t>(bits + 1));
      const float middle = low + (high - low) / 2;
      if (middle - low != high - middle)
        continue;  // between two denormal bf16 there may be no fp32
      ASSERT_EQ(ToKv(format.dtype, middle), bits + (bits & 1)) << bits;
    }
  }
}

TEST(DtypeTest, BeyondTheLargestFiniteValueIsInfinite) {
  for (const Format& format : kFormats) {
    const float largest = format.largest;
    EXPECT_EQ(FromKv(format.dtype, ToKv(format.dtype, largest)), largest);
    EXPECT_EQ(FromKv(format.dtype, ToKv(format.dtype, -largest)), -largest);
    EXPECT_TRUE(std::isinf(FromKv(format.dtype, ToKv(format.dtype, 3.4e38f * 1.0f + largest))));
  }
}

TEST(DtypeTest, KnownPatterns) {
  EXPECT_EQ(ToBf16(1.0f), 0x3F80);
  EXPECT_EQ(ToBf16(-2.5f), 0xC020);
  EXPECT_EQ(ToFp16(1.0f), 0x3C00);
  EXPECT_EQ(ToFp16(-2.5f), 0xC100);
  EXPECT_EQ(FromFp16(0x0001), 0x1p-24f);
  EXPECT_EQ(FromBf16(0x0001), 0x1p-133f);
  EXPECT_TRUE(std::isnan(FromFp16(0x7C01)));
  EXPECT_TRUE(std::signbit(FromFp16(0x8000)));
}

}  // namespace
}  // namespace kvd
