// Deliberately shares nothing with kernels/ but the geometry's names: offsets, nibbles and 16-bit
// floats are worked out here a second time, from kernels/README.md.

#include "tests/support/oracle.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

namespace kvd::testing {
namespace {

double Decode16(KvDtype dtype, unsigned bits) {
  const int mantissa_bits = dtype == KvDtype::kBf16 ? 7 : 10;
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  const int one = 1 << mantissa_bits;
  return exponent == 0 ? sign * std::ldexp(mantissa, 1 - bias - mantissa_bits)
                       : sign * std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
}

double Bf16At(const uint8_t* at) {
  return Decode16(KvDtype::kBf16, at[0] | (static_cast<unsigned>(at[1]) << 8));
}

int NibbleAt(const uint8_t* row, int dim) { return (row[dim / 2] >> (4 * (dim % 2))) & 15; }

double TwosComplement(int value, int bits) {
  return value >= (1 << (bits - 1)) ? value - (1 << bits) : value;
}

double Lse(const std::vector<double>& x) {
  const double most = *std::max_element(x.begin(), x.end());
  if (std::isinf(most)) return most;
  double sum = 0;
  for (double v : x) sum += std::exp(v - most);
  return most + std::log(sum);
}

double Cap(double x, double softcap) { return softcap > 0 ? softcap * std::tanh(x / softcap) : x; }

}  // namespace

double OracleLogit(const uint16_t* q, const uint16_t* k, int head_dim, KvDtype dtype, double scale,
                   double softcap) {
  double sum = 0;
  for (int d = 0; d < head_dim; ++d) sum += Decode16(dtype, q[d]) * Decode16(dtype, k[d]);
  return Cap(scale * sum, softcap);
}

double OraclePageLse(const uint16_t* q, const uint16_t* keys, int page_tokens, int head_dim,
                     KvDtype dtype, double scale, double softcap) {
  std::vector<double> logits;
  for (int t = 0; t < page_tokens; ++t)
    logits.push_back(OracleLogit(q, keys + t * head_dim, head_dim, dtype, scale, softcap));
  return Lse(logits);
}

std::vector<double> OracleRecordLogits(const uint16_t* q, const uint8_t* coarse,
                                       const uint8_t* fine, int head_dim, int page_tokens, int rank,
                                       KvDtype dtype, double scale, double softcap) {
  const int row = head_dim / 2;
  // Coarse: hi | 2 basis rows | 2 coefficient rows | 2 scales | s_mu | tau | checksum.
  const uint8_t* centroid_scale = coarse + 3 * row + 2 * page_tokens + 4;
  double centroid = 0;
  for (int d = 0; d < head_dim; ++d) {
    const double high = 16.0 * (NibbleAt(coarse, d) - 8);
    centroid += (high + (fine != nullptr ? NibbleAt(fine, d) : 7.5)) * Decode16(dtype, q[d]);
  }
  std::vector<double> logits(static_cast<size_t>(page_tokens), Bf16At(centroid_scale) * centroid);

  const auto add_modes = [&](const uint8_t* basis, int num_modes) {
    const uint8_t* coefficients = basis + num_modes * row;
    const uint8_t* scales = coefficients + num_modes * page_tokens;
    for (int k = 0; k < num_modes; ++k) {
      double z = 0;
      for (int d = 0; d < head_dim; ++d)
        z += TwosComplement(NibbleAt(basis + k * row, d), 4) * Decode16(dtype, q[d]);
      for (int t = 0; t < page_tokens; ++t)
        logits[static_cast<size_t>(t)] +=
            Bf16At(scales + 2 * k) * TwosComplement(coefficients[k * page_tokens + t], 8) * z;
    }
  };
  add_modes(coarse + row, 2);
  // Fine: lo | R - 2 basis rows | coefficient rows | scales.
  if (fine != nullptr) add_modes(fine + row, rank - 2);
  for (double& x : logits) x = Cap(scale * x, softcap);
  return logits;
}

double OracleRecordLse(const uint16_t* q, const uint8_t* coarse, const uint8_t* fine, int head_dim,
                       int page_tokens, int rank, KvDtype dtype, double scale, double softcap) {
  const double lse =
      Lse(OracleRecordLogits(q, coarse, fine, head_dim, page_tokens, rank, dtype, scale, softcap));
  if (fine != nullptr || softcap > 0) return lse;
  double norm2 = 0;
  for (int d = 0; d < head_dim; ++d) norm2 += std::pow(Decode16(dtype, q[d]), 2);
  const double tau = Bf16At(coarse + 3 * (head_dim / 2) + 2 * page_tokens + 6);
  return lse + 0.5 * scale * scale * norm2 * tau;
}

OracleAttention OracleAttend(const uint16_t* q, const uint16_t* keys, const uint16_t* values,
                             int64_t num_tokens, int head_dim, KvDtype dtype, double scale,
                             double softcap) {
  OracleAttention out;
  out.o.assign(static_cast<size_t>(head_dim), 0.0);
  out.lse = -std::numeric_limits<double>::infinity();
  if (num_tokens == 0) return out;
  std::vector<double> logits;
  for (int64_t t = 0; t < num_tokens; ++t)
    logits.push_back(OracleLogit(q, keys + t * head_dim, head_dim, dtype, scale, softcap));
  out.lse = Lse(logits);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const double weight = std::exp(logits[static_cast<size_t>(t)] - out.lse);
    for (int d = 0; d < head_dim; ++d)
      out.o[static_cast<size_t>(d)] += weight * Decode16(dtype, values[t * head_dim + d]);
  }
  return out;
}

double LogAddExp(double a, double b) {
  const double most = std::max(a, b);
  if (std::isinf(most)) return most;
  return most + std::log1p(std::exp(std::min(a, b) - most));
}

void OracleEigh(const double* matrix, int n, double* values, double* vectors) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(Eigen::Map<const Matrix>(matrix, n, n));
  for (int k = 0; k < n; ++k) {  // Eigen's order is rising
    values[k] = solver.eigenvalues()(n - 1 - k);
    for (int i = 0; i < n; ++i) vectors[k * n + i] = solver.eigenvectors()(i, n - 1 - k);
  }
}

}  // namespace kvd::testing
