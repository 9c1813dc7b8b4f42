// Goal: attention on the GPU gives what the reference gives. Method: random units on the host and
// the device, compared within the tolerance of kernels/README.md; wrong answers are rejected by the
// same comparison.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "kernels/attend.h"
#include "kernels/built_geometries.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;
using kvd::testing::RandomKv;

class AttendParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

struct AttendCase {
  int head_dim, page_tokens, group;
  KvDtype dtype;
  float softcap;
};

struct Attention {
  std::vector<float> o, lse;
};

// Three sequences of two KV heads over units of random keys; the last unit of a list is partly
// filled, its other rows are NaN. One list is empty.
class AttendBatch {
 public:
  static constexpr int kN = 3, kHeads = 2, kMaxUnits = 150;
  explicit AttendBatch(const AttendCase& c)
      : case_(c), bytes_(MakeUnitLayout(c.head_dim, c.page_tokens).bytes) {
    constexpr int kUnits = 80;
    const int64_t values = static_cast<int64_t>(bytes_ / 2);
    std::vector<uint16_t> all = RandomKv(kUnits * values, c.dtype, 1.0f, 3);
    for (int64_t i = 0; i < values; ++i) {  // the last unit: five tokens
      const int64_t token = i / c.head_dim % c.page_tokens;
      if (token >= 5) all[static_cast<size_t>((kUnits - 1) * values + i)] = 0x7FFF;
    }
    units_.resize(all.size() * 2);
    std::memcpy(units_.data(), all.data(), units_.size());
    d_units_ = std::make_unique<DeviceArray<uint8_t>>(units_);
    query_ = RandomKv(int64_t{kN} * kHeads * c.group * c.head_dim, c.dtype, 2.0f, 4);
    d_query_ = std::make_unique<DeviceArray<uint16_t>>(query_);
    counts_ = {150, 37, 1, 0, 64, 65};
    std::mt19937 random(7);
    host_.resize(kN * kHeads * kMaxUnits);
    for (size_t row = 0; row < counts_.size(); ++row) {
      for (int i = 0; i < counts_[row]; ++i) {
        const bool last = i + 1 == counts_[row];
        const size_t unit = last ? kUnits - 1 : random() % (kUnits - 1);
        host_[row * kMaxUnits + static_cast<size_t>(i)] = {units_.data() + unit * bytes_,
                                                           last ? 5 : c.page_tokens};
      }
    }
    std::vector<UnitRef> on_device = host_;
    for (UnitRef& ref : on_device)
      if (ref.unit != nullptr) ref.unit = d_units_->data() + (ref.unit - units_.data());
    d_refs_ = std::make_unique<DeviceArray<UnitRef>>(on_device);
    d_counts_ = std::make_unique<DeviceArray<int32_t>>(counts_);
  }
  size_t Rows() const { return static_cast<size_t>(kN * kHeads * case_.group); }

  Attention Ref(float times_scale = 1) const {
    Attention out = {std::vector<float>(Rows() * static_cast<size_t>(case_.head_dim)),
                     std::vector<float>(Rows())};
    AttendArgs args =
        Args(query_.data(), host_.data(), counts_.data(), out.o.data(), out.lse.data());
    args.softmax_scale *= times_scale;
    ref::Attend(args);
    return out;
  }
  // Of the first `num_sequences`; the others' outputs are left as they were, poisoned.
  Attention Gpu(int num_sequences = kN) const {
    DeviceArray<float> o(Rows() * static_cast<size_t>(case_.head_dim)), lse(Rows());
    o.Poison();
    lse.Poison();
    AttendArgs args =
        Args(d_query_->data(), d_refs_->data(), d_counts_->data(), o.data(), lse.data());
    args.num_sequences = num_sequences;
    const Graph graph([&](cudaStream_t stream) { KVD_CUDA_OK(LaunchAttend(args, stream)); });
    graph.Replay();
    return {o.Download(), lse.Download()};
  }
  // Of the batch `times` times over: more rows than a CTA each is given for. Returns the copies one
  // after the other.
  Attention Repeated(int times) const {
    std::vector<uint16_t> query;
    std::vector<UnitRef> refs;
    std::vector<int32_t> counts;
    const std::vector<UnitRef> once = d_refs_->Download();
    for (int i = 0; i < times; ++i) {
      query.insert(query.end(), query_.begin(), query_.end());
      refs.insert(refs.end(), once.begin(), once.end());
      counts.insert(counts.end(), counts_.begin(), counts_.end());
    }
    const DeviceArray<uint16_t> d_query(query);
    const DeviceArray<UnitRef> d_refs(refs);
    const DeviceArray<int32_t> d_counts(counts);
    const size_t rows = Rows() * static_cast<size_t>(times);
    DeviceArray<float> o(rows * static_cast<size_t>(case_.head_dim)), lse(rows);
    o.Poison();
    lse.Poison();
    AttendArgs args = Args(d_query.data(), d_refs.data(), d_counts.data(), o.data(), lse.data());
    args.num_sequences = kN * times;
    KVD_CUDA_OK(LaunchAttend(args, nullptr));
    return {o.Download(), lse.Download()};
  }

