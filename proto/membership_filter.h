// Decides which answers of a provider become the view.
//
// Why: a provider fails, lies and wavers; placement must do none of it. What is refused leaves the
// last view as it is. Thread safety: compatible. No clock: the caller passes a monotonic time.

#ifndef LOCKS_KVD_PROTO_MEMBERSHIP_FILTER_H_
#define LOCKS_KVD_PROTO_MEMBERSHIP_FILTER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/membership.h"

namespace kvd {

class MembershipFilter {
 public:
  explicit MembershipFilter(absl::Duration min_interval) : min_interval_(min_interval) {}

  struct Outcome {
    bool changed = false;  // view() is another one
    absl::Status problem;  // why the answer was refused
    bool is_new = false;   // and that this was not so before
  };
  // Takes what the provider answered at `now`: members as it gave them, or why it gave none.
  //
  // A change is held until `hold` after the last one. `hold` is min_interval, doubled (up to 64
  // times min_interval) each time that a view comes back which the one before had replaced, and
  // min_interval again once the provider has said the same for 2 `hold`.
  Outcome Offer(absl::StatusOr<std::vector<Member>> answer, absl::Duration now);

  // Null before the first good answer.
  const std::shared_ptr<const MembershipView>& view() const { return view_; }
  uint64_t num_accepted() const { return num_accepted_; }
  uint64_t num_refused() const { return num_refused_; }
  absl::Duration last_good() const { return last_good_; }  // time of the last good answer

 private:
  Outcome Refuse(absl::Status problem);
  absl::Duration Hold() const { return min_interval_ * (1 << returns_); }

  const absl::Duration min_interval_;
  std::shared_ptr<const MembershipView> view_;
  std::vector<Member> replaced_;  // the members before view_'s
  absl::Duration last_change_;
  absl::Duration same_since_;  // since when the provider names view_'s members
  absl::Duration last_good_;
  int returns_ = 0;        // 0 .. 6
  uint32_t reported_ = 0;  // bit c: a problem of code c was reported
  uint64_t num_accepted_ = 0;
  uint64_t num_refused_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_MEMBERSHIP_FILTER_H_
