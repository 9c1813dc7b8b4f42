#include "tests/support/kv_data.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "kernels/rotate.h"

namespace kvd::testing {
namespace {

// splitmix64. Normal values are sums of twelve 16-bit uniforms: exact arithmetic, so the same bits
// everywhere, which neither the standard's distributions nor a libm promise.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : state_(Mix64(seed * kGolden64 + stream)) {}
  uint64_t Next() { return Mix64(state_ += kGolden64); }
  int Below(int n) { return static_cast<int>((Next() >> 32) * static_cast<uint64_t>(n) >> 32); }
  double Normal() {
    int64_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      const uint64_t bits = Next();
      for (int shift = 0; shift < 64; shift += 16)
        sum += static_cast<int64_t>((bits >> shift) & 0xFFFF);
    }
    return static_cast<double>(sum - 6 * 0xFFFF) / 65536.0;
  }

 private:
  uint64_t state_;
};

// Every part of a head draws from a stream of its own, so that regimes share what they do not
// change.
enum Stream : uint64_t { kModel, kKeys, kValues, kQueries, kPlaces };

constexpr int kLatentDims = 48;
constexpr double kLatentRho = 0.8;
constexpr double kWalkCosine = 0.84;
constexpr double kRopeTheta = 5e5;
constexpr double kLogitDeviation = 2.5;

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

Vector NormalVector(Random* random, int n) {
  Vector v(n);
  for (int i = 0; i < n; ++i) v(i) = random->Normal();
  return v;
}

// Rotates pairs (i, i + D/2) by position * theta^(-2i/D).
void Rope(double position, Vector* x) {
  const auto half = x->size() / 2;
  for (Eigen::Index i = 0; i < half; ++i) {
    const double angle =
        position * std::pow(kRopeTheta, -static_cast<double>(i) / static_cast<double>(half));
    const double c = std::cos(angle), s = std::sin(angle);
    const double a = (*x)(i), b = (*x)(i + half);
    (*x)(i) = a * c - b * s;
    (*x)(i + half) = a * s + b * c;
  }
}

struct Model {
  Vector constant;  // c
  Matrix mixing;    // M [D, 48]
};

Model MakeModel(const SyntheticSpec& spec) {
  Random random(spec.seed, kModel);
  const int dim = spec.head_dim;
  Model model;
  model.constant = 0.7 * NormalVector(&random, dim);
  const double outlier = spec.regime == Regime::kOutlierChannels ? 40.0 : 12.0;
  for (int i = 0; i < 4; ++i) {  // one in each quarter of the slowest quarter of the pairs
    const int pair = 3 * dim / 8 + i * dim / 32 + random.Below(dim / 32);
    const int channel = pair + (random.Below(2) == 0 ? 0 : dim / 2);
    model.constant(channel) = random.Below(2) == 0 ? outlier : -outlier;
  }
  model.mixing.resize(dim, kLatentDims);
  for (int j = 0; j < kLatentDims; ++j)
    model.mixing.col(j) = 0.45 * std::pow(0.93, j) * NormalVector(&random, dim);
  return model;
}

Matrix MakeKeys(const SyntheticSpec& spec, const Model& model) {
  Random random(spec.seed, kKeys);
  Matrix keys(spec.num_pages * spec.page_tokens, spec.head_dim);
  Vector z = NormalVector(&random, kLatentDims);
  const double innovation = std::sqrt(1 - kLatentRho * kLatentRho);
  for (Eigen::Index t = 0; t < keys.rows(); ++t) {
    Vector k = model.constant + model.mixing * z + 0.35 * NormalVector(&random, spec.head_dim);
    Rope(static_cast<double>(t), &k);
    keys.row(t) = k;
    z = kLatentRho * z + innovation * NormalVector(&random, kLatentDims);
  }
  return keys;
}

std::vector<uint16_t> Round(const Matrix& m, KvDtype dtype) {
  std::vector<uint16_t> bits;
  for (Eigen::Index i = 0; i < m.size(); ++i)
    bits.push_back(ToKv(dtype, static_cast<float>(m.data()[i])));
  return bits;
}

void RoundInPlace(KvDtype dtype, Matrix* m) {
  for (Eigen::Index i = 0; i < m->size(); ++i)
    m->data()[i] =
        static_cast<double>(FromKv(dtype, ToKv(dtype, static_cast<float>(m->data()[i]))));
}

