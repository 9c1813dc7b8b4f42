// Fetches the units that a layer's selection missed in the page cache: one list per daemon, all
// daemons at once, in waves that stay under a daemon's caps.
//
// Use: Clear, Add each miss, Start, attend what is there, Finish, then read unit(i).
// Thread safety: compatible: one step at a time. Allocates in Make only.

#ifndef LOCKS_KVD_CLIENT_MISS_FETCH_H_
#define LOCKS_KVD_CLIENT_MISS_FETCH_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/buffer.h"
#include "client/fetcher.h"
#include "client/sequence_pages.h"
#include "client/stats.h"
#include "client/step_options.h"

namespace kvd {

// One unit that is not in the page cache.
struct Miss {
  int32_t page;
  int32_t head;        // of the worker
  int32_t cache_slot;  // claimed for it
  uint8_t* destination;
  enum class Outcome : uint8_t { kVerified, kMissing, kLate, kFailed, kCorrupt } outcome;
};

class MissFetch {
 public:
  // A quarter of the daemon's default caps of one list (65,536 units) and of a session's bytes in
  // flight (256 MiB), so that several sequences of one worker can fetch at once.
  static constexpr size_t kMaxListUnits = 16384;
  static constexpr size_t kMaxListBytes = size_t{64} << 20;

  static absl::StatusOr<std::unique_ptr<MissFetch>> Make(const WorkerShape& shape,
                                                         size_t max_misses, int max_daemons,
                                                         const StepOptions& options,
                                                         size_t max_list_units = kMaxListUnits);

  void Clear() { num_misses_ = 0; }
  // REQUIRES: fewer than max_misses since Clear.
  void Add(int32_t page, int32_t head, int32_t cache_slot, uint8_t* destination);

  // Sends the first wave to every daemon that has misses.
  void Start(SequencePages& pages, int layer);
  // Waits for it, sends and waits for the others, proves every unit, and masks pages and daemons
  // that failed; what has a second holder is asked for there. Blocking: up to fetch_timeout a wave;
  // a daemon that is late gets no further wave.
  // Returns the bytes that travelled.
  int64_t Finish(SequencePages& pages, int layer, UnitCounts& counts);

  // Of every list since Make, by path; any thread.
  const FetchTotals& totals() const { return totals_; }

  // Misses of the last Start, grouped by daemon.
  std::span<const Miss> misses() const { return {grouped_.data(), num_misses_}; }

 private:
  // What one daemon is asked for: misses [begin, end) of grouped_; `sent` of them so far.
  struct Work {
    size_t begin = 0;
    size_t end = 0;
    size_t sent = 0;  // end of the wave in flight
    bool in_flight = false;
    int64_t post_ns = 0;  // that starting the wave took
    FetchList list;
  };

  MissFetch(const WorkerShape& shape, const StepOptions& options)
      : shape_(shape), options_(options) {}
  void StartWave(SequencePages& pages, int daemon);
  void FinishWave(SequencePages& pages, int layer, int daemon, UnitCounts& counts);
  // Judges the miss at `place` of grouped_, which was asked of `daemon` by a list that ended with
  // `code`; one whose page has turned to another holder is kept for FetchAgain.
  void Settle(SequencePages& pages, int layer, int daemon, size_t place, bool valid,
              absl::StatusCode code, UnitCounts& counts);
  int64_t FetchAgain(SequencePages& pages, int layer, UnitCounts& counts);
  PathTotals& TotalsOf(const SequencePages& pages, int daemon);
  static void CountUnit(Miss::Outcome outcome, absl::StatusCode code, PathTotals& totals);
  Miss::Outcome Judge(SequencePages& pages, int layer, const Miss& miss, bool valid,
                      absl::StatusCode code);
  // Of the unit that was fetched; where it lies on a GPU it is copied down first.
  bool HasChecksum(const Miss& miss, uint64_t checksum);

  const WorkerShape shape_;
  const StepOptions options_;
  size_t max_wave_ = 0;  // units of one list
  size_t num_misses_ = 0;
  Buffer<Miss> added_;
  Buffer<Miss> grouped_;
  Buffer<FetchEntry> entries_;
  Buffer<uint8_t*> destinations_;
  Buffer<uint8_t> valid_;
  std::vector<Work> work_;  // [max_daemons]
  Buffer<uint8_t> unit_;    // of a GPU, to be verified
  Buffer<uint32_t> again_;  // places in grouped_ that are asked for at a second holder
  size_t num_again_ = 0;
  absl::Duration give_up_at_;  // SteadyClock's
  FetchTotals totals_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_MISS_FETCH_H_
