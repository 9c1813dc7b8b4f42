// A GPU worker for system tests: prompts put into a daemon's GPU arena, a batch of sequences whose
// budget covers every page, and exact attention beside each step. The daemon runs in PID, IPC and
// mount namespaces of its own.
//
// Thread safety: compatible.

#ifndef LOCKS_KVD_TESTS_SYSTEM_GPU_WORKER_H_
#define LOCKS_KVD_TESTS_SYSTEM_GPU_WORKER_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/decode_batch.h"
#include "client/kv_client.h"
#include "kernels/dtype.h"
#include "proto/status.h"
#include "tests/client/engine_cache.h"
#include "tests/support/daemon_process.h"
#include "tests/support/gpu_geometry.h"
#include "tests/support/gpu_step.h"

namespace kvd::testing {

// The worker has GPU 0; KVD_TEST_DAEMON_GPU chooses the daemon's, 0 if it is not set.
inline DaemonSpec GpuDaemonSpec() {
  const char* gpu = std::getenv("KVD_TEST_DAEMON_GPU");
  DaemonSpec spec;
  spec.geometry = GpuGeometry();
  spec.gpu = gpu == nullptr ? 0 : std::atoi(gpu);
  return spec;
}

// What DaemonProcess::StartUnder takes to run a daemon in PID, IPC and mount namespaces of its own,
// with its own /dev/shm and /proc: of the test's files it needs the folder of its socket alone.
// Empty, and said so, where this machine allows no namespaces.
inline std::vector<std::string> OwnNamespaces() {
  std::vector<std::string> prefix = {
      "unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child=SIGKILL", "--mount-proc"};
  if (geteuid() != 0) prefix.insert(prefix.begin() + 1, {"--user", "--map-root-user"});
  prefix.insert(prefix.end(),
                {"sh", "-euc", "mount -t tmpfs none /dev/shm; exec \"$@\"", "daemon"});
  std::vector<std::string> quoted;
  for (const std::string& word : prefix) quoted.push_back(absl::StrCat("'", word, "'"));
  if (std::system(absl::StrCat(absl::StrJoin(quoted, " "), " true 2>/dev/null").c_str()) == 0)
    return prefix;
  std::printf("[   NOTE   ] this machine allows no namespaces: the daemon shares the test's\n");
  return {};
}

inline absl::StatusOr<std::unique_ptr<DaemonProcess>> StartGpuDaemon(const DaemonSpec& spec) {
  auto dir = std::make_unique<TempDir>();
  const locks_kvd::v1::DaemonConfig config = MakeConfig(spec, dir->path());
  return DaemonProcess::StartUnder(OwnNamespaces(), std::move(dir), config);
}

inline ClientOptions GpuOptions(const std::string& daemon, PathKind path) {
  ClientOptions options;
  options.daemons = {daemon};
  options.tenant = "test";
  options.model = "model";
  options.geometry = GpuGeometry();
  options.weights_id = "weights";
  options.rope = "theta=10000";
  options.gpu = 0;
  options.required_path = path;
  options.best_path = path;
  return options;
}

// A prompt of `num_pages` pages and `rest` tokens, and as many further tokens as a test decodes.
struct Prompt {
  Prompt(uint32_t id, int pages, int rest_tokens, int num_decoded)
      : num_pages(pages),
        rest(rest_tokens),
        data(SequenceData::Random(GpuGeometry(), int64_t{pages} * 16 + rest_tokens + num_decoded,
                                  id)),
        cache(data),
        tokens(static_cast<size_t>(pages) * 16) {
    std::iota(tokens.begin(), tokens.end(), id * 1000000);
  }
  int num_pages;
  int rest;
  SequenceData data;
  EngineCache cache;
  std::vector<uint32_t> tokens;  // of the complete pages
};

// A prompt whose output tells what it was made of, whichever pages were chosen: component 0 of
// every value is `mark`, so it is that of o too, for any weights. A unit of another prompt, or one
// that nobody wrote, moves it.
inline Prompt MarkedPrompt(uint32_t id, int pages, int rest_tokens, int num_decoded,
                           float mark = 1) {
  Prompt prompt(id, pages, rest_tokens, num_decoded);
  for (auto& values : prompt.data.values) {
    for (size_t i = 0; i < values.size(); i += static_cast<size_t>(GpuGeometry().head_dim))
      values[i] = ToBf16(mark);
  }
  prompt.cache = EngineCache(prompt.data);
  return prompt;
}

// How far a step's output is from exact attention, over all layers and query heads of a row.
struct Distance {
  double o = 0;  // largest difference of a component
  double lse = 0;
  bool Within(double tolerance) const { return o <= tolerance && lse <= tolerance; }
};

class GpuWorker {
 public:
  // A step's arithmetic is within 4e-5 of the largest component of o (kernels/attend.h).
  static constexpr double kTolerance = 2e-4;