 private:
  AttendArgs Args(const uint16_t* query, const UnitRef* units, const int32_t* counts, float* o,
                  float* lse) const {
    return {kN,
            kHeads,
            case_.group,
            case_.head_dim,
            case_.page_tokens,
            case_.dtype,
            1.0f / std::sqrt(static_cast<float>(case_.head_dim)),
            case_.softcap,
            query,
            kMaxUnits,
            units,
            counts,
            o,
            lse};
  }
  AttendCase case_;
  size_t bytes_;
  std::vector<uint8_t> units_;
  std::vector<uint16_t> query_;
  std::vector<int32_t> counts_;
  std::vector<UnitRef> host_;
  std::unique_ptr<DeviceArray<uint8_t>> d_units_;
  std::unique_ptr<DeviceArray<uint16_t>> d_query_;
  std::unique_ptr<DeviceArray<UnitRef>> d_refs_;
  std::unique_ptr<DeviceArray<int32_t>> d_counts_;
};

// Rows whose lse is off by more than 1e-5 (relative above 1), or whose o is off by more than 4e-5
// of its largest component.
int CountWrong(const Attention& got, const Attention& want) {
  const size_t dim = want.o.size() / want.lse.size();
  int wrong = 0;
  for (size_t row = 0; row < want.lse.size(); ++row) {
    const float w = want.lse[row], g = got.lse[row];
    bool bad = !(w == g || std::abs(w - g) <= 1e-5f * std::max(1.0f, std::abs(w)));
    float largest = 0;
    for (size_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(want.o[row * dim + d]));
    for (size_t d = 0; d < dim; ++d)
      bad |= !(std::abs(want.o[row * dim + d] - got.o[row * dim + d]) <= 4e-5f * largest);
    if (bad && ++wrong <= 3)
      std::printf("row %zu: lse %.9g, want %.9g; o %.9g, want %.9g\n", row, double{g}, double{w},
                  double{got.o[row * dim]}, double{want.o[row * dim]});
  }
  return wrong;
}

TEST_F(AttendParityTest, AttentionEqualsTheReference) {
  for (const AttendCase& c : {AttendCase{128, 16, 4, KvDtype::kBf16, 0},
                              {128, 32, 12, KvDtype::kFp16, 0},
                              {64, 16, 3, KvDtype::kBf16, 0},
                              {64, 32, 16, KvDtype::kFp16, 30},
                              {96, 16, 7, KvDtype::kBf16, 20},
                              {96, 32, 1, KvDtype::kFp16, 0},
                              {256, 16, 5, KvDtype::kBf16, 0},
                              {256, 32, 16, KvDtype::kBf16, 50}}) {
    if (!IsBuiltHeadDim(c.head_dim)) continue;
    const AttendBatch batch(c);
    const Attention want = batch.Ref(), got = batch.Gpu(), again = batch.Gpu();
    EXPECT_EQ(CountWrong(got, want), 0)
        << "D " << c.head_dim << " B " << c.page_tokens << " G " << c.group;
    EXPECT_EQ(got.o, again.o);
    EXPECT_EQ(got.lse, again.lse);
    const Attention alone = batch.Gpu(1);
    EXPECT_EQ(
        std::memcmp(alone.o.data(), got.o.data(), got.o.size() / AttendBatch::kN * sizeof(float)),
        0)
        << "a sequence's bits depend on the batch";
    for (const size_t times : {6, 11}) {  // so many rows that a CTA has two parts, four
      const Attention many = batch.Repeated(static_cast<int>(times));
      for (size_t i = 0; i < times; ++i) {
        EXPECT_EQ(std::memcmp(many.o.data() + i * got.o.size(), got.o.data(),
                              got.o.size() * sizeof(float)),
                  0)
            << "D " << c.head_dim << " G " << c.group << ": bits depend on the batch's size";
        EXPECT_EQ(std::memcmp(many.lse.data() + i * got.lse.size(), got.lse.data(),
                              got.lse.size() * sizeof(float)),
                  0);
      }
    }
    Attention swapped = got;  // the first two heads
    std::swap(swapped.lse[0], swapped.lse[static_cast<size_t>(c.group)]);
    EXPECT_EQ(CountWrong(swapped, want), 2);
    Attention shifted = got;
    std::rotate(shifted.o.begin(), shifted.o.begin() + 1, shifted.o.end());
    EXPECT_GT(CountWrong(shifted, want), static_cast<int>(batch.Rows()) / 2);
    EXPECT_GT(CountWrong(got, batch.Ref(.9f)), static_cast<int>(batch.Rows()) / 2)
        << "another scale was not noticed";
  }
}

