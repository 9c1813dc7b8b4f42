// Batches of records for the tests of the GPU's score: built by the encoder, on the host and on the
// device.
//
// Thread safety: compatible. A failing CUDA call ends the process (gpu.h). Only built with
// KVD_CUDA.

#ifndef LOCKS_KVD_TESTS_KERNELS_SCORE_PARITY_H_
#define LOCKS_KVD_TESTS_KERNELS_SCORE_PARITY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/built_geometries.h"
#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "kernels/score.h"
#include "kernels/summarize.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd::testing {

struct Geometry {
  int head_dim, page_tokens, rank, group;
  KvDtype dtype = KvDtype::kBf16;
  float softcap = 0;
};

inline std::string Name(const ::testing::TestParamInfo<Geometry>& info) {
  const Geometry& g = info.param;
  return "D" + std::to_string(g.head_dim) + "_B" + std::to_string(g.page_tokens) + "_R" +
         std::to_string(g.rank) + "_G" + std::to_string(g.group) +
         (g.dtype == KvDtype::kBf16 ? "_bf16" : "_fp16") + (g.softcap > 0 ? "_softcap" : "");
}

// A batch of sequences of different lengths, one of them empty, on the host and on the device.
class Batch {
 public:
  static constexpr int kHeads = 2;

  Batch(const Geometry& g, std::vector<int> lengths, bool with_extremes)
      : geometry_(g), num_pages_(std::move(lengths)) {
    layout_ = MakeSummaryLayout(g.head_dim, g.page_tokens, g.rank);
    const int n = static_cast<int>(num_pages_.size());
    stride_ = *std::max_element(num_pages_.begin(), num_pages_.end()) + 5;
    for (int s = 0; s < n; ++s) AddSequence(s, with_extremes);
    const std::vector<uint16_t> plain =
        RandomKv(int64_t{n} * kHeads * g.group * g.head_dim, g.dtype, 1.0f, 99);
    query_.resize(plain.size());
    d_plain_ = std::make_unique<DeviceArray<uint16_t>>(plain);
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
    return Args(query_.data(), host_coarse_.data(), host_fine_.data(), capacity_.data(),
                num_pages_.data(), lse);
  }
  ScoreArgs DeviceArgs(float* lse) const {
    return Args(d_query_->data(), d_coarse_->data(), d_fine_->data(), d_capacity_->data(),
                d_num_pages_->data(), lse);
  }
  // The same queries before they were rotated: score is to do it.
  ScoreArgs PlainArgs(float* lse) const {
    ScoreArgs args = DeviceArgs(lse);
    args.query = d_plain_->data();
    args.rotate_query = true;
    return args;
  }
  size_t LseSize() const {
    return num_pages_.size() * static_cast<size_t>(kHeads * geometry_.group) *
           static_cast<size_t>(stride_);
  }
  int64_t stride() const { return stride_; }
  const std::vector<int>& num_pages() const { return num_pages_; }
  // Of a page of the first KV head of the first sequence, on the host alone.
  void DropCentroidScale(int page) {
    std::memset(coarse_[0].data() + static_cast<size_t>(page) * layout_.coarse_bytes +
                    layout_.coarse[kCentroidScale],
                0, 2);
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
                 host_fine_[static_cast<size_t>(s)] + record * layout_.fine_bytes, g.head_dim,
                 g.page_tokens, g.rank, decoded.get());
    const uint16_t* q = query_.data() + (int64_t{s} * kHeads * g.group + head) * g.head_dim;
    const auto dot = [&](const float* v) {
      double sum = 0;
      for (int d = 0; d < g.head_dim; ++d) sum += double{FromKv(g.dtype, q[d])} * double{v[d]};
      return std::abs(sum);
    };
    double total = dot(decoded->centroid);
    for (int k = 0; k < g.rank; ++k) {
      double largest = 0;
      for (int t = 0; t < g.page_tokens; ++t)
        largest = std::max(largest, std::abs(double{decoded->coefficients[k][t]}));
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
    coarse_.emplace_back(static_cast<size_t>(kHeads * (pages + 3)) * layout_.coarse_bytes,
                         uint8_t{0xFF});
    fine_.emplace_back(static_cast<size_t>(kHeads * (pages + 3)) * layout_.fine_bytes,
                       uint8_t{0xFF});
    const auto extremes = AdversarialPages(g.head_dim, g.page_tokens, g.rank, g.dtype);
    for (int i = 0; i < kHeads * pages; ++i) {
      const int hk = i / pages, page = i % pages;
      // Pages of unequal spread: some stay far from each other, some need the guarded way.
      const float sigma = page % 7 == 3 ? 12.0f : 1.0f;
      std::vector<uint16_t> keys = RandomKv(int64_t{g.page_tokens} * g.head_dim, g.dtype, sigma,
                                            static_cast<uint64_t>(s * 1000000 + i));
      if (with_extremes && page % 3 == 1)
        keys = extremes[static_cast<size_t>(page / 3) % extremes.size()].keys;
      std::vector<uint8_t> unit(MakeUnitLayout(g.head_dim, g.page_tokens).bytes);
      std::memcpy(unit.data(), keys.data(), keys.size() * 2);
      const int64_t record = int64_t{hk} * (pages + 3) + page;
      ref::Summarize({g.head_dim, g.page_tokens, g.rank, g.dtype, true, Encoder::kE1, unit.data(),
                      nullptr, coarse_.back().data() + record * layout_.coarse_bytes,
                      fine_.back().data() + record * layout_.fine_bytes});
      // The residual's energy is only stored with a query metric: give every page one of its own.
      const uint16_t tau = ToBf16(.01f * static_cast<float>(page % 11));
      std::memcpy(coarse_.back().data() + record * layout_.coarse_bytes + layout_.coarse[kTau],
                  &tau, 2);
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
    return {static_cast<int>(num_pages_.size()),
            kHeads,
            geometry_.group,
            geometry_.head_dim,
            geometry_.page_tokens,
            geometry_.rank,
            geometry_.dtype,
            Scale(),
            geometry_.softcap,
            query,
            coarse,
            fine,
            capacity,
            num_pages,
            stride_,
            lse};
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
  std::unique_ptr<DeviceArray<uint16_t>> d_query_, d_plain_;
  std::unique_ptr<DeviceArray<const uint8_t*>> d_coarse_, d_fine_;
  std::unique_ptr<DeviceArray<int64_t>> d_capacity_;
  std::unique_ptr<DeviceArray<int>> d_num_pages_;
};

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Those of them that this build has.
inline std::vector<Geometry> Built(const std::vector<Geometry>& all) {
  std::vector<Geometry> built;
  for (const Geometry& g : all)
    if (IsBuilt(g.head_dim, g.page_tokens, g.rank)) built.push_back(g);
  return built;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_KERNELS_SCORE_PARITY_H_
