// The builder against the mathematics of kernels/README.md, "Building a record", carried out in
// double with Eigen: keys are compared as decoded, never code by code, because a code that stands
// on a rounding boundary may go either way.

#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "kernels/summarize.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

struct Case {
  int head_dim, page_tokens, rank;
  Encoder encoder;
};

double RoundScale(double x) { return static_cast<double>(RoundBf16(static_cast<float>(x))); }

Matrix Quantise(const Matrix& x, double scale, double low, double high) {
  if (scale == 0) return Matrix::Zero(x.rows(), x.cols());
  return (x / scale).unaryExpr(
      [=](double v) { return std::min(std::max(std::nearbyint(v), low), high); });
}

struct Truth {
  Matrix keys;     // K^ = mu^ + C V
  Matrix optimum;  // the best of rank R with no rounding, mu + U U' X of the metric's modes
  double tau = 0;
};

// The basis codes of one mode with the least error in `s` among the clips.
Matrix BasisCodes(const Vector& v, const Matrix& s, Encoder encoder, double* step) {
  Matrix best;
  double least = INFINITY;
  for (double clip : {1.0, .92, .85, .78, .70}) {
    const double scale = RoundScale(clip * v.cwiseAbs().maxCoeff() / 7);
    const Matrix codes = Quantise(v.transpose(), scale, -8, 7);
    const Vector error = v - scale * codes.transpose();
    const double squared = error.dot(s * error);
    if (squared < least) {
      least = squared;
      best = codes;
      *step = scale;
    }
    if (encoder == Encoder::kE0) break;
  }
  return best;
}

Truth Encode(const Matrix& k, const Matrix& s, const Case& c) {
  const Vector mean = k.colwise().mean().transpose();
  const double mean_scale = RoundScale(mean.cwiseAbs().maxCoeff() / 127);
  const Vector mean_hat = mean_scale * Quantise(mean, mean_scale, -127, 127);
  const Matrix x = k.rowwise() - mean.transpose();
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(x * s * x.transpose());
  const Matrix target = k.rowwise() - mean_hat.transpose();

  Matrix basis(c.rank, c.head_dim), plain(c.page_tokens, c.rank), modes(c.page_tokens, c.rank);
  for (int m = 0; m < c.rank; ++m) {
    const Vector u = solver.eigenvectors().col(c.page_tokens - 1 - m);
    Vector v = x.transpose() * u;
    const double length = v.norm();
    v /= length;
    Eigen::Index largest;
    v.cwiseAbs().maxCoeff(&largest);
    const double sign = v(largest) < 0 ? -1 : 1;
    double step = 0;
    basis.row(m) = BasisCodes(sign * v, s, c.encoder, &step);
    plain.col(m) = sign * u * length * step;
    modes.col(m) = u;
  }
  Matrix coefficients = plain;
  if (c.encoder != Encoder::kE0) {
    Matrix normal = basis * s * basis.transpose();
    normal.diagonal().array() += 1e-6 * normal.trace() / c.rank;
    coefficients = (normal.inverse() * (basis * s * target.transpose())).transpose();
  }
  Truth truth;
  Matrix coarse = Matrix::Zero(c.page_tokens, c.head_dim);
  truth.keys = Matrix::Zero(c.page_tokens, c.head_dim);
  for (int m = 0; m < c.rank; ++m) {
    const double g = RoundScale(coefficients.col(m).cwiseAbs().maxCoeff() / 127);
    truth.keys += g * Quantise(coefficients.col(m), g, -127, 127) * basis.row(m);
    if (m == kCoarseModes - 1) coarse = truth.keys;
  }
  const Matrix residual = target - coarse;
  truth.tau = (residual * s).cwiseProduct(residual).sum() / c.page_tokens / s.trace();
  truth.keys.rowwise() += mean_hat.transpose();
  truth.optimum = (modes * modes.transpose() * x).rowwise() + mean.transpose();
  return truth;
}

