// Goal: what of a provider becomes the view. Method: answers at chosen times.

#include "proto/membership_filter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvd {
namespace {

std::vector<Member> Named(const std::vector<std::string>& names) {
  std::vector<Member> members;
  for (const std::string& name : names) members.push_back({name, name + ".kv:7411", 1});
  return members;
}

const std::vector<Member> kA = Named({"kv-0", "kv-1", "kv-2"});
const std::vector<Member> kB = Named({"kv-0", "kv-1"});
const std::vector<Member> kC = Named({"kv-0", "kv-2"});

class MembershipFilterTest : public ::testing::Test {
 protected:
  MembershipFilter::Outcome Offer(absl::StatusOr<std::vector<Member>> answer, double seconds) {
    return filter_.Offer(std::move(answer), absl::Seconds(seconds));
  }
  MembershipFilter filter_{absl::Seconds(1)};
};

TEST_F(MembershipFilterTest, ChangesAreNumberedFromOne) {
  EXPECT_EQ(filter_.view(), nullptr);
  EXPECT_TRUE(Offer(kA, 0).changed);
  EXPECT_EQ(filter_.view()->version, 1u);
  EXPECT_EQ(filter_.view()->members, kA);
  EXPECT_FALSE(Offer(kA, 5).changed);
  EXPECT_EQ(filter_.view()->version, 1u);
  const auto first = filter_.view();
  EXPECT_TRUE(Offer(kB, 10).changed);
  EXPECT_EQ(filter_.view()->version, 2u);
  EXPECT_EQ(first->members, kA);  // who holds a view keeps it
  EXPECT_EQ(filter_.num_accepted(), 2u);
  EXPECT_EQ(filter_.num_refused(), 0u);
}

TEST_F(MembershipFilterTest, TheOrderOfAnAnswerIsNoChange) {
  Offer(kA, 0);
  EXPECT_FALSE(Offer(std::vector<Member>(kA.rbegin(), kA.rend()), 5).changed);
  EXPECT_EQ(filter_.last_good(), absl::Seconds(5));
}

TEST_F(MembershipFilterTest, AnotherAddressOrWeightIsAChange) {
  Offer(kA, 0);
  std::vector<Member> moved = kA;
  moved[1].address = "[2001:db8::1]:7411";
  EXPECT_TRUE(Offer(moved, 5).changed);
  moved[1].weight = 2;
  EXPECT_TRUE(Offer(moved, 10).changed);
}

TEST_F(MembershipFilterTest, BadAnswersKeepTheLastViewAndAreReportedOnce) {
  Offer(kA, 0);
  std::vector<Member> twice = kA;
  twice[1].name = twice[0].name;
  std::vector<Member> same_address = kA;
  same_address[1].address = same_address[0].address;
  std::vector<Member> weightless = kA;
  weightless[0].weight = 0;
  struct Case {
    absl::StatusOr<std::vector<Member>> answer;
    absl::StatusCode code;
  };
  const std::vector<Case> cases = {
      {std::vector<Member>(), absl::StatusCode::kUnavailable},
      {absl::UnavailableError("no server answers"), absl::StatusCode::kUnavailable},
      {twice, absl::StatusCode::kInvalidArgument},
      {same_address, absl::StatusCode::kInvalidArgument},
      {weightless, absl::StatusCode::kInvalidArgument},
      {absl::NotFoundError("no file"), absl::StatusCode::kNotFound},
  };
  double at = 10;
  std::vector<int> reports(17);
  for (int round = 0; round < 3; ++round) {
    for (const Case& c : cases) {
      const auto outcome = Offer(c.answer, at += 5);
      EXPECT_FALSE(outcome.changed);
      EXPECT_EQ(outcome.problem.code(), c.code);
      if (outcome.is_new) ++reports[static_cast<size_t>(c.code)];
    }
  }
  EXPECT_EQ(filter_.view()->version, 1u);
  EXPECT_EQ(filter_.view()->members, kA);
  EXPECT_EQ(filter_.num_refused(), 18u);
  EXPECT_EQ(filter_.last_good(), absl::ZeroDuration());
  for (const auto code : {absl::StatusCode::kUnavailable, absl::StatusCode::kInvalidArgument,
                          absl::StatusCode::kNotFound}) {
    EXPECT_EQ(reports[static_cast<size_t>(code)], 1) << static_cast<int>(code);
  }
  // A good answer ends the matter; the next failure is news.
  EXPECT_TRUE(Offer(kA, at += 5).problem.ok());
  EXPECT_EQ(filter_.last_good(), absl::Seconds(at));
  EXPECT_TRUE(Offer(absl::NotFoundError("no file"), at += 5).is_new);
}

TEST_F(MembershipFilterTest, ABadFirstAnswerGivesNoView) {
  EXPECT_FALSE(Offer(std::vector<Member>(), 0).changed);
  EXPECT_EQ(filter_.view(), nullptr);
  EXPECT_TRUE(Offer(kA, .1).changed);
}

TEST_F(MembershipFilterTest, AChangeTooSoonIsHeldNotLost) {
  Offer(kA, 0);
  EXPECT_TRUE(Offer(kB, 5).changed);
  const auto held = Offer(kC, 5.5);
  EXPECT_FALSE(held.changed);
  EXPECT_TRUE(absl::IsResourceExhausted(held.problem)) << held.problem;
  EXPECT_TRUE(held.is_new);
  EXPECT_EQ(filter_.view()->members, kB);
  EXPECT_TRUE(Offer(kC, 6).changed);
}

TEST_F(MembershipFilterTest, AViewThatFlipsEverySecondIsDampedAndReportedOnce) {
  int changes = 0;
  int reports = 0;
  for (int second = 0; second < 600; ++second) {
    const auto outcome = Offer(second % 2 == 0 ? kA : kB, second);
    changes += outcome.changed ? 1 : 0;
    reports += outcome.is_new ? 1 : 0;
  }
  // Undamped 600. Holds of 1, 2, 4 .. 64 s, then one change in 64 s (65 where the second in between
  // is the wrong one).
  EXPECT_LE(changes, 8 + 600 / 64);
  EXPECT_GE(changes, 8);
  EXPECT_EQ(reports, 1);
  // It settles on what it was not: that is taken once the hold is over, and calm ends the damping.
  const std::vector<Member> settled = filter_.view()->members == kA ? kB : kA;
  int waited = 0;
  while (!Offer(settled, 600 + waited).changed) ++waited;
  EXPECT_LE(waited, 65);
  for (int second = waited + 1; second < waited + 200; ++second)
    EXPECT_TRUE(Offer(settled, 600 + second).problem.ok());
  const std::vector<Member> other = settled == kA ? kB : kA;
  EXPECT_TRUE(Offer(other, 900).changed);
  EXPECT_TRUE(Offer(settled, 902).changed);  // a hold of 2 s at most
  EXPECT_TRUE(Offer(other, 902.5).is_new);
}

// A rolling restart takes members out and back in, one after the other, slowly: no damping.
TEST_F(MembershipFilterTest, ARollingRestartIsNotHeld) {
  Offer(kA, 0);
  double at = 60;
  for (int i = 0; i < 12; ++i) {
    std::vector<Member> without = kA;
    without.erase(without.begin() + i % 3);
    EXPECT_TRUE(Offer(without, at).changed);
    EXPECT_TRUE(Offer(without, at + 5).problem.ok());
    EXPECT_TRUE(Offer(kA, at + 10).changed);
    EXPECT_TRUE(Offer(kA, at + 15).problem.ok());
    at += 20;
  }
}

}  // namespace
}  // namespace kvd
