#include "service/verifier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

constexpr SessionId kA{1};

class VerifierTest : public ::testing::Test {
 protected:
  explicit VerifierTest(uint32_t slots = 4)
      : arena_(testing::MakeArena(testing::TinyOptions(slots, &clock_))) {
    arena_->BeginSession(kA);
  }
  // Looks at every slot, a few a call.
  VerifyOutcome VerifyAll(uint32_t slots_a_call = 0) const {
    VerifyOutcome sum;
    while (!sum.done) {
      const VerifyOutcome part = VerifySlots(*arena_, sum.next_slot, slots_a_call);
      EXPECT_TRUE(part.done || part.next_slot > sum.next_slot);
      sum.next_slot = part.next_slot;
      sum.done = part.done;
      sum.pages += part.pages;
      sum.units += part.units;
      sum.evicted += part.evicted;
      for (const auto& failure : part.failures) sum.failures.push_back(failure);
    }
    return sum;
  }
  // What is found once the byte at `address` is another one; it is put back.
  std::string FoundAt(uint8_t* address) {
    *address = static_cast<uint8_t>(*address ^ 0x10);
    const VerifyOutcome outcome = VerifyAll();
    *address = static_cast<uint8_t>(*address ^ 0x10);
    EXPECT_EQ(outcome.failures.size(), 1u);
    return outcome.failures.size() == 1 ? outcome.failures[0].what : "";
  }

  TestClock clock_;
  std::unique_ptr<Arena> arena_;
};

TEST_F(VerifierTest, SealedPagesMatchAndOthersAreLeftAlone) {
  testing::PutPage(arena_.get(), kA, 1);
  testing::PutPage(arena_.get(), kA, 2, 1);
  testing::ReserveOne(arena_.get(), kA, 3);
  for (const uint32_t slots_a_call : {0u, 1u, 2u}) {
    const VerifyOutcome outcome = VerifyAll(slots_a_call);
    EXPECT_EQ(outcome.pages, 2u);
    EXPECT_EQ(outcome.units, 4u);
    EXPECT_EQ(outcome.evicted, 0u);
    EXPECT_TRUE(outcome.failures.empty());
  }
  EXPECT_TRUE(VerifySlots(*arena_, 1000, 0).done) << "behind the end there is nothing to do";
}

TEST_F(VerifierTest, OneWrongBitAnywhereIsFoundAndNamed) {
  testing::PutPage(arena_.get(), kA, 1);
  const PageLocation page = testing::PutPage(arena_.get(), kA, 2);
  const ArenaMemory& memory = arena_->memory();
  const SlotLayout& slot = memory.shape().slot;
  EXPECT_THAT(FoundAt(memory.unit(page.slot, 1, 0)),
              HasSubstr("1 units, the first of layer 1, head 0"));
  EXPECT_THAT(FoundAt(memory.unit(page.slot, 0, 0) + slot.unit_bytes - 1), HasSubstr("layer 0"));
  EXPECT_EQ(FoundAt(memory.summary(page.slot)), "its records");
  EXPECT_EQ(FoundAt(memory.summary(page.slot) + slot.summary_bytes() - 1), "its records");
  EXPECT_EQ(FoundAt(memory.header(page.slot)->key), "the key in its header");
  EXPECT_EQ(FoundAt(reinterpret_cast<uint8_t*>(&memory.header(page.slot)->summary_checksum)),
            "its records");
  memory.header(page.slot)->generation.store(page.generation + 2);
  const VerifyOutcome outcome = VerifyAll();
  ASSERT_EQ(outcome.failures.size(), 1u);
  EXPECT_EQ(outcome.failures[0].what, "the generation in its header");
  EXPECT_EQ(outcome.failures[0].location, page);
  EXPECT_EQ(outcome.pages, 1u) << "the other page is still fine";
}

TEST_F(VerifierTest, LeasesNothingAndKeepsTheOrderOfEviction) {
  std::vector<PageLocation> pages;
  for (int page = 0; page < 4; ++page) {
    pages.push_back(testing::PutPage(arena_.get(), kA, page));
  }
  for (const int page : {2, 0, 1, 3}) {
    clock_.Advance(absl::Seconds(1));
    ASSERT_TRUE(arena_->Release(kA, {&pages[static_cast<size_t>(page)], 1}).ok());
  }
  EXPECT_EQ(VerifyAll().pages, 4u);
  EXPECT_EQ(arena_->Stats().leases, 0u);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 9);
  EXPECT_EQ(reserved.slot, pages[2].slot) << "the page released first goes first";
}

// Pages come and go while they are verified: none of them is ever called wrong.
TEST_F(VerifierTest, EvictionMeanwhileIsNeverAFailure) {
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int i = 0; i < 300; ++i) {
      const PageLocation page = testing::PutPage(arena_.get(), kA, i % 7 + 10 * i);
      ASSERT_TRUE(arena_->Release(kA, {&page, 1}).ok());
    }
    stop = true;
  });
  while (!stop.load()) {
    const VerifyOutcome outcome = VerifyAll();
    for (const auto& failure : outcome.failures) ADD_FAILURE() << failure.what;
  }
  writer.join();
  EXPECT_EQ(VerifyAll().pages, 4u);
  EXPECT_TRUE(VerifyAll().failures.empty());
}

}  // namespace
}  // namespace kvd
