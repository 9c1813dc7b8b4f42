// The carrier that is always there: units and records as UCX messages, through staging memory where
// the arena is on a GPU.
//
// See service/mover.h.

#ifndef LOCKS_KVD_SERVICE_UCX_MOVER_H_
#define LOCKS_KVD_SERVICE_UCX_MOVER_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "proto/ingest_channel.h"
#include "proto/staging.h"
#include "proto/ucx_worker.h"
#include "service/arena.h"
#include "service/mover.h"

namespace kvd {

class UcxMover final : public Mover {
 public:
  // `arena` and `worker` must outlive it. Errors: as IngestChannel::Connect.
  static absl::StatusOr<std::unique_ptr<UcxMover>> Make(const Arena* arena, UcxWorker* worker,
                                                        const std::string& remote_address,
                                                        const Incarnation& incarnation,
                                                        const SessionToken& session,
                                                        absl::Duration timeout);
  Carrier carrier() const override { return Carrier::kUcx; }
  // kUnavailable, kAborted, kDeadlineExceeded: the other daemon is gone or slow.
  absl::StatusOr<std::vector<uint64_t>> Move(std::span<const MovedPage> pages) override;

 private:
  UcxMover(const Arena* arena, absl::Duration timeout) : arena_(*arena), timeout_(timeout) {}

  const Arena& arena_;
  const absl::Duration timeout_;
  std::unique_ptr<IngestChannel> channel_;
  std::vector<StagingBuffer> staging_;  // of a batch's pages, where the arena is on a GPU
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_UCX_MOVER_H_
