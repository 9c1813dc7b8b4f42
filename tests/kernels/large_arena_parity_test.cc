// Goal: nothing wraps in buffers of more than 2^31 elements and more than 2^32 bytes. Method: few
// records and units at the far ends of such buffers, poisoned otherwise; what the kernels store,
// score, pack and gather there equals the reference's on small copies. Needs 28 GB of GPU memory.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/gather.h"
#include "kernels/score.h"
#include "kernels/store_records.h"
#include "kernels/summarize.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::RandomKv;

constexpr int kDim = 128, kTokens = 16, kRank = 8, kHeads = 20, kGroup = 16, kSequences = 7,
              kPages = 9;
constexpr int64_t kCapacity = kMaxPages;
constexpr SummaryLayout kLayout = MakeSummaryLayout(kDim, kTokens, kRank);
constexpr size_t kUnitBytes = MakeUnitLayout(kDim, kTokens).bytes;
constexpr size_t kCoarseBytes = size_t{kHeads} * kCapacity * kLayout.coarse_bytes;
constexpr size_t kFineBytes = size_t{kHeads} * kCapacity * kLayout.fine_bytes;
constexpr size_t kLseSize = size_t{kSequences} * kHeads * kGroup * kCapacity;
constexpr size_t kTwo32 = size_t{1} << 32;
static_assert(kCoarseBytes - kCapacity * kLayout.coarse_bytes > kTwo32 && kFineBytes / 2 > kTwo32 &&
              kLseSize > kTwo32 / 2);

class LargeArenaParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
    size_t free = 0, total = 0;
    KVD_CUDA_OK(cudaMemGetInfo(&free, &total));
    if (free < kCoarseBytes + kFineBytes + 4 * kLseSize + (size_t{1} << 30))
      GTEST_SKIP() << "too little free GPU memory";
  }
};

// Records [head][page] of random units.
struct Records {
  Records()
      : coarse(kHeads * kPages * kLayout.coarse_bytes), fine(kHeads * kPages * kLayout.fine_bytes) {
    std::vector<uint8_t> unit(kUnitBytes);
    for (size_t i = 0; i < kHeads * kPages; ++i) {
      const std::vector<uint16_t> keys = RandomKv(kTokens * kDim, KvDtype::kBf16, 1.0f, i);
      std::memcpy(unit.data(), keys.data(), keys.size() * 2);
      ref::Summarize({kDim, kTokens, kRank, KvDtype::kBf16, true, Encoder::kE1, unit.data(),
                      nullptr, coarse.data() + i * kLayout.coarse_bytes,
                      fine.data() + i * kLayout.fine_bytes});
    }
  }
  std::vector<uint8_t> coarse, fine;
};

// Every page's summary as a slot of all heads holds it.
std::vector<uint8_t> Summaries(const Records& records, const SlotLayout& slot) {
  std::vector<uint8_t> all(kPages * slot.summary_bytes());
  for (size_t page = 0; page < kPages; ++page) {
    uint8_t* summary = all.data() + page * slot.summary_bytes();
    for (int head = 0; head < kHeads; ++head) {
      const size_t i = static_cast<size_t>(head) * kPages + page;
      std::memcpy(summary + slot.coarse_offset(0, head),
                  records.coarse.data() + i * kLayout.coarse_bytes, kLayout.coarse_bytes);
      std::memcpy(summary + slot.fine_offset(0, head), records.fine.data() + i * kLayout.fine_bytes,
                  kLayout.fine_bytes);
    }
  }
  return all;
}

