// The worker's door to a pool: puts pages, opens sequences, shows which path each daemon is reached
// by.
//
// Use: Make once a process (or once a tensor-parallel rank), PageKeys for a prompt, Put what was
// computed, OpenSequence to decode. client/README.md has the whole of it in twenty lines. Thread
// safety: safe; a Sequence is not. Blocking: every call has a deadline (client_options.h).
// Lifetime: the client outlives its sequences and put reports.

#ifndef LOCKS_KVD_CLIENT_KV_CLIENT_H_
#define LOCKS_KVD_CLIENT_KV_CLIENT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client_options.h"
#include "client/metrics.h"
#include "client/page_writer.h"
#include "client/pool.h"
#include "client/sequence.h"
#include "client/tail_sealer.h"
#include "client/worker_shape.h"
#include "kernels/gather.h"
#include "proto/page_key.h"

namespace kvd {

// Pages [first_page, first_page + num_pages) of the sequence that `keys` name, from an engine's
// cache.
struct PutRequest {
  std::span<const PageKey> keys;  // from the sequence's page 0: placement goes by stripes
  int first_page = 0;
  int num_pages = 0;
  // One a pooled layer; heads are the worker's own, from 0. In host memory, or on the client's GPU.
  std::span<const EngineKv> layers;
  int64_t first_token = 0;  // index in the engine's cache of page first_page's first token
};

// Units of a resident prefix, for engines that use the pool as a store only.
struct FetchedPages {
  int num_pages = 0;
  std::vector<uint8_t> units;  // [num_pages][L][heads] units: [K: B x D][V: B x D] each
};

// How a daemon is reached at the moment.
struct DaemonView {
  std::string address;
  bool attached = false;
  bool draining = false;
  std::string incarnation;  // hex; empty if not attached
  PathReport path;          // valid if attached
};

class KvClient {
 public:
  // Attaches to every daemon. Errors: kInvalidArgument names the option; kUnavailable: a daemon was
  // not reached (see allow_partial); kFailedPrecondition: version, model, arena or required path
  // not met; kUnauthenticated, kPermissionDenied. Blocking: up to two control timeouts.
  static absl::StatusOr<std::unique_ptr<KvClient>> Make(ClientOptions options);
  ~KvClient();
  KvClient(const KvClient&) = delete;
  KvClient& operator=(const KvClient&) = delete;

  // Keys of the complete pages of `tokens`. `extra`: adapter or media hash.
  std::vector<PageKey> PageKeys(std::span<const uint32_t> tokens,
                                absl::string_view extra = {}) const;

  // Puts pages. Idempotent: resident pages are hits and are not sent. The report holds leases on
  // what is resident until it is destroyed, so that it can be opened meanwhile. Errors:
  // kInvalidArgument: the request; kUnavailable: no daemon is attached. A page that failed is in
  // the report.
  absl::StatusOr<PutReport> Put(const PutRequest& request);

  // Opens the longest resident prefix of `keys`: see Sequence::num_open_pages. Errors:
  // kInvalidArgument; kUnavailable: no daemon is attached, or one was lost meanwhile (open again);
  // kResourceExhausted.
  absl::StatusOr<std::unique_ptr<Sequence>> OpenSequence(std::span<const PageKey> keys,
                                                         const SequenceOptions& options);

  // Fetches every unit of the longest resident prefix of `keys`, proved by generation. Errors as
  // OpenSequence.
  absl::StatusOr<FetchedPages> FetchPages(std::span<const PageKey> keys);

  std::vector<DaemonView> Daemons() const;
  // The client's figures as Prometheus text, version 0.0.4 (deploy/docs/metrics.md). The library
  // binds no port: the engine serves this beside its own metrics, from any thread. With several
  // clients in one process, serve each under a path or label of its own: their names are the same.
  std::string MetricsText() const;
  const WorkerShape& shape() const { return shape_; }

 private:
  KvClient(ClientOptions options, WorkerShape shape);
  absl::StatusOr<FetchedPages> FetchOnce(std::span<const PageKey> keys);

  const ClientOptions options_;
  const WorkerShape shape_;
  const Fingerprint fingerprint_;
  // Destroyed in reverse order: the sealer uses the writer, the writer the pool, the pool the
  // worker.
  ClientMetrics metrics_;
  std::unique_ptr<UcxWorker> ucx_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<PageWriter> writer_;
  std::unique_ptr<TailSealer> sealer_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_KV_CLIENT_H_
