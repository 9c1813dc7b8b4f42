// Goal: LaunchAttendPages attends what its sequences and selections say, the step's token among it.
// Method: bits compared with LaunchAttend's over a list made on the host, of pages to which the
// reference appended; padding and long lists among them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "kernels/append.h"
#include "kernels/attend_pages.h"
#include "kernels/built_geometries.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;
using kvd::testing::RandomKv;

struct Case {
  int head_dim, page_tokens, group, sequences, num_pages, max_selected;
  KvDtype dtype;
};

// Sequences whose lengths end in the first, a middle and the last place of a page; the second is
// padding. Every KV head has a list of its own, one of them empty.
class Sequences {
 public:
  static constexpr int kHeads = 2, kLayers = 2, kLayer = 1, kSinks = 1, kRing = 2;

  explicit Sequences(const Case& c)
      : case_(c),
        unit_bytes_(MakeUnitLayout(c.head_dim, c.page_tokens).bytes),
        bytes_of_sequence_(static_cast<size_t>((c.num_pages + kRing) * kLayers * kHeads) *
                           unit_bytes_) {
    // The same pages for all, so that the largest case stays small on the host.
    const auto values = RandomKv(static_cast<int64_t>(bytes_of_sequence_ / 2), c.dtype, 1.0f, 3);
    std::vector<uint8_t> once(bytes_of_sequence_);
    std::memcpy(once.data(), values.data(), once.size());
    for (int n = 0; n < c.sequences; ++n) pages_.insert(pages_.end(), once.begin(), once.end());
    d_pages_ = std::make_unique<DeviceArray<uint8_t>>(pages_);
    k_ = RandomKv(int64_t{c.sequences} * kHeads * c.head_dim, c.dtype, 1.0f, 5);
    v_ = RandomKv(int64_t{c.sequences} * kHeads * c.head_dim, c.dtype, 1.0f, 6);
    query_ = RandomKv(int64_t{c.sequences} * kHeads * c.group * c.head_dim, c.dtype, 2.0f, 4);
    std::mt19937 random(9);
    for (int n = 0; n < c.sequences; ++n) {
      const int in_tail = n % 3 == 0 ? 0 : n % 3 == 1 ? c.page_tokens / 2 : c.page_tokens - 1;
      StepRow row;
      row.num_tokens = n == 1 ? -1 : int64_t{c.num_pages + n % kRing} * c.page_tokens + in_tail;
      row.num_sinks = kSinks;
      row.first_ring_page = c.num_pages - 1;
      row.ring_pages = c.num_pages + kRing;
      row.ring = d_pages_->data() + static_cast<size_t>(n) * bytes_of_sequence_;
      rows_.push_back(row);
      for (int h = 0; h < kHeads; ++h) {
        std::vector<int32_t> chosen;
        for (int p = kSinks;
             p < c.num_pages - 1 && static_cast<int>(chosen.size()) < c.max_selected; ++p)
          if (random() % 8 != 0 && n + h != 3) chosen.push_back(p);
        num_selected_.push_back(static_cast<int32_t>(chosen.size()));
        chosen.resize(static_cast<size_t>(c.max_selected), -1);
        selected_.insert(selected_.end(), chosen.begin(), chosen.end());
      }
    }
  }

  struct Result {
    std::vector<float> o, lse;
    std::vector<uint8_t> pages;
  };

  // What is to come: the token appended by the reference, and a list of units for LaunchAttend.
  Result Expected() {
    const auto n = static_cast<size_t>(case_.sequences), dim = static_cast<size_t>(case_.head_dim);
    std::vector<uint8_t> appended = pages_;
    std::vector<UnitRef> units;
    std::vector<int32_t> counts;
    const int max_units = kSinks + case_.max_selected + kRing + 1;
    for (size_t r = 0; r < n * kHeads; ++r) {
      const StepRow& row = rows_[r / kHeads];
      std::vector<int64_t> list;
      const int64_t tail = row.num_tokens / case_.page_tokens;
      if (row.num_tokens >= 0) {
        for (int p = 0; p < row.num_sinks; ++p) list.push_back(p);
        for (int i = 0; i < num_selected_[r]; ++i)
          list.push_back(
              selected_[r * static_cast<size_t>(case_.max_selected) + static_cast<size_t>(i)]);
        for (int64_t p = row.first_ring_page; p <= tail; ++p) list.push_back(p);
        uint8_t* const unit = appended.data() + OffsetOf(r, tail);
        uint8_t* const tails[] = {unit};
        const auto token = static_cast<int32_t>(row.num_tokens % case_.page_tokens);
        ref::Append({1, 1, case_.head_dim, case_.page_tokens, k_.data() + r * dim,
                     v_.data() + r * dim, tails, &token});
      }
      counts.push_back(static_cast<int32_t>(list.size()));
      for (const int64_t page : list) {
        const int64_t tokens =
            std::min<int64_t>(case_.page_tokens, row.num_tokens + 1 - page * case_.page_tokens);
        units.push_back({d_pages_->data() + OffsetOf(r, page), static_cast<int32_t>(tokens)});
      }
      units.resize((r + 1) * static_cast<size_t>(max_units));
    }
    d_pages_->Upload(appended);
    const DeviceArray<UnitRef> d_units(units);
    const DeviceArray<int32_t> d_counts(counts);
    Result result = Run([&](AttendArgs args, cudaStream_t stream) {
      args.max_units = max_units;
      args.units = d_units.data();
      args.num_units = d_counts.data();
      return LaunchAttend(args, stream);
    });
    result.pages = appended;
    return result;
  }

