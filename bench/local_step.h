// The sparse decode step with all KV in the worker's own memory: the same kernels as DecodeBatch,
// but attend reads the selected pages where they lie. No daemon, no page cache, no fetch: what the
// peer path is compared with, and whose results it must equal.
//
// It has DecodeBatch's shape, so that one driver (tests/support/gpu_step.h) runs both. Completed
// tail pages are not sealed: they stay attended, as those of a ring. Row n holds pages [n P, (n +
// 1) P) of the synthetic prompt. Thread safety: compatible. Only built with KVD_CUDA.

#ifndef LOCKS_KVD_BENCH_LOCAL_STEP_H_
#define LOCKS_KVD_BENCH_LOCAL_STEP_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/decode_batch.h"
#include "client/worker_shape.h"
#include "tests/support/gpu.h"

namespace kvd::bench {

class LocalStep {
 public:
  // `num_pages` of each row; options.step.scan must be full or progressive. kResourceExhausted if
  // the GPU has no room.
  static absl::StatusOr<std::unique_ptr<LocalStep>> Make(const WorkerShape& shape,
                                                         const BatchOptions& options,
                                                         int num_pages);
  ~LocalStep();
  LocalStep(const LocalStep&) = delete;
  LocalStep& operator=(const LocalStep&) = delete;

  absl::Status BeginStep(cudaStream_t stream);
  absl::Status Run(int layer, const BatchInput& input, const BatchOutput& output,
                   cudaStream_t stream);
  absl::Status EndStep(cudaStream_t stream);
  const BatchOptions& options() const { return options_; }

  // Compares one (row, layer, KV head) of the last step with attention in double precision over the
  // very pages that it read, and those of the prompt with what the host makes of them. `q`, `o`,
  // `lse` are that step's, [N, H, D] and [N, H]. The problem, or empty.
  std::string Check(int row, int layer, int head, const std::vector<uint16_t>& q,
                    const std::vector<float>& o, const std::vector<float>& lse) const;
  // Compares what select chose in the layer that ran last with the shares of all pages in double
  // precision. The problem, or empty. REQUIRES: a full scan; the progressive one's scores are gone.
  std::string CheckSelection(int row, int head) const;

 private:
  struct Memory;
  LocalStep(const WorkerShape& shape, const BatchOptions& options, int num_pages);
  void Fill();
  void Select(int layer, const uint16_t* query, cudaStream_t stream);
  // Of a layer in the lists of all.
  size_t FirstList(int layer) const {
    return static_cast<size_t>(layer * options_.max_sequences * shape_.num_heads());
  }
  size_t Budget() const { return static_cast<size_t>(options_.step.budget); }
  std::vector<int32_t> Selected(int row, int layer, int head) const;
  // What the last step attended there, in order.
  std::vector<int32_t> PagesRead(int row, int layer, int head) const;

  const WorkerShape shape_;
  const BatchOptions options_;
  const int num_pages_;
  const int page_capacity_;
  StepShape step_shape_;
  std::vector<StepRow> rows_;       // of the next step
  std::vector<StepRow> last_rows_;  // of the last
  int last_layer_ = 0;              // that ran
  std::unique_ptr<Memory> memory_;
};

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_LOCAL_STEP_H_
