// The steps and symbols are those of kernels/README.md, "Building a record". All work is done on
// keys multiplied by 2^exponent (step 1); scales and tau are stored with that undone.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/check.h"
#include "kernels/checksum.h"
#include "kernels/dense.h"
#include "kernels/dtype.h"
#include "kernels/eigh.h"
#include "kernels/quant.h"
#include "kernels/rotate.h"
#include "kernels/summarize.h"

namespace kvd {
namespace {

constexpr int kMaxDim = 256;
constexpr int kMaxTokens = 32;
constexpr int kMaxRank = 8;
constexpr float kMaxBf16 = 0x1.FEp127f;

// A mode is dropped below this share of the strongest.
constexpr float kModeFloor = 0x1p-10f;
// ... and when X' u is only rounding: the Gram squares the keys, so that its null space alone, at
// sqrt(eps) of sigma_1, stands too near to kModeFloor.
constexpr float kNoiseFloor = 0x1p-16f;

constexpr int kNumClips = 5;
constexpr float kClips[kNumClips] = {1.0f, 0.92f, 0.85f, 0.78f, 0.70f};
constexpr double kRefitRidge = 1e-6;

struct Scale {
  uint16_t bits;  // as stored
  float value;    // what it stands for, times 2^exponent
};

struct Mode {
  Scale scale;         // g
  const float* codes;  // V4 [D], integers
  float sigma;         // Euclidean length of X' u
  float u[kMaxTokens];
  float coefficients[kMaxTokens];  // real-valued, against the integer basis
  int8_t stored[kMaxTokens];       // C8
};

// About 220 KiB, on the stack of the thread that seals.
struct Work {
  int exponent;
  int num_modes;
  Scale centroid_scale;
  Mode modes[kMaxRank];
  alignas(64) float keys[kMaxTokens * kMaxDim];     // k', later the target T, later the residual
  alignas(64) float centred[kMaxTokens * kMaxDim];  // X
  alignas(64) float basis[kMaxRank * kMaxDim];      // v, unit vectors
  alignas(64) float codes[kMaxRank * kNumClips * kMaxDim];    // V4 of every clip
  alignas(64) float errors[kMaxRank * kNumClips * kMaxDim];   // v - s V4
  alignas(64) float product[kMaxRank * kNumClips * kMaxDim];  // rows times the metric
  float mean[kMaxDim];
  float centroid_codes[kMaxDim];  // mu8, integers
};
static_assert(kMaxTokens <= kMaxRank * kNumClips, "product holds a row for each token");

// The bf16 scale nearest to `x` with the prescale undone. A power of two does not change the
// rounding, except below the smallest normal bf16, where a scale may become 0: then so do its
// codes.
Scale RoundScale(float x, int exponent) {
  const uint16_t bits = ToBf16(std::min(std::ldexp(x, -exponent), kMaxBf16));
  return {bits, std::ldexp(FromBf16(bits), exponent)};
}

// Multiplies by 2^exponent, in two steps because 2^133, which denormal keys need, is no fp32.
void MultiplyByPowerOfTwo(float* x, int count, int exponent) {
  const float first = std::ldexp(1.0f, exponent / 2);
  const float second = std::ldexp(1.0f, exponent - exponent / 2);
  for (int i = 0; i < count; ++i) x[i] = x[i] * first * second;
}

// Brings the largest magnitude to [1, 2); returns the exponent used, 0 for zeros only.
int Normalise(float* x, int count) {
  const float largest = MaxAbs(x, count);
  if (largest == 0.0f) return 0;
  const int exponent = -std::ilogb(largest);
  MultiplyByPowerOfTwo(x, count, exponent);
  return exponent;
}

// Step 1. Twice: before the rotation, whose sums of D keys could overflow, and after it.
void LoadKeys(const SummarizeArgs& args, Work* w) {
  const int count = args.page_tokens * args.head_dim;
  uint16_t bits[kMaxTokens * kMaxDim];
  std::memcpy(bits, args.unit, static_cast<size_t>(count) * sizeof(uint16_t));
  for (int i = 0; i < count; ++i) w->keys[i] = FromKv(args.dtype, bits[i]);
  w->exponent = Normalise(w->keys, count);
  if (!args.rotated) return;
  Rotate(w->keys, args.page_tokens, args.head_dim);
  w->exponent += Normalise(w->keys, count);
}

// Step 2 and X of step 3. The mean folds halves of the page onto each other, so that equal tokens
// give exactly their own value, X = 0 and no modes.
void Centre(const SummarizeArgs& args, Work* w) {
  const int dim = args.head_dim, tokens = args.page_tokens;
  const int count = tokens * dim;
  float* fold = w->product;
  std::copy_n(w->keys, count, fold);
  for (int half = count / 2; half >= dim; half /= 2) {
    for (int i = 0; i < half; ++i) fold[i] += fold[half + i];
  }
  const float share = 1.0f / static_cast<float>(tokens);
  for (int d = 0; d < dim; ++d) w->mean[d] = fold[d] * share;
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < dim; ++d) w->centred[t * dim + d] = w->keys[t * dim + d] - w->mean[d];
  }

