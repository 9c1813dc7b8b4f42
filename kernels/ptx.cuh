// The few PTX instructions that the GPU kernels use by name: bulk copies into shared memory with
// their barriers, the 16x8x16 matrix product in fp16, and small helpers around them.
//
// Why a header of their own: score and attend stream through the same kind of ring. Device code
// only, compute capability 9.0 or later. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_PTX_CUH_
#define LOCKS_KVD_KERNELS_PTX_CUH_

#include <cstdint>

namespace kvd::ptx {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- barriers in shared memory, and the copies that complete on them -----------------------------

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives and announces `bytes` that copies will deliver in this phase.
__device__ __forceinline__ void BarrierExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Copies `bytes` (a multiple of 16) from global to shared memory; both ends are 16-byte aligned.
__device__ __forceinline__ void BulkCopy(void* shared, const void* global, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// --- clusters ------------------------------------------------------------------------------------

// Between the two every CTA of the cluster has initialised its barriers, and fenced that; nothing
// else that is written before is read by another CTA.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// What this thread wrote and read before is done for those who wait.
__device__ __forceinline__ void ClusterArriveRelease() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in CTA `rank` of the cluster, of what stands at `own` in this one.
__device__ __forceinline__ uint32_t AddressIn(int rank, const void* own) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SharedAddress(own)), "r"(rank));
  return address;
}
// Writes into the shared memory of CTA `rank`; counts towards the bytes that `barrier` there
// expects. Clusters of two CTAs at least.
__device__ __forceinline__ void Send(int rank, void* place, uint64_t value,
                                     const uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                   AddressIn(rank, place)),
               "l"(value), "r"(AddressIn(rank, barrier))
               : "memory");
}
__device__ __forceinline__ void Send(int rank, void* place, const uint4& value,
                                     const uint64_t* barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(AddressIn(rank, place)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(AddressIn(rank, barrier))
      : "memory");
}

// --- copies of 16 bytes, by each thread ----------------------------------------------------------

// Copies `bytes` (0 to 16) from global to shared memory and fills up to 16 with zeros; both ends
// are 16-byte aligned.
__device__ __forceinline__ void AsyncCopy16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
// Copies 4 bytes.
__device__ __forceinline__ void AsyncCopy4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
// The thread's copies since the last call are a group from here on.
__device__ __forceinline__ void AsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the last kGroups groups of this thread are on their way.
template <int kGroups>
__device__ __forceinline__ void AsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// --- arithmetic ----------------------------------------------------------------------------------

// d = A B + c: A is 16 x 16 fp16 (row g and g + 8 of lane 4 g + t: a[0], a[2] and a[1], a[3]), B is
// 16 x 8 fp16 (column g), c and d are fp32 (row g: elements 0, 1, row g + 8: elements 2, 3; columns
// 2 t, 2 t + 1).
__device__ __forceinline__ void MmaFp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// The same with bf16 operands.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// The same with a K of 32 and int8 operands: four neighbours of a row (column) a register, int32
// sums, exact.
__device__ __forceinline__ void MmaInt8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, const int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

// Four 8 x 8 matrices of 16-bit values as operands: lane i gives the address of row i % 8 of matrix
// i / 8, 16 bytes; lane 4 g + t gets elements 2 t and 2 t + 1 of row g of each, transposed of
// column g.
__device__ __forceinline__ void LoadMatrices(uint32_t (&m)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&m)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared)
               : "memory");
}

// (a & mask) ^ flip in one instruction; of two constants the compiler makes two.
__device__ __forceinline__ uint32_t AndXor(uint32_t a, uint32_t mask, uint32_t flip) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(flip));
  return d;
}

// Hides where a value comes from, so that a loop keeps it in a register instead of computing it
// again.
template <class T>
__device__ __forceinline__ T Keep(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 2^x and log2(x), within 2^-22.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// For results that a kernel reads soon after this one: they stay in the L2, rather than being
// written to memory between the reads of a scan, which slows those down by more than their own
// bytes.
__device__ __forceinline__ void StoreKept(float* at, float value) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(at), "f"(value), "l"(policy)
               : "memory");
}

// Reductions over the four lanes of a quad; every lane gets the result, and the same bits.
template <class T>
__device__ __forceinline__ T QuadSum(T x) {
  x += __shfl_xor_sync(kAllLanes, x, 2);
  return x + __shfl_xor_sync(kAllLanes, x, 1);
}
__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
}

// The floats of a pair of bf16 values, the low half first.
__device__ __forceinline__ float2 Bf16Pair(uint32_t bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
}
// The pair of two floats, each rounded to nearest even.
__device__ __forceinline__ uint32_t ToBf16Pair(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

}  // namespace kvd::ptx

#endif  // LOCKS_KVD_KERNELS_PTX_CUH_
