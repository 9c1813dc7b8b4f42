// How a sequence is decoded: the budget, what is always kept, and what to do when pages are lost.
//
// Thread safety: plain values.

#ifndef LOCKS_KVD_CLIENT_STEP_OPTIONS_H_
#define LOCKS_KVD_CLIENT_STEP_OPTIONS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/select.h"

namespace kvd {

// How the records are read (ARCHITECTURE.md, "The record").
enum class ScanMode {
  kAuto,  // whichever the scan model estimates to be faster; progressive only if it wins by 10%
  kFull,  // every record whole
  kProgressive,  // coarse parts of all pages, then the candidates' fine parts
};

// How a fetched unit is proved. The generation is always checked after the copy, on every path.
enum class VerifyPolicy {
  kGeneration,
  kChecksum,  // and the unit's bytes against the checksum in its record
};

// What a step does about pages that are gone.
enum class LossPolicy {
  kRecompute,  // Run answers kUnavailable, with o valid over what was read, until Repair succeeded
  kFail,       // Run answers kAborted; the sequence cannot be used any more
  kGoOn,       // Run succeeds; the result says how much attention mass is estimated lost
};

// When the mass figures are computed: they read every page's estimate once more.
enum class MassReport { kOnLoss, kAlways };

// Of any timeout that a caller may set: deadlines never leave the range of a clock.
inline constexpr absl::Duration kMaxTimeout = absl::Hours(1);

struct StepOptions {
  int budget = 128;  // K: pages chosen by score, per layer and KV head
  int n_sink = 1;    // first pages, always attended
  int n_win = 1;     // last sealed pages, always attended
  ScanMode scan = ScanMode::kAuto;
  CombineRule rule = CombineRule::kShare;
  double cache_ratio = 3;              // page cache slots per selected page
  int num_candidates = 0;              // C of the progressive scan; 0: max(16 K, 1024)
  std::vector<int> dense_layers = {};  // layers that attend every page
  VerifyPolicy verify = VerifyPolicy::kGeneration;
  LossPolicy loss = LossPolicy::kRecompute;
  MassReport mass = MassReport::kOnLoss;
  absl::Duration fetch_timeout = absl::Seconds(1);  // above 0, at most kMaxTimeout
  // Where pages have a second holder: how long the first one is waited for, within fetch_timeout.
  // 0: half of it.
  absl::Duration failover_after = absl::ZeroDuration();

  absl::Duration failover_timeout() const {
    return failover_after > absl::ZeroDuration() ? failover_after : fetch_timeout / 2;
  }
  int candidates() const;
};

// kInvalidArgument names the field, what was expected and what came.
absl::Status Validate(const StepOptions& options, int num_layers);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_STEP_OPTIONS_H_
