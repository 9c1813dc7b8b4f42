// What the parity tests of summarize share: building records on either side, what they stand for,
// and synthetic heads with the metric of their queries.
//
// Thread safety: one thread a test. Only built with KVD_CUDA.

#ifndef LOCKS_KVD_TESTS_KERNELS_SUMMARIZE_PARITY_H_
#define LOCKS_KVD_TESTS_KERNELS_SUMMARIZE_PARITY_H_

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "kernels/summarize.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"

namespace kvd::testing {

struct Format {
  int head_dim, page_tokens, rank;
  KvDtype dtype = KvDtype::kBf16;
  bool rotated = true;
};

struct Record {
  std::vector<uint8_t> coarse, fine;
  friend bool operator==(const Record&, const Record&) = default;
};

using Unit = std::vector<uint8_t>;
using Matrix = std::vector<float>;

struct Built {
  std::vector<Record> records;
  std::vector<int32_t> non_finite;
};

// Unit i with metric number metric_of[i], or 0 where the list is empty. Captured, and replayed
// twice.
inline Built BuildOnGpu(const Format& f, Encoder encoder, const std::vector<Unit>& units,
                        const std::vector<Matrix>& metrics,
                        const std::vector<size_t>& metric_of = {}) {
  const SummaryLayout layout = MakeSummaryLayout(f.head_dim, f.page_tokens, f.rank);
  const size_t num = units.size(), packed_bytes = PackedMetricBytes(f.head_dim);
  std::vector<uint8_t> all_units;
  for (const Unit& unit : units) all_units.insert(all_units.end(), unit.begin(), unit.end());
  std::vector<float> all_metrics;
  for (const Matrix& metric : metrics)
    all_metrics.insert(all_metrics.end(), metric.begin(), metric.end());
  const DeviceArray<uint8_t> d_units(all_units);
  const DeviceArray<float> d_metrics(all_metrics);
  DeviceArray<uint8_t> packed(metrics.size() * packed_bytes);
  DeviceArray<uint8_t> coarse(num * layout.coarse_bytes), fine(num * layout.fine_bytes);
  DeviceArray<int32_t> non_finite(num);
  coarse.Poison();
  fine.Poison();
  non_finite.Poison();
  packed.Poison();
  std::vector<const uint8_t*> unit_list, metric_list;
  std::vector<uint8_t*> coarse_list, fine_list;
  for (size_t i = 0; i < num; ++i) {
    unit_list.push_back(d_units.data() + i * units[0].size());
    metric_list.push_back(packed.data() + (metric_of.empty() ? 0 : metric_of[i]) * packed_bytes);
    coarse_list.push_back(coarse.data() + i * layout.coarse_bytes);
    fine_list.push_back(fine.data() + i * layout.fine_bytes);
  }
  const DeviceArray<const uint8_t*> d_unit_list(unit_list), d_metric_list(metric_list);
  const DeviceArray<uint8_t*> d_coarse_list(coarse_list), d_fine_list(fine_list);
  const Graph graph([&](cudaStream_t stream) {
    KVD_CUDA_OK(LaunchPackMetrics(d_metrics.data(), static_cast<int>(metrics.size()), f.head_dim,
                                  packed.data(), stream));
    KVD_CUDA_OK(LaunchSummarize(
        {f.head_dim, f.page_tokens, f.rank, f.dtype, f.rotated, encoder, static_cast<int64_t>(num),
         d_unit_list.data(), encoder == Encoder::kE1S ? d_metric_list.data() : nullptr,
         d_coarse_list.data(), d_fine_list.data(), non_finite.data()},
        stream));
  });
  graph.Replay();
  graph.Replay();
  const std::vector<uint8_t> got_coarse = coarse.Download(), got_fine = fine.Download();
  Built built;
  for (size_t i = 0; i < num; ++i) {
    const auto part = [&](const std::vector<uint8_t>& bytes, size_t size) {
      const uint8_t* begin = bytes.data() + i * size;
      return std::vector<uint8_t>(begin, begin + size);
    };
    built.records.push_back(
        {part(got_coarse, layout.coarse_bytes), part(got_fine, layout.fine_bytes)});
  }
  built.non_finite = non_finite.Download();
  return built;
}

inline Record BuildOnHost(const Format& f, Encoder encoder, const Unit& unit,
                          const Matrix& metric) {
  const SummaryLayout layout = MakeSummaryLayout(f.head_dim, f.page_tokens, f.rank);
  Record record{std::vector<uint8_t>(layout.coarse_bytes), std::vector<uint8_t>(layout.fine_bytes)};
  ref::Summarize({f.head_dim, f.page_tokens, f.rank, f.dtype, f.rotated, encoder, unit.data(),
                  encoder == Encoder::kE1S ? metric.data() : nullptr, record.coarse.data(),
                  record.fine.data()});
  return record;
}

// --- what a record stands for ------------------------------------------------------------------

inline DecodedRecord Decode(const Format& f, const Record& record) {
  DecodedRecord decoded;
  DecodeRecord(record.coarse.data(), record.fine.data(), f.head_dim, f.page_tokens, f.rank,
               &decoded);
  return decoded;
}

// K^, [B, D], times 2^-16 so that the largest keys fit.
inline std::vector<double> DecodedKeys(const Format& f, const DecodedRecord& record) {
  std::vector<double> keys;
  for (int t = 0; t < f.page_tokens; ++t) {
    for (int d = 0; d < f.head_dim; ++d) {
      double key = double{record.centroid[d]};
      for (int k = 0; k < f.rank; ++k)
        key += double{record.coefficients[k][t]} * double{record.basis[k][d]};
      keys.push_back(std::ldexp(key, -16));
    }
  }
  return keys;
}

inline std::vector<double> TrueKeys(const Format& f, const Unit& unit) {
  std::vector<float> rows(static_cast<size_t>(f.page_tokens * f.head_dim));
  for (size_t i = 0; i < rows.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, unit.data() + 2 * i, 2);
    rows[i] = std::ldexp(FromKv(f.dtype, bits), -16);
  }
  if (f.rotated) Rotate(rows.data(), f.page_tokens, f.head_dim);
  return {rows.begin(), rows.end()};
}

