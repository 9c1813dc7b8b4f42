#include "proto/membership_filter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvd {
namespace {

constexpr int kMaxReturns = 6;

constexpr uint32_t BitOf(absl::StatusCode code) { return 1u << static_cast<int>(code); }

}  // namespace

MembershipFilter::Outcome MembershipFilter::Refuse(absl::Status problem) {
  ++num_refused_;
  const uint32_t bit = BitOf(problem.code());
  const bool is_new = (reported_ & bit) == 0;
  reported_ |= bit;
  return {false, std::move(problem), is_new};
}

MembershipFilter::Outcome MembershipFilter::Offer(absl::StatusOr<std::vector<Member>> answer,
                                                  absl::Duration now) {
  if (answer.ok() && answer->empty())
    answer = absl::UnavailableError("the provider names no member");
  if (answer.ok()) answer = CheckMembers(*std::move(answer));
  if (!answer.ok()) return Refuse(answer.status());
  reported_ &= BitOf(absl::StatusCode::kResourceExhausted);
  if (view_ != nullptr && *answer == view_->members) {
    last_good_ = now;
    if (now - same_since_ >= 2 * Hold()) {
      returns_ = 0;
      reported_ = 0;
    }
    return {};
  }
  if (view_ != nullptr && now - last_change_ < Hold()) {
    same_since_ = now;
    return Refuse(absl::ResourceExhaustedError(
        absl::StrCat("the members change more often than once in ", absl::FormatDuration(Hold()),
                     ": the last view is kept; look at what makes the provider waver")));
  }
  if (*answer == replaced_) returns_ = std::min(returns_ + 1, kMaxReturns);
  auto next = std::make_shared<MembershipView>();
  next->version = view_ == nullptr ? 1 : view_->version + 1;
  next->members = *std::move(answer);
  if (view_ != nullptr) replaced_ = view_->members;
  view_ = std::move(next);
  last_change_ = same_since_ = last_good_ = now;
  ++num_accepted_;
  return {true, absl::OkStatus(), false};
}

}  // namespace kvd
