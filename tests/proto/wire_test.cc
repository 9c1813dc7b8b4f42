#include "proto/wire.h"

#include <gtest/gtest.h>

#include <random>

namespace kvd {
namespace {

std::array<uint8_t, sizeof(MessageHeader)> Bytes(const MessageHeader& header) {
  std::array<uint8_t, sizeof(MessageHeader)> bytes;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

TEST(WireTest, AHeaderSurvivesTheWireAtFixedOffsets) {
  MessageHeader header;
  header.type = MessageType::kFetchReply;
  header.flags = kFlagSummaries;
  header.incarnation.fill(0xA1);
  header.session.fill(0xB2);
  header.request = 0x0102030405060708;
  header.count = 77;
  header.piece = 3;
  header.status = WireStatus::kLate;
  header.first_entry = 99;
  header.deadline_us = 1000000;
  const auto bytes = Bytes(header);
  EXPECT_EQ(bytes[0], 'L');
  EXPECT_EQ(bytes[3], '1');
  EXPECT_EQ(bytes[4], kWireVersion);
  EXPECT_EQ(bytes[6], 2);      // type
  EXPECT_EQ(bytes[8], 0xA1);   // incarnation
  EXPECT_EQ(bytes[24], 0xB2);  // session
  EXPECT_EQ(bytes[40], 0x08);  // request, little-endian
  const auto parsed = ParseHeader(bytes, MessageType::kFetchReply);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(Bytes(*parsed), bytes);
}

TEST(WireTest, WhatIsNotAHeaderOfThisVersionIsRefusedByTheFieldsName) {
  const auto good = Bytes(MessageHeader{});
  const auto Message = [](std::span<const uint8_t> bytes, MessageType type) {
    return std::string(ParseHeader(bytes, type).status().message());
  };
  EXPECT_TRUE(ParseHeader(good, MessageType::kFetch).ok());
  EXPECT_NE(Message({good.data(), 63}, MessageType::kFetch).find("length"), std::string::npos);
  EXPECT_NE(Message({good.data(), size_t{0}}, MessageType::kFetch).find("length"),
            std::string::npos);
  EXPECT_NE(Message(good, MessageType::kIngest).find("type"), std::string::npos);
  auto bad = good;
  bad[1] ^= 1;
  EXPECT_NE(Message(bad, MessageType::kFetch).find("magic"), std::string::npos);
  bad = good;
  bad[4] = 9;
  EXPECT_NE(Message(bad, MessageType::kFetch).find("version"), std::string::npos);
}

TEST(WireTest, RandomBytesAreNeverAHeader) {
  std::mt19937 random(7);
  for (int round = 0; round < 10000; ++round) {
    std::vector<uint8_t> bytes(random() % 130);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    EXPECT_FALSE(ParseHeader(bytes, MessageType::kFetch).ok());
  }
}

TEST(WireTest, TokensDifferInAnyByte) {
  SessionToken a;
  a.fill(0x5A);
  EXPECT_TRUE(TokensEqual(a, a));
  for (size_t i = 0; i < a.size(); ++i) {
    SessionToken b = a;
    b[i] ^= 0x80;
    EXPECT_FALSE(TokensEqual(a, b)) << i;
  }
}

TEST(WireTest, APieceIsAsLargeAsAllowedAndNoLarger) {
  for (const size_t item :
       {size_t{1}, size_t{64}, size_t{4096}, size_t{8192}, size_t{204864}, size_t{2097152}}) {
    const size_t entries = EntriesPerPiece(item);
    EXPECT_LE(BitmapBytes(entries) + entries * item, kMaxPieceBytes) << item;
    EXPECT_GT(BitmapBytes(entries + 1) + (entries + 1) * item, kMaxPieceBytes) << item;
  }
  EXPECT_EQ(EntriesPerPiece(kMaxPieceBytes), 1u);
  EXPECT_EQ(EntriesPerPiece(3 * kMaxPieceBytes), 1u);
}

TEST(WireTest, BitmapsHoldABitAnEntryAndKeepAlignment) {
  EXPECT_EQ(BitmapBytes(1), 64u);
  EXPECT_EQ(BitmapBytes(512), 64u);
  EXPECT_EQ(BitmapBytes(513), 128u);
}

TEST(WireTest, CanariesDifferByIncarnationAndPlace) {
  Incarnation a = {1};
  Incarnation b = {2};
  EXPECT_NE(CanaryWord(a, 0), CanaryWord(b, 0));
  EXPECT_NE(CanaryWord(a, 0), CanaryWord(a, 1));
  EXPECT_EQ(CanaryWord(a, 5), CanaryWord(a, 5));
}

}  // namespace
}  // namespace kvd
