// Figures of one client, and their answer to a scrape.
//
// The client binds no port: an engine serves KvClient::MetricsText beside its own metrics, from any
// of its threads. What a step counts has one writer and costs a plain addition (client/stats.h);
// what happens outside of steps is counted by relaxed additions. A sequence's totals stay when it
// ends, so counters never fall. Names, labels and meanings: the table in client/metrics.cc, which
// deploy/docs/metrics.md is made from. Thread safety: safe.

#ifndef LOCKS_KVD_CLIENT_METRICS_H_
#define LOCKS_KVD_CLIENT_METRICS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/path.h"
#include "client/stats.h"
#include "client/step_options.h"
#include "proto/metrics_text.h"

namespace kvd {

inline constexpr char kClientPrefix[] = "locks_kv_client_";
// Every family that a client can show.
std::span<const MetricInfo> ClientMetricTable();

// Units fetched outside of steps: to open and repair sequences, and by FetchPages.
struct UnitTotals {
  uint64_t verified = 0, missing = 0, late = 0, failed = 0, aborted = 0, bytes = 0;
};

// What concerns one daemon, over all sessions with it.
class ChannelFigures {
 public:
  static constexpr size_t kNumCodes = 17;  // canonical codes

  // One attempt to attach.
  void CountAttach(absl::StatusCode code) { attaches_[static_cast<size_t>(code)].Add(); }
  // One attached session: the paths that it does not use, and why.
  void CountPath(const PathReport& report);
  // Its daemon was another process than before.
  void CountIncarnationChange() { incarnation_changes_.Add(); }
  // One list of units that was fetched outside of a step.
  void CountFetch(const FetchList& list, PathKind path);

  uint64_t attaches(absl::StatusCode code) const {
    return attaches_[static_cast<size_t>(code)].value();
  }
  uint64_t incarnation_changes() const { return incarnation_changes_.value(); }
  uint64_t refusals(PathKind path, PathRefusal reason) const {
    return refusals_[static_cast<size_t>(path)][static_cast<size_t>(reason)].value();
  }
  void AddUnits(PathKind path, UnitTotals* totals) const;

 private:
  struct Fetched {
    Counter verified, missing, late, failed, aborted, bytes;
  };
  std::array<Counter, kNumCodes> attaches_;
  Counter incarnation_changes_;
  std::array<std::array<Counter, kNumPathRefusals>, kNumPaths> refusals_;
  std::array<Fetched, kNumPaths> fetched_;
};

// A daemon at the moment of a scrape.
struct ChannelView {
  std::string daemon;  // host:port
  std::shared_ptr<const ChannelFigures> figures;
  std::optional<PathKind> path;  // none: not attached
};

class ClientMetrics {
 public:
  ClientMetrics();
  ~ClientMetrics();

  // What one open sequence counts; both must live until Remove.
  struct SequenceFigures {
    const StepTotals* step = nullptr;
    const FetchTotals* fetch = nullptr;
    LossPolicy loss = LossPolicy::kRecompute;
    uint64_t mirror_bytes = 0;
    uint64_t cache_bytes = 0;
  };
  void Add(const SequenceFigures& sequence);
  // The sequence ends; what it counted stays. Nothing happens if it was not added.
  void Remove(const StepTotals* step);

  // Resident pages of a prompt that were not used because their records did not come.
  void CountUnusedHits(uint64_t pages) { unused_hits_.Add(pages); }

  // Prometheus text, version 0.0.4.
  std::string Text(std::span<const ChannelView> daemons) const;

 private:
  struct Sums;
  static void Fold(const SequenceFigures& sequence, Sums* sums);

  Counter unused_hits_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<SequenceFigures> open_;
  const std::unique_ptr<Sums> ended_;  // of sequences that have ended
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_METRICS_H_