// More units than a warp looks up at once, some of them without tokens, as a fetch that failed
// lists them.
TEST_F(AttendParityTest, AttentionOverALongListWithMissingUnitsEqualsTheReference) {
  constexpr int kDim = 64, kTokens = 16, kGroup = 2, kList = 4500, kUnits = 50;
  const size_t bytes = MakeUnitLayout(kDim, kTokens).bytes;
  const std::vector<uint16_t> values =
      RandomKv(int64_t{kUnits} * static_cast<int64_t>(bytes / 2), KvDtype::kBf16, 1.0f, 5);
  const std::vector<uint16_t> query = RandomKv(kGroup * kDim, KvDtype::kBf16, 2.0f, 6);
  const DeviceArray<uint16_t> d_values(values), d_query(query);
  std::mt19937 random(8);
  std::vector<UnitRef> host, on_device;
  for (int i = 0; i < kList; ++i) {
    const size_t at = random() % kUnits * bytes;
    const int32_t tokens = random() % 5 == 0 ? 0 : kTokens;
    host.push_back({reinterpret_cast<const uint8_t*>(values.data()) + at, tokens});
    on_device.push_back(
        {tokens == 0 ? nullptr : reinterpret_cast<const uint8_t*>(d_values.data()) + at, tokens});
  }
  const int32_t count = kList;
  const DeviceArray<UnitRef> d_refs(on_device);
  const DeviceArray<int32_t> d_count(std::vector<int32_t>{count});
  Attention want = {std::vector<float>(kGroup * kDim), std::vector<float>(kGroup)};
  DeviceArray<float> o(want.o.size()), lse(want.lse.size());
  o.Poison();
  lse.Poison();
  const AttendArgs on_host = {1,
                              1,
                              kGroup,
                              kDim,
                              kTokens,
                              KvDtype::kBf16,
                              .125f,
                              0,
                              query.data(),
                              kList,
                              host.data(),
                              &count,
                              want.o.data(),
                              want.lse.data()};
  ref::Attend(on_host);
  AttendArgs args = on_host;
  args.query = d_query.data();
  args.units = d_refs.data();
  args.num_units = d_count.data();
  args.o = o.data();
  args.lse = lse.data();
  KVD_CUDA_OK(LaunchAttend(args, nullptr));
  const Attention got = {o.Download(), lse.Download()};
  EXPECT_EQ(CountWrong(got, want), 0);
  host[4321].num_tokens = host[4321].num_tokens == 0 ? kTokens : 0;  // another list is told apart
  ref::Attend(on_host);
  EXPECT_GT(CountWrong(got, want), 0);
}

TEST_F(AttendParityTest, MergedPartsEqualTheReferenceAndEmptyPartsAreNeutral) {
  constexpr size_t kRows = 6, kDim = 96;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> o1(kRows * kDim), o2(kRows * kDim), o(kRows * kDim), lse(kRows);
  for (size_t i = 0; i < o1.size(); ++i) {
    o1[i] = std::sin(static_cast<float>(i));
    o2[i] = std::cos(static_cast<float>(3 * i));
  }
  std::vector<float> lse1 = {1, 2, -infinity, 5, -infinity, 80},
                     lse2 = {2, 1, 3, -infinity, -infinity, -80};
  for (size_t i = 2 * kDim; i < 3 * kDim; ++i) o1[i] = 0;
  ref::MergeAttention(
      {kRows, kDim, o1.data(), lse1.data(), o2.data(), lse2.data(), o.data(), lse.data()});
  DeviceArray<float> d_o1(o1), d_o2(o2), d_lse1(lse1), d_lse2(lse2);
  KVD_CUDA_OK(LaunchMergeAttention({kRows, kDim, d_o1.data(), d_lse1.data(), d_o2.data(),
                                    d_lse2.data(), d_o1.data(), d_lse1.data()},
                                   nullptr));
  const std::vector<float> got_o = d_o1.Download(), got_lse = d_lse1.Download();
  for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(got_o[i], o[i], 2e-6);
  for (size_t i = 0; i < lse.size(); ++i)
    EXPECT_TRUE(got_lse[i] == lse[i] || std::abs(got_lse[i] - lse[i]) < 1e-5f) << i;
}

}  // namespace
}  // namespace kvd
