// Goal: the score kernels give what the reference gives, on every geometry, and the same bits whoever asks.
// Method: records that the encoder built from random, spread and adversarial pages; lse compared with
// kvd::ref within the tolerance of kernels/README.md.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/built_geometries.h"
#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "kernels/score.h"
#include "kernels/summarize.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;

struct Geometry {
  int head_dim, page_tokens, rank, group;
  KvDtype dtype = KvDtype::kBf16;
  float softcap = 0;
};

std::string Name(const ::testing::TestParamInfo<Geometry>& info) {
  const Geometry& g = info.param;
  return "D" + std::to_string(g.head_dim) + "_B" + std::to_string(g.page_tokens) + "_R" + std::to_string(g.rank) +
         "_G" + std::to_string(g.group) + (g.dtype == KvDtype::kBf16 ? "_bf16" : "_fp16") +
         (g.softcap > 0 ? "_softcap" : "");
}

// A batch of sequences of different lengths, one of them empty, on the host and on the device.
class Batch {
 public:
  static constexpr int kHeads = 2;

  Batch(const Geometry& g, std::vector<int> lengths, bool with_extremes) : geometry_(g), num_pages_(std::move(lengths)) {
    layout_ = MakeSummaryLayout(g.head_dim, g.page_tokens, g.rank);
    const int n = static_cast<int>(num_pages_.size());
    stride_ = *std::max_element(num_pages_.begin(), num_pages_.end()) + 5;
    for (int s = 0; s < n; ++s) AddSequence(s, with_extremes);
    const std::vector<uint16_t> plain =
        kvd::testing::RandomKv(int64_t{n} * kHeads * g.group * g.head_dim, g.dtype, 1.0f, 99);
    query_.resize(plain.size());
    RotateQuery(plain.data(), int64_t{n} * kHeads * g.group, g.head_dim, g.dtype, query_.data());
    for (int s = 0; s < n; ++s) {
      host_coarse_.push_back(coarse_[static_cast<size_t>(s)].data());
      host_fine_.push_back(fine_[static_cast<size_t>(s)].data());
      device_coarse_.emplace_back(coarse_[static_cast<size_t>(s)]);
      device_fine_.emplace_back(fine_[static_cast<size_t>(s)]);
    }
    Upload();
  }

  ScoreArgs HostArgs(float* lse) const {
    return Args(query_.data(), host_coarse_.data(), host_fine_.data(), capacity_.data(), num_pages_.data(), lse);
  }
  ScoreArgs DeviceArgs(float* lse) const {
    return Args(d_query_->data(), d_coarse_->data(), d_fine_->data(), d_capacity_->data(), d_num_pages_->data(), lse);
  }
  size_t LseSize() const {
    return num_pages_.size() * static_cast<size_t>(kHeads * geometry_.group) * static_cast<size_t>(stride_);
  }
  int64_t stride() const { return stride_; }
  const std::vector<int>& num_pages() const { return num_pages_; }
  // Of a page of the first KV head of the first sequence, on the host alone.
  void DropCentroidScale(int page) {
    std::memset(coarse_[0].data() + static_cast<size_t>(page) * layout_.coarse_bytes + layout_.coarse[kCentroidScale], 0, 2);
  }
  void SetLength(int sequence, int pages) {
    num_pages_[static_cast<size_t>(sequence)] = pages;
    d_num_pages_->Upload(num_pages_);
  }

  // What a page's logits are made of, in nats: the size that rounding errors are relative to.
  double Magnitude(int s, int head, int page) const {
    const Geometry& g = geometry_;
    const int hk = head / g.group;
    const int64_t record = capacity_[static_cast<size_t>(s)] * hk + page;
    auto decoded = std::make_unique<DecodedRecord>();
    DecodeRecord(host_coarse_[static_cast<size_t>(s)] + record * layout_.coarse_bytes,
                 host_fine_[static_cast<size_t>(s)] + record * layout_.fine_bytes, g.head_dim, g.page_tokens, g.rank,
                 decoded.get());
    const uint16_t* q = query_.data() + (int64_t{s} * kHeads * g.group + head) * g.head_dim;
    const auto dot = [&](const float* v) {
      double sum = 0;
      for (int d = 0; d < g.head_dim; ++d) sum += double{FromKv(g.dtype, q[d])} * double{v[d]};
      return std::abs(sum);
    };
    double total = dot(decoded->centroid);
    for (int k = 0; k < g.rank; ++k) {
      double largest = 0;
      for (int t = 0; t < g.page_tokens; ++t) largest = std::max(largest, std::abs(double{decoded->coefficients[k][t]}));
      total += largest * dot(decoded->basis[k]);
    }
    return total * double{Scale()};
  }

