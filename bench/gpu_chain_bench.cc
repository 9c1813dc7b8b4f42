#include "bench/gpu_chain_bench.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/gpu_timing.h"
#include "kernels/attend.h"
#include "kernels/resolve.h"
#include "kernels/score.h"
#include "kernels/select.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd::bench {
namespace {

using kvd::testing::DeviceArray;

constexpr int kDim = 128, kTokens = 16, kRank = 8, kKvHeads = 8, kGroup = 4;
constexpr float kScale = 0.08838834764831845f;  // 128^-1/2
constexpr int kSelect = 126, kSlots = 378, kUnits = 128;
constexpr int kLayers = 32;
constexpr SummaryLayout kLayout = MakeSummaryLayout(kDim, kTokens, kRank);
constexpr size_t kUnitBytes = MakeUnitLayout(kDim, kTokens).bytes;

// `num` parts of `bytes` bytes: random codes, and from `scales` on `num_scales` scales of .01 in bf16.
std::vector<uint8_t> RandomParts(size_t num, size_t bytes, size_t scales, int num_scales) {
  std::mt19937_64 random(num);
  std::vector<uint8_t> parts(num * bytes);
  for (size_t i = 0; i + 8 <= parts.size(); i += 8) {
    const uint64_t codes = random();
    std::memcpy(parts.data() + i, &codes, 8);
  }
  const std::vector<uint16_t> small(static_cast<size_t>(num_scales), 0x3C24);
  for (size_t i = 0; i < num; ++i) std::memcpy(parts.data() + i * bytes + scales, small.data(), small.size() * 2);
  return parts;
}

// The memory of one layer of a batch. It serves several layers of the graph, whose lookups then all hit.
class Layer {
 public:
  Layer(int sequences, int pages, const std::vector<uint8_t>& coarse, const std::vector<uint8_t>& fine)
      : num_rows_(static_cast<size_t>(sequences) * kKvHeads), num_pages_(static_cast<size_t>(pages)), coarse_(coarse),
        fine_(fine), page_slot_(std::vector<int32_t>(num_rows_ * num_pages_, -1)),
        slot_page_(std::vector<int32_t>(num_rows_ * kSlots, -1)),
        slot_step_(std::vector<uint64_t>(num_rows_ * kSlots, 0)),
        units_(std::vector<uint8_t>(num_rows_ * kUnits * kUnitBytes, 0x3C)),
        coarse_bases_(Bases(coarse_, kLayout.coarse_bytes)), fine_bases_(Bases(fine_, kLayout.fine_bytes)),
        resolve_rows_(ResolveRows()), refs_(Refs()) {}
  const uint8_t* const* coarse() const { return coarse_bases_.data(); }
  const uint8_t* const* fine() const { return fine_bases_.data(); }
  const ResolveRow* resolve_rows() const { return resolve_rows_.data(); }
  const UnitRef* units() const { return refs_.data(); }

