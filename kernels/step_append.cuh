// A step's new token: its key and value into the tail unit of a (row, KV head), by the kernel that
// attends, or that lists what attend reads.
//
// Why there: attend is the first to read them, and a kernel of its own cost every layer a launch.
// Device code only. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_STEP_APPEND_CUH_
#define LOCKS_KVD_KERNELS_STEP_APPEND_CUH_

#include "kernels/step.h"

namespace kvd {

// The page that a sequence's next token belongs to, and how many tokens it has before that. A page
// has 16 or 32 tokens: a division by as many as the kernel is told would take longer than the read
// that waits for it.
struct Tail {
  int page, num_tokens;
};
__device__ __forceinline__ Tail TailOf(int64_t num_tokens, int page_tokens) {
  return {static_cast<int>(num_tokens >> (page_tokens == 16 ? 4 : 5)),
          static_cast<int>(num_tokens & (page_tokens - 1))};
}

// What one thread has of the key and value of list r = row * heads + head: 16 bytes, or nothing.
// Reading and writing are apart, so that the read can be on its way while the predecessor ends: k
// and v are older than that. It bypasses the L1, where a line of the last layer's token may still
// be: an engine may use one buffer for all layers.
class TokenWord {
 public:
  // k, v [N, heads, D]; `rank`: of the thread among 2 D/8 or more; those beyond have nothing.
  __device__ __forceinline__ TokenWord(const StepShape& shape, int r, const uint16_t* k,
                                       const uint16_t* v, int rank)
      : words_(shape.head_dim / 8), rank_(rank) {
    if (rank < 2 * words_)
      word_ = __ldcg(reinterpret_cast<const uint4*>(rank < words_ ? k : v) + int64_t{r} * words_ +
                     rank % words_);
  }

  // Writes it to the tail unit; nothing for padding.
  __device__ __forceinline__ void Store(const StepShape& shape, int layer, const StepRow& row,
                                        int head) const {
    if (row.num_tokens < 0 || rank_ >= 2 * words_) return;
    const Tail tail = TailOf(row.num_tokens, shape.page_tokens);
    const int token = tail.num_tokens, half = rank_ < words_ ? 0 : 1;
    const int64_t unit =
        (int64_t{tail.page % row.ring_pages} * shape.num_layers + layer) * shape.num_kv_heads +
        head;
    auto* to = reinterpret_cast<uint4*>(row.ring) + unit * (2 * shape.page_tokens * words_);
    to[(half * shape.page_tokens + token) * words_ + rank_ % words_] = word_;
  }

 private:
  int words_;  // of a key
  int rank_;
  uint4 word_;
};

// The same for one warp: the two words that a lane may have.
class WarpToken {
 public:
  __device__ __forceinline__ WarpToken(const StepShape& shape, int r, const uint16_t* k,
                                       const uint16_t* v)
      : low_(shape, r, k, v, static_cast<int>(threadIdx.x) % 32),
        high_(shape, r, k, v, static_cast<int>(threadIdx.x) % 32 + 32) {}
  // The warp's other lanes see what this one has written.
  __device__ __forceinline__ void Store(const StepShape& shape, int layer, const StepRow& row,
                                        int head) const {
    low_.Store(shape, layer, row, head);
    high_.Store(shape, layer, row, head);
    __syncwarp();
  }

 private:
  TokenWord low_, high_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_STEP_APPEND_CUH_