// [steps * G, D], rounded: a direction common to the group plus a private part each, both walking.
Matrix MakeQueries(const SyntheticSpec& spec, const Model& model, const Matrix& keys,
                   double scale) {
  Random random(spec.seed, kQueries);
  const int group = spec.group;
  Matrix latent(group + 1, kLatentDims);  // the last row is common
  const auto draw = [&]() -> Eigen::RowVectorXd { return NormalVector(&random, kLatentDims); };
  for (int g = 0; g <= group; ++g) latent.row(g) = draw();
  const Matrix centred = keys.rowwise() - keys.colwise().mean();
  const Matrix covariance = centred.transpose() * centred / static_cast<double>(keys.rows());
  Matrix queries(spec.num_steps * group, spec.head_dim);
  for (int step = 0; step < spec.num_steps; ++step) {
    for (int g = 0; g < group; ++g) {
      Vector q = model.mixing * (latent.row(group) + 0.6 * latent.row(g)).transpose();
      Rope(static_cast<double>(keys.rows() + step), &q);
      const double deviation = scale * std::sqrt(q.dot(covariance * q));
      queries.row(step * group + g) = q * (kLogitDeviation / deviation);
    }
    const double innovation = std::sqrt(1 - kWalkCosine * kWalkCosine);
    for (int g = 0; g <= group; ++g)
      latent.row(g) = kWalkCosine * latent.row(g) + innovation * draw();
  }
  RoundInPlace(spec.dtype, &queries);
  return queries;
}

double Lse(const Vector& x) {
  const double most = x.maxCoeff();
  return most + std::log((x.array() - most).exp().sum());
}

// The vector of least length whose logits with the rows of `queries` are `logits`.
Vector VectorWithLogits(const Matrix& queries, const Vector& logits, double scale) {
  const Matrix gram = queries * queries.transpose();
  return queries.transpose() * gram.ldlt().solve(logits / scale);
}

// Adds `shift` logits, in the mean over the group, along the group's mean query.
void ShiftToken(const Matrix& queries, double shift, double scale, Matrix* keys,
                Eigen::Index token) {
  const Vector mean = queries.colwise().mean().transpose();
  keys->row(token) += (shift / (scale * mean.squaredNorm()) * mean).transpose();
}

// Four tokens a step rise to the mean of the heads' lse + .5.
void AddNeedles(const SyntheticSpec& spec, const Matrix& queries, double scale, Matrix* keys) {
  Random random(spec.seed, kPlaces);
  for (int step = 0; step < spec.num_steps; ++step) {
    const Matrix q = queries.middleRows(step * spec.group, spec.group);
    const Matrix logits = scale * (*keys * q.transpose());
    double lse = 0;
    for (int g = 0; g < spec.group; ++g) lse += Lse(logits.col(g)) / spec.group;
    for (int i = 0; i < 4; ++i) {
      const int token = random.Below(static_cast<int>(keys->rows()));
      const double now = scale * (q * keys->row(token).transpose()).mean();
      ShiftToken(q, lse + 0.5 - now, scale, keys, token);
    }
  }
}

void AddOutlierTokens(const SyntheticSpec& spec, const Matrix& queries, double scale,
                      Matrix* keys) {
  constexpr double kShifts[] = {-50, -20, 20};
  Random random(spec.seed, kPlaces);
  for (int page = 0; page < spec.num_pages; ++page) {
    const int token = page * spec.page_tokens + random.Below(spec.page_tokens);
    ShiftToken(queries, kShifts[page % 3], scale, keys, token);
  }
}

// Token 0 takes .05, .3, .7, .95 of the mass of successive heads.
void AddSink(const SyntheticSpec& spec, const Matrix& queries, double scale, Matrix* keys) {
  constexpr double kMasses[] = {0.05, 0.3, 0.7, 0.95};
  const Matrix logits = scale * (*keys * queries.transpose());
  Vector wanted(spec.group);
  for (int g = 0; g < spec.group; ++g) {
    const double mass = kMasses[g % 4];
    const Vector rest = logits.col(g).tail(keys->rows() - 1);
    wanted(g) = Lse(rest) + std::log(mass / (1 - mass)) - logits(0, g);
  }
  keys->row(0) += VectorWithLogits(queries, wanted, scale).transpose();
}