 private:
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(geometry_.head_dim)); }

  void AddSequence(int s, bool with_extremes) {
    const Geometry& g = geometry_;
    const int pages = num_pages_[static_cast<size_t>(s)];
    capacity_.push_back(pages + 3);
    coarse_.emplace_back(static_cast<size_t>(kHeads * (pages + 3)) * layout_.coarse_bytes, uint8_t{0xFF});
    fine_.emplace_back(static_cast<size_t>(kHeads * (pages + 3)) * layout_.fine_bytes, uint8_t{0xFF});
    const auto extremes = kvd::testing::AdversarialPages(g.head_dim, g.page_tokens, g.rank, g.dtype);
    for (int i = 0; i < kHeads * pages; ++i) {
      const int hk = i / pages, page = i % pages;
      // Pages of unequal spread: some stay far from each other, some need the guarded way.
      const float sigma = page % 7 == 3 ? 12.0f : 1.0f;
      std::vector<uint16_t> keys = kvd::testing::RandomKv(int64_t{g.page_tokens} * g.head_dim, g.dtype, sigma,
                                                          static_cast<uint64_t>(s * 1000000 + i));
      if (with_extremes && page % 3 == 1)
        keys = extremes[static_cast<size_t>(page / 3) % extremes.size()].keys;
      std::vector<uint8_t> unit(MakeUnitLayout(g.head_dim, g.page_tokens).bytes);
      std::memcpy(unit.data(), keys.data(), keys.size() * 2);
      const int64_t record = int64_t{hk} * (pages + 3) + page;
      ref::Summarize({g.head_dim, g.page_tokens, g.rank, g.dtype, true, Encoder::kE1, unit.data(), nullptr,
                      coarse_.back().data() + record * layout_.coarse_bytes,
                      fine_.back().data() + record * layout_.fine_bytes});
      // The residual's energy is only stored with a query metric: give every page one of its own.
      const uint16_t tau = ToBf16(.01f * static_cast<float>(page % 11));
      std::memcpy(coarse_.back().data() + record * layout_.coarse_bytes + layout_.coarse[kTau], &tau, 2);
    }
  }

  void Upload() {
    d_query_ = std::make_unique<DeviceArray<uint16_t>>(query_);
    std::vector<const uint8_t*> coarse, fine;
    for (const auto& part : device_coarse_) coarse.push_back(part.data());
    for (const auto& part : device_fine_) fine.push_back(part.data());
    d_coarse_ = std::make_unique<DeviceArray<const uint8_t*>>(coarse);
    d_fine_ = std::make_unique<DeviceArray<const uint8_t*>>(fine);
    d_capacity_ = std::make_unique<DeviceArray<int64_t>>(capacity_);
    d_num_pages_ = std::make_unique<DeviceArray<int>>(num_pages_);
  }

  ScoreArgs Args(const uint16_t* query, const uint8_t* const* coarse, const uint8_t* const* fine,
                 const int64_t* capacity, const int32_t* num_pages, float* lse) const {
    return {static_cast<int>(num_pages_.size()), kHeads, geometry_.group, geometry_.head_dim, geometry_.page_tokens,
            geometry_.rank, geometry_.dtype, Scale(), geometry_.softcap, query, coarse, fine, capacity, num_pages,
            stride_, lse};
  }

  Geometry geometry_;
  std::vector<int> num_pages_;
  SummaryLayout layout_;
  int64_t stride_;
  std::vector<uint16_t> query_;
  std::vector<std::vector<uint8_t>> coarse_, fine_;
  std::vector<int64_t> capacity_;
  std::vector<const uint8_t*> host_coarse_, host_fine_;
  std::vector<DeviceArray<uint8_t>> device_coarse_, device_fine_;
  std::unique_ptr<DeviceArray<uint16_t>> d_query_;
  std::unique_ptr<DeviceArray<const uint8_t*>> d_coarse_, d_fine_;
  std::unique_ptr<DeviceArray<int64_t>> d_capacity_;
  std::unique_ptr<DeviceArray<int>> d_num_pages_;
};

