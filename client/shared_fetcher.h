// Fetches from an arena of this host that is mapped read-only: a copy, and no system call.
//
// Right because: ref::GatherUnits checks the generation after the copy. The mapping of a dead
// daemon stays readable, so Shutdown (heartbeat, incarnation) is what fences it, not the memory
// (guarantee G3).
// Thread safety: safe. The mapping ends with the fetcher.

#ifndef LOCKS_KVD_CLIENT_SHARED_FETCHER_H_
#define LOCKS_KVD_CLIENT_SHARED_FETCHER_H_

#include <atomic>
#include <memory>

#include "client/fetcher.h"
#include "proto/arena_memory.h"

namespace kvd {

class SharedFetcher final : public Fetcher {
 public:
  explicit SharedFetcher(std::unique_ptr<const ArenaMemory> memory) : memory_(std::move(memory)) {}

  PathKind path() const override { return PathKind::kShared; }
  // Copies at once, on the calling thread.
  void Start(FetchList& list) override;
  void Wait(FetchList&) override {}
  void FetchSummaries(FetchList& list) override;
  bool failed() const override { return false; }
  void Shutdown() override { lost_.store(true, std::memory_order_release); }

 private:
  bool Refuse(FetchList& list) const;

  const std::unique_ptr<const ArenaMemory> memory_;
  std::atomic<bool> lost_{false};
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_SHARED_FETCHER_H_
