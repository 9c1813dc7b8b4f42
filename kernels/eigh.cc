#include "kernels/eigh.h"

#include <algorithm>
#include <cmath>

#include "kernels/check.h"

namespace kvd {
namespace {

// An off-diagonal element this small against its diagonal is rounding: rotating it away would only
// add noise, and would keep the last sweeps busy.
constexpr float kNegligible = 1e-8f;

struct Rotation {
  float t;    // tangent
  float s;    // sine
  float tau;  // s / (1 + cosine): the tangent of half the angle
};

// The rotation of the plane (p, q) that zeroes a_pq (Rutishauser's formulas: the smaller angle).
Rotation MakeRotation(float app, float aqq, float apq) {
  const float theta = (aqq - app) / (2.0f * apq);
  // Beyond 1e9 theta squared would overflow sooner than matter: t = 1 / (2 theta) to full
  // precision.
  const float magnitude = std::fabs(theta);
  const float root = magnitude < 1e9f ? std::sqrt(magnitude * magnitude + 1.0f) : magnitude;
  const float t = std::copysign(1.0f / (magnitude + root), theta);
  const float c = 1.0f / std::sqrt(t * t + 1.0f);
  const float s = t * c;
  return {t, s, s / (1.0f + c)};
}

// Written as a change of p and q, so that the rounding of a small rotation is small too: with plain
// cosines the vectors lose twice the orthogonality that is allowed at n = 32.
void RotateRows(float* __restrict p, float* __restrict q, int n, Rotation r) {
  for (int i = 0; i < n; ++i) {
    const float x = p[i], y = q[i];
    p[i] = x - r.s * (y + r.tau * x);
    q[i] = y + r.s * (x - r.tau * y);
  }
}

// One two-sided rotation: rows p and q first (contiguous), then their mirror columns.
void RotateBothSides(float* a, int n, int p, int q, Rotation r) {
  const float app = a[p * n + p], aqq = a[q * n + q], apq = a[p * n + q];
  RotateRows(a + p * n, a + q * n, n, r);
  for (int i = 0; i < n; ++i) {
    a[i * n + p] = a[p * n + i];
    a[i * n + q] = a[q * n + i];
  }
  a[p * n + p] = app - r.t * apq;
  a[q * n + q] = aqq + r.t * apq;
  a[p * n + q] = 0.0f;
  a[q * n + p] = 0.0f;
}

// Returns whether anything was rotated.
bool Sweep(float* a, float* vectors, int n) {
  bool rotated = false;
  for (int p = 0; p < n - 1; ++p) {
    for (int q = p + 1; q < n; ++q) {
      const float apq = a[p * n + q];
      const float limit = kNegligible * std::max(std::fabs(a[p * n + p]), std::fabs(a[q * n + q]));
      if (std::fabs(apq) <= limit) continue;
      const Rotation r = MakeRotation(a[p * n + p], a[q * n + q], apq);
      RotateBothSides(a, n, p, q, r);
      RotateRows(vectors + p * n, vectors + q * n, n, r);
      rotated = true;
    }
  }
  return rotated;
}

void FixSign(float* vector, int n) {
  int largest = 0;
  for (int i = 1; i < n; ++i) {
    if (std::fabs(vector[i]) > std::fabs(vector[largest])) largest = i;
  }
  if (vector[largest] >= 0.0f) return;
  for (int i = 0; i < n; ++i) vector[i] = -vector[i];
}

}  // namespace

void Eigh(float* matrix, int n, float* values, float* vectors) {
  KVD_CHECK(n >= 1 && n <= kMaxEighSize);
  float rows[kMaxEighSize * kMaxEighSize];
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) rows[i * n + j] = i == j ? 1.0f : 0.0f;
  }
  for (int sweep = 0; sweep < EighSweeps(n) && Sweep(matrix, rows, n); ++sweep) {
  }
  int order[kMaxEighSize];
  for (int i = 0; i < n; ++i) order[i] = i;
  std::sort(order, order + n, [&](int i, int j) {
    const float wi = matrix[i * n + i], wj = matrix[j * n + j];
    return wi != wj ? wi > wj : i < j;
  });
  for (int k = 0; k < n; ++k) {
    values[k] = matrix[order[k] * n + order[k]];
    std::copy_n(rows + order[k] * n, n, vectors + k * n);
    FixSign(vectors + k * n, n);
  }
}

}  // namespace kvd