// Places where `got` is not `want`: a NaN, a value beyond a page list's end that is not -inf, or one that is
// off by more than 1e-3, or 3e-5 of what its logits are made of.
int CountWrong(const Batch& batch, const std::vector<float>& got, const std::vector<float>& want, int group) {
  int wrong = 0;
  size_t at = 0;
  for (int s = 0; s < static_cast<int>(batch.num_pages().size()); ++s) {
    for (int head = 0; head < Batch::kHeads * group; ++head) {
      for (int64_t p = 0; p < batch.stride(); ++p, ++at) {
        const double g = double{got[at]}, w = double{want[at]};
        if (g == w) continue;  // -inf too
        const bool close = std::abs(g - w) <= 1e-3 ||
                           (p < batch.num_pages()[static_cast<size_t>(s)] &&
                            std::abs(g - w) <= 3e-5 * batch.Magnitude(s, head, static_cast<int>(p)));
        if (close) continue;
        if (++wrong <= 3) std::printf("sequence %d head %d page %d: got %.9g, want %.9g\n", s, head, static_cast<int>(p), g, w);
      }
    }
  }
  return wrong;
}

enum class Scan { kFull, kCoarse };

std::vector<float> RunRef(const Batch& batch, Scan scan) {
  std::vector<float> lse(batch.LseSize());
  scan == Scan::kFull ? ref::ScoreFull(batch.HostArgs(lse.data())) : ref::ScoreCoarse(batch.HostArgs(lse.data()));
  return lse;
}

