// The truth in double precision, written independently of kernels/ (Eigen for the eigenproblem),
// reading the same stored codes. Slow and plain on purpose.

#ifndef LOCKS_KVD_TESTS_SUPPORT_ORACLE_H_
#define LOCKS_KVD_TESTS_SUPPORT_ORACLE_H_

#include <cstdint>
#include <vector>

#include "kernels/layout.h"

namespace kvd::testing {

// q.k * scale, soft-capped; q and k are bit patterns of `dtype`, D long.
double OracleLogit(const uint16_t* q, const uint16_t* k, int head_dim, KvDtype dtype, double scale,
                   double softcap);

// lse of the exact logits of one page's keys.
double OraclePageLse(const uint16_t* q, const uint16_t* keys, int page_tokens, int head_dim,
                     KvDtype dtype, double scale, double softcap);

// lse that a record stands for, from its stored codes; `fine` null: the coarse estimate with its
// tau term. `q` is already rotated if the record is.
double OracleRecordLse(const uint16_t* q, const uint8_t* coarse, const uint8_t* fine, int head_dim,
                       int page_tokens, int rank, KvDtype dtype, double scale, double softcap);
// The B logits behind it (without the tau term).
std::vector<double> OracleRecordLogits(const uint16_t* q, const uint8_t* coarse,
                                       const uint8_t* fine, int head_dim, int page_tokens, int rank,
                                       KvDtype dtype, double scale, double softcap);

struct OracleAttention {
  std::vector<double> o;
  double lse;
};
// Exact attention over `num_tokens` rows of K and V, [T, D] bit patterns.
OracleAttention OracleAttend(const uint16_t* q, const uint16_t* keys, const uint16_t* values,
                             int64_t num_tokens, int head_dim, KvDtype dtype, double scale,
                             double softcap);

double LogAddExp(double a, double b);

// Eigenpairs of a symmetric n x n row-major matrix, falling; vectors row k.
void OracleEigh(const double* matrix, int n, double* values, double* vectors);

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_ORACLE_H_
