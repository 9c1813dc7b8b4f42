// Fetches over UCX active messages: one request a list, answered in pieces.
//
// Right because: a piece is taken only for the list that asked for it (request number), within its
// bounds; it is received into memory of the fetcher and copied to the destinations by the caller's
// own thread in Wait. So a piece that comes late, after an error or a deadline, can reach no
// destination. For destinations in a GPU's memory, pieces may come from the daemon's GPU memory
// into this fetcher's, and one kernel puts the units where they belong. UCX copies out of the
// daemon's memory itself there, without a check after the copy. It stays as it is until the copy
// has ended, or if the connection fails until the list's deadline: so nothing counts that was not
// here by then; and a piece whose copy did not end well is never used again.
// Thread safety: safe. At most kMaxLists lists are in flight; a further one ends with
// kResourceExhausted.
// Hot path: Start and Wait allocate nothing and take no lock; at most one system call each, to wake
// a thread that sleeps.

#ifndef LOCKS_KVD_CLIENT_UCX_FETCHER_H_
#define LOCKS_KVD_CLIENT_UCX_FETCHER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/fetcher.h"
#include "kernels/layout.h"
#include "kernels/memory_space.h"
#include "proto/ucx_worker.h"

namespace kvd {

class UcxFetcher final : public Fetcher {
 public:
  static constexpr int kMaxLists = 8;
  // Units of one list; a longer one ends with kInvalidArgument.
  static constexpr size_t kMaxUnits = 65536;

  // GPU memory of pieces that a fetcher to a GPU takes at once.
  static constexpr size_t kGpuPieces = 4;

  // Connects; `worker` must outlive the fetcher. Errors: see UcxLink::Connect. `place`: of the
  // units' destinations; on a GPU only if worker->has_gpu_memory(), of its GPU; kResourceExhausted
  // if the GPU has no room for pieces.
  static absl::StatusOr<std::unique_ptr<UcxFetcher>> Connect(
      UcxWorker* worker, const std::string& remote_address, const Incarnation& incarnation,
      const SessionToken& session, const SlotLayout& slot, absl::Duration timeout,
      const MemoryPlace& place = {});
  ~UcxFetcher() override;

  PathKind path() const override { return PathKind::kUcx; }
  MemorySpace destination_space() const override;
  void Start(FetchList& list) override;
  void Wait(FetchList& list) override;
  void FetchSummaries(FetchList& list) override;
  bool failed() const override;
  void Shutdown() override;

  // Answers that came for no list: late, or not ours.
  uint64_t num_dropped_pieces() const;
  // Pieces that came from GPU memory into GPU memory.
  uint64_t num_gpu_pieces() const;

 private:
  class Impl;
  explicit UcxFetcher(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_UCX_FETCHER_H_
