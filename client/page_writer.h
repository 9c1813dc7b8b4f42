// Puts pages into the pool: reserve, send, seal, in batches of bounded memory, all daemons at once.
//
// Idempotent: a page that is resident is a hit and is not sent; one that another writer has is
// reported as pending. After a failure nothing is left half: unsealed reservations are given back.
// Thread safety: safe; one call uses up to kStagingBytes for each daemon.

#ifndef LOCKS_KVD_CLIENT_PAGE_WRITER_H_
#define LOCKS_KVD_CLIENT_PAGE_WRITER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/pool.h"
#include "client/worker_shape.h"

namespace kvd {

// What became of one page.
struct PutOutcome {
  enum class State {
    kHit,      // was resident
    kNew,      // sent and sealed now
    kPending,  // another writer has it: match it later
    kFailed,   // see status
  };
  State state = State::kFailed;
  absl::Status status;  // of kFailed
  int daemon = -1;
  std::vector<SlotRef> slots;  // one a shard held; of kNew and kHit
};

struct PutReport {
  int64_t num_new = 0;
  int64_t num_hit = 0;
  int64_t num_pending = 0;
  int64_t num_failed = 0;
  int64_t bytes_sent = 0;
  absl::Status first_failure;       // kOk if nothing failed
  std::vector<PutOutcome> pages;    // parallel to the request
  std::vector<LeasedSlots> leases;  // hold the new and hit pages until the report is destroyed
};

class PageWriter {
 public:
  static constexpr size_t kStagingBytes = size_t{32} << 20;

  // Writes the slots [L][shard heads] of one shard of the pages at these positions, one after
  // another. Called from several threads at once.
  using SlotReader =
      std::function<absl::Status(std::span<const size_t> pages, int shard_pos, uint8_t* slots)>;

  PageWriter(Pool* pool, const WorkerShape* shape, absl::Duration send_timeout)
      : pool_(*pool), shape_(*shape), send_timeout_(send_timeout) {}

  // Blocking: up to three control timeouts a batch. Never fails as a whole: see each page's
  // outcome.
  PutReport Write(const PoolView& view, std::span<const PlacedPage> pages,
                  const SlotReader& read) const;

 private:
  struct Job;    // what one daemon gets
  struct Batch;  // pages of one job that are reserved, sent and sealed together
  void WriteJob(Job& job, std::span<const PlacedPage> pages, const SlotReader& read) const;
  absl::Status WriteShard(Batch& batch, int shard_pos, std::span<const PlacedPage> pages,
                          const SlotReader& read) const;
  absl::Status SendNew(Batch& batch, int shard_pos, std::span<const size_t> fresh,
                       std::span<const uint64_t> tickets, const SlotReader& read) const;
  void SealNew(Batch& batch, int shard_pos, std::span<const size_t> fresh,
               std::span<const uint64_t> tickets, const absl::Status& sent) const;

  Pool& pool_;
  const WorkerShape& shape_;
  const absl::Duration send_timeout_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_PAGE_WRITER_H_