class SummarizeTruthTest : public ::testing::TestWithParam<Case> {};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (int d : {64, 96, 128, 256}) {
    for (int b : {16, 32}) {
      for (int r : {4, 8}) {
        for (Encoder encoder : {Encoder::kE0, Encoder::kE1, Encoder::kE1S})
          cases.push_back({d, b, r, encoder});
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(AllGeometries, SummarizeTruthTest, ::testing::ValuesIn(AllCases()),
                         [](const auto& tested) {
                           return "D" + std::to_string(tested.param.head_dim) + "_B" +
                                  std::to_string(tested.param.page_tokens) + "_R" +
                                  std::to_string(tested.param.rank) + "_E" +
                                  std::to_string(static_cast<int>(tested.param.encoder));
                         });

struct Page {
  std::vector<uint8_t> unit;
  Matrix keys;  // rotated
};

Page MakePage(const testing::SyntheticHead& head, const Case& c, int page) {
  Page out{head.Unit(page, c.head_dim, c.page_tokens), Matrix(c.page_tokens, c.head_dim)};
  const uint16_t* bits = head.keys.data() + page * c.page_tokens * c.head_dim;
  std::vector<float> rows;
  for (int i = 0; i < c.page_tokens * c.head_dim; ++i) rows.push_back(FromBf16(bits[i]));
  Rotate(rows.data(), c.page_tokens, c.head_dim);
  for (int i = 0; i < c.page_tokens * c.head_dim; ++i)
    out.keys.data()[i] = static_cast<double>(rows[static_cast<size_t>(i)]);
  return out;
}

Matrix Decoded(const Case& c, const DecodedRecord& record) {
  Matrix keys(c.page_tokens, c.head_dim);
  for (int t = 0; t < c.page_tokens; ++t) {
    for (int d = 0; d < c.head_dim; ++d) {
      keys(t, d) = static_cast<double>(record.centroid[d]);
      for (int k = 0; k < c.rank; ++k)
        keys(t, d) += static_cast<double>(record.coefficients[k][t] * record.basis[k][d]);
    }
  }
  return keys;
}

double Norm2(const Matrix& x, const Matrix& s) { return (x * s).cwiseProduct(x).sum(); }

// In the metric, the record's distance from the truth must stay under 10% of the truth's own
// rounding (rms over pages). And it must be able to fail: without the metric, or with a mode left
// out, it is over.
TEST_P(SummarizeTruthTest, DecodedKeysEqualTheTruthFarWithinItsRounding) {
  const Case c = GetParam();
  testing::SyntheticSpec spec;
  spec.regime = testing::Regime::kWalk;
  spec.head_dim = c.head_dim;
  spec.page_tokens = c.page_tokens;
  spec.num_pages = 24;
  spec.num_steps = 60;
  const testing::SyntheticHead head = MakeSyntheticHead(spec);
  const std::vector<float> metric =
      testing::MetricOfQueries(head.query, c.head_dim, spec.dtype, true);
  const bool weighted = c.encoder == Encoder::kE1S;
  Matrix s = Matrix::Identity(c.head_dim, c.head_dim);
  if (weighted) {
    for (int i = 0; i < c.head_dim * c.head_dim; ++i)
      s.data()[i] = static_cast<double>(metric[static_cast<size_t>(i)]);
  }
  const SummaryLayout layout = MakeSummaryLayout(c.head_dim, c.page_tokens, c.rank);
  std::vector<uint8_t> coarse(layout.coarse_bytes), fine(layout.fine_bytes);
  double apart2 = 0, rounding2 = 0, missing_mode2 = 0, other_encoder2 = 0;
  for (int p = 0; p < spec.num_pages; ++p) {
    const Page page = MakePage(head, c, p);
    const Truth truth = Encode(page.keys, s, c);
    ref::Summarize({c.head_dim, c.page_tokens, c.rank, spec.dtype, true, c.encoder,
                    page.unit.data(), weighted ? metric.data() : nullptr, coarse.data(),
                    fine.data()});
    DecodedRecord record;
    DecodeRecord(coarse.data(), fine.data(), c.head_dim, c.page_tokens, c.rank, &record);
    apart2 += Norm2(Decoded(c, record) - truth.keys, s);
    rounding2 += Norm2(truth.keys - truth.optimum, s);
    const double tau = weighted ? truth.tau : 0.0;
    EXPECT_NEAR(static_cast<double>(record.tau), tau, 0.01 * tau) << "page " << p;

    std::fill_n(record.coefficients[c.rank - 1], c.page_tokens, 0.0f);
    missing_mode2 += Norm2(Decoded(c, record) - truth.keys, s);
    ref::Summarize({c.head_dim, c.page_tokens, c.rank, spec.dtype, true,
                    c.encoder == Encoder::kE1 ? Encoder::kE0 : Encoder::kE1, page.unit.data(),
                    nullptr, coarse.data(), fine.data()});
    DecodeRecord(coarse.data(), fine.data(), c.head_dim, c.page_tokens, c.rank, &record);
    other_encoder2 += Norm2(Decoded(c, record) - truth.keys, s);
  }
  RecordProperty("apart_over_rounding", std::to_string(std::sqrt(apart2 / rounding2)));
  EXPECT_LE(apart2, 0.01 * rounding2);
  EXPECT_GT(missing_mode2, 0.01 * rounding2);
  EXPECT_GT(other_encoder2, 0.01 * rounding2);
}

}  // namespace
}  // namespace kvd
