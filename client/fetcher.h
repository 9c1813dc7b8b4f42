// Fetches chosen units of a pool daemon's arena into a worker's memory: one list per (layer, step),
// one interface for every path.
//
// Why one interface: the guard that proves the bytes (generation after the copy, guarantee G1) and
// the deadline (G5) must be the same on every path; one conformance suite tests them all.
// Thread safety: a Fetcher is safe; a FetchList belongs to one caller at a time.
// Ownership: lists, destinations and results are the caller's and must live until Wait returned.
// Hot path: Start and Wait allocate nothing, take no lock and make no RPC.

#ifndef LOCKS_KVD_CLIENT_FETCHER_H_
#define LOCKS_KVD_CLIENT_FETCHER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/memory_space.h"
#include "proto/wire.h"

namespace kvd {

enum class PathKind { kPeer, kShared, kUcx };
absl::string_view PathName(PathKind path);  // "peer", "shared", "ucx"

// One list of units and its outcome.
struct FetchList {
  // Set by the caller before Start.
  std::span<const FetchEntry> entries;     // what, with the generation that Match or Seal gave
  uint8_t* const* destinations = nullptr;  // [entries] unit_bytes each
  uint8_t* valid = nullptr;  // [entries] out: 1 if the destination holds the sealed bytes
  absl::Duration deadline = absl::Seconds(1);  // from Start

  // Outcome, set by Wait. A missing page is no error: its `valid` is 0 and its destination zeroed
  // (or untouched after an error).
  // kDeadlineExceeded, kUnavailable, kAborted, kInvalidArgument ...
  absl::StatusCode code = absl::StatusCode::kOk;
  int64_t num_valid = 0;
  uint64_t path_bytes = 0;  // bytes that travelled

  // The fetcher's own: reached through the list so that nothing is allocated for a fetch.
  void* in_flight = nullptr;
};

// Records of whole slots on their way into a mirror in a GPU's memory, and the outcome.
struct RecordList {
  struct Entry {
    uint32_t slot;
    uint64_t generation;  // that Match or Seal gave
    int32_t page;         // place in the mirror
    int32_t first_head;   // head of the worker that the slot's head 0 is
  };
  // Set by the caller. The mirror is that of kernels/store_records.h.
  std::span<const Entry> entries;
  uint8_t* coarse = nullptr;
  uint8_t* fine = nullptr;
  int num_heads = 0;
  int64_t page_capacity = 0;
  // true: changes nothing; `valid` says that the mirror has these very records
  bool compare_only = false;
  // [entries] out: 1 if the records are there and proved; else they are undefined
  uint8_t* valid = nullptr;
  absl::Duration deadline = absl::Seconds(1);

  absl::StatusCode code = absl::StatusCode::kOk;  // as in a FetchList
  int64_t num_valid = 0;
};

class PeerFetcher;

class Fetcher {
 public:
  virtual ~Fetcher() = default;
  virtual PathKind path() const = 0;
  // Where the destinations of Start are: in host memory, or in a GPU's. FetchSummaries always
  // fetches to the host.
  virtual MemorySpace destination_space() const { return MemorySpace::kHost; }
  // The peer path's own form, for kernels that read the arena themselves; null on every other path.
  virtual const PeerFetcher* peer() const { return nullptr; }

  // Begins a fetch; returns at once. Never fails: errors are in the list after Wait.
  virtual void Start(FetchList& list) = 0;

  // Returns when the list is done or its deadline passed. After an error or a deadline, nothing
  // writes to the destinations any more.
  virtual void Wait(FetchList& list) = 0;

  // Fetches whole records of slots (when a sequence is opened or extended): for each entry (layer
  // and head 0) destinations[i] receives the slot's summary_bytes(), checked against the header's
  // generation and summary checksum. Blocking: up to the deadline. May allocate.
  virtual void FetchSummaries(FetchList& list) = 0;

  // The same into a mirror on the GPU where this fetcher's destinations are; kUnimplemented from
  // one that delivers to the host. Blocking: up to the deadline.
  virtual void StoreRecords(RecordList& list) {
    list.code = absl::StatusCode::kUnimplemented;
    list.num_valid = 0;
    std::fill_n(list.valid, list.entries.size(), uint8_t{0});
  }

  // True once the connection is beyond repair: only another session helps. Any thread.
  virtual bool failed() const = 0;

  // Once the session is lost: later fetches end with kAborted, waiting ones soon.
  virtual void Shutdown() = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_FETCHER_H_