  w->centroid_scale = RoundScale(MaxAbs(w->mean, dim) / 127.0f, w->exponent);
  const float scale = w->centroid_scale.value;
  for (int d = 0; d < dim; ++d) {
    w->centroid_codes[d] = scale > 0.0f ? RoundClamped(w->mean[d] / scale, -127.0f, 127.0f) : 0.0f;
  }
}

// Step 3: X X', or X S X' in the metric.
void MakeGram(const SummarizeArgs& args, Work* w, float* gram) {
  const int dim = args.head_dim, n = args.page_tokens;
  const float* x = w->centred;
  if (args.metric == nullptr) {
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j <= i; ++j) {
        gram[i * n + j] = Dot(x + i * dim, x + j * dim, dim);
        gram[j * n + i] = gram[i * n + j];
      }
    }
    return;
  }
  TimesMetric(x, n, args.metric, dim, Half::kUpper, w->product);
  float half[kMaxTokens * kMaxTokens];
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) half[i * n + j] = Dot(w->product + i * dim, x + j * dim, dim);
  }
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) gram[i * n + j] = half[i * n + j] + half[j * n + i];
  }
}

// Step 5 for one mode: v = X' u, unit length, its largest component positive. Returns the length
// before.
float MakeBasisVector(const SummarizeArgs& args, const Work& w, float* u, float* v) {
  const int dim = args.head_dim;
  std::fill_n(v, dim, 0.0f);
  for (int t = 0; t < args.page_tokens; ++t) AddScaled(v, u[t], w.centred + t * dim, dim);
  const float length = std::sqrt(Dot(v, v, dim));
  if (length == 0.0f) return 0.0f;
  int largest = 0;
  for (int d = 1; d < dim; ++d) {
    if (std::fabs(v[d]) > std::fabs(v[largest])) largest = d;
  }
  const float sign = v[largest] < 0.0f ? -1.0f : 1.0f;
  for (int d = 0; d < dim; ++d) v[d] *= sign / length;
  for (int t = 0; t < args.page_tokens; ++t) u[t] *= sign;
  return length;
}

// Steps 3 to 5: fills u, sigma and the basis of the modes that are kept, strongest first.
void FindModes(const SummarizeArgs& args, Work* w) {
  const int n = args.page_tokens;
  float gram[kMaxTokens * kMaxTokens], values[kMaxTokens], vectors[kMaxTokens * kMaxTokens];
  MakeGram(args, w, gram);
  Eigh(gram, n, values, vectors);
  const float floor = kModeFloor * kModeFloor * values[0];
  const float noise = kNoiseFloor * std::sqrt(Dot(w->centred, w->centred, n * args.head_dim));
  w->num_modes = 0;
  for (int k = 0; k < args.rank && values[k] > 0.0f && values[k] > floor; ++k) {
    Mode* mode = &w->modes[w->num_modes];
    std::copy_n(vectors + k * n, n, mode->u);
    mode->sigma = MakeBasisVector(args, *w, mode->u, w->basis + w->num_modes * args.head_dim);
    if (mode->sigma > noise) ++w->num_modes;
  }
}

// Step 6: the int4 codes of each mode, at the clip with the least squared error (E0: the first).
void ChooseBasisCodes(const SummarizeArgs& args, Work* w, float* steps) {
  const int dim = args.head_dim;
  const int num_clips = args.encoder == Encoder::kE0 ? 1 : kNumClips;
  const int num_rows = w->num_modes * num_clips;
  float row_steps[kMaxRank * kNumClips];
  for (int row = 0; row < num_rows; ++row) {
    const float* v = w->basis + row / num_clips * dim;
    const float step = RoundBf16(kClips[row % num_clips] * MaxAbs(v, dim) / 7.0f);
    float* codes = w->codes + row * dim;
    float* error = w->errors + row * dim;
    for (int d = 0; d < dim; ++d) {
      codes[d] = RoundClamped(v[d] / step, -8.0f, 7.0f);
      error[d] = v[d] - step * codes[d];
    }
    row_steps[row] = step;
  }
  const float* weighted = w->errors;
  if (args.metric != nullptr) {
    const int padded = (num_rows + kMetricRows - 1) / kMetricRows * kMetricRows;
    std::fill_n(w->errors + num_rows * dim, (padded - num_rows) * dim, 0.0f);
    TimesMetric(w->errors, padded, args.metric, dim, Half::kUpper, w->product);
    weighted = w->product;  // half of e'Se: the order is the same
  }
  for (int k = 0; k < w->num_modes; ++k) {
    int best = k * num_clips;
    float least = Dot(w->errors + best * dim, weighted + best * dim, dim);
    for (int row = best + 1; row < (k + 1) * num_clips; ++row) {
      const float squared = Dot(w->errors + row * dim, weighted + row * dim, dim);
      if (squared >= least) continue;
      least = squared;
      best = row;
    }
    w->modes[k].codes = w->codes + best * dim;
    steps[k] = row_steps[best];
  }
}

