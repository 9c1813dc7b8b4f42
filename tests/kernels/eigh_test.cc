// Truth: Eigen in double. Limits: kernels/README.md, "Tolerances", first row.

#include "kernels/eigh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"

namespace kvd {
namespace {

struct Pairs {
  std::vector<float> values, vectors;
};

Pairs Solve(std::vector<float> matrix, int n) {
  Pairs pairs{std::vector<float>(static_cast<size_t>(n)), std::vector<float>(matrix.size())};
  Eigh(matrix.data(), n, pairs.values.data(), pairs.vectors.data());
  return pairs;
}

// The Gram X X' of n rows of `dim` values whose columns fall off like a key's.
std::vector<float> MakeGram(int n, int dim, double decay, uint64_t seed) {
  const std::vector<uint16_t> bits = testing::RandomKv(n * dim, KvDtype::kFp16, 1.0f, seed);
  std::vector<float> gram(static_cast<size_t>(n * n));
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int d = 0; d < dim; ++d) {
        const auto x = static_cast<double>(FromFp16(bits[static_cast<size_t>(i * dim + d)]));
        const auto y = static_cast<double>(FromFp16(bits[static_cast<size_t>(j * dim + d)]));
        sum += x * y * std::pow(decay, 2 * d);
      }
      gram[static_cast<size_t>(i * n + j)] = static_cast<float>(sum);
    }
  }
  return gram;
}

double At(const std::vector<float>& m, int i) {
  return static_cast<double>(m[static_cast<size_t>(i)]);
}

void ExpectWithinLimits(const std::vector<float>& gram, int n) {
  const Pairs pairs = Solve(gram, n);
  const double w1 = std::max(At(pairs.values, 0), 1e-300);
  for (int k = 0; k < n; ++k) {
    double residual2 = 0;
    for (int i = 0; i < n; ++i) {
      double sum = -At(pairs.values, k) * At(pairs.vectors, k * n + i);
      for (int j = 0; j < n; ++j) sum += At(gram, i * n + j) * At(pairs.vectors, k * n + j);
      residual2 += sum * sum;
    }
    EXPECT_LE(std::sqrt(residual2), 2e-5 * w1) << "mode " << k;
    EXPECT_LE(At(pairs.values, k), At(pairs.values, std::max(k - 1, 0)));
  }
  double off2 = 0;
  for (int k = 0; k < n; ++k) {
    for (int l = 0; l < n; ++l) {
      double sum = k == l ? -1 : 0;
      for (int i = 0; i < n; ++i)
        sum += At(pairs.vectors, k * n + i) * At(pairs.vectors, l * n + i);
      off2 += sum * sum;
    }
  }
  EXPECT_LE(std::sqrt(off2), 1e-5);
}

// Frobenius distance of the projectors on the first r modes.
double ProjectorDistance(const std::vector<float>& gram, int n, int r) {
  const Pairs pairs = Solve(gram, n);
  const std::vector<double> exact(gram.begin(), gram.end());
  std::vector<double> values(static_cast<size_t>(n)), vectors(exact.size());
  testing::OracleEigh(exact.data(), n, values.data(), vectors.data());
  double distance2 = 0;
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int k = 0; k < r; ++k) {
        sum += At(pairs.vectors, k * n + i) * At(pairs.vectors, k * n + j) -
               vectors[static_cast<size_t>(k * n + i)] * vectors[static_cast<size_t>(k * n + j)];
      }
      distance2 += sum * sum;
    }
  }
  return std::sqrt(distance2);
}

TEST(EighTest, ResidualAndOrthogonalityStayWithinTheLimits) {
  for (int n : {16, 32}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      ExpectWithinLimits(MakeGram(n, 128, 1.0, seed), n);
      ExpectWithinLimits(MakeGram(n, 128, 0.9, seed), n);
      ExpectWithinLimits(MakeGram(n, 24, 0.5, seed), n);  // falls by four orders a few modes on
    }
  }
}