  static absl::StatusOr<std::unique_ptr<GpuWorker>> Make(ClientOptions options,
                                                         const BatchOptions& batch) {
    auto worker = std::unique_ptr<GpuWorker>(new GpuWorker(batch));
    KVD_ASSIGN_OR_RETURN(worker->client_, KvClient::Make(std::move(options)));
    KVD_ASSIGN_OR_RETURN(worker->batch_, DecodeBatch::Plan(worker->client_->shape(), batch));
    worker->step_ = std::make_unique<GpuStep>(worker->batch_.get(), worker->client_->shape(),
                                              batch.max_sequences);
    worker->rows_.resize(static_cast<size_t>(batch.max_sequences));
    return worker;
  }
  ~GpuWorker() {
    for (size_t row = 0; row < rows_.size(); ++row) Leave(static_cast<int>(row));
  }

  KvClient& client() { return *client_; }
  DecodeBatch& batch() { return *batch_; }
  GpuStep& step() { return *step_; }
  Sequence& sequence(int row) { return *rows_[static_cast<size_t>(row)].sequence; }

  absl::StatusOr<PutReport> Put(const Prompt& prompt) {
    const std::vector<PageKey> keys = client_->PageKeys(prompt.tokens);
    return client_->Put({.keys = keys,
                         .first_page = 0,
                         .num_pages = prompt.num_pages,
                         .layers = prompt.cache.layers(),
                         .first_token = 0});
  }

  // Opens the prompt, appends its rest and joins it. `prompt` outlives its stay.
  absl::StatusOr<int> Join(const Prompt& prompt) {
    const std::vector<PageKey> keys = client_->PageKeys(prompt.tokens);
    KVD_ASSIGN_OR_RETURN(
        auto sequence,
        client_->OpenSequence(keys, {.max_tokens = options_.max_tokens, .step = options_.step}));
    if (sequence->num_open_pages() != prompt.num_pages) {
      return absl::InternalError(absl::StrCat("expected ", prompt.num_pages,
                                              " resident pages, got ", sequence->num_open_pages()));
    }
    KVD_RETURN_IF_ERROR(
        sequence->AppendTail(prompt.cache.layers(), int64_t{prompt.num_pages} * 16, prompt.rest));
    KVD_ASSIGN_OR_RETURN(const int row, batch_->Join(sequence.get()));
    Row& taken = rows_[static_cast<size_t>(row)];
    taken = {&prompt, std::move(sequence), int64_t{prompt.num_pages} * 16 + prompt.rest};
    return row;
  }
  void Leave(int row) {
    Row& left = rows_[static_cast<size_t>(row)];
    if (left.prompt == nullptr) return;
    batch_->Leave(row);
    left = {};
  }

  // The next token of every row, with queries of its own for each step, row and layer; waits for
  // it.
  absl::Status Step() {
    MakeInputs();
    step_->UploadInputs(q_, k_, v_);
    step_->PoisonOutputs();
    absl::Status status = step_->Step();
    for (int tries = 0; status.code() == absl::StatusCode::kResourceExhausted && tries < 2000;
         ++tries) {
      absl::SleepFor(absl::Milliseconds(5));  // the sealer is behind
      status = step_->Step();
    }
    o_ = step_->DownloadO();
    lse_ = step_->DownloadLse();
    ++num_steps_;
    for (Row& row : rows_) row.num_tokens += row.prompt != nullptr ? 1 : 0;
    return status;
  }
  int num_steps() const { return num_steps_; }
  int64_t num_tokens(int row) const { return rows_[static_cast<size_t>(row)].num_tokens; }
  const std::vector<float>& o() const { return o_; }
  const std::vector<float>& lse() const { return lse_; }

