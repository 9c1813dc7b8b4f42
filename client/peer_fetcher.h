// Fetches from a GPU arena of this host that is mapped read-only on this worker's GPU: gather
// kernels over NVLink, or within one GPU. No system call, no daemon in the loop.
//
// Why it also shows the mapping: the captured step fetches by a kernel of its own (kernels/step.h)
// and needs no Start.
// Right because: the generation is checked after the copy, on the device. The mapping of a dead
// daemon stays readable, so Shutdown (heartbeat, incarnation) is what fences it, not the memory
// (guarantee G3): it sets a word in host memory that kernels read at the start of a step.
// Thread safety: safe. Built with KVD_CUDA only. Lifetime: the mapping ends with the fetcher; its
// destructor waits for the GPU. Nothing may be enqueued that reads the mapping once the last
// reference is given up.

#ifndef LOCKS_KVD_CLIENT_PEER_FETCHER_H_
#define LOCKS_KVD_CLIENT_PEER_FETCHER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "client/device_buffer.h"
#include "client/fetcher.h"
#include "kernels/step.h"
#include "proto/arena_memory.h"

namespace kvd {

class PeerFetcher final : public Fetcher {
 public:
  // Lists at work at once; a further one begins in its Wait.
  static constexpr int kMaxLists = 8;

  // `memory` as ArenaMemory::MapGpu gave it. Errors: kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<PeerFetcher>> Make(
      std::unique_ptr<const ArenaMemory> memory);
  ~PeerFetcher() override;

  PathKind path() const override { return PathKind::kPeer; }
  MemorySpace destination_space() const override { return MemorySpace::kGpu; }
  const PeerFetcher* peer() const override { return this; }
  // Enqueues the gather on a stream of its own; destinations are device memory of the worker's GPU.
  // A short lock; no allocation.
  void Start(FetchList& list) override;
  void Wait(FetchList& list) override;
  void FetchSummaries(FetchList& list) override;
  void StoreRecords(RecordList& list) override;
  bool failed() const override;  // a CUDA error: the context is gone
  void Shutdown() override;

  // The arena as kernels see it; valid for as long as the fetcher.
  const PeerArena& arena() const;
  const ArenaMemory& memory() const;

 private:
  struct Impl;
  explicit PeerFetcher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_PEER_FETCHER_H_