TEST(EighTest, EigenvaluesAndProjectorsEqualTheTruth) {
  for (int n : {16, 32}) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      const std::vector<float> gram = MakeGram(n, 128, 0.9, seed);
      const std::vector<double> exact(gram.begin(), gram.end());
      std::vector<double> values(static_cast<size_t>(n)), vectors(exact.size());
      testing::OracleEigh(exact.data(), n, values.data(), vectors.data());
      const Pairs pairs = Solve(gram, n);
      for (int k = 0; k < n; ++k)
        EXPECT_NEAR(At(pairs.values, k), values[static_cast<size_t>(k)], 2e-6 * values[0]);
      for (int r : {4, 8}) {
        const auto k = static_cast<size_t>(r);
        if (values[k - 1] <= 1.05 * values[k]) continue;
        EXPECT_LE(ProjectorDistance(gram, n, r), 1e-4) << n << " " << seed << " " << r;
      }
    }
  }
}

TEST(EighTest, EqualLeadingEigenvaluesGiveTheRightSubspace) {
  // Two equal pairs: only their projectors are determined.
  const int n = 16;
  std::vector<float> gram(static_cast<size_t>(n * n), 0.0f);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      if (i / 4 == j / 4 && i < 8)
        gram[static_cast<size_t>(i * n + j)] = i % 2 == j % 2 ? 5.0f : -5.0f;
    }
  }
  ExpectWithinLimits(gram, n);
  EXPECT_LE(ProjectorDistance(gram, n, 2), 1e-5);
  const Pairs pairs = Solve(gram, n);
  EXPECT_NEAR(pairs.values[0], 20.0f, 1e-4f);
  EXPECT_NEAR(pairs.values[1], 20.0f, 1e-4f);
  EXPECT_NEAR(pairs.values[2], 0.0f, 1e-4f);
}

TEST(EighTest, NullSpaceOfARankOneGramStaysAtRounding) {
  for (int n : {16, 32}) {
    const std::vector<float> gram = MakeGram(n, 1, 1.0, 3);
    ExpectWithinLimits(gram, n);
    const Pairs pairs = Solve(gram, n);
    for (int k = 1; k < n; ++k)
      EXPECT_LE(std::fabs(pairs.values[static_cast<size_t>(k)]), 1e-6f * pairs.values[0]);
  }
}

TEST(EighTest, ZeroAndDiagonalMatricesComeBackOrdered) {
  const Pairs zero = Solve(std::vector<float>(256, 0.0f), 16);
  for (float w : zero.values) EXPECT_EQ(w, 0.0f);
  std::vector<float> diagonal(256, 0.0f);
  const float entries[] = {1, 7, 3, 7, 0, 2, 2, 9, 4, 4, 4, 1, 8, 5, 6, 0};
  for (size_t i = 0; i < 16; ++i) diagonal[i * 17] = entries[i];
  const Pairs pairs = Solve(diagonal, 16);
  EXPECT_EQ(pairs.values[0], 9.0f);
  EXPECT_EQ(pairs.vectors[7], 1.0f);
  EXPECT_EQ(pairs.vectors[2 * 16 + 1], 1.0f) << "of the two 7s the lower place comes first";
  EXPECT_EQ(pairs.vectors[3 * 16 + 3], 1.0f);
}

TEST(EighTest, LargestComponentIsPositiveAndBitsRepeat) {
  for (int n : {16, 32}) {
    const std::vector<float> gram = MakeGram(n, 128, 0.9, 5);
    const Pairs pairs = Solve(gram, n);
    for (int k = 0; k < n; ++k) {
      const auto first = pairs.vectors.begin() + k * n;
      const auto largest = std::max_element(
          first, first + n, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
      EXPECT_GT(*largest, 0.0f);
    }
    EXPECT_EQ(Solve(gram, n).vectors, pairs.vectors);
  }
}

TEST(EighTest, ExtremeMagnitudesStayFinite) {
  for (float factor : {1e-30f, 1e30f}) {
    std::vector<float> gram = MakeGram(16, 64, 0.9, 6);
    for (float& x : gram) x *= factor;
    const Pairs pairs = Solve(gram, 16);
    for (float x : pairs.values) EXPECT_TRUE(std::isfinite(x));
    for (float x : pairs.vectors) EXPECT_TRUE(std::isfinite(x));
    ExpectWithinLimits(gram, 16);
  }
}

}  // namespace
}  // namespace kvd
