#include "bench/gpu_summarize_bench.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/gpu_timing.h"
#include "kernels/summarize.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd::bench {
namespace {

using kvd::testing::DeviceArray;

constexpr int kDim = 128, kTokens = 16, kRank = 8;
constexpr SummaryLayout kLayout = MakeSummaryLayout(kDim, kTokens, kRank);
constexpr size_t kUnitBytes = MakeUnitLayout(kDim, kTokens).bytes;
constexpr size_t kMatrix = size_t{kDim} * kDim;

// 32 layers x 8 KV heads of a sequence of 400 pages: 102,400 units. Unit u holds page u % kPattern
// of a synthetic head, and heads share kMetrics different metrics.
constexpr size_t kHeads = 256, kPages = 400, kUnits = kHeads * kPages, kPattern = 509, kMetrics = 8;

enum class Order { kByHead, kByPage };

struct Data {
  std::vector<std::vector<uint8_t>> pattern;
  std::vector<float> metrics;  // [kMetrics, D, D]
  Data() {
    kvd::testing::SyntheticSpec spec;
    spec.num_pages = kPattern;
    const kvd::testing::SyntheticHead head = MakeSyntheticHead(spec);
    for (int p = 0; p < spec.num_pages; ++p) pattern.push_back(head.Unit(p, kDim, kTokens));
    spec.regime = kvd::testing::Regime::kWalk;
    spec.num_pages = 1;
    spec.num_steps = 200;
    for (size_t m = 0; m < kMetrics; ++m) {
      spec.seed = m + 1;
      const std::vector<float> metric =
          kvd::testing::MetricOfQueries(MakeSyntheticHead(spec).query, kDim, spec.dtype, true);
      metrics.insert(metrics.end(), metric.begin(), metric.end());
    }
  }
};

// Everything on the device; heads have packed metrics of their own, as a model does.
class SummarizeBench {
 public:
  explicit SummarizeBench(const Data& data)
      : data_(data),
        units_(kUnits * kUnitBytes),
        packed_(kHeads * PackedMetricBytes(kDim)),
        coarse_(kUnits * kLayout.coarse_bytes),
        fine_(kUnits * kLayout.fine_bytes),
        non_finite_(kUnits) {
    std::vector<uint8_t> bytes;
    for (size_t u = 0; u < kUnits; ++u)
      bytes.insert(bytes.end(), data.pattern[u % kPattern].begin(),
                   data.pattern[u % kPattern].end());
    units_.Upload(bytes);
    const DeviceArray<float> metrics(data.metrics);
    for (size_t head = 0; head < kHeads; ++head)
      KVD_CUDA_OK(LaunchPackMetrics(metrics.data() + head % kMetrics * kMatrix, 1, kDim,
                                    packed_.data() + head * PackedMetricBytes(kDim), nullptr));
    KVD_CUDA_OK(cudaDeviceSynchronize());
  }

  // Builds all records, the list in one order or the other; returns how many are wrong.
  int Add(Encoder encoder, Order order, const std::string& name, double read_rate, Report* report) {
    std::vector<const uint8_t*> units, metrics;
    std::vector<uint8_t*> coarse, fine;
    for (size_t i = 0; i < kUnits; ++i) {
      const size_t head = order == Order::kByHead ? i / kPages : i % kHeads;
      units.push_back(units_.data() + i * kUnitBytes);
      metrics.push_back(packed_.data() + head * PackedMetricBytes(kDim));
      coarse.push_back(coarse_.data() + i * kLayout.coarse_bytes);
      fine.push_back(fine_.data() + i * kLayout.fine_bytes);
    }
    const DeviceArray<const uint8_t*> d_units(units), d_metrics(metrics);
    const DeviceArray<uint8_t*> d_coarse(coarse), d_fine(fine);
    coarse_.Poison();
    fine_.Poison();
    const double us = MedianUs(2, [&](int, cudaStream_t stream) {
      KVD_CUDA_OK(
          LaunchSummarize({kDim, kTokens, kRank, KvDtype::kBf16, true, encoder, kUnits,
                           d_units.data(), encoder == Encoder::kE1S ? d_metrics.data() : nullptr,
                           d_coarse.data(), d_fine.data(), non_finite_.data()},
                          stream));
    });
    const double limit = read_rate / static_cast<double>(kUnitBytes),
                 rate = static_cast<double>(kUnits) / us;
    report->Add(
        {absl::StrCat("summarize 102,400 units, ", name), rate, "M/s", limit, rate / limit});
    return Check(encoder, order, name);
  }

 private:
  // K^ of every 499th record against the reference's: within 10% of the rounding's own rms.
  int Check(Encoder encoder, Order order, const std::string& name) const {
    const std::vector<uint8_t> coarse = coarse_.Download(), fine = fine_.Download();
    std::vector<uint8_t> want_coarse(kLayout.coarse_bytes), want_fine(kLayout.fine_bytes);
    double apart2 = 0, energy2 = 0;
    int num_wrong = 0;
    for (size_t u = 0; u < kUnits; u += 499) {
      const size_t head = order == Order::kByHead ? u / kPages : u % kHeads;
      ref::Summarize(
          {kDim, kTokens, kRank, KvDtype::kBf16, true, encoder, data_.pattern[u % kPattern].data(),
           encoder == Encoder::kE1S ? data_.metrics.data() + head % kMetrics * kMatrix : nullptr,
           want_coarse.data(), want_fine.data()});
      DecodedRecord got, want;
      DecodeRecord(coarse.data() + u * kLayout.coarse_bytes, fine.data() + u * kLayout.fine_bytes,
                   kDim, kTokens, kRank, &got);
      DecodeRecord(want_coarse.data(), want_fine.data(), kDim, kTokens, kRank, &want);
      num_wrong += got.unit_checksum != want.unit_checksum;
      for (int t = 0; t < kTokens; ++t) {
        for (int d = 0; d < kDim; ++d) {
          double apart = double{got.centroid[d]} - double{want.centroid[d]}, varying = 0;
          for (int k = 0; k < kRank; ++k) {
            const double x = double{want.coefficients[k][t]} * double{want.basis[k][d]};
            apart += double{got.coefficients[k][t]} * double{got.basis[k][d]} - x;
            varying += x;
          }
          apart2 += apart * apart;
          energy2 += varying * varying;
        }
      }
    }
    // The rounding is about 10% of what varies in a page, so its tenth is 1%.
    if (!(apart2 <= 1e-4 * energy2)) ++num_wrong;
    if (num_wrong > 0)
      std::fprintf(stderr, "WRONG: summarize, %s: %d checksums or distances; apart %g of %g\n",
                   name.c_str(), num_wrong, apart2, energy2);
    return num_wrong;
  }

  const Data& data_;
  DeviceArray<uint8_t> units_, packed_, coarse_, fine_;
  DeviceArray<int32_t> non_finite_;
};

}  // namespace

int AddSummarize(double read_rate, Report* report) {
  const Data data;
  SummarizeBench bench(data);
  return bench.Add(Encoder::kE1S, Order::kByHead, "E1S", read_rate, report) +
         bench.Add(Encoder::kE1S, Order::kByPage, "E1S, page by page", read_rate, report) +
         bench.Add(Encoder::kE1, Order::kByHead, "E1", read_rate, report);
}

}  // namespace kvd::bench
