#include "bench/decode_cases.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/decode_kernels.h"
#include "bench/local_step.h"
#include "bench/report.h"
#include "proto/status.h"
#include "tests/support/gpu_step.h"

namespace kvd::bench {
namespace {

using testing::DeviceArray;
using testing::GpuStepOf;

constexpr int kCheckedStep = 12;  // before a page completes: neither run has sealed anything yet

class Event {
 public:
  Event() { KVD_CUDA_OK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void Record(cudaStream_t stream) { KVD_CUDA_OK(cudaEventRecord(event_, stream)); }
  double UsSince(const Event& start) const {
    float ms = 0;
    KVD_CUDA_OK(cudaEventSynchronize(event_));
    KVD_CUDA_OK(cudaEventElapsedTime(&ms, start.event_, event_));
    return double{ms} * 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Inputs and loops of one batch. The same calls give the same inputs, whatever the batch is.
template <class Batch>
class Driver {
 public:
  Driver(Batch* batch, const WorkerShape& shape, int num_rows, const StepOptionsOfBench& options)
      : options_(options),
        batch_(*batch),
        step_(batch, shape, num_rows),
        count_(step_.q_values() * static_cast<size_t>(shape.num_layers())),
        state_(count_),
        kv_state_(step_.kv_values() * static_cast<size_t>(shape.num_layers())) {
    const auto kv_count = static_cast<int64_t>(kv_state_.size());
    KVD_CUDA_OK(LaunchDrift(kv_state_.data(), step_.k(), kv_count, 0, 1000001, step_.stream()));
    KVD_CUDA_OK(LaunchDrift(kv_state_.data(), step_.v(), kv_count, 0, 1000002, step_.stream()));
    KVD_CUDA_OK(
        LaunchDrift(state_.data(), step_.q(), static_cast<int64_t>(count_), 0, 0, step_.stream()));
  }

  absl::Status Check(CaseFigures* figures) {
    for (int i = 1; i <= kCheckedStep; ++i) {
      if (i > 1) Drift();
      if (i == 1 || i == kCheckedStep) step_.PoisonOutputs();
      KVD_RETURN_IF_ERROR(Step(nullptr));
      if (i == 1 || i == kCheckedStep)
        figures->outputs.push_back({Queries(), step_.DownloadO(), step_.DownloadLse()});
    }
    return absl::OkStatus();
  }

  absl::StatusOr<LoopFigures> Loop(bool drifting) {
    LoopFigures figures;
    for (int i = 0; i < 4; ++i) KVD_RETURN_IF_ERROR(Step(nullptr));
    step_.Wait();
    Event start, end;
    start.Record(step_.stream());
    for (int i = 0; i < options_.steps; ++i) {
      if (drifting) Drift();
      KVD_RETURN_IF_ERROR(Step(nullptr));
    }
    end.Record(step_.stream());
    figures.step_us = end.UsSince(start) / options_.steps;

    std::vector<double> host, graph;
    uint64_t hits = 0, misses = 0;
    for (int i = 0; i < options_.steps; ++i) {
      if (drifting) Drift();
      step_.Wait();
      StepTimes times;
      KVD_RETURN_IF_ERROR(Step(&times));
      host.push_back(times.host_us);
      graph.push_back(times.layers_end.UsSince(times.layers_start));
      CountUnits(&hits, &misses, &figures.failed);
    }
    figures.host_us = Median(host);
    figures.graph_us = Median(graph);
    figures.hit_rate =
        hits + misses == 0 ? 1 : static_cast<double>(hits) / static_cast<double>(hits + misses);
    return figures;
  }

 private:
  struct StepTimes {
    double host_us = 0;
    Event layers_start, layers_end;
  };

  void Drift() {
    KVD_CUDA_OK(LaunchDrift(state_.data(), step_.q(), static_cast<int64_t>(count_), options_.drift,
                            ++num_drifts_, step_.stream()));
  }
  // Waits for a sealer that is behind, outside of what is timed.
  absl::Status Step(StepTimes* times) {
    using Clock = std::chrono::steady_clock;
    Clock::time_point start = Clock::now();
    absl::Status begun = step_.Begin();
    for (int tries = 0; begun.code() == absl::StatusCode::kResourceExhausted && tries < 2000;
         ++tries) {
      absl::SleepFor(absl::Milliseconds(5));
      start = Clock::now();
      begun = step_.Begin();
    }
    KVD_RETURN_IF_ERROR(begun);
    Clock::duration timing{};
    const auto record = [&](Event& event) {
      const Clock::time_point before = Clock::now();
      event.Record(step_.stream());
      timing += Clock::now() - before;
    };
    if (times != nullptr) record(times->layers_start);
    absl::Status status = step_.RunLayers();
    if (times != nullptr) record(times->layers_end);
    status.Update(step_.End());
    if (times != nullptr)
      times->host_us =
          std::chrono::duration<double, std::micro>(Clock::now() - start - timing).count();
    return status;
  }
  // Of the last step whose figures have arrived.
  void CountUnits(uint64_t* hits, uint64_t* misses, uint64_t* failed) const {
    if constexpr (std::is_same_v<Batch, DecodeBatch>) {
      *hits += batch_.report().hits;
      *misses += batch_.report().misses;
      *failed += batch_.report().failed;
    }
  }
  std::vector<uint16_t> Queries() const {
    std::vector<uint16_t> q(count_);
    step_.Wait();
    KVD_CUDA_OK(
        cudaMemcpy(q.data(), step_.q(), q.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost));
    return q;
  }

  const StepOptionsOfBench options_;
  Batch& batch_;
  GpuStepOf<Batch> step_;
  const size_t count_;
  DeviceArray<float> state_;
  DeviceArray<float> kv_state_;
  uint32_t num_drifts_ = 0;
};

BatchOptions BatchOptionsOf(const DecodeCase& c, const StepOptionsOfBench& options,
                            int page_tokens) {
  // 4 loops with their warm-up steps, the checked ones, and a page to spare.
  const int64_t decoded = 4 * (options.steps + 4) + kCheckedStep + page_tokens;
  return {.max_sequences = c.batch,
          .max_tokens = int64_t{c.num_pages} * page_tokens + decoded,
          .mode = options.mode,
          .step = options.step};
}

double FreeBytes() {
  size_t free = 0, total = 0;
  KVD_CUDA_OK(cudaMemGetInfo(&free, &total));
  return static_cast<double>(free);
}

}  // namespace

absl::StatusOr<CaseFigures> RunPoolCase(const DecodeCase& c, const StepOptionsOfBench& options,
                                        const DecodePool& pool, KvClient& client) {
  CaseFigures figures;
  const WorkerShape& shape = client.shape();
  const BatchOptions batch_options = BatchOptionsOf(c, options, shape.geometry.page_tokens);
  const double free_before = FreeBytes();
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (int n = 0; n < c.batch; ++n) {
    const auto keys =
        std::span(pool.keys())
            .subspan(static_cast<size_t>(n * c.num_pages), static_cast<size_t>(c.num_pages));
    const absl::Time start = absl::Now();
    KVD_ASSIGN_OR_RETURN(
        auto sequence,
        client.OpenSequence(keys, {.max_tokens = batch_options.max_tokens, .step = options.step}));
    figures.open_ms = absl::ToDoubleMilliseconds(absl::Now() - start);
    if (sequence->num_open_pages() != c.num_pages) {
      return absl::InternalError(
          absl::StrCat(sequence->num_open_pages(), " pages of ", c.num_pages, " are resident"));
    }
    sequences.push_back(std::move(sequence));
  }
  KVD_ASSIGN_OR_RETURN(auto batch, DecodeBatch::Plan(shape, batch_options));
  figures.scan = batch->scan();
  for (int n = 0; n < c.batch; ++n) {
    KVD_ASSIGN_OR_RETURN(const int row, batch->Join(sequences[static_cast<size_t>(n)].get()));
    if (row != n) return absl::InternalError(absl::StrCat("expected row ", n, ", got ", row));
  }
  figures.gpu_bytes = free_before - FreeBytes();
  for (const auto& sequence : sequences)
    figures.counted_bytes += static_cast<double>(sequence->mirror_bytes());
  figures.counted_bytes += static_cast<double>(batch->cache_bytes() + batch->workspace_bytes());
  const double capacity =
      std::ceil(static_cast<double>(batch_options.max_tokens) / shape.geometry.page_tokens);
  figures.formula_bytes = c.batch * static_cast<double>(shape.units_per_page()) *
                          (capacity * shape.summary.record_bytes() +
                           std::ceil(options.step.cache_ratio * options.step.budget) *
                               static_cast<double>(shape.unit_bytes()));
  {
    Driver<DecodeBatch> driver(batch.get(), shape, c.batch, options);
    KVD_RETURN_IF_ERROR(driver.Check(&figures));
    KVD_ASSIGN_OR_RETURN(figures.warm, driver.Loop(false));
    KVD_ASSIGN_OR_RETURN(figures.drifting, driver.Loop(true));
  }
  for (int n = 0; n < c.batch; ++n) batch->Leave(n);
  return figures;
}

absl::StatusOr<CaseFigures> RunLocalCase(const DecodeCase& c, const StepOptionsOfBench& options,
                                         const WorkerShape& shape,
                                         std::vector<std::string>* problems) {
  CaseFigures figures;
  figures.scan = options.step.scan;
  KVD_ASSIGN_OR_RETURN(
      auto batch,
      LocalStep::Make(shape, BatchOptionsOf(c, options, shape.geometry.page_tokens), c.num_pages));
  Driver<LocalStep> driver(batch.get(), shape, c.batch, options);
  KVD_RETURN_IF_ERROR(driver.Check(&figures));
  // The lists of pages are those of the last step.
  const CaseFigures::Output& last = figures.outputs.back();
  const auto layers = static_cast<size_t>(shape.num_layers());
  for (int i = 0; i < 12; ++i) {
    const int layer = i * 7 % shape.num_layers(), row = i % c.batch,
              head = i * 3 % shape.num_heads();
    const auto slice = [&](const auto& all) {
      const auto size = static_cast<std::ptrdiff_t>(all.size() / layers);
      return std::vector(all.begin() + layer * size, all.begin() + (layer + 1) * size);
    };
    std::string problem =
        batch->Check(row, layer, head, slice(last.q), slice(last.o), slice(last.lse));
    if (problem.empty() && batch->options().step.scan == ScanMode::kFull)
      problem = batch->CheckSelection(row, head);
    if (!problem.empty()) problems->push_back(std::move(problem));
  }
  KVD_ASSIGN_OR_RETURN(figures.warm, driver.Loop(false));
  return figures;
}

std::string CompareOutputs(const CaseFigures& a, const CaseFigures& b) {
  if (a.outputs.size() != b.outputs.size()) return "a run has no outputs";
  for (size_t s = 0; s < a.outputs.size(); ++s) {
    const auto& x = a.outputs[s];
    const auto& y = b.outputs[s];
    if (x.q != y.q || x.o.size() != y.o.size()) return "the runs had other queries";
    const size_t dim = x.o.size() / x.lse.size();
    size_t apart = 0;
    double worst = 0;
    for (size_t r = 0; r < x.lse.size(); ++r) {
      double largest = 0, gap = std::abs(double{x.lse[r]} - y.lse[r]);
      for (size_t i = r * dim; i < (r + 1) * dim; ++i)
        largest = std::max(largest, std::abs(double{y.o[i]}));
      for (size_t i = r * dim; i < (r + 1) * dim; ++i)
        gap = std::max(gap, std::abs(double{x.o[i]} - y.o[i]) / largest);
      if (!(gap <= 2e-4)) ++apart;
      worst = gap <= worst ? worst : gap;
    }
    if (apart > 0)
      return absl::StrCat("checked step ", s, ": ", apart, " of ", x.lse.size(),
                          " query heads differ, by up to ", worst);
  }
  return "";
}

}  // namespace kvd::bench