void AddHeadOffsets(const SyntheticSpec& spec, const Matrix& queries, double scale, Matrix* keys) {
  Vector offsets(spec.group);
  for (int g = 0; g < spec.group; ++g) offsets(g) = 30.0 * (g + 1) / spec.group;
  keys->rowwise() += VectorWithLogits(queries, offsets, scale).transpose();
}

void ApplyRegime(const SyntheticSpec& spec, const Matrix& queries, double scale, Matrix* keys) {
  const Matrix first = queries.topRows(spec.group);
  switch (spec.regime) {
    case Regime::kNeedle:
      return AddNeedles(spec, queries, scale, keys);
    case Regime::kOutlierToken:
      return AddOutlierTokens(spec, first, scale, keys);
    case Regime::kSink:
      return AddSink(spec, first, scale, keys);
    case Regime::kHeadOffset:
      return AddHeadOffsets(spec, first, scale, keys);
    case Regime::kDiffuse:
    case Regime::kOutlierChannels:  // a matter of MakeModel
    case Regime::kWalk:             // a matter of num_steps
      return;
  }
}

// White noise, a constant and a mean of each page.
Matrix MakeValues(const SyntheticSpec& spec) {
  Random random(spec.seed, kValues);
  const int dim = spec.head_dim;
  const Vector constant = NormalVector(&random, dim);
  Matrix values(spec.num_pages * spec.page_tokens, dim);
  for (int page = 0; page < spec.num_pages; ++page) {
    const Vector mean = constant + 0.5 * NormalVector(&random, dim);
    for (int t = 0; t < spec.page_tokens; ++t)
      values.row(page * spec.page_tokens + t) = (mean + NormalVector(&random, dim)).transpose();
  }
  return values;
}

// --- adversarial pages ---

struct PageMaker {
  int dim;
  int tokens;
  KvDtype dtype;

  template <typename ValueAt>  // float(int t, int d)
  std::vector<uint16_t> Make(ValueAt value_at) const {
    std::vector<uint16_t> keys;
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < dim; ++d) keys.push_back(ToKv(dtype, value_at(t, d)));
    }
    return keys;
  }

  // Small integers on `rank` directions of disjoint support: exact in both dtypes, of that very
  // rank.
  std::vector<uint16_t> MakeRank(int rank) const {
    Random random(7, static_cast<uint64_t>(rank));
    std::vector<float> weights(static_cast<size_t>(tokens * rank)), signs(static_cast<size_t>(dim));
    for (float& w : weights) w = static_cast<float>(random.Below(17) - 8);
    for (float& s : signs) s = random.Below(2) == 0 ? 1.0f : -1.0f;
    return Make([&](int t, int d) {
      return weights[static_cast<size_t>(t * rank + d % rank)] * signs[static_cast<size_t>(d)];
    });
  }
};

}  // namespace

std::vector<uint8_t> SyntheticHead::Unit(int page, int head_dim, int page_tokens) const {
  const size_t count = static_cast<size_t>(head_dim) * static_cast<size_t>(page_tokens);
  const size_t start = static_cast<size_t>(page) * count;
  std::vector<uint8_t> unit(4 * count);
  std::memcpy(unit.data(), keys.data() + start, 2 * count);
  std::memcpy(unit.data() + 2 * count, values.data() + start, 2 * count);
  return unit;
}

SyntheticHead MakeSyntheticHead(const SyntheticSpec& spec) {
  const double scale = 1.0 / std::sqrt(spec.head_dim);
  const Model model = MakeModel(spec);
  Matrix keys = MakeKeys(spec, model);
  const Matrix queries = MakeQueries(spec, model, keys, scale);
  ApplyRegime(spec, queries, scale, &keys);
  SyntheticHead head;
  head.keys = Round(keys, spec.dtype);
  head.values = Round(MakeValues(spec), spec.dtype);
  head.query = Round(queries, spec.dtype);
  head.softmax_scale = static_cast<float>(scale);
  return head;
}

std::vector<uint16_t> RandomKv(int64_t count, KvDtype dtype, float sigma, uint64_t seed) {
  Random random(seed, kValues);
  std::vector<uint16_t> out(static_cast<size_t>(count));
  for (uint16_t& bits : out) bits = ToKv(dtype, sigma * static_cast<float>(random.Normal()));
  return out;
}