// Squared distance of rows [B, D], in the metric if there is one.
inline double Distance2(const Format& f, const std::vector<double>& a, const std::vector<double>& b,
                        const Matrix* metric) {
  const auto dim = static_cast<size_t>(f.head_dim);
  double sum = 0;
  std::vector<double> x(dim);
  for (size_t row = 0; row < a.size(); row += dim) {
    for (size_t i = 0; i < dim; ++i) x[i] = a[row + i] - b[row + i];
    for (size_t i = 0; i < dim; ++i) {
      double weighted = metric == nullptr ? x[i] : 0;
      for (size_t j = 0; metric != nullptr && j < dim; ++j)
        weighted += double{(*metric)[i * dim + j]} * x[j];
      sum += weighted * x[i];
    }
  }
  return sum;
}

// Sums over pages of how far the two builders' records are apart and how far the reference's is
// from the keys.
struct Distances {
  double apart2 = 0, rounding2 = 0;
  // The limit: 10% of the rounding's own rms.
  bool Close() const { return apart2 <= 0.01 * rounding2; }
};

inline Distances Compare(const Format& f, const std::vector<Unit>& units,
                         const std::vector<Record>& got, const std::vector<Record>& want,
                         const Matrix* metric) {
  Distances sum;
  for (size_t i = 0; i < units.size(); ++i) {
    const std::vector<double> keys = DecodedKeys(f, Decode(f, want[i]));
    sum.apart2 += Distance2(f, DecodedKeys(f, Decode(f, got[i])), keys, metric);
    sum.rounding2 += Distance2(f, TrueKeys(f, units[i]), keys, metric);
  }
  return sum;
}

// --- data --------------------------------------------------------------------------------------

// Pages of one synthetic head and the metric of its queries.
struct Head {
  Head(Regime regime, const Format& f, int group, int num_pages, uint64_t seed = 1) {
    SyntheticSpec spec;
    spec.regime = regime;
    spec.head_dim = f.head_dim;
    spec.group = group;
    spec.page_tokens = f.page_tokens;
    spec.num_pages = num_pages;
    spec.dtype = f.dtype;
    spec.seed = seed;
    head = MakeSyntheticHead(spec);
    for (int p = 0; p < num_pages; ++p) units.push_back(head.Unit(p, f.head_dim, f.page_tokens));
    spec.regime = Regime::kWalk;
    spec.num_steps = 300;
    const std::vector<uint16_t> walk = MakeSyntheticHead(spec).query;
    metric = MetricOfQueries({walk.begin() + 64 * group * f.head_dim, walk.end()}, f.head_dim,
                             f.dtype, f.rotated);
  }
  std::vector<Record> Reference(const Format& f, Encoder encoder) const {
    std::vector<Record> records;
    for (const Unit& unit : units) records.push_back(BuildOnHost(f, encoder, unit, metric));
    return records;
  }
  SyntheticHead head;
  std::vector<Unit> units;
  Matrix metric;
};

inline const Matrix* InMetric(const Head& head, Encoder encoder) {
  return encoder == Encoder::kE1S ? &head.metric : nullptr;
}

// Errors of page lse, in nats: about the mean of each head, the part that moves a ranking.
inline double LseError(const Format& f, const Head& head, int group,
                       const std::vector<Record>& records) {
  const auto dim = static_cast<size_t>(f.head_dim);
  std::vector<uint16_t> query(head.head.query.begin(),
                              head.head.query.begin() + group * f.head_dim),
      rotated(query.size());
  RotateQuery(query.data(), group, f.head_dim, f.dtype, rotated.data());
  const double scale = double{head.head.softmax_scale}, num = static_cast<double>(records.size());
  double variance = 0;
  for (size_t g = 0; g < static_cast<size_t>(group); ++g) {
    double sum = 0, sum2 = 0;
    for (size_t p = 0; p < records.size(); ++p) {
      const uint16_t* keys = head.head.keys.data() + p * static_cast<size_t>(f.page_tokens) * dim;
      const double error =
          OracleRecordLse(rotated.data() + g * dim, records[p].coarse.data(),
                          records[p].fine.data(), f.head_dim, f.page_tokens, f.rank, f.dtype, scale,
                          0) -
          OraclePageLse(query.data() + g * dim, keys, f.page_tokens, f.head_dim, f.dtype, scale, 0);
      sum += error;
      sum2 += error * error;
    }
    variance += sum2 / num - sum / num * (sum / num);
  }
  return std::sqrt(variance / group);
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_KERNELS_SUMMARIZE_PARITY_H_
