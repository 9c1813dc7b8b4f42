// Fetches chosen units of a pool daemon's arena into a worker's memory: one list per (layer, step), one
// interface for every path.
//
// Why one interface: the guard that proves the bytes (generation after the copy, guarantee G1) and the
// deadline (G5) must be the same on every path; one conformance suite tests them all.
// Thread safety: a Fetcher is safe; a FetchList belongs to one caller at a time.
// Ownership: lists, destinations and results are the caller's and must live until Wait returned.
// Hot path: Start and Wait allocate nothing, take no lock and make no RPC.

#ifndef LOCKS_KVD_CLIENT_FETCHER_H_
#define LOCKS_KVD_CLIENT_FETCHER_H_

#include <atomic>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/wire.h"

namespace kvd {

enum class PathKind { kPeer, kShared, kUcx };
absl::string_view PathName(PathKind path);  // "peer", "shared", "ucx"

// One list of units and its outcome.
struct FetchList {
  // Set by the caller before Start.
  std::span<const FetchEntry> entries;    // what, with the generation that Match or Seal gave
  uint8_t* const* destinations = nullptr; // [entries] unit_bytes each
  uint8_t* valid = nullptr;               // [entries] out: 1 if the destination holds the sealed bytes
  absl::Duration deadline = absl::Seconds(1);  // from Start

  // Outcome, set by Wait. A missing page is no error: its `valid` is 0 and its destination zeroed (or
  // untouched after an error).
  absl::StatusCode code = absl::StatusCode::kOk;  // kDeadlineExceeded, kUnavailable, kAborted, kInvalidArgument ...
  int64_t num_valid = 0;
  uint64_t path_bytes = 0;  // bytes that travelled

  // The fetcher's own: reached through the list so that nothing is allocated for a fetch.
  void* in_flight = nullptr;
};

class Fetcher {
 public:
  virtual ~Fetcher() = default;
  virtual PathKind path() const = 0;

  // Begins a fetch; returns at once. Never fails: errors are in the list after Wait.
  virtual void Start(FetchList& list) = 0;

  // Returns when the list is done or its deadline passed. After an error or a deadline, nothing writes to
  // the destinations any more.
  virtual void Wait(FetchList& list) = 0;

  // Fetches whole records of slots (when a sequence is opened or extended): for each entry (layer and head
  // 0) destinations[i] receives the slot's summary_bytes(), checked against the header's generation and
  // summary checksum. Blocking: up to the deadline. May allocate.
  virtual void FetchSummaries(FetchList& list) = 0;

  // True once the connection is beyond repair: only another session helps. Any thread.
  virtual bool failed() const = 0;

  // Once the session is lost: later fetches end with kAborted, waiting ones soon.
  virtual void Shutdown() = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_FETCHER_H_
