// The sparse decode step on a GPU, for a batch of sequences: score, select; find, append, fetch and
// attend.
//
// Two ways to run it, with the same results:
//   captured     every daemon is reached by the peer path: Run enqueues kernels only, so all layers
//                of a step can be captured in one CUDA graph and replayed while sequences grow,
//                pages seal and the page cache churns
//   host-driven  any path: Run waits for the miss list, fetches it while the hits are attended, and
//                merges exactly
//
// Use: KvClient with a GPU (ClientOptions::gpu), Plan with its shape() (allocates everything), Join
// sequences; then for each token
//   BeginStep(stream)                        host: takes over sealed pages, lost daemons, joined
//                                            and left sequences
//   Run(0 .. L-1, ..., stream), or launch the graph that was captured from them
//   EndStep(stream)                          host: counts the token, wakes the sealer
// Thread safety: compatible: one thread at a time, which also owns the joined sequences. Sequences
// outlive their stay. The calling thread's current GPU is the client's. Capture with
// cudaStreamCaptureModeThreadLocal or Relaxed: other threads of the client use the GPU meanwhile.
// BeginStep and EndStep are not captured; an EndStep follows every BeginStep that succeeded.
//
// Shapes (slowest to fastest)  dtype      notes; device memory of the worker's GPU, 16-byte
//                                         aligned; N = max_sequences
//   q    [N, query heads, D]   bf16|fp16  post-RoPE; heads are the worker's own
//   k, v [N, KV heads, D]      bf16|fp16  post-RoPE key, value of the new token
//   o    [N, query heads, D]   fp32       out; 0 for padding
//   lse  [N, query heads]      fp32       out, natural log, over what was attended; -inf for
//                                         padding
// All N rows can be read; what those of padding hold does not matter. A kernel of the engine that
// stands before Run in the stream and lets its successor start early (programmatic dependent
// launch) must have waited for its own predecessor first.
// Guarantee: o and lse are exact over the attended units, each of which is local or was proved by
// its generation after it was copied (G1). Units that did not arrive are left out, counted, and
// masked from the next layer on.

#ifndef LOCKS_KVD_CLIENT_DECODE_BATCH_H_
#define LOCKS_KVD_CLIENT_DECODE_BATCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/sequence.h"
#include "client/step_options.h"
#include "kernels/step.h"

namespace kvd {

enum class BatchMode { kCaptured, kHostDriven };

struct BatchOptions {
  int max_sequences = 1;   // N: rows of every input and output
  int64_t max_tokens = 0;  // of the longest sequence that may join, what will be decoded included
  BatchMode mode = BatchMode::kCaptured;
  // n_sink and n_win must be each sequence's own; see Plan for what a GPU does not do
  StepOptions step = {};
};

struct BatchInput {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
};
struct BatchOutput {
  float* o;
  float* lse;
};

// Attention mass of a row's step: the mean over its layers and query heads.
struct RowMass {
  float unread = 0;  // estimated share that was not attended
  float lost = 0;    // the part of it whose page is missing
};

// Sums over the rows of the last step whose figures have arrived: BeginStep takes them over without
// waiting.
struct BatchReport {
  uint64_t num_steps = 0;  // whose figures have arrived, since Plan
  uint64_t hits = 0;       // units found in the page cache
  uint64_t misses = 0;     // units fetched, those that failed among them
  uint64_t failed = 0;     // units that were not there any more, or damaged
  // [N]; empty unless Plan was asked for it: MassReport::kAlways, or LossPolicy::kGoOn, with which
  // the shares of rows that have lost nothing are 0. It costs a launch a layer.
  std::vector<RowMass> mass;
};

class DecodeBatch {
 public:
  // Errors: kInvalidArgument names the option (dense_layers are not for GPUs); kFailedPrecondition:
  // the shape's place is no GPU; kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<DecodeBatch>> Plan(const WorkerShape& shape,
                                                           const BatchOptions& options);
  ~DecodeBatch();
  DecodeBatch(const DecodeBatch&) = delete;
  DecodeBatch& operator=(const DecodeBatch&) = delete;

  // Between steps. The row that the sequence has from now on. kResourceExhausted: no free row, or
  // no memory for its page cache; kInvalidArgument: it is longer than max_tokens, or its
  // always-kept pages differ; kFailedPrecondition: captured mode, and a daemon of it is not on the
  // peer path.
  absl::StatusOr<int> Join(Sequence* sequence);
  // The same for pages that have no Sequence around them: nobody seals their tail. `totals` may be
  // null.
  absl::StatusOr<int> Join(SequencePages* pages, StepTotals* totals);
  // Between steps; the row becomes padding. Blocking: until the GPU has finished what was enqueued.
  void Leave(int row);

  // kResourceExhausted names the row that has no room for the token; nothing was begun: let it
  // leave, or retry.
  absl::Status BeginStep(cudaStream_t stream);
  // One layer; layers in order. Captured mode: enqueues only. Host-driven mode: blocking, up to
  // fetch_timeout.
  absl::Status Run(int layer, const BatchInput& input, const BatchOutput& output,
                   cudaStream_t stream);
  // Counts the token of every row. Errors, with the token counted: pages of some row are missing,
  // by LossPolicy: kUnavailable (kRecompute: o and lse are valid over the rest; Repair), kAborted
  // (kFail: not to be used). None with kGoOn: report().mass says what was lost.
  absl::Status EndStep(cudaStream_t stream);

  const BatchReport& report() const;
  const BatchOptions& options() const;
  ScanMode scan() const;  // that Plan chose: kFull or kProgressive
  // GPU bytes: page caches with their maps and tables of the joined rows, and the rest of the
  // batch.
  size_t cache_bytes() const;
  size_t workspace_bytes() const;

 private:
  struct Impl;
  explicit DecodeBatch(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_DECODE_BATCH_H_
