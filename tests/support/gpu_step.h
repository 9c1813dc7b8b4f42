// Drives a DecodeBatch as an engine does: device memory for every layer's inputs and outputs, one
// CUDA graph of all layers (captured mode), and what the host does around a replay. For tests and
// benchmarks. Only built with KVD_CUDA.
//
// Thread safety: one thread. A failing CUDA call ends the process (gpu.h).

#ifndef LOCKS_KVD_TESTS_SUPPORT_GPU_STEP_H_
#define LOCKS_KVD_TESTS_SUPPORT_GPU_STEP_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "client/decode_batch.h"
#include "client/worker_shape.h"
#include "tests/support/gpu.h"

namespace kvd::testing {

// `Batch` is DecodeBatch, or has its BeginStep, Run, EndStep and options.
template <class Batch>
class GpuStepOf {
 public:
  // `batch` outlives it. Inputs are zeros, outputs poison, until somebody writes them.
  GpuStepOf(Batch* batch, const WorkerShape& shape, int num_rows)
      : batch_(*batch),
        num_layers_(shape.num_layers()),
        q_values_(static_cast<size_t>(num_rows * shape.num_q_heads() * shape.geometry.head_dim)),
        kv_values_(static_cast<size_t>(num_rows * shape.num_heads() * shape.geometry.head_dim)),
        lse_values_(static_cast<size_t>(num_rows * shape.num_q_heads())),
        q_(q_values_ * layers()),
        k_(kv_values_ * layers()),
        v_(kv_values_ * layers()),
        o_(q_values_ * layers()),
        lse_(lse_values_ * layers()) {
    q_.Poison(0);
    k_.Poison(0);
    v_.Poison(0);
    o_.Poison();
    lse_.Poison();
    if (batch_.options().mode == BatchMode::kCaptured) Capture();
  }
  GpuStepOf(const GpuStepOf&) = delete;
  GpuStepOf& operator=(const GpuStepOf&) = delete;
  ~GpuStepOf() {
    stream_.Wait();
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }

  // [L] of what DecodeBatch::Run takes.
  uint16_t* q() const { return q_.data(); }
  uint16_t* k() const { return k_.data(); }
  uint16_t* v() const { return v_.data(); }
  float* o() const { return o_.data(); }
  float* lse() const { return lse_.data(); }
  size_t q_values() const { return q_values_; }      // of one layer; o has as many
  size_t kv_values() const { return kv_values_; }    // of one layer
  size_t lse_values() const { return lse_values_; }  // of one layer
  cudaStream_t stream() const { return stream_.get(); }

  void UploadInputs(const std::vector<uint16_t>& q, const std::vector<uint16_t>& k,
                    const std::vector<uint16_t>& v) {
    stream_.Wait();
    q_.Upload(q);
    k_.Upload(k);
    v_.Upload(v);
  }
  // So that what a step leaves unwritten stands out.
  void PoisonOutputs() {
    stream_.Wait();
    o_.Poison(0xFF);  // NaN
    lse_.Poison(0xFF);
  }
  // Both wait for the step.
  std::vector<float> DownloadO() const { return o_.Download(); }
  std::vector<float> DownloadLse() const { return lse_.Download(); }

  absl::Status Begin() { return batch_.BeginStep(stream_.get()); }
  absl::Status RunLayers() {
    if (graph_ != nullptr) {
      KVD_CUDA_OK(cudaGraphLaunch(graph_, stream_.get()));
      return absl::OkStatus();
    }
    return EnqueueLayers(stream_.get());
  }
  absl::Status End() { return batch_.EndStep(stream_.get()); }

  // One token; enqueued only. kResourceExhausted: nothing was begun. Every other failure is that of
  // a step which ran.
  absl::Status Step() {
    absl::Status status = Begin();
    if (status.code() == absl::StatusCode::kResourceExhausted) return status;
    status.Update(RunLayers());
    status.Update(End());
    return status;
  }
  void Wait() const { stream_.Wait(); }

 private:
  size_t layers() const { return static_cast<size_t>(num_layers_); }
  absl::Status EnqueueLayers(cudaStream_t stream) {
    absl::Status status;
    for (int layer = 0; layer < num_layers_; ++layer) {
      const auto l = static_cast<size_t>(layer);
      status.Update(batch_.Run(layer,
                               {q() + l * q_values_, k() + l * kv_values_, v() + l * kv_values_},
                               {o() + l * q_values_, lse() + l * lse_values_}, stream));
    }
    return status;
  }
  void Capture() {
    cudaGraph_t graph = nullptr;
    KVD_CUDA_OK(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    const absl::Status status = EnqueueLayers(stream_.get());
    KVD_CUDA_OK(cudaStreamEndCapture(stream_.get(), &graph));
    if (!status.ok()) {
      std::fprintf(stderr, "gpu_step.h: capture: %s\n", status.ToString().c_str());
      std::abort();
    }
    KVD_CUDA_OK(cudaGraphInstantiate(&graph_, graph, 0));
    KVD_CUDA_OK(cudaGraphDestroy(graph));
  }

  Batch& batch_;
  const int num_layers_;
  const size_t q_values_;
  const size_t kv_values_;
  const size_t lse_values_;
  DeviceArray<uint16_t> q_;
  DeviceArray<uint16_t> k_;
  DeviceArray<uint16_t> v_;
  DeviceArray<float> o_;
  DeviceArray<float> lse_;
  const Stream stream_;
  cudaGraphExec_t graph_ = nullptr;
};

using GpuStep = GpuStepOf<DecodeBatch>;

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_GPU_STEP_H_