// T = k' - mu^, in place of the keys.
void MakeTarget(const SummarizeArgs& args, Work* w) {
  const int dim = args.head_dim;
  for (int t = 0; t < args.page_tokens; ++t)
    AddScaled(w->keys + t * dim, -w->centroid_scale.value, w->centroid_codes, dim);
}

// Cholesky factor of the n x n matrix, lower triangle, in place. Double: the ridge of 1e-6 stands
// at the edge of what fp32 resolves.
void Factor(double (*a)[kMaxRank], int n) {
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j <= i; ++j) {
      double sum = a[i][j];
      for (int k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
      a[i][j] = i == j ? std::sqrt(std::max(sum, 1e-300)) : sum / a[j][j];
    }
  }
}

void SolveFactored(const double (*a)[kMaxRank], int n, double* x) {
  for (int i = 0; i < n; ++i) {
    for (int k = 0; k < i; ++k) x[i] -= a[i][k] * x[k];
    x[i] /= a[i][i];
  }
  for (int i = n - 1; i >= 0; --i) {
    for (int k = i + 1; k < n; ++k) x[i] -= a[k][i] * x[k];
    x[i] /= a[i][i];
  }
}

// Step 7, E1 and E1S: C = T S V' (V S V' + e I)^-1 against the integer basis V; S = I without a
// metric.
void Refit(const SummarizeArgs& args, Work* w) {
  const int dim = args.head_dim, n = w->num_modes;
  float* basis = w->errors;
  std::fill_n(basis, kMaxRank * dim, 0.0f);
  for (int k = 0; k < n; ++k) std::copy_n(w->modes[k].codes, dim, basis + k * dim);
  const float* weighted = basis;
  if (args.metric != nullptr) {
    TimesMetric(basis, kMaxRank, args.metric, dim, Half::kFull, w->product);
    weighted = w->product;
  }
  double normal[kMaxRank][kMaxRank] = {};
  double trace = 0;
  for (int k = 0; k < n; ++k) {
    for (int j = 0; j <= k; ++j)
      normal[k][j] = static_cast<double>(Dot(weighted + k * dim, basis + j * dim, dim));
    trace += normal[k][k];
  }
  for (int k = 0; k < n; ++k) normal[k][k] += kRefitRidge * trace / args.rank;
  Factor(normal, n);
  for (int t = 0; t < args.page_tokens; ++t) {
    double c[kMaxRank];
    for (int k = 0; k < n; ++k)
      c[k] = static_cast<double>(Dot(w->keys + t * dim, weighted + k * dim, dim));
    SolveFactored(normal, n, c);
    for (int k = 0; k < n; ++k) w->modes[k].coefficients[t] = static_cast<float>(c[k]);
  }
}

// Step 7, E0: u sigma, against the integer basis.
void KeepPlainCoefficients(const SummarizeArgs& args, const float* steps, Work* w) {
  for (int k = 0; k < w->num_modes; ++k) {
    Mode* mode = &w->modes[k];
    for (int t = 0; t < args.page_tokens; ++t)
      mode->coefficients[t] = mode->u[t] * mode->sigma * steps[k];
  }
}

// Step 8, format B.
void QuantiseCoefficients(const SummarizeArgs& args, Work* w) {
  for (int k = 0; k < w->num_modes; ++k) {
    Mode* mode = &w->modes[k];
    mode->scale = RoundScale(MaxAbs(mode->coefficients, args.page_tokens) / 127.0f, w->exponent);
    const float g = mode->scale.value;
    for (int t = 0; t < args.page_tokens; ++t) {
      const float code = g > 0.0f ? RoundClamped(mode->coefficients[t] / g, -127.0f, 127.0f) : 0.0f;
      mode->stored[t] = static_cast<int8_t>(code);
    }
  }
}

