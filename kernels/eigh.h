// Eigenpairs of a small symmetric matrix: the B x B Gram of a page, B = 16 or 32.
//
// Why our own: cyclic Jacobi is exact enough in fp32, needs no workspace, does the same on every
// machine and ports to a GPU warp; batched vendor solvers failed at scale (kernels/README.md,
// "Eigenpairs").
// Thread safety: pure function. Equal inputs give equal bits.
// Order: eigenvalues fall; equal ones keep the order of their diagonal places.
// Sign: the component of largest magnitude of each vector is positive, the lowest index winning
// ties.
// Numerics: |A u - w u| <= 2e-5 w_1 and |U U' - I| <= 1e-5 for a positive semidefinite A
// (tests/kernels/eigh_test.cc).

#ifndef LOCKS_KVD_KERNELS_EIGH_H_
#define LOCKS_KVD_KERNELS_EIGH_H_

namespace kvd {

inline constexpr int kMaxEighSize = 32;

// Sweeps over all pairs after which an n x n matrix counts as diagonal; a sweep without a rotation
// ends the work before.
constexpr int EighSweeps(int n) { return n <= 16 ? 8 : 10; }

// `matrix` [n, n], symmetric and finite, is destroyed. `values` [n] falling; `vectors` [n, n], row
// k is the unit eigenvector of values[k]. REQUIRES: 1 <= n <= kMaxEighSize.
void Eigh(float* matrix, int n, float* values, float* vectors);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_EIGH_H_
