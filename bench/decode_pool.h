// A daemon with a GPU arena full of synthetic pages, for decode_bench: its process, what fills it,
// and what is measured of it without a decode step (opening, single fetches).
//
// Thread safety: compatible. Only built with KVD_CUDA.

#ifndef LOCKS_KVD_BENCH_DECODE_POOL_H_
#define LOCKS_KVD_BENCH_DECODE_POOL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client_options.h"
#include "client/page_writer.h"
#include "client/pool.h"
#include "client/worker_shape.h"
#include "proto/page_key.h"
#include "proto/ucx_worker.h"
#include "tests/support/daemon_process.h"

namespace kvd::bench {

// A session below the client's facade.
class PoolSession {
 public:
  // `transports`: of UCX; empty: its choice for this worker's memory.
  static absl::StatusOr<std::unique_ptr<PoolSession>> Attach(ClientOptions options,
                                                             const std::string& transports = "");
  Pool& pool() { return *pool_; }
  const WorkerShape& shape() const { return shape_; }
  // Never null: a daemon that was lost ends the benchmark.
  std::shared_ptr<Attachment> attachment() const;

 private:
  PoolSession() = default;
  // Destroyed in reverse order.
  ClientOptions options_;
  WorkerShape shape_;
  std::unique_ptr<UcxWorker> ucx_;
  std::unique_ptr<Pool> pool_;
};

struct DecodePoolOptions {
  KvGeometry geometry;
  int num_pages = 0;    // of the synthetic prompt
  int spare_pages = 0;  // room for what is decoded
  int worker_gpu = 0;
  int daemon_gpu = 0;
  bool own_namespaces = false;  // the daemon in PID, IPC and mount namespaces of its own
  int fill_threads = 8;
};

struct OpenFigures {
  double hash_ms = 0;    // keys from tokens
  double match_ms = 0;   // matching and leasing
  double mirror_ms = 0;  // records into a mirror on the GPU
  double mirror_bytes = 0;
};

class DecodePool {
 public:
  // The daemon's arena is made, and empty.
  static absl::StatusOr<std::unique_ptr<DecodePool>> Start(const DecodePoolOptions& options);

  // Puts every page, over UCX on loopback, and keeps leases on them; prints how it goes.
  absl::Status Fill();
  double fill_gb_per_s() const { return fill_gb_per_s_; }

  ClientOptions OptionsFor(PathKind path) const;
  const std::vector<PageKey>& keys() const { return keys_; }  // [num_pages]
  SlotRef slot(int page) const { return slots_[static_cast<size_t>(page)]; }

  // Leases the prompt's first pages to the session, for as long as the answer lives: a daemon
  // serves nothing else by ucx.
  absl::StatusOr<MatchedPages> Lease(PoolSession& session, int num_pages) const;
  absl::StatusOr<OpenFigures> MeasureOpen(PoolSession& session, int num_pages) const;

 private:
  explicit DecodePool(const DecodePoolOptions& options) : options_(options) {}
  absl::StatusOr<PutReport> WriteBatch(PoolSession& session, int first_page, int num_pages) const;

  const DecodePoolOptions options_;
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::vector<uint32_t> tokens_;
  std::vector<PageKey> keys_;
  std::vector<SlotRef> slots_;
  double fill_gb_per_s_ = 0;
  std::unique_ptr<PoolSession> writer_;  // its leases hold the pages
  std::vector<PutReport> reports_;
};

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_DECODE_POOL_H_