// Mean over t of r'Sr / tr(S), r what the coarse part leaves with the full centroid. Destroys the
// target.
uint16_t MakeTau(const SummarizeArgs& args, Work* w) {
  if (args.metric == nullptr) return 0;
  const int dim = args.head_dim, tokens = args.page_tokens;
  for (int k = 0; k < std::min(w->num_modes, kCoarseModes); ++k) {
    const Mode& mode = w->modes[k];
    for (int t = 0; t < tokens; ++t) {
      const float coefficient = mode.scale.value * static_cast<float>(mode.stored[t]);
      AddScaled(w->keys + t * dim, -coefficient, mode.codes, dim);
    }
  }
  TimesMetric(w->keys, tokens, args.metric, dim, Half::kUpper, w->product);
  const float energy = 2.0f * Dot(w->keys, w->product, tokens * dim) / static_cast<float>(tokens);
  float trace = 0;
  for (int d = 0; d < dim; ++d) trace += args.metric[d * dim + d];
  // In double: two prescales undone at once may leave fp32.
  const double tau = std::ldexp(static_cast<double>(energy / trace), -2 * w->exponent);
  return ToBf16(static_cast<float>(std::clamp(tau, 0.0, static_cast<double>(kMaxBf16))));
}

void PutU16(uint8_t* at, uint16_t bits) { std::memcpy(at, &bits, sizeof(bits)); }

void WriteMode(const SummarizeArgs& args, const Mode& mode, uint8_t* basis, uint8_t* coefficients,
               uint8_t* scale) {
  if (mode.scale.value == 0.0f) return;  // a scale that vanished takes its codes with it
  for (int d = 0; d < args.head_dim; d += 2)
    basis[d / 2] =
        PackNibbles(static_cast<int>(mode.codes[d]), static_cast<int>(mode.codes[d + 1]));
  std::memcpy(coefficients, mode.stored, static_cast<size_t>(args.page_tokens));
  PutU16(scale, mode.scale.bits);
}

void WriteRecord(const SummarizeArgs& args, const Work& w, uint16_t tau) {
  const SummaryLayout layout = MakeSummaryLayout(args.head_dim, args.page_tokens, args.rank);
  uint8_t* coarse = args.coarse;
  uint8_t* fine = args.fine;
  std::memset(coarse, 0, layout.coarse_bytes);
  std::memset(fine, 0, layout.fine_bytes);
  for (int d = 0; d < args.head_dim; d += 2) {
    const auto even = static_cast<int>(w.centroid_codes[d]);
    const auto odd = static_cast<int>(w.centroid_codes[d + 1]);
    coarse[layout.coarse[kCentroidHigh] + static_cast<uint32_t>(d / 2)] =
        PackNibbles(CentroidHighNibble(even), CentroidHighNibble(odd));
    fine[layout.fine[kCentroidLow] + static_cast<uint32_t>(d / 2)] =
        PackNibbles(CentroidLowNibble(even), CentroidLowNibble(odd));
  }
  const int row = args.head_dim / 2, tokens = args.page_tokens;
  for (int k = 0; k < w.num_modes; ++k) {
    const Mode& mode = w.modes[k];
    if (k < kCoarseModes) {
      WriteMode(args, mode, coarse + layout.coarse[kCoarseBasis] + k * row,
                coarse + layout.coarse[kCoarseCoefficients] + k * tokens,
                coarse + layout.coarse[kCoarseScales] + k * 2);
    } else {
      const int i = k - kCoarseModes;
      WriteMode(args, mode, fine + layout.fine[kFineBasis] + i * row,
                fine + layout.fine[kFineCoefficients] + i * tokens,
                fine + layout.fine[kFineScales] + i * 2);
    }
  }
  PutU16(coarse + layout.coarse[kCentroidScale], w.centroid_scale.bits);
  PutU16(coarse + layout.coarse[kTau], tau);
  const uint64_t checksum =
      Checksum64(args.unit, MakeUnitLayout(args.head_dim, args.page_tokens).bytes);
  std::memcpy(coarse + layout.coarse[kUnitChecksum], &checksum, sizeof(checksum));
}

}  // namespace

namespace ref {

void Summarize(const SummarizeArgs& args) {
  KVD_CHECK((args.metric != nullptr) == (args.encoder == Encoder::kE1S));
  KVD_CHECK(args.head_dim <= kMaxDim && args.page_tokens <= kMaxTokens && args.rank <= kMaxRank);
  Work w;
  LoadKeys(args, &w);
  Centre(args, &w);
  FindModes(args, &w);
  float steps[kMaxRank];
  ChooseBasisCodes(args, &w, steps);
  MakeTarget(args, &w);
  if (args.encoder == Encoder::kE0) {
    KeepPlainCoefficients(args, steps, &w);
  } else {
    Refit(args, &w);
  }
  QuantiseCoefficients(args, &w);
  WriteRecord(args, w, MakeTau(args, &w));
}

}  // namespace ref

}  // namespace kvd
