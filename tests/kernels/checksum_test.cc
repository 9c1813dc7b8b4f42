#include "kernels/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvd {
namespace {

// The definition, read off kernels/checksum.h one byte at a time.
uint64_t Definition(const std::vector<uint8_t>& bytes) {
  uint64_t sum = 0;
  for (size_t i = 0; 4 * i < bytes.size(); ++i) {
    uint64_t word = 0;
    for (size_t b = 0; b < 4 && 4 * i + b < bytes.size(); ++b)
      word |= static_cast<uint64_t>(bytes[4 * i + b]) << (8 * b);
    sum += Mix64(word + (i + 1) * kGolden64);
  }
  return sum;
}

std::vector<uint8_t> SomeBytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(Mix64(i) >> 56);
  return bytes;
}

uint64_t Sum(const std::vector<uint8_t>& bytes) { return Checksum64(bytes.data(), bytes.size()); }

// Of zeros, the terms are the outputs of splitmix64 seeded with 0, which are published.
TEST(ChecksumTest, OfZerosIsTheSumOfSplitmix64Outputs) {
  EXPECT_EQ(Checksum64(nullptr, 0), 0u);
  EXPECT_EQ(Sum(std::vector<uint8_t>(4)), 0xE220A8397B1DCDAFull);
  EXPECT_EQ(Sum(std::vector<uint8_t>(8)), 0xE220A8397B1DCDAFull + 0x6E789E6AA1B965F4ull);
}

// Computed by the fitting tool, in Python (bench/trace/FORMAT.md).
TEST(ChecksumTest, EqualsTheTestVectorOfTheFileFormat) {
  EXPECT_EQ(Sum({1, 0, 0, 0, 2, 0, 0, 0}), 0x50D273FC94FE7B03ull);
}

TEST(ChecksumTest, EqualsItsDefinitionAtEveryLength) {
  for (size_t n = 0; n < 130; ++n) EXPECT_EQ(Sum(SomeBytes(n)), Definition(SomeBytes(n))) << n;
  EXPECT_EQ(Sum(SomeBytes(32768)), Definition(SomeBytes(32768)));
}

TEST(ChecksumTest, DoesNotDependOnAlignment) {
  const std::vector<uint8_t> bytes = SomeBytes(8192);
  std::vector<uint8_t> shifted(8192 + 16);
  for (size_t offset = 0; offset < 16; ++offset) {
    std::memcpy(shifted.data() + offset, bytes.data(), bytes.size());
    EXPECT_EQ(Checksum64(shifted.data() + offset, bytes.size()), Sum(bytes)) << offset;
  }
}

TEST(ChecksumTest, SeesEverySingleBitOfAUnit) {
  std::vector<uint8_t> bytes = SomeBytes(1024);
  const uint64_t right = Sum(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_NE(Sum(bytes), right) << bit;
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

TEST(ChecksumTest, SeesSwappedWordsRowsAndShiftedPages) {
  const std::vector<uint8_t> bytes = SomeBytes(4096);
  std::vector<uint8_t> swapped = bytes;
  std::swap_ranges(swapped.begin(), swapped.begin() + 4, swapped.begin() + 4);
  EXPECT_NE(Sum(swapped), Sum(bytes));
  swapped = bytes;
  std::swap_ranges(swapped.begin(), swapped.begin() + 256, swapped.begin() + 256);
  EXPECT_NE(Sum(swapped), Sum(bytes));
  std::vector<uint8_t> rotated = bytes;
  std::rotate(rotated.begin(), rotated.begin() + 2, rotated.end());
  EXPECT_NE(Sum(rotated), Sum(bytes));
}

TEST(ChecksumTest, SeesTruncationToAWholeWord) {
  std::vector<uint8_t> bytes(64);
  const uint64_t right = Sum(bytes);
  bytes.resize(60);
  EXPECT_NE(Sum(bytes), right);
}

}  // namespace
}  // namespace kvd
