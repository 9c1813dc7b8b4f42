#include "kernels/dense.h"

#include <cstring>

#include "kernels/check.h"

namespace kvd {
namespace {

// Four floats in one register: g++ 12 makes poor code of the same tile written as plain loops (a
// third of the speed). The lanes are independent sums, so the bits are those of the plain loops.
using Float4 = float __attribute__((vector_size(16)));

// A tile of kMetricRows rows by kTileDims columns of the result stays in registers.
constexpr int kTileDims = 8;

struct Tile {
  Float4 low[kMetricRows];   // columns 0 to 3
  Float4 high[kMetricRows];  // columns 4 to 7
};

Float4 Load(const float* at) {
  Float4 v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}

// tile[r][j] += sum over e < count of rows[r][e] * s[e][j].
void AddProducts(const float* rows, int row_stride, const float* s, int s_stride, int count,
                 Tile* tile) {
  Tile local = *tile;
  for (int e = 0; e < count; ++e) {
    const Float4 low = Load(s + e * s_stride);
    const Float4 high = Load(s + e * s_stride + 4);
#pragma GCC unroll 4
    for (int r = 0; r < kMetricRows; ++r) {
      const float x = rows[r * row_stride + e];
      local.low[r] += x * low;
      local.high[r] += x * high;
    }
  }
  *tile = local;
}

}  // namespace

void TimesMetric(const float* rows, int num_rows, const float* s, int dim, Half half, float* out) {
  KVD_CHECK(num_rows % kMetricRows == 0 && dim % kTileDims == 0);
  for (int d = 0; d < dim; d += kTileDims) {
    float corner[kTileDims][kTileDims];  // of U: half the diagonal, nothing below it
    for (int i = 0; i < kTileDims; ++i) {
      for (int j = 0; j < kTileDims; ++j) {
        const float weight = i < j ? 1.0f : i == j ? 0.5f : 0.0f;
        corner[i][j] = weight * s[(d + i) * dim + d + j];
      }
    }
    for (int r = 0; r < num_rows; r += kMetricRows) {
      Tile tile = {};
      if (half == Half::kFull) {
        AddProducts(rows + r * dim, dim, s + d, dim, dim, &tile);
      } else {
        AddProducts(rows + r * dim, dim, s + d, dim, d, &tile);
        AddProducts(rows + r * dim + d, dim, corner[0], kTileDims, kTileDims, &tile);
      }
      for (int i = 0; i < kMetricRows; ++i) {
        std::memcpy(out + (r + i) * dim + d, &tile.low[i], sizeof(Float4));
        std::memcpy(out + (r + i) * dim + d + 4, &tile.high[i], sizeof(Float4));
      }
    }
  }
}

}  // namespace kvd
