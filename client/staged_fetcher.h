// Lets a fetcher that delivers to host memory serve a worker with a GPU: units land in pinned
// staging memory and are uploaded from there by one kernel. Of a fetcher that delivers units to the
// GPU itself it brings up the records alone.
//
// Why: the shared and the ucx path then serve the host-driven step on a GPU with the same contract
// as the peer path.
// Right because: the inner fetcher proves every unit before it is uploaded, and staging memory
// belongs to one list until its upload has ended. A list is cut into parts; two are on their way at
// once, so that one travels while the other is uploaded. Thread safety: as the inner fetcher's.

#ifndef LOCKS_KVD_CLIENT_STAGED_FETCHER_H_
#define LOCKS_KVD_CLIENT_STAGED_FETCHER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "client/fetcher.h"
#include "kernels/memory_space.h"
#include "proto/arena_memory.h"

namespace kvd {

class StagedFetcher final : public Fetcher {
 public:
  // Lists at work at once, two parts each; a further one begins in its Wait.
  static constexpr int kMaxLists = 3;

  // `inner` delivers to host memory, or its units to `place`; destinations are at `place`. With a
  // host place the upload is a plain copy and records are not stored: for tests. Errors:
  // kResourceExhausted; kFailedPrecondition: no such GPU.
  static absl::StatusOr<std::unique_ptr<StagedFetcher>> Make(std::unique_ptr<Fetcher> inner,
                                                             const ArenaShape& shape,
                                                             const MemoryPlace& place);
  ~StagedFetcher() override;

  PathKind path() const override;
  MemorySpace destination_space() const override;
  // A short lock; no allocation.
  void Start(FetchList& list) override;
  void Wait(FetchList& list) override;
  void FetchSummaries(FetchList& list) override;
  void StoreRecords(RecordList& list) override;
  bool failed() const override;
  void Shutdown() override;

 private:
  struct Impl;
  explicit StagedFetcher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_STAGED_FETCHER_H_