  // Query heads of the last step, all layers and rows, whose output is not that of MarkedPrompt's
  // pages alone.
  int WrongHeads() const {
    int wrong = 0;
    for (size_t i = 0; i < lse_.size(); ++i) {
      const bool right = std::abs(o_[i * Dim()] - 1) < 1e-3f && std::isfinite(lse_[i]);
      wrong += right ? 0 : 1;
    }
    return wrong;
  }
  // Of the last step from exact attention over `pages` and every token from `tail_begin` on.
  // `layer_shift` and `head_shift` compare with another layer's, another head's truth: what a
  // mixed-up step would have computed.
  Distance From(int row, const std::vector<int>& pages, int64_t tail_begin, int layer_shift = 0,
                int head_shift = 0) const {
    const KvGeometry g = GpuGeometry();
    const Row& at = rows_[static_cast<size_t>(row)];
    Distance worst;
    for (int layer = 0; layer < g.num_layers; ++layer) {
      for (int h = 0; h < g.num_q_heads; ++h) {
        const size_t idx = Index(layer, row, h);
        const int kv_head = (h / g.group() + head_shift) % g.num_kv_heads;
        const auto truth = at.prompt->data.Attend(
            (layer + layer_shift) % g.num_layers, kv_head * g.group() + h % g.group(),
            q_.data() + idx * Dim(), pages, tail_begin, at.num_tokens);
        worst.lse = std::max(worst.lse, Gap(truth.lse, lse_[idx]));
        for (size_t i = 0; i < Dim(); ++i)
          worst.o = std::max(worst.o, Gap(truth.o[i], o_[idx * Dim() + i]));
      }
    }
    return worst;
  }
  // From full attention.
  Distance FromAll(int row, int layer_shift = 0, int head_shift = 0) const {
    return From(row, {}, 0, layer_shift, head_shift);
  }
  // True if the last step wrote what a row of padding gets.
  bool IsPadding(int row) const {
    const KvGeometry g = GpuGeometry();
    for (int layer = 0; layer < g.num_layers; ++layer) {
      for (int h = 0; h < g.num_q_heads; ++h) {
        const size_t idx = Index(layer, row, h);
        if (!(std::isinf(lse_[idx]) && lse_[idx] < 0)) return false;
        for (size_t i = 0; i < Dim(); ++i) {
          if (o_[idx * Dim() + i] != 0) return false;
        }
      }
    }
    return true;
  }

 private:
  struct Row {
    const Prompt* prompt = nullptr;
    std::unique_ptr<Sequence> sequence;
    int64_t num_tokens = 0;
  };

  explicit GpuWorker(const BatchOptions& options) : options_(options) {}
  static size_t Dim() { return static_cast<size_t>(GpuGeometry().head_dim); }
  // A difference that no NaN passes.
  static double Gap(double a, double b) {
    const double gap = std::abs(a - b);
    return gap == gap ? gap : 1e30;
  }
  // Query head h of (layer, row) among [L][N][H].
  size_t Index(int layer, int row, int h) const {
    const auto heads = static_cast<size_t>(GpuGeometry().num_q_heads);
    return (static_cast<size_t>(layer) * rows_.size() + static_cast<size_t>(row)) * heads +
           static_cast<size_t>(h);
  }
  void MakeInputs() {
    const KvGeometry g = GpuGeometry();
    q_.clear();
    k_.clear();
    v_.clear();
    for (int layer = 0; layer < g.num_layers; ++layer) {
      for (size_t row = 0; row < rows_.size(); ++row) {
        const auto seed =
            static_cast<uint64_t>((num_steps_ * 1000 + static_cast<int>(row)) * 10 + layer + 1);
        const auto q = RandomKv(int64_t{g.num_q_heads} * g.head_dim, g.dtype, 2.0f, seed);
        q_.insert(q_.end(), q.begin(), q.end());
        const SequenceData* data =
            rows_[row].prompt == nullptr ? nullptr : &rows_[row].prompt->data;
        const int64_t token = rows_[row].num_tokens;
        const auto none = std::vector<uint16_t>(static_cast<size_t>(g.num_kv_heads) * Dim(),
                                                0x7FC0);  // NaN: nobody may read it
        const auto k = data == nullptr ? none : data->Rows(data->keys, layer, token);
        const auto v = data == nullptr ? none : data->Rows(data->values, layer, token);
        k_.insert(k_.end(), k.begin(), k.end());
        v_.insert(v_.end(), v.begin(), v.end());
      }
    }
  }

  const BatchOptions options_;
  int num_steps_ = 0;
  std::vector<uint16_t> q_;  // [L][N][...] of the last step
  std::vector<uint16_t> k_;
  std::vector<uint16_t> v_;
  std::vector<float> o_;
  std::vector<float> lse_;
  // Destroyed in reverse order: the sequences leave before their batch ends, the batch before its
  // client.
  std::unique_ptr<KvClient> client_;
  std::unique_ptr<DecodeBatch> batch_;
  std::unique_ptr<GpuStep> step_;
  std::vector<Row> rows_;
};

// How a case runs its steps.
struct GpuWay {
  BatchMode mode;
  PathKind path;
};
inline std::string GpuWayName(const ::testing::TestParamInfo<GpuWay>& info) {
  return absl::StrCat(info.param.mode == BatchMode::kCaptured ? "captured_" : "host_",
                      PathName(info.param.path));
}

// A budget that covers every page of these prompts, in a batch of `num_rows` rows.
inline BatchOptions CoveringBatch(BatchMode mode, int num_rows, int64_t max_tokens) {
  BatchOptions options;
  options.max_sequences = num_rows;
  options.max_tokens = max_tokens;
  options.mode = mode;
  options.step.budget = static_cast<int>(max_tokens / 16);
  options.step.cache_ratio = 1.25;
  options.step.fetch_timeout = absl::Milliseconds(500);
  return options;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SYSTEM_GPU_WORKER_H_
