// The stored bytes of one page in every geometry: they change only when the layout or an encoder is
// changed on purpose. How the file is made and compared: tests/golden/README.md.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/summarize.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

constexpr const char* kPath = KVD_GOLDEN_DIR "/records_v1.bin";
static_assert(kLayoutVersion == 1, "a new layout gets a new golden file; the old one is deleted");

// Random keys with a strong common part, so that centroid and modes all carry weight.
std::vector<uint8_t> GoldenUnit(int head_dim, int page_tokens) {
  const int64_t count = int64_t{head_dim} * page_tokens;
  std::vector<uint16_t> values = testing::RandomKv(2 * count, KvDtype::kBf16, 1.0f, 2026);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const float common = 0.25f * static_cast<float>(i % head_dim % 17) - 2.0f;
    values[at] = ToBf16(FromBf16(values[at]) + common);
  }
  std::vector<uint8_t> unit(4 * static_cast<size_t>(count));
  std::memcpy(unit.data(), values.data(), unit.size());
  return unit;
}

std::vector<uint8_t> MakeRecords() {
  std::vector<uint8_t> all;
  for (int head_dim : {64, 96, 128, 256}) {
    // Some tridiagonal metric; diagonally dominant, so positive definite.
    std::vector<float> metric(static_cast<size_t>(head_dim * head_dim), 0.0f);
    for (int i = 0; i < head_dim; ++i) {
      for (int j = std::max(0, i - 1); j < std::min(head_dim, i + 2); ++j)
        metric[static_cast<size_t>(i * head_dim + j)] = i == j ? (i % 4 == 0 ? 3.0f : 1.0f) : 0.25f;
    }
    for (int page_tokens : {16, 32}) {
      const std::vector<uint8_t> unit = GoldenUnit(head_dim, page_tokens);
      for (int rank : {4, 8}) {
        const SummaryLayout layout = MakeSummaryLayout(head_dim, page_tokens, rank);
        for (Encoder encoder : {Encoder::kE0, Encoder::kE1, Encoder::kE1S}) {
          std::vector<uint8_t> record(layout.record_bytes());
          ref::Summarize({head_dim, page_tokens, rank, KvDtype::kBf16, true, encoder, unit.data(),
                          encoder == Encoder::kE1S ? metric.data() : nullptr, record.data(),
                          record.data() + layout.coarse_bytes});
          all.insert(all.end(), record.begin(), record.end());
        }
      }
    }
  }
  return all;
}

TEST(SummarizeGoldenTest, RecordsAreTheStoredBytes) {
  const std::vector<uint8_t> made = MakeRecords();
  if (std::getenv("KVD_WRITE_GOLDEN") != nullptr) {
    std::ofstream out(kPath, std::ios::binary);
    for (uint8_t byte : made) out.put(static_cast<char>(byte));
    GTEST_SKIP() << "wrote " << kPath << ": read its diff, then run again without KVD_WRITE_GOLDEN";
  }
  std::ifstream in(kPath, std::ios::binary);
  ASSERT_TRUE(in) << kPath << " is not there";
  const std::vector<char> stored{std::istreambuf_iterator<char>(in), {}};
  ASSERT_EQ(stored.size(), made.size());
  for (size_t i = 0; i < made.size(); ++i)
    ASSERT_EQ(static_cast<uint8_t>(stored[i]), made[i]) << "byte " << i << " of " << kPath;
}

}  // namespace
}  // namespace kvd
