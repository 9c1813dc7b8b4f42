#include "service/session_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class SessionTableTest : public ::testing::Test {
 protected:
  SessionTableTest() {
    incarnation_.fill(7);
    arena_ = testing::MakeArena(testing::TinyOptions(4, &clock_));
    table_ = std::make_unique<SessionTable>(SessionTable::Options{.incarnation = incarnation_,
                                                                  .ttl = absl::Seconds(5),
                                                                  .sessions_per_tenant = 2,
                                                                  .clock = &clock_});
  }
  AttachedSession Attach() {
    const auto session = table_->Attach(arena_, "test");
    EXPECT_TRUE(session.ok());
    return *session;
  }

  TestClock clock_;
  Incarnation incarnation_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<SessionTable> table_;
};

TEST_F(SessionTableTest, TokenFindsItsSessionAndNothingElseDoes) {
  const AttachedSession a = Attach();
  const AttachedSession b = Attach();
  EXPECT_NE(a.token, b.token);
  ASSERT_TRUE(table_->Find(a.token, incarnation_).ok());
  EXPECT_EQ(table_->Find(a.token, incarnation_)->id, a.id);
  SessionToken flipped = a.token;
  flipped[15] ^= 1;
  EXPECT_EQ(table_->Find(flipped, incarnation_).status().code(), absl::StatusCode::kAborted);
  Incarnation other = incarnation_;
  other[3] ^= 1;
  const auto stranger = table_->Find(a.token, other);
  EXPECT_EQ(stranger.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(stranger.status().message(), HasSubstr("incarnation"));
}

TEST_F(SessionTableTest, SilentSessionIsLostAfterItsTtlAndPingsKeepItAlive) {
  const AttachedSession silent = Attach();
  const AttachedSession alive = Attach();
  testing::PutPage(arena_.get(), silent.id, 1);
  clock_.Advance(absl::Seconds(5) - absl::Nanoseconds(1));
  EXPECT_THAT(table_->EndSilent(), IsEmpty());
  ASSERT_TRUE(table_->Ping(alive.token, incarnation_).ok());
  clock_.Advance(absl::Nanoseconds(1));
  const auto ended = table_->EndSilent();
  ASSERT_THAT(ended, SizeIs(1));
  EXPECT_EQ(ended[0].id, silent.id);
  EXPECT_EQ(table_->Find(silent.token, incarnation_).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(table_->Ping(silent.token, incarnation_).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(arena_->Stats().leases, 0u);
  EXPECT_EQ(arena_->Stats().leases_lost, 1u);
  EXPECT_TRUE(table_->Find(alive.token, incarnation_).ok());
}

TEST_F(SessionTableTest, DetachEndsAtOnceAndOnlyOnce) {
  const AttachedSession a = Attach();
  testing::PutPage(arena_.get(), a.id, 1);
  EXPECT_TRUE(table_->Detach(a.token, incarnation_).ok());
  EXPECT_EQ(arena_->Stats().leases, 0u);
  EXPECT_EQ(table_->Detach(a.token, incarnation_).code(), absl::StatusCode::kAborted);
}

TEST_F(SessionTableTest, TenantsCapIsNamed) {
  Attach();
  const AttachedSession second = Attach();
  const auto third = table_->Attach(arena_, "test");
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(third.status().message(), HasSubstr("limits.sessions_per_tenant: tenant acme has 2"));
  ASSERT_TRUE(table_->Detach(second.token, incarnation_).ok());
  EXPECT_TRUE(table_->Attach(arena_, "test").ok());
}

TEST_F(SessionTableTest, TableThatEndsGivesLeasesBack) {
  testing::PutPage(arena_.get(), Attach().id, 1);
  table_.reset();
  EXPECT_EQ(arena_->Stats().leases, 0u);
}

}  // namespace
}  // namespace kvd
