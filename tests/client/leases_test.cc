#include "client/leases.h"

#include <vector>

#include "gtest/gtest.h"

namespace kvd {
namespace {

TEST(LeaseBookTest, ASlotIsReleasedWithItsLastHolderOnly) {
  LeaseBook book;
  const std::vector<SlotRef> shared = {{1, 2}, {2, 2}};
  const std::vector<SlotRef> other = {{2, 2}, {3, 4}};
  book.Add(shared);
  book.Add(other);
  EXPECT_EQ(book.num_slots(), 3u);
  EXPECT_EQ(book.Drop(shared), (std::vector<SlotRef>{{1, 2}}));
  EXPECT_EQ(book.Drop(other), (std::vector<SlotRef>{{2, 2}, {3, 4}}));
  EXPECT_EQ(book.num_slots(), 0u);
}

TEST(LeaseBookTest, DroppingWhatIsNotHeldReleasesNothing) {
  LeaseBook book;
  const std::vector<SlotRef> slots = {{7, 2}};
  EXPECT_TRUE(book.Drop(slots).empty());
}

}  // namespace
}  // namespace kvd
