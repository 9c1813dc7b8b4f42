// A pool inside the test: random pages with real records, dense truth, and a Fetcher that injects
// faults.
//
// The fake stands only for what travels: units and generations. Everything else is the real code.

#ifndef LOCKS_KVD_TESTS_CLIENT_FAKE_POOL_H_
#define LOCKS_KVD_TESTS_CLIENT_FAKE_POOL_H_

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "client/sequence_pages.h"
#include "client/step_options.h"
#include "kernels/check.h"
#include "kernels/summarize.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"

namespace kvd::testing {

inline KvGeometry SmallGeometry() {
  return {.num_layers = 2,
          .num_q_heads = 6,
          .num_kv_heads = 2,
          .num_shards = 1,
          .head_dim = 64,
          .page_tokens = 16,
          .rank = 8,
          .dtype = KvDtype::kBf16,
          .rotated = true,
          .softmax_scale = 0.125f,
          .logit_softcap = 0};
}

// K and V of a whole sequence: [L][heads][T, D] each.
struct SequenceData {
  KvGeometry geometry;
  int64_t num_tokens = 0;
  std::vector<std::vector<uint16_t>> keys;    // [L * heads]
  std::vector<std::vector<uint16_t>> values;  // [L * heads]

  static SequenceData Random(const KvGeometry& g, int64_t num_tokens, uint64_t seed) {
    SequenceData data{.geometry = g, .num_tokens = num_tokens, .keys = {}, .values = {}};
    for (int i = 0; i < g.num_layers * g.num_kv_heads; ++i) {
      const auto s = seed * 1000 + static_cast<uint64_t>(i);
      data.keys.push_back(RandomKv(num_tokens * g.head_dim, g.dtype, 1.0f, 2 * s));
      data.values.push_back(RandomKv(num_tokens * g.head_dim, g.dtype, 1.0f, 2 * s + 1));
    }
    return data;
  }
  size_t at(int layer, int head) const {
    return static_cast<size_t>(layer * geometry.num_kv_heads + head);
  }
  // Packed [K: B x D][V: B x D].
  std::vector<uint8_t> Unit(int layer, int head, int page) const {
    const auto values_per_page = static_cast<size_t>(geometry.page_tokens * geometry.head_dim);
    std::vector<uint8_t> unit(values_per_page * 4);
    const size_t from = values_per_page * static_cast<size_t>(page);
    std::memcpy(unit.data(), keys[at(layer, head)].data() + from, values_per_page * 2);
    std::memcpy(unit.data() + values_per_page * 2, values[at(layer, head)].data() + from,
                values_per_page * 2);
    return unit;
  }
  // The K (or V) rows of one token, [heads, D].
  std::vector<uint16_t> Rows(const std::vector<std::vector<uint16_t>>& from, int layer,
                             int64_t token) const {
    std::vector<uint16_t> rows;
    for (int h = 0; h < geometry.num_kv_heads; ++h) {
      const uint16_t* row = from[at(layer, h)].data() + token * geometry.head_dim;
      rows.insert(rows.end(), row, row + geometry.head_dim);
    }
    return rows;
  }
  // Exact attention of one query head over the tokens of `pages` and the rest from `tail_begin` on.
  OracleAttention Attend(int layer, int q_head, const uint16_t* q, std::span<const int> pages,
                         int64_t tail_begin, int64_t tail_end) const {
    const int d = geometry.head_dim;
    const size_t idx = at(layer, q_head / geometry.group());
    std::vector<uint16_t> k;
    std::vector<uint16_t> v;
    const auto add = [&](int64_t begin, int64_t end) {
      k.insert(k.end(), keys[idx].begin() + begin * d, keys[idx].begin() + end * d);
      v.insert(v.end(), values[idx].begin() + begin * d, values[idx].begin() + end * d);
    };
    for (const int p : pages) {
      add(int64_t{p} * geometry.page_tokens, int64_t{p + 1} * geometry.page_tokens);
    }
    add(tail_begin, tail_end);
    return OracleAttend(q, k.data(), v.data(), static_cast<int64_t>(k.size()) / d, d,
                        geometry.dtype, geometry.softmax_scale, geometry.logit_softcap);
  }
};

// Serves the units of a SequenceData: slot = page, generation = 2 + 2 * page.
class FakeFetcher final : public Fetcher {
 public:
  explicit FakeFetcher(const SequenceData* data) : data_(data) {}

  PathKind path() const override { return PathKind::kShared; }
  void Start(FetchList& list) override { list.in_flight = this; }
  void Wait(FetchList& list) override {
    KVD_CHECK(list.in_flight == this);
    list.in_flight = nullptr;
    ++num_lists;
    list.num_valid = 0;
    list.path_bytes = 0;
    if (list_code != absl::StatusCode::kOk) {
      list.code = list_code;
      return;
    }
    for (size_t i = 0; i < list.entries.size(); ++i) Serve(list, i);
  }
  void FetchSummaries(FetchList& list) override { list.code = absl::StatusCode::kUnimplemented; }
  bool failed() const override { return false; }
  void Shutdown() override { list_code = absl::StatusCode::kAborted; }