void Store(const Records& records, uint8_t* coarse, uint8_t* fine) {
  const SlotLayout slot = {1, kHeads, kUnitBytes, kLayout.coarse_bytes, kLayout.fine_bytes};
  const std::vector<uint8_t> summaries = Summaries(records, slot);
  const DeviceArray<uint8_t> d_summaries(summaries);
  std::vector<SlotRecords> list;
  for (size_t page = 0; page < kPages; ++page) {
    const size_t at = page * slot.summary_bytes();
    list.push_back({d_summaries.data() + at, nullptr, 0,
                    Checksum64(summaries.data() + at, slot.summary_bytes()),
                    static_cast<int32_t>(page), 0});
  }
  const DeviceArray<SlotRecords> slots(list);
  const DeviceArray<uint64_t> sums(kPages);
  const DeviceArray<uint8_t> valid(kPages);
  KVD_CUDA_OK(LaunchStoreRecords({slot, kHeads, kCapacity, kPages, slots.data(), coarse, fine,
                                  sums.data(), valid.data(), false},
                                 nullptr));
  EXPECT_EQ(valid.Download(), std::vector<uint8_t>(kPages, 1));
}

TEST_F(LargeArenaParityTest, RecordsBeyond32BitsAreStoredAndScored) {
  const Records records;
  DeviceArray<uint8_t> coarse(kCoarseBytes), fine(kFineBytes);
  coarse.Poison();
  fine.Poison();
  Store(records, coarse.data(), fine.data());

  const DeviceArray<const uint8_t*> coarse_bases(
      std::vector<const uint8_t*>(kSequences, coarse.data())),
      fine_bases(std::vector<const uint8_t*>(kSequences, fine.data()));
  const DeviceArray<int64_t> capacity(std::vector<int64_t>(kSequences, kCapacity));
  const DeviceArray<int32_t> num_pages(std::vector<int32_t>(kSequences, kPages));
  const std::vector<uint16_t> query =
      RandomKv(int64_t{kSequences} * kHeads * kGroup * kDim, KvDtype::kBf16, 1.0f, 99);
  const DeviceArray<uint16_t> d_query(query);
  DeviceArray<float> lse(kLseSize);
  const ScoreArgs args = {kSequences,
                          kHeads,
                          kGroup,
                          kDim,
                          kTokens,
                          kRank,
                          KvDtype::kBf16,
                          .0883883f,
                          0,
                          d_query.data(),
                          coarse_bases.data(),
                          fine_bases.data(),
                          capacity.data(),
                          num_pages.data(),
                          kCapacity,
                          lse.data()};
  std::vector<int32_t> all_pages;
  for (int i = 0; i < kSequences * kHeads * kPages; ++i) all_pages.push_back(i % kPages);
  const DeviceArray<int32_t> candidates(all_pages);
  const DeviceArray<int32_t> counts(std::vector<int32_t>(kSequences * kHeads, kPages));

  const std::vector<const uint8_t*> host_coarse(kSequences, records.coarse.data()),
      host_fine(kSequences, records.fine.data());
  const std::vector<int64_t> host_capacity(kSequences, kPages);
  const std::vector<int32_t> host_pages(kSequences, kPages);
  std::vector<float> want(size_t{kSequences} * kHeads * kGroup * kPages), got(want.size());
  ScoreArgs host = args;
  host.query = query.data();
  host.coarse = host_coarse.data();
  host.fine = host_fine.data();
  host.page_capacity = host_capacity.data();
  host.num_pages = host_pages.data();
  host.lse_stride = kPages;
  host.lse = want.data();
  for (const int scan : {0, 1, 2}) {  // coarse, full, refine
    lse.Poison();
    KVD_CUDA_OK(scan == 0 ? LaunchScoreCoarse(args, nullptr)
                : scan == 1
                    ? LaunchScoreFull(args, nullptr)
                    : LaunchScoreRefine({args, kPages, candidates.data(), counts.data()}, nullptr));
    KVD_CUDA_OK(cudaMemcpy2D(got.data(), kPages * 4, lse.data(), kCapacity * 4, kPages * 4,
                             kSequences * kHeads * kGroup, cudaMemcpyDeviceToHost));
    scan == 0 ? ref::ScoreCoarse(host) : ref::ScoreFull(host);
    int wrong = 0, shifted = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      wrong += !(std::abs(got[i] - want[i]) <= 1e-3f);
      shifted += !(std::abs(got[i] - want[(i + kPages * kGroup) % want.size()]) <=
                   1e-3f);  // as of the head before
    }
    EXPECT_EQ(wrong, 0) << "scan " << scan;
    EXPECT_GT(shifted, static_cast<int>(want.size() / 2));
    float last = 0;
    KVD_CUDA_OK(cudaMemcpy(&last, lse.data() + kLseSize - 1, 4, cudaMemcpyDeviceToHost));
    EXPECT_TRUE(scan == 2 || last == -INFINITY) << "beyond the end of the last row: " << last;
  }
}

