// Pages out of an engine's own KV cache, in host memory or on the worker's GPU, packed into slots.
//
// Why: the pool's unit layout is canonical and engines lay KV out as they like; only this and
// TailRing know an engine's layout. From a GPU the units are packed there and come down in one copy
// a batch. Thread safety: safe (immutable). Ownership: views of the engine's cache, which must not
// change meanwhile.

#ifndef LOCKS_KVD_CLIENT_ENGINE_PAGES_H_
#define LOCKS_KVD_CLIENT_ENGINE_PAGES_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "client/worker_shape.h"
#include "kernels/gather.h"

namespace kvd {

class EnginePages {
 public:
  // `layers`: one EngineKv a pooled layer. Page 0 begins at `first_token` of the engine's cache.
  EnginePages(const WorkerShape& shape, std::span<const EngineKv> layers, int64_t first_token)
      : shape_(shape), layers_(layers), first_token_(first_token) {}

  // Writes the slots [L][shard heads] of one shard of `pages`, one after another, to host memory.
  // Blocking. REQUIRES: a cache on a GPU belongs to a worker with that GPU (ClientOptions::gpu).
  absl::Status Read(std::span<const size_t> pages, int shard_pos, uint8_t* slots) const;

 private:
  absl::Status ReadFromGpu(std::span<const size_t> pages, int shard_pos, uint8_t* slots) const;
  int64_t token_of(size_t page) const {
    return first_token_ + static_cast<int64_t>(page) * shape_.geometry.page_tokens;
  }

  const WorkerShape& shape_;
  const std::span<const EngineKv> layers_;
  const int64_t first_token_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_ENGINE_PAGES_H_
