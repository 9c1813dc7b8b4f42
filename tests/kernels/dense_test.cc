#include "kernels/dense.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/dtype.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

std::vector<float> Values(int count, uint64_t seed) {
  std::vector<float> out;
  for (uint16_t bits : testing::RandomKv(count, KvDtype::kFp16, 1.0f, seed))
    out.push_back(FromFp16(bits));
  return out;
}

std::vector<float> Symmetric(int dim, uint64_t seed) {
  std::vector<float> s = Values(dim * dim, seed);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < i; ++j)
      s[static_cast<size_t>(i * dim + j)] = s[static_cast<size_t>(j * dim + i)];
  }
  return s;
}

double ProductAt(const std::vector<float>& rows, const std::vector<float>& s, int dim, int r,
                 int d) {
  double sum = 0;
  for (int e = 0; e < dim; ++e)
    sum += static_cast<double>(rows[static_cast<size_t>(r * dim + e)]) *
           static_cast<double>(s[static_cast<size_t>(e * dim + d)]);
  return sum;
}

TEST(DenseTest, FullProductEqualsTheTruth) {
  for (int dim : {64, 96, 256}) {
    const std::vector<float> rows = Values(8 * dim, 1), s = Symmetric(dim, 2);
    std::vector<float> out(rows.size());
    TimesMetric(rows.data(), 8, s.data(), dim, Half::kFull, out.data());
    for (int i = 0; i < 8 * dim; ++i)
      ASSERT_NEAR(out[static_cast<size_t>(i)], ProductAt(rows, s, dim, i / dim, i % dim), 1e-4)
          << i;
  }
}

TEST(DenseTest, TwoUpperProductsMakeTheSymmetricForm) {
  for (int dim : {64, 96, 128, 256}) {
    const std::vector<float> rows = Values(4 * dim, 3), s = Symmetric(dim, 4);
    std::vector<float> full(rows.size()), upper(rows.size());
    TimesMetric(rows.data(), 4, s.data(), dim, Half::kFull, full.data());
    TimesMetric(rows.data(), 4, s.data(), dim, Half::kUpper, upper.data());
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const float* x = rows.data() + i * dim;
        const float* y = rows.data() + j * dim;
        const float form =
            Dot(upper.data() + i * dim, y, dim) + Dot(upper.data() + j * dim, x, dim);
        EXPECT_NEAR(form, Dot(full.data() + i * dim, y, dim), 2e-3f);
        EXPECT_GT(std::fabs(form - Dot(upper.data() + i * dim, y, dim)), 2e-3f)
            << "one half is not it";
      }
    }
  }
}

TEST(DenseTest, RoundsHalfToEvenInsideTheBounds) {
  for (float x = -200.0f; x <= 200.0f; x += 0.25f) {
    const float expected = std::nearbyint(std::min(std::max(x, -127.0f), 127.0f));
    EXPECT_EQ(RoundClamped(x, -127.0f, 127.0f), expected) << x;
  }
}

TEST(DenseTest, DotAndMaxAbsSeeEveryElement) {
  for (int at = 0; at < 24; ++at) {
    std::vector<float> x(24, 0.0f), ones(24, 1.0f);
    x[static_cast<size_t>(at)] = -3.0f;
    EXPECT_EQ(Dot(x.data(), ones.data(), 24), -3.0f);
    EXPECT_EQ(MaxAbs(x.data(), 24), 3.0f);
  }
}

}  // namespace
}  // namespace kvd