TEST_F(LargeArenaParityTest, UnitsBeyond32BitsArePackedAndGathered) {
  constexpr size_t kFar[] = {0, kTwo32 - kUnitBytes, kTwo32 + kUnitBytes,
                             2 * kTwo32 + 3 * kUnitBytes};  // in bytes
  constexpr size_t kHeadStride = 5 * (kTwo32 / 4), kNum = std::size(kFar);
  DeviceArray<uint8_t> arena(kFineBytes), out(2 * kTwo32 + 4 * kUnitBytes);
  arena.Poison();
  out.Poison();
  // An engine's K and V, token by token: two heads 5 GiB apart. Head 1 is packed to the far end of
  // the arena.
  const std::vector<uint16_t> rows = RandomKv(2 * kTokens * kDim, KvDtype::kBf16, 1.0f, 5);
  std::vector<uint8_t> unit(kUnitBytes);
  std::memcpy(unit.data(), rows.data(), kUnitBytes);
  uint8_t* engine = arena.data() + 16 * kUnitBytes;
  KVD_CUDA_OK(cudaMemcpy(engine + kHeadStride, unit.data(), kUnitBytes, cudaMemcpyHostToDevice));
  const DeviceArray<int32_t> heads(std::vector<int32_t>{1});
  const DeviceArray<int64_t> first_tokens(std::vector<int64_t>{0});
  const DeviceArray<uint8_t*> packed(std::vector<uint8_t*>{arena.data() + kFar[kNum - 1]});
  KVD_CUDA_OK(LaunchPackUnits(
      {{engine, engine + kUnitBytes / 2, static_cast<int64_t>(kHeadStride), kDim * 2},
       1,
       heads.data(),
       first_tokens.data(),
       kDim,
       kTokens,
       packed.data()},
      nullptr));
  KVD_CUDA_OK(cudaDeviceSynchronize());
  std::vector<uint8_t> got(kUnitBytes);
  KVD_CUDA_OK(
      cudaMemcpy(got.data(), arena.data() + kFar[kNum - 1], kUnitBytes, cudaMemcpyDeviceToHost));
  EXPECT_EQ(got, unit);

  std::vector<std::vector<uint8_t>> units(kNum, unit);
  std::vector<GatherUnit> list;
  for (size_t i = 0; i < kNum; ++i) {
    units[i][0] = static_cast<uint8_t>(i);
    KVD_CUDA_OK(
        cudaMemcpy(arena.data() + kFar[i], units[i].data(), kUnitBytes, cudaMemcpyHostToDevice));
    list.push_back({arena.data() + kFar[i], nullptr, 0, out.data() + kFar[kNum - 1 - i]});
  }
  const DeviceArray<GatherUnit> d_list(list);
  const DeviceArray<uint8_t> valid(kNum);
  KVD_CUDA_OK(LaunchGatherUnits(d_list.data(), kNum, kUnitBytes, valid.data(), nullptr));
  EXPECT_EQ(valid.Download(), std::vector<uint8_t>(kNum, 1));
  for (size_t i = 0; i < kNum; ++i) {
    KVD_CUDA_OK(cudaMemcpy(got.data(), out.data() + kFar[kNum - 1 - i], kUnitBytes,
                           cudaMemcpyDeviceToHost));
    EXPECT_EQ(got, units[i]) << i;
    EXPECT_NE(got, units[(i + 1) % kNum]) << i;
  }
}

}  // namespace
}  // namespace kvd
