#include <array>
#include <cmath>

#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/rotate.h"

namespace kvd {
namespace {

constexpr int kMaxDim = RotationSigns::kMaxDim;

// +1 or -1 a dim.
std::array<float, kMaxDim> MakeSigns() {
  constexpr RotationSigns kSigns = MakeRotationSigns();
  std::array<float, kMaxDim> signs;
  for (size_t d = 0; d < kMaxDim; ++d)
    signs[d] = (kSigns.words[d / 32] >> (d % 32) & 1) != 0 ? -1.0f : 1.0f;
  return signs;
}

// Unnormalised Walsh-Hadamard transform of x[0..n), Sylvester's order, n a power of two >= 4.
void HadamardInPlace(float* x, int n) {
  for (int i = 0; i < n; i += 4) {  // the first two stages in one pass over registers
    const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
    const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
    x[i] = a + c;
    x[i + 1] = b + d;
    x[i + 2] = a - c;
    x[i + 3] = b - d;
  }
  for (int half = 4; half < n; half *= 2) {
    for (int start = 0; start < n; start += 2 * half) {
      float* __restrict low = x + start;
      float* __restrict high = x + start + half;
      for (int i = 0; i < half; ++i) {
        const float sum = low[i] + high[i];
        high[i] = low[i] - high[i];
        low[i] = sum;
      }
    }
  }
}

}  // namespace

void Rotate(float* rows, int64_t num_rows, int head_dim) {
  static const std::array<float, kMaxDim> signs = MakeSigns();
  KVD_CHECK(head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256);
  const int n = head_dim == 96 ? 32 : head_dim;
  const float norm = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t r = 0; r < num_rows; ++r) {
    float* x = rows + r * head_dim;
    for (int d = 0; d < head_dim; ++d) x[d] *= signs[static_cast<size_t>(d)];
    for (int start = 0; start < head_dim; start += n) HadamardInPlace(x + start, n);
    for (int d = 0; d < head_dim; ++d) x[d] *= norm;
  }
}

void RotateQuery(const uint16_t* query, int64_t num_rows, int head_dim, KvDtype dtype,
                 uint16_t* out) {
  float row[kMaxDim];
  for (int64_t r = 0; r < num_rows; ++r) {
    const uint16_t* in = query + r * head_dim;
    for (int d = 0; d < head_dim; ++d) row[d] = FromKv(dtype, in[d]);
    Rotate(row, 1, head_dim);
    for (int d = 0; d < head_dim; ++d) out[r * head_dim + d] = ToKv(dtype, row[d]);
  }
}

}  // namespace kvd
