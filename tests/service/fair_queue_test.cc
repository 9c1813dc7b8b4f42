#include "service/fair_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace kvd {
namespace {

using ::testing::ElementsAre;

bool Any(int) { return true; }

TEST(FairQueueTest, OwnersTakeTurnsWhoeverHasMore) {
  FairQueue<int> queue;
  for (int i = 0; i < 5; ++i) queue.Push("flood", i);
  queue.Push("quiet", 100);
  queue.Push("third", 200);
  std::vector<int> order;
  while (!queue.empty()) {
    order.push_back(*queue.Pop(Any));
    if (order.size() == 3)
      queue.Push("quiet", 101);  // it comes again: one turn of each other is before it
  }
  EXPECT_THAT(order, ElementsAre(0, 100, 200, 1, 101, 2, 3, 4));
}

TEST(FairQueueTest, WhatMayNotGoKeepsItsPlaceAndBlocksNobody) {
  FairQueue<int> queue;
  queue.Push("a", 1);
  queue.Push("a", 2);
  queue.Push("b", 3);
  EXPECT_EQ(queue.Pop([](int item) { return item == 3; }), 3);
  EXPECT_EQ(queue.Pop([](int) { return false; }), std::nullopt);
  EXPECT_EQ(queue.Pop([](int item) { return item != 1; }), 2);
  EXPECT_EQ(queue.Pop(Any), 1);
  EXPECT_EQ(queue.Pop(Any), std::nullopt);
}

}  // namespace
}  // namespace kvd