 private:
  DeviceArray<const uint8_t*> Bases(const DeviceArray<uint8_t>& records, size_t bytes) const {
    std::vector<const uint8_t*> bases;
    for (size_t row = 0; row < num_rows_; row += kKvHeads) bases.push_back(records.data() + row * num_pages_ * bytes);
    return DeviceArray<const uint8_t*>(bases);
  }
  DeviceArray<ResolveRow> ResolveRows() const {
    std::vector<ResolveRow> rows;
    for (size_t r = 0; r < num_rows_; ++r)
      rows.push_back({page_slot_.data() + r * num_pages_, slot_page_.data() + r * kSlots,
                      slot_step_.data() + r * kSlots, kSlots});
    return DeviceArray<ResolveRow>(rows);
  }
  DeviceArray<UnitRef> Refs() const {
    std::vector<UnitRef> refs;
    for (size_t u = 0; u < num_rows_ * kUnits; ++u) refs.push_back({units_.data() + u * kUnitBytes, kTokens});
    return DeviceArray<UnitRef>(refs);
  }
  size_t num_rows_, num_pages_;
  DeviceArray<uint8_t> coarse_, fine_;
  DeviceArray<int32_t> page_slot_, slot_page_;
  DeviceArray<uint64_t> slot_step_;
  DeviceArray<uint8_t> units_;
  DeviceArray<const uint8_t*> coarse_bases_, fine_bases_;
  DeviceArray<ResolveRow> resolve_rows_;
  DeviceArray<UnitRef> refs_;
};

void AddOne(int sequences, int thousand_tokens, Report* report) {
  const std::string name = absl::StrCat("score, select, resolve, attend, ", sequences, " x ", thousand_tokens,
                                        "K tokens, a layer of ", kLayers);
  if (!IsWanted(name)) return;
  const int pages = thousand_tokens * 1024 / kTokens;
  const size_t rows = static_cast<size_t>(sequences) * kKvHeads, records = rows * static_cast<size_t>(pages);
  const auto coarse = RandomParts(records, kLayout.coarse_bytes, kLayout.coarse[kCoarseScales], 4);
  const auto fine = RandomParts(records, kLayout.fine_bytes, kLayout.fine[kFineScales], kRank - 2);
  // Few layers' memory in turn: more than the L2 holds.
  const int sets = static_cast<int>((size_t{256} << 20) / (records * kLayout.record_bytes()) + 2);
  std::vector<Layer> layers;
  layers.reserve(static_cast<size_t>(sets));
  for (int i = 0; i < sets; ++i) layers.emplace_back(sequences, pages, coarse, fine);
  const auto n = static_cast<size_t>(sequences);
  const DeviceArray<uint16_t> query(
      kvd::testing::RandomKv(static_cast<int64_t>(rows) * kGroup * kDim, KvDtype::kBf16, 1.0f, 7));
  const DeviceArray<int64_t> capacity(std::vector<int64_t>(n, pages));
  const DeviceArray<int32_t> num_pages(std::vector<int32_t>(n, pages)), counts(std::vector<int32_t>(rows, kUnits));
  const DeviceArray<float> lse(rows * kGroup * static_cast<size_t>(pages)), log_norm(rows * kGroup), threshold(rows),
      o(rows * kGroup * kDim), out_lse(rows * kGroup);
  const DeviceArray<int32_t> chosen(rows * kSelect), num_chosen(rows), slots(rows * kSelect), misses(rows * kSelect),
      num_misses(rows);
  const DeviceArray<uint8_t> scratch(SelectGpuScratchBytes(static_cast<int64_t>(rows), kGroup, pages));
  DeviceArray<uint64_t> step(1);
  uint64_t now = 0;
  const double us = MedianUs(
      kLayers,
      [&](int i, cudaStream_t stream) {
        const Layer& layer = layers[static_cast<size_t>(i % sets)];
        KVD_CUDA_OK(LaunchScoreFull({sequences, kKvHeads, kGroup, kDim, kTokens, kRank, KvDtype::kBf16, kScale, 0,
                                     query.data(), layer.coarse(), layer.fine(), capacity.data(),
                                     num_pages.data(), pages, lse.data()}, stream));
        KVD_CUDA_OK(LaunchSelect({sequences, kKvHeads, kGroup, CombineRule::kShare, 1, 1, kSelect, lse.data(), pages,
                                  num_pages.data(), nullptr, 0, nullptr, nullptr, chosen.data(), num_chosen.data(),
                                  threshold.data(), log_norm.data(), nullptr, scratch.data()}, stream));
        KVD_CUDA_OK(LaunchResolve({static_cast<int>(rows), kSelect, kSlots, layer.resolve_rows(), chosen.data(),
                                   num_chosen.data(), step.data(), slots.data(), misses.data(), num_misses.data()},
                                  stream));
        KVD_CUDA_OK(LaunchAttend({sequences, kKvHeads, kGroup, kDim, kTokens, KvDtype::kBf16, kScale, 0, query.data(),
                                  kUnits, layer.units(), counts.data(), o.data(), out_lse.data()}, stream));
      },
      [&] { step.Upload({++now}); });
  report->Add({name, us, "us", 0, 0});
}

}  // namespace

void AddChain(Report* report) {
  AddOne(1, 32, report);
  AddOne(1, 128, report);
  AddOne(8, 32, report);
}

}  // namespace kvd::bench
