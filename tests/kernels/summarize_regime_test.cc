// How well records estimate page lse on the synthetic regimes (kernels/README.md, "Synthetic
// data"), encoder against encoder. The figures are in the test's XML output, and in the README.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/rotate.h"
#include "kernels/summarize.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"

namespace kvd {
namespace {

using testing::Regime;
using testing::SyntheticSpec;

constexpr int kRank = 8;

struct Queries {
  const uint16_t* plain;
  std::vector<uint16_t> rotated;
};

Queries QueriesOfStep(const SyntheticSpec& spec, const testing::SyntheticHead& head, int step) {
  const int count = spec.group * spec.head_dim;
  Queries q{head.query.data() + step * count, std::vector<uint16_t>(static_cast<size_t>(count))};
  RotateQuery(q.plain, spec.group, spec.head_dim, spec.dtype, q.rotated.data());
  return q;
}

// rms over pages and heads of lse error about each head's bias: only this part moves a ranking.
double LseError(const SyntheticSpec& spec, const testing::SyntheticHead& head, int step,
                Encoder encoder, const float* metric) {
  const int dim = spec.head_dim, tokens = spec.page_tokens;
  const auto scale = static_cast<double>(head.softmax_scale);
  const SummaryLayout layout = MakeSummaryLayout(dim, tokens, kRank);
  const Queries q = QueriesOfStep(spec, head, step);
  std::vector<uint8_t> coarse(layout.coarse_bytes), fine(layout.fine_bytes);
  std::vector<double> sum(static_cast<size_t>(spec.group)), sum2(sum);
  for (int p = 0; p < spec.num_pages; ++p) {
    const std::vector<uint8_t> unit = head.Unit(p, dim, tokens);
    ref::Summarize({dim, tokens, kRank, spec.dtype, true, encoder, unit.data(), metric,
                    coarse.data(), fine.data()});
    for (int g = 0; g < spec.group; ++g) {
      const double estimate =
          testing::OracleRecordLse(q.rotated.data() + g * dim, coarse.data(), fine.data(), dim,
                                   tokens, kRank, spec.dtype, scale, 0.0);
      const double truth =
          testing::OraclePageLse(q.plain + g * dim, head.keys.data() + p * tokens * dim, tokens,
                                 dim, spec.dtype, scale, 0.0);
      sum[static_cast<size_t>(g)] += estimate - truth;
      sum2[static_cast<size_t>(g)] += (estimate - truth) * (estimate - truth);
    }
  }
  double variance = 0;
  for (size_t g = 0; g < sum.size(); ++g)
    variance += sum2[g] / spec.num_pages - std::pow(sum[g] / spec.num_pages, 2);
  return std::sqrt(variance / spec.group);
}

// The metric of 1000 steps of the walk that the first query starts; the first 64, which may be
// scored or correlate with what is, are left out. Regimes change keys, not what queries look at.
std::vector<float> WalkMetric(SyntheticSpec spec) {
  spec.regime = Regime::kWalk;
  spec.num_steps = 1000;
  const std::vector<uint16_t> walk = MakeSyntheticHead(spec).query;
  return testing::MetricOfQueries({walk.begin() + 64 * spec.group * spec.head_dim, walk.end()},
                                  spec.head_dim, spec.dtype, true);
}

struct Errors {
  double e0, e1, e1s;
  std::string ToString() const {
    return "E0 " + std::to_string(e0) + " E1 " + std::to_string(e1) + " E1S " + std::to_string(e1s);
  }
};

SyntheticSpec MakeSpec(Regime regime, int head_dim, int group) {
  SyntheticSpec spec;
  spec.regime = regime;
  spec.head_dim = head_dim;
  spec.group = group;
  spec.num_pages = 96;
  return spec;
}

// Errors for the queries of the last step.
Errors Measure(const SyntheticSpec& spec) {
  const testing::SyntheticHead head = MakeSyntheticHead(spec);
  const std::vector<float> metric = WalkMetric(spec);
  const int step = spec.num_steps - 1;
  return {LseError(spec, head, step, Encoder::kE0, nullptr),
          LseError(spec, head, step, Encoder::kE1, nullptr),
          LseError(spec, head, step, Encoder::kE1S, metric.data())};
}

std::string RegimeName(Regime regime) {
  constexpr const char* kNames[] = {"Diffuse", "Needle",     "OutlierToken", "OutlierChannels",
                                    "Sink",    "HeadOffset", "Walk"};
  return kNames[static_cast<int>(regime)];
}

class RegimeTest : public ::testing::TestWithParam<Regime> {};
INSTANTIATE_TEST_SUITE_P(AllRegimes, RegimeTest,
                         ::testing::Values(Regime::kDiffuse, Regime::kNeedle, Regime::kOutlierToken,
                                           Regime::kOutlierChannels, Regime::kSink,
                                           Regime::kHeadOffset, Regime::kWalk),
                         [](const auto& tested) { return RegimeName(tested.param); });

// The largest error of E1S as a share of E1's. In two regimes tokens are shifted along the very
// query that scores them: the leading basis row is then that query, and E1's residual, orthogonal
// to the row, vanishes for it; a metric knows the query only as one of many and cannot have this
// luck. At D = 64 the 48 latent dims of these queries leave little to choose.
double AllowedByTheMetric(Regime regime, int head_dim) {
  if (regime == Regime::kOutlierToken) return 2.5;
  if (regime == Regime::kNeedle) return 1.1;
  return head_dim == 64 ? 1.03 : 0.95;
}

// E1 must not lose to E0 by more than noise; E1S, told what queries look at, must win.
TEST_P(RegimeTest, RefitAndMetricLowerTheErrorOfTheEstimate) {
  for (const auto& [head_dim, group] : {std::pair{64, 3}, std::pair{128, 4}, std::pair{256, 4}}) {
    const Errors errors = Measure(MakeSpec(GetParam(), head_dim, group));
    RecordProperty("D" + std::to_string(head_dim), errors.ToString());
    EXPECT_LE(errors.e1, 1.03 * errors.e0) << "D" << head_dim << ": " << errors.ToString();
    EXPECT_LE(errors.e1s, AllowedByTheMetric(GetParam(), head_dim) * errors.e1)
        << "D" << head_dim << ": " << errors.ToString();
  }
}

// The same outlier tokens, scored by a query 40 steps later (cosine .001 with the shift).
TEST(OutlierTokenTest, MetricDoesNotLoseWhereAnotherQueryLooks) {
  for (int head_dim : {128, 256}) {
    SyntheticSpec spec = MakeSpec(Regime::kOutlierToken, head_dim, 4);
    spec.num_steps = 41;
    const Errors errors = Measure(spec);
    RecordProperty("D" + std::to_string(head_dim), errors.ToString());
    EXPECT_LE(errors.e1s, errors.e1) << "D" << head_dim << ": " << errors.ToString();
  }
}

}  // namespace
}  // namespace kvd