  std::set<uint32_t> missing_slots;  // proved gone
  std::set<uint32_t> corrupt_slots;  // right generation, a flipped bit
  absl::StatusCode list_code = absl::StatusCode::kOk;
  int64_t num_lists = 0;
  int64_t num_units = 0;

 private:
  void Serve(FetchList& list, size_t i) {
    const FetchEntry& entry = list.entries[i];
    ++num_units;
    const bool valid =
        entry.generation == 2 + 2 * uint64_t{entry.slot} && missing_slots.count(entry.slot) == 0;
    list.valid[i] = valid ? 1 : 0;
    const auto values = static_cast<size_t>(data_->geometry.page_tokens * data_->geometry.head_dim);
    if (!valid) {
      std::memset(list.destinations[i], 0, values * 4);
      return;
    }
    const size_t idx = data_->at(entry.layer, entry.head);
    std::memcpy(list.destinations[i], data_->keys[idx].data() + values * entry.slot, values * 2);
    std::memcpy(list.destinations[i] + values * 2, data_->values[idx].data() + values * entry.slot,
                values * 2);
    if (corrupt_slots.count(entry.slot) != 0) list.destinations[i][5] ^= 4;
    ++list.num_valid;
    list.path_bytes += values * 4;
  }

  const SequenceData* data_;
};

// Records of one page as a daemon would build them: SlotLayout::summary_bytes().
inline std::vector<uint8_t> PageRecords(const SequenceData& data, const WorkerShape& shape,
                                        int page) {
  const SlotLayout& slot = shape.slot;
  std::vector<uint8_t> records(slot.summary_bytes());
  for (int layer = 0; layer < shape.num_layers(); ++layer) {
    for (int h = 0; h < slot.shard_heads; ++h) {
      const std::vector<uint8_t> unit = data.Unit(layer, h, page);
      ref::Summarize({.head_dim = data.geometry.head_dim,
                      .page_tokens = data.geometry.page_tokens,
                      .rank = data.geometry.rank,
                      .dtype = data.geometry.dtype,
                      .rotated = data.geometry.rotated,
                      .encoder = Encoder::kE1,
                      .unit = unit.data(),
                      .metric = nullptr,
                      .coarse = records.data() + slot.coarse_offset(layer, h),
                      .fine = records.data() + slot.fine_offset(layer, h)});
    }
  }
  return records;
}

inline SlotRef FakeSlot(int page) {
  return {static_cast<uint32_t>(page), 2 + 2 * static_cast<uint64_t>(page)};
}

// An open sequence of `num_pages` pages over `num_daemons` fake daemons (page p lives on p %
// num_daemons) and `tail` further tokens of the data.
struct FakeSequence {
  static constexpr int kSpareCapacity = 40;

  FakeSequence(SequenceData sequence_data, int num_pages, const StepOptions& options,
               int num_daemons = 1)
      : data(std::move(sequence_data)),
        shape(*WorkerShape::Make(data.geometry, {})),
        pages(*SequencePages::Make(shape, num_pages + kSpareCapacity, options.n_sink, options.n_win,
                                   num_daemons)) {
    for (int d = 0; d < num_daemons; ++d) {
      auto source = std::make_shared<PageSource>();
      auto fetcher = std::make_unique<FakeFetcher>(&data);
      fetchers.push_back(fetcher.get());
      source->fetcher = std::move(fetcher);
      sources.push_back(source);
      pages->SetSource(d, source);
    }
    for (int p = 0; p < num_pages; ++p) {
      KVD_CHECK(pages->mirror().Store(p, 0, PageRecords(data, shape, p).data()).ok());
      pages->SetPage(p, p % num_daemons, std::vector<SlotRef>{FakeSlot(p)});
    }
    pages->SetNumPages(num_pages);
    FillLocal();
  }

  // What opening a sequence fetches: sinks and the window.
  void FillLocal() {
    for (int layer = 0; layer < shape.num_layers(); ++layer) {
      for (int h = 0; h < shape.num_heads(); ++h) {
        const auto copy = [&](int p, uint8_t* to) {
          const std::vector<uint8_t> unit = data.Unit(layer, h, p);
          std::memcpy(to, unit.data(), unit.size());
        };
        for (int p = 0; p < pages->num_sinks(); ++p) copy(p, pages->sink_unit(p, layer, h));
        for (int p = pages->first_ring_page(); p < pages->num_pages(); ++p) {
          copy(p, pages->ring_unit(p, layer, h));
        }
      }
    }
  }

  SequenceData data;
  WorkerShape shape;
  std::unique_ptr<SequencePages> pages;
  std::vector<std::shared_ptr<PageSource>> sources;
  std::vector<FakeFetcher*> fetchers;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_FAKE_POOL_H_