std::vector<float> RunGpu(const Batch& batch, Scan scan) {
  DeviceArray<float> lse(batch.LseSize());
  lse.Poison();
  const ScoreArgs args = batch.DeviceArgs(lse.data());
  KVD_CUDA_OK(scan == Scan::kFull ? LaunchScoreFull(args, nullptr) : LaunchScoreCoarse(args, nullptr));
  return lse.Download();
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class ScoreParityTest : public ::testing::TestWithParam<Geometry> {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(ScoreParityTest, FullAndCoarseScansEqualTheReference) {
  const Batch batch(GetParam(), {37, 0, 70, 8, 1}, false);
  for (const Scan scan : {Scan::kFull, Scan::kCoarse}) {
    const std::vector<float> want = RunRef(batch, scan), got = RunGpu(batch, scan);
    EXPECT_EQ(CountWrong(batch, got, want, GetParam().group), 0) << (scan == Scan::kFull ? "full" : "coarse");
    EXPECT_TRUE(SameBits(got, RunGpu(batch, scan))) << "a repeat gave other bits";
  }
}

TEST_P(ScoreParityTest, ExtremePagesSaturateAndLeaveTheirNeighboursBits) {
  const Batch batch(GetParam(), {64, 21}, true);
  const Batch mild(GetParam(), {64, 21}, false);
  for (const Scan scan : {Scan::kFull, Scan::kCoarse}) {
    const std::vector<float> want = RunRef(batch, scan), got = RunGpu(batch, scan), plain = RunGpu(mild, scan);
    EXPECT_EQ(CountWrong(batch, got, want, GetParam().group), 0);
    int moved = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_FALSE(std::isnan(got[i]));
      const auto page = static_cast<int64_t>(i) % batch.stride();
      if (page % 3 != 1 && std::memcmp(&got[i], &plain[i], 4) != 0) ++moved;
    }
    EXPECT_EQ(moved, 0) << "pages whose result depends on their neighbours";
  }
}

TEST_P(ScoreParityTest, WrongAnswersAreRejected) {
  const Batch batch(GetParam(), {37, 12}, false);
  const int group = GetParam().group;
  const std::vector<float> want = RunRef(batch, Scan::kFull), got = RunGpu(batch, Scan::kFull);
  const auto stride = static_cast<std::ptrdiff_t>(batch.stride());
  std::vector<float> swapped = got;  // the first head of either KV head
  std::swap_ranges(swapped.begin(), swapped.begin() + stride, swapped.begin() + group * stride);
  EXPECT_GT(CountWrong(batch, swapped, want, group), 20);
  std::vector<float> shifted = got;
  std::rotate(shifted.begin(), shifted.begin() + 1, shifted.begin() + 37);
  EXPECT_GT(CountWrong(batch, shifted, want, group), 20);
  EXPECT_GT(CountWrong(batch, RunGpu(batch, Scan::kCoarse), want, group), 20) << "the fine part was dropped";
  Batch dropped(GetParam(), {37, 12}, false);
  dropped.DropCentroidScale(5);
  const std::vector<float> without = RunRef(dropped, Scan::kFull);
  int wrong = 0;
  for (int g = 0; g < group; ++g) {
    const auto at = static_cast<size_t>(g * stride + 5);
    wrong += !(std::abs(got[at] - without[at]) <= 1e-3f);
  }
  EXPECT_EQ(wrong, group) << "a scale was dropped";
}

TEST_P(ScoreParityTest, RefineGivesTheBitsOfTheFullScan) {
  const Batch batch(GetParam(), {70, 9}, true);
  constexpr int kMax = 40;
  std::vector<int32_t> candidates(4 * kMax, -1), counts;
  for (int row = 0; row < 4; ++row) {
    int count = 0;
    for (int p = row % 2; p < batch.num_pages()[static_cast<size_t>(row / 2)]; p += 2 + row % 2)
      candidates[static_cast<size_t>(row * kMax + count++)] = p;
    counts.push_back(row == 3 ? 0 : count);
  }
  DeviceArray<int32_t> d_candidates(candidates), d_counts(counts);
  DeviceArray<float> lse(batch.LseSize());
  lse.Poison();
  const std::vector<float> before = lse.Download();
  KVD_CUDA_OK(LaunchScoreRefine({batch.DeviceArgs(lse.data()), kMax, d_candidates.data(), d_counts.data()}, nullptr));
  const std::vector<float> got = lse.Download(), full = RunGpu(batch, Scan::kFull);
  std::vector<float> want = before;
  for (int row = 0; row < 4; ++row) {
    for (int i = 0; i < counts[static_cast<size_t>(row)]; ++i) {
      for (int g = 0; g < GetParam().group; ++g) {
        const auto at = static_cast<size_t>((row * GetParam().group + g) * batch.stride() +
                                            candidates[static_cast<size_t>(row * kMax + i)]);
        want[at] = full[at];
      }
    }
  }
  EXPECT_TRUE(SameBits(got, want));
}

// Those of them that this build has.
std::vector<Geometry> Built(const std::vector<Geometry>& all) {
  std::vector<Geometry> built;
  for (const Geometry& g : all)
    if (IsBuilt(g.head_dim, g.page_tokens, g.rank)) built.push_back(g);
  return built;
}

INSTANTIATE_TEST_SUITE_P(
    Geometries, ScoreParityTest,
    ::testing::ValuesIn(Built(
        {{128, 16, 8, 4}, {128, 16, 8, 1, KvDtype::kFp16}, {128, 16, 8, 8}, {128, 16, 8, 5, KvDtype::kFp16}, {128, 16, 8, 12},
         {128, 16, 8, 16, KvDtype::kFp16}, {128, 16, 8, 4, KvDtype::kBf16, 30.0f}, {128, 16, 8, 7, KvDtype::kBf16, 50.0f},
         {64, 16, 8, 3}, {64, 16, 8, 2, KvDtype::kFp16}, {64, 16, 8, 6}, {64, 16, 8, 16}, {64, 16, 8, 9, KvDtype::kFp16, 20.0f},
         {128, 16, 4, 8}, {128, 32, 8, 12}, {128, 32, 4, 5, KvDtype::kFp16}, {64, 16, 4, 16}, {64, 32, 8, 7}, {64, 32, 4, 2},
         {96, 16, 8, 6}, {96, 16, 4, 4}, {96, 32, 8, 16, KvDtype::kFp16}, {96, 32, 4, 9}, {256, 16, 8, 4},
         {256, 16, 4, 10, KvDtype::kFp16}, {256, 32, 8, 16}, {256, 32, 4, 4}, {256, 16, 8, 12, KvDtype::kBf16, 50.0f}})),
    Name);

class ScoreGraphTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(ScoreGraphTest, ACapturedScanFollowsLengthsThatChangeBetweenReplays) {
  Batch batch({128, 16, 8, 4}, {90, 40, 64}, false);
  DeviceArray<float> lse(batch.LseSize());
  const Graph graph([&](cudaStream_t stream) { KVD_CUDA_OK(LaunchScoreFull(batch.DeviceArgs(lse.data()), stream)); });
  for (const auto& [first, second] : {std::pair(90, 40), {3, 40}, {0, 0}, {90, 17}}) {
    batch.SetLength(0, first);
    batch.SetLength(1, second);
    lse.Poison();
    graph.Replay();
    EXPECT_EQ(CountWrong(batch, lse.Download(), RunRef(batch, Scan::kFull), 4), 0) << first << ' ' << second;
  }
}

// More sequences than a warp has lanes, and a batch that is mostly padding.
TEST_F(ScoreGraphTest, ASequenceHasTheSameBitsWhereverItStandsInTheBatch) {
  std::vector<int> lengths(75, 0);
  for (size_t i = 0; i < lengths.size(); i += 3) lengths[i] = static_cast<int>(i) % 13 + 1;
  const Batch batch({64, 16, 8, 4}, lengths, false);
  const std::vector<float> got = RunGpu(batch, Scan::kFull);
  EXPECT_EQ(CountWrong(batch, got, RunRef(batch, Scan::kFull), 4), 0);
  // The same records and queries again, alone: one sequence a launch.
  DeviceArray<float> alone(batch.LseSize());
  alone.Poison();
  for (int s = 0; s < 75; ++s) {
    ScoreArgs args = batch.DeviceArgs(alone.data() + s * Batch::kHeads * 4 * batch.stride());
    args.num_sequences = 1;
    args.query += s * Batch::kHeads * 4 * 64;
    args.coarse += s;
    args.fine += s;
    args.page_capacity += s;
    args.num_pages += s;
    KVD_CUDA_OK(LaunchScoreFull(args, nullptr));
  }
  EXPECT_TRUE(SameBits(alone.Download(), got));
}

TEST_F(ScoreGraphTest, GeometriesBeyondTheLimitsAreRefused) {
  const Batch batch({64, 16, 8, 4}, {3}, false);
  DeviceArray<float> lse(batch.LseSize());
  const ScoreArgs good = batch.DeviceArgs(lse.data());
  ScoreArgs bad = good;
  bad.head_dim = 80;
  EXPECT_EQ(LaunchScoreFull(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.group = 17;
  EXPECT_EQ(LaunchScoreCoarse(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.rank = 6;
  EXPECT_EQ(LaunchScoreFull(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.page_tokens = 8;
  EXPECT_EQ(LaunchScoreFull(bad, nullptr), cudaErrorInvalidValue);
}

TEST(BuiltGeometriesTest, AGeometryThatIsNotBuiltIsRefusedAndTheOptionNamed) {
  if (kAllGeometries) GTEST_SKIP() << "this build has all of them";
  ScoreArgs score = {1, 1, 4, 96, 16, 8, KvDtype::kBf16, 1, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 8, nullptr};
  EXPECT_EQ(LaunchScoreFull(score, nullptr), cudaErrorNotSupported);
  score.head_dim = 128;
  score.page_tokens = 32;
  EXPECT_EQ(LaunchScoreCoarse(score, nullptr), cudaErrorNotSupported);
  score.page_tokens = 16;
  score.rank = 4;
  EXPECT_EQ(LaunchScoreRefine({score, 8, nullptr, nullptr}, nullptr), cudaErrorNotSupported);
  KvGeometry geometry;
  geometry.head_dim = 128;
  EXPECT_EQ(GpuProblem(geometry), nullptr);
  geometry.head_dim = 256;
  ASSERT_NE(GpuProblem(geometry), nullptr);
  EXPECT_NE(std::string(GpuProblem(geometry)).find("KVD_ALL_GEOMETRIES"), std::string::npos);
}

}  // namespace
}  // namespace kvd
