// What a daemon does to its slots on the GPU: pieces in and out, generations, headers.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/arena_io.h"
#include "kernels/checksum.h"
#include "tests/support/gpu.h"

namespace kvd {
namespace {

using testing::DeviceArray;
using testing::Graph;

class ArenaIoParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = testing::WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

std::vector<uint8_t> Bytes(size_t size, uint64_t seed) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(Mix64(seed + i));
  return bytes;
}

TEST_F(ArenaIoParityTest, PiecesOfAnySizeArriveWhereTheyBelongAndNothingElseChanges) {
  for (const size_t bytes :
       {size_t{16}, size_t{64}, size_t{4096}, size_t{8192}, size_t{8208}, size_t{204800}}) {
    constexpr size_t kPieces = 5;
    const size_t stride = bytes + 32;
    const std::vector<uint8_t> source = Bytes(kPieces * stride, bytes);
    DeviceArray<uint8_t> from(source), to(kPieces * stride);
    std::vector<PieceCopy> copies;
    std::vector<uint8_t> want(kPieces * stride, 0xA5);
    for (size_t i = 0; i < kPieces; ++i) {
      const size_t place = (i * 3 + 1) % kPieces;
      copies.push_back({from.data() + i * stride, to.data() + place * stride});
      std::memcpy(want.data() + place * stride, source.data() + i * stride, bytes);
    }
    DeviceArray<PieceCopy> d_copies(copies);
    to.Poison();
    const Graph graph([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchCopyPieces(d_copies.data(), kPieces, bytes, stream));
    });
    graph.Replay();
    EXPECT_EQ(to.Download(), want) << bytes;
    std::swap(want[0], want[stride]);
    EXPECT_NE(to.Download(), want);
  }
  EXPECT_EQ(LaunchCopyPieces(nullptr, 1, 24, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(LaunchCopyPieces(nullptr, -1, 16, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(LaunchCopyPieces(nullptr, 0, 16, nullptr), cudaSuccess);
}

TEST_F(ArenaIoParityTest, EvenHeadersBringKeyAndChecksumOddOnesLeaveThem) {
  constexpr size_t kHeaders = 300;
  DeviceArray<uint64_t> headers(8 * kHeaders);  // eight words each
  headers.Poison(0x11);
  const auto* first = reinterpret_cast<PageHeader*>(headers.data());
  const auto publish = [&](uint64_t generation) {
    std::vector<HeaderUpdate> updates;
    for (size_t i = 0; i < kHeaders; ++i) {
      updates.push_back({const_cast<PageHeader*>(first) + i, generation, {i, i + 1000}, i + 2000});
    }
    DeviceArray<HeaderUpdate> d_updates(updates);
    KVD_CUDA_OK(LaunchPublishHeaders(d_updates.data(), kHeaders, nullptr));
    return headers.Download();
  };
  const uint64_t untouched = 0x1111111111111111ull;
  std::vector<uint64_t> got = publish(7);
  for (size_t i = 0; i < kHeaders; ++i) {
    EXPECT_EQ(got[8 * i], 7u);
    for (size_t w = 1; w < 8; ++w) EXPECT_EQ(got[8 * i + w], untouched);
  }
  got = publish(8);
  for (size_t i = 0; i < kHeaders; ++i) {
    EXPECT_EQ(got[8 * i], 8u);
    EXPECT_EQ(got[8 * i + 1], i);
    EXPECT_EQ(got[8 * i + 2], i + 1000);
    EXPECT_EQ(got[8 * i + 3], i + 2000);
    for (size_t w = 4; w < 8; ++w) EXPECT_EQ(got[8 * i + w], untouched);
  }
  got = publish(9);
  EXPECT_EQ(got[8 * 5], 9u);
  EXPECT_EQ(got[8 * 5 + 3], 2005u);
}

TEST_F(ArenaIoParityTest, OnlyTheExpectedEvenGenerationIsValid) {
  std::vector<uint64_t> words(8 * 4);
  for (size_t i = 0; i < 4; ++i) words[8 * i] = 4 + i;  // 4, 5, 6, 7
  DeviceArray<uint64_t> headers(words);
  const auto* first = reinterpret_cast<const PageHeader*>(headers.data());
  DeviceArray<GenerationCheck> checks(std::vector<GenerationCheck>{{first, 4},
                                                                   {first, 6},
                                                                   {first + 1, 5},
                                                                   {first + 2, 6},
                                                                   {first + 2, 4},
                                                                   {first + 3, 6},
                                                                   {first + 3, 8}});
  DeviceArray<uint8_t> valid(7);
  valid.Poison();
  KVD_CUDA_OK(LaunchCheckGenerations(checks.data(), 7, valid.data(), nullptr));
  EXPECT_EQ(valid.Download(), (std::vector<uint8_t>{1, 0, 0, 1, 0, 0, 0}));
}

TEST_F(ArenaIoParityTest, ChecksumsOfLongPiecesAreTheHosts) {
  for (const size_t bytes :
       {size_t{32} << 10, (size_t{32} << 10) - 4, size_t{204800}, size_t{204800 + 44}}) {
    const std::vector<uint8_t> data = Bytes(3 * bytes, bytes);
    DeviceArray<uint8_t> d_data(data);
    DeviceArray<const uint8_t*> pieces(std::vector<const uint8_t*>{
        d_data.data() + 2 * bytes, d_data.data(), d_data.data() + bytes});
    DeviceArray<uint64_t> sums(3);
    sums.Poison();
    KVD_CUDA_OK(LaunchChecksum64(pieces.data(), 3, bytes, sums.data(), nullptr));
    EXPECT_EQ(sums.Download(), (std::vector<uint64_t>{Checksum64(data.data() + 2 * bytes, bytes),
                                                      Checksum64(data.data(), bytes),
                                                      Checksum64(data.data() + bytes, bytes)}));
    EXPECT_NE(Checksum64(data.data(), bytes), Checksum64(data.data(), bytes - 4));
  }
}

}  // namespace
}  // namespace kvd