  // `shift`: of every selected page, a wrong answer.
  Result Gpu(int shift = 0) {
    d_pages_->Upload(pages_);
    std::vector<int32_t> selected = selected_;
    for (int32_t& page : selected) page = page < 0 ? page : page + shift;
    const DeviceArray<StepRow> rows(rows_);
    const DeviceArray<uint16_t> k(k_), v(v_);
    const DeviceArray<int32_t> d_selected(selected), num_selected(num_selected_);
    args_ = {.attend = {},
             .layer = kLayer,
             .num_layers = kLayers,
             .rows = rows.data(),
             .k = k.data(),
             .v = v.data(),
             .max_selected = case_.max_selected,
             .selected = d_selected.data(),
             .num_selected = num_selected.data()};
    return Run([&](const AttendArgs& args, cudaStream_t stream) {
      args_.attend = args;
      return LaunchAttendPages(args_, stream);
    });
  }
  AttendPagesArgs& args() { return args_; }

 private:
  size_t OffsetOf(size_t r, int64_t page) const {
    const auto unit = static_cast<size_t>((page * kLayers + kLayer) * kHeads) + r % kHeads;
    return r / kHeads * bytes_of_sequence_ + unit * unit_bytes_;
  }
  template <class Launch>
  Result Run(Launch launch) {
    const size_t heads = query_.size() / static_cast<size_t>(case_.head_dim);
    DeviceArray<float> o(query_.size()), lse(heads);
    const DeviceArray<uint16_t> query(query_);
    o.Poison();
    lse.Poison();
    const AttendArgs args = {case_.sequences,   kHeads,      case_.group, case_.head_dim,
                             case_.page_tokens, case_.dtype, .1f,         0,
                             query.data(),      0,           nullptr,     nullptr,
                             o.data(),          lse.data()};
    Graph([&](cudaStream_t stream) { KVD_CUDA_OK(launch(args, stream)); }).Replay();
    return {o.Download(), lse.Download(), d_pages_->Download()};
  }

  const Case case_;
  const size_t unit_bytes_, bytes_of_sequence_;
  std::vector<uint8_t> pages_;
  std::unique_ptr<DeviceArray<uint8_t>> d_pages_;
  std::vector<uint16_t> k_, v_, query_;
  std::vector<StepRow> rows_;
  std::vector<int32_t> selected_, num_selected_;
  AttendPagesArgs args_ = {};
};

class AttendPagesParityTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
    if (!IsBuiltHeadDim(GetParam().head_dim)) GTEST_SKIP() << "this head_dim is not built";
  }
};

TEST_P(AttendPagesParityTest, EqualsAttendOverTheListOfTheSameUnits) {
  Sequences sequences(GetParam());
  const Sequences::Result want = sequences.Expected(), got = sequences.Gpu();
  EXPECT_EQ(std::memcmp(got.o.data(), want.o.data(), want.o.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(got.lse.data(), want.lse.data(), want.lse.size() * sizeof(float)), 0);
  EXPECT_TRUE(got.pages == want.pages)
      << "the token was not appended, or something else was written";
  EXPECT_NE(sequences.Gpu(1).o, want.o) << "other pages were not noticed";
}

// As few sequences as leave a CTA one part, and so many that it has two or four; lists longer than
// a warp's lanes take at once.
INSTANTIATE_TEST_SUITE_P(Sizes, AttendPagesParityTest,
                         ::testing::Values(Case{128, 16, 4, 3, 160, 125, KvDtype::kBf16},
                                           Case{128, 16, 8, 40, 90, 60, KvDtype::kBf16},
                                           Case{128, 32, 4, 40, 20, 12, KvDtype::kFp16},
                                           Case{128, 16, 4, 20, 150, 125, KvDtype::kBf16},
                                           Case{64, 16, 2, 3, 2600, 2200, KvDtype::kBf16},
                                           Case{64, 16, 4, 32, 650, 560, KvDtype::kFp16},
                                           Case{64, 32, 16, 3, 50, 30, KvDtype::kBf16},
                                           Case{96, 16, 5, 3, 90, 60, KvDtype::kFp16},
                                           Case{256, 32, 4, 3, 40, 30, KvDtype::kBf16},
                                           Case{128, 16, 12, 3, 3, 8, KvDtype::kBf16}),
                         [](const auto& p) { return "Case" + std::to_string(p.index); });

TEST(AttendPagesTest, RefusesALayerThatThereIsNotAndAMissingToken) {
  if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  Sequences sequences({64, 16, 2, 3, 20, 8, KvDtype::kBf16});
  sequences.Gpu();
  AttendPagesArgs args = sequences.args();
  args.layer = args.num_layers;
  EXPECT_EQ(LaunchAttendPages(args, nullptr), cudaErrorInvalidValue);
  args.layer = -1;
  EXPECT_EQ(LaunchAttendPages(args, nullptr), cudaErrorInvalidValue);
  args = sequences.args();
  args.k = nullptr;
  EXPECT_EQ(LaunchAttendPages(args, nullptr), cudaErrorInvalidValue);
  args = sequences.args();
  args.attend.group = 17;
  EXPECT_EQ(LaunchAttendPages(args, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvd
