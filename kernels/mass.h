// The attention mass that a step did not read, and the mass of pages that were lost: figures that a
// user sees beside every answer.
//
// Thread safety: pure functions; no allocation. Units: natural log in, shares (0..1) out.
// unread_g = exp(R_g - logaddexp(lse_A[g], R_g)), R_g = LSE of the estimated lse of the pages not
// in A. lost_g: the same denominator, but only the missing pages in the numerator.

#ifndef LOCKS_KVD_KERNELS_MASS_H_
#define LOCKS_KVD_KERNELS_MASS_H_

#include <cstdint>

namespace kvd {

struct MassArgs {
  int64_t num_pages;
  const float* lse;          // [P] estimated lse of one query head
  float lse_attended;        // exact, over everything attended; -inf if nothing was
  const uint64_t* attended;  // bitset: pages whose bytes were attended
  const uint64_t* missing;   // bitset: pages that are gone; may be null
};
struct MassFigures {
  float unread;  // estimated share of the mass that was not attended
  float lost;    // the part of it that was not attended because its page is missing
};

namespace ref {
MassFigures EstimateMass(const MassArgs& args);
}  // namespace ref
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_MASS_H_