std::vector<float> MetricOfQueries(const std::vector<uint16_t>& queries, int head_dim,
                                   KvDtype dtype, bool rotated) {
  std::vector<float> rows;
  for (uint16_t bits : queries) rows.push_back(FromKv(dtype, bits));
  const auto num_rows = static_cast<int64_t>(rows.size()) / head_dim;
  if (rotated) Rotate(rows.data(), num_rows, head_dim);
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Matrix q = Eigen::Map<const Rows>(rows.data(), num_rows, head_dim).cast<double>();
  Matrix s = q.transpose() * q / static_cast<double>(num_rows);
  s.diagonal().array() += 0.01 * s.trace() / head_dim;
  const Rows out = s.cast<float>();
  return {out.data(), out.data() + out.size()};
}

std::vector<AdversarialPage> AdversarialPages(int head_dim, int page_tokens, int rank,
                                              KvDtype dtype) {
  const PageMaker maker{head_dim, page_tokens, dtype};
  const float largest = FromKv(dtype, dtype == KvDtype::kBf16 ? 0x7F7F : 0x7BFF);
  const std::vector<uint16_t> noise = RandomKv(int64_t{page_tokens} * head_dim, dtype, 1.0f, 11);
  const auto noise_at = [&](int t, int d) {
    return FromKv(dtype, noise[static_cast<size_t>(t * head_dim + d)]);
  };
  const auto sign_at = [&](int t, int d) { return noise_at(t, d) < 0 ? -1.0f : 1.0f; };

  std::vector<AdversarialPage> pages;
  const auto add = [&](std::string name, std::vector<uint16_t> keys, int max_modes, bool exact) {
    pages.push_back({std::move(name), std::move(keys), max_modes, exact});
  };
  add("AllZero", maker.Make([](int, int) { return 0.0f; }), 0, true);
  add("AllEqual", maker.Make([&](int, int d) { return noise_at(0, d); }), 0, true);
  add("TwoAntipodal", maker.Make([&](int t, int d) {
    return t < 2 ? noise_at(0, d) * (t == 0 ? 1.0f : -1.0f) : 0.0f;
  }),
      1, true);
  add("AlternatingSigns",
      maker.Make([&](int t, int d) { return noise_at(0, d) * (t % 2 == 0 ? 1.0f : -1.0f); }), 1,
      true);
  add("OneTokenOf1000",
      maker.Make([&](int t, int d) { return t == 5 ? 1e3f * sign_at(0, d) : 0.0f; }), 1, true);
  add("OneElement", maker.Make([](int t, int d) { return t == 3 && d == 2 ? 1.0f : 0.0f; }), 1,
      true);
  add("RankExactlyR", maker.MakeRank(rank), rank, true);
  add("RankOneMoreThanR", maker.MakeRank(rank + 1), rank, false);
  // Two orthogonal directions of equal strength: any rotation of them is as good.
  add("EqualLeadingEigenvalues", maker.Make([&](int t, int d) {
    return t / 2 % 2 != d % 2 ? 0.0f : sign_at(0, d) * (t % 2 == 0 ? 1.0f : -1.0f);
  }),
      2, true);
  add("OrthogonalTokens",
      maker.Make([&](int t, int d) { return d % page_tokens == t ? sign_at(0, d) : 0.0f; }), rank,
      false);
  add("LargestEqual", maker.Make([&](int, int) { return largest; }), 0, true);
  add("LargestAlternating",
      maker.Make([&](int t, int d) { return sign_at(0, d) * (t % 2 == 0 ? largest : -largest); }),
      1, true);
  add("LargestRandomSigns", maker.Make([&](int t, int d) { return sign_at(t, d) * largest; }), rank,
      false);
  const uint16_t mantissa = dtype == KvDtype::kBf16 ? 0x807F : 0x83FF;
  std::vector<uint16_t> denormals;
  for (size_t i = 0; i < noise.size(); ++i)
    denormals.push_back(static_cast<uint16_t>(Mix64(i) & mantissa));
  add("Denormals", std::move(denormals), rank, false);
  const float smallest = FromKv(dtype, 1);
  add("SmallestDenormal", maker.Make([&](int t, int d) { return sign_at(t, d) * smallest; }), rank,
      false);
  add("LargestAmongDenormals",
      maker.Make([&](int t, int d) { return t == 0 ? sign_at(0, d) * largest : smallest; }), 1,
      true);
  return pages;
}

}  // namespace kvd::testing
