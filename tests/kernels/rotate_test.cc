// Truth: the matrix written out, H[i][j] = (-1)^popcount(i & j), with signs from splitmix64, in
// double.

#include "kernels/rotate.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "kernels/dtype.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

std::vector<double> RotateByMatrix(const std::vector<double>& x) {
  const size_t dim = x.size();
  const size_t n = dim == 96 ? 32 : dim;
  std::vector<double> signed_x(dim);
  uint64_t state = 1;
  for (size_t d = 0; d < dim; ++d) {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    signed_x[d] = (z >> 63) == 1 ? -x[d] : x[d];
  }
  std::vector<double> out(dim, 0.0);
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = i / n * n; j < i / n * n + n; ++j)
      out[i] += std::popcount((i % n) & (j % n)) % 2 == 0 ? signed_x[j] : -signed_x[j];
    out[i] /= std::sqrt(static_cast<double>(n));
  }
  return out;
}

class RotateTest : public ::testing::TestWithParam<int> {
 protected:
  std::vector<float> Rows(int num_rows, uint64_t seed) const {
    std::vector<float> rows;
    for (uint16_t bits : testing::RandomKv(num_rows * GetParam(), KvDtype::kFp16, 1.0f, seed))
      rows.push_back(FromFp16(bits));
    return rows;
  }
};

double DotOf(const float* a, const float* b, int dim) {
  double sum = 0;
  for (int d = 0; d < dim; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  return sum;
}

TEST_P(RotateTest, EqualsTheMatrixOnEveryRow) {
  const int dim = GetParam();
  std::vector<float> rows = Rows(5, 1);
  const std::vector<float> before = rows;
  Rotate(rows.data(), 5, dim);
  for (int r = 0; r < 5; ++r) {
    const std::vector<double> truth = RotateByMatrix(
        std::vector<double>(before.begin() + r * dim, before.begin() + (r + 1) * dim));
    for (int d = 0; d < dim; ++d)
      ASSERT_NEAR(rows[static_cast<size_t>(r * dim + d)], truth[static_cast<size_t>(d)], 2e-6);
  }
}

TEST_P(RotateTest, KeepsEveryLogitOnlyIfBothSidesAreRotated) {
  const int dim = GetParam();
  const std::vector<float> before = Rows(2, 2);
  std::vector<float> rows = before;
  Rotate(rows.data(), 2, dim);
  const double logit = DotOf(before.data(), before.data() + dim, dim);
  EXPECT_NEAR(DotOf(rows.data(), rows.data() + dim, dim), logit, 1e-4);
  EXPECT_GT(std::fabs(DotOf(rows.data(), before.data() + dim, dim) - logit), 0.1);
}

TEST_P(RotateTest, SpreadsOneChannelOverItsWholeMatrix) {
  const int dim = GetParam();
  const int n = dim == 96 ? 32 : dim;
  std::vector<float> row(static_cast<size_t>(dim), 0.0f);
  row[7] = 40.0f;
  Rotate(row.data(), 1, dim);
  for (int d = 0; d < dim; ++d) {
    const float expected = d < n ? 40.0f / std::sqrt(static_cast<float>(n)) : 0.0f;
    EXPECT_NEAR(std::fabs(row[static_cast<size_t>(d)]), expected, 1e-5f);
  }
}

TEST_P(RotateTest, QueryIsRotatedInFp32AndRoundedOnceInPlaceOrNot) {
  const int dim = GetParam();
  for (KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    std::vector<uint16_t> query = testing::RandomKv(3 * dim, dtype, 2.0f, 3);
    std::vector<float> rows;
    for (uint16_t bits : query) rows.push_back(FromKv(dtype, bits));
    Rotate(rows.data(), 3, dim);
    std::vector<uint16_t> out(query.size());
    RotateQuery(query.data(), 3, dim, dtype, out.data());
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], ToKv(dtype, rows[i]));
    RotateQuery(query.data(), 3, dim, dtype, query.data());
    EXPECT_EQ(query, out);
  }
}

INSTANTIATE_TEST_SUITE_P(AllDims, RotateTest, ::testing::Values(64, 96, 128, 256),
                         [](const auto& tested) { return "D" + std::to_string(tested.param); });

}  // namespace
}  // namespace kvd
