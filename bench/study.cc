#include "bench/study.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bench/selectors.h"
#include "kernels/attend.h"
#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/gather.h"

namespace kvd::bench {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Rows of one head: [tokens, Hk, D] with the head's rows picked.
void AppendPage(const KvTrace& trace, const KvTrace::Layer& layer, int head, int64_t first_token,
                int page_tokens, std::vector<uint8_t>* units) {
  const auto row_bytes = static_cast<int64_t>(trace.head_dim) * 2;
  const EngineKv kv = {reinterpret_cast<const uint8_t*>(layer.k.data()),
                       reinterpret_cast<const uint8_t*>(layer.v.data()), row_bytes,
                       row_bytes * trace.num_kv_heads};
  const size_t unit_bytes = MakeUnitLayout(trace.head_dim, page_tokens).bytes;
  units->resize(units->size() + unit_bytes);
  ref::PackUnit(kv, head, first_token, trace.head_dim, page_tokens,
                units->data() + units->size() - unit_bytes);
}

// Writes one token's row of K and of V.
void PutToken(const uint16_t* k, const uint16_t* v, int token, int head_dim, int page_tokens,
              uint8_t* unit) {
  const size_t row = static_cast<size_t>(head_dim) * 2;
  const UnitLayout layout = MakeUnitLayout(head_dim, page_tokens);
  std::memcpy(unit + static_cast<size_t>(token) * row, k, row);
  std::memcpy(unit + layout.k_bytes + static_cast<size_t>(token) * row, v, row);
}

std::vector<float> QueryRows(const Stream& stream, int step) {
  const auto count = static_cast<size_t>(stream.group * stream.head_dim);
  std::vector<float> q(count);
  for (size_t i = 0; i < count; ++i) q[i] = FromKv(stream.dtype, stream.step_query(step)[i]);
  return q;
}

// lse of one page's logits for one head; `keys` are the unit's first num_tokens rows.
float PageLse(const Stream& stream, const float* q, const uint8_t* unit, int num_tokens) {
  double logits[64];
  double peak = -std::numeric_limits<double>::infinity();
  for (int t = 0; t < num_tokens; ++t) {
    uint16_t row[256];
    std::memcpy(row, unit + static_cast<size_t>(t * stream.head_dim) * 2,
                static_cast<size_t>(stream.head_dim) * 2);
    float dot = 0;
    for (int d = 0; d < stream.head_dim; ++d) dot += q[d] * FromKv(stream.dtype, row[d]);
    double x = static_cast<double>(dot) * stream.softmax_scale;
    if (stream.logit_softcap > 0) x = stream.logit_softcap * std::tanh(x / stream.logit_softcap);
    logits[t] = x;
    peak = std::max(peak, x);
  }
  double sum = 0;
  for (int t = 0; t < num_tokens; ++t) sum += std::exp(logits[t] - peak);
  return static_cast<float>(peak + std::log(sum));
}

// Attention over a list of units, through the tested reference kernel.
void AttendUnits(const Stream& stream, int step, const std::vector<UnitRef>& units, float* o,
                 float* lse) {
  const auto count = static_cast<int32_t>(units.size());
  AttendArgs args = {};
  args.num_sequences = 1;
  args.num_kv_heads = 1;
  args.group = stream.group;
  args.head_dim = stream.head_dim;
  args.page_tokens = stream.page_tokens;
  args.dtype = stream.dtype;
  args.softmax_scale = stream.softmax_scale;
  args.logit_softcap = stream.logit_softcap;
  args.query = stream.step_query(step);
  args.max_units = count;
  args.units = units.data();
  args.num_units = &count;
  args.o = o;
  args.lse = lse;
  ref::Attend(args);
}

}  // namespace

Stream Stream::Make(const KvTrace& trace, int layer, int head, int page_tokens,
                    std::span<const KvTrace> foreign) {
  Stream stream;
  stream.head_dim = trace.head_dim;
  stream.group = trace.group();
  stream.page_tokens = page_tokens;
  stream.dtype = trace.dtype;
  stream.softmax_scale = trace.softmax_scale;
  stream.logit_softcap = trace.logit_softcap;
  stream.num_steps = trace.num_steps;
  const KvTrace::Layer& own = trace.layers[static_cast<size_t>(layer)];
  const auto own_pages = static_cast<int>(trace.num_tokens / page_tokens);
  AppendPage(trace, own, head, 0, page_tokens, &stream.units);
  for (const KvTrace& other : foreign) {
    const int pages = static_cast<int>(other.num_tokens / page_tokens);
    for (int p = 1; p < pages; ++p)
      AppendPage(other, other.layers[static_cast<size_t>(layer)], head,
                 static_cast<int64_t>(p) * page_tokens, page_tokens, &stream.units);
  }
  for (int p = 1; p < own_pages; ++p)
    AppendPage(trace, own, head, static_cast<int64_t>(p) * page_tokens, page_tokens, &stream.units);
  stream.prompt_pages = static_cast<int>(stream.units.size() / stream.unit_bytes());

  // The prompt's rest, then every step's token, in unit-laid pages; complete ones join the pages.
  stream.rest_ = static_cast<int>(trace.num_tokens - static_cast<int64_t>(own_pages) * page_tokens);
  const int tail_pages = (stream.rest_ + trace.num_steps + page_tokens - 1) / page_tokens;
  stream.tail.resize(static_cast<size_t>(tail_pages) * stream.unit_bytes());
  const auto row = static_cast<size_t>(trace.num_kv_heads * trace.head_dim);
  const auto column = static_cast<size_t>(head * trace.head_dim);
  for (int i = 0; i < stream.rest_ + trace.num_steps; ++i) {
    const bool prompt = i < stream.rest_;
    const size_t token = prompt ? static_cast<size_t>(own_pages * page_tokens + i)
                                : static_cast<size_t>(i - stream.rest_);
    const uint16_t* k = (prompt ? own.k : own.step_k).data() + token * row + column;
    const uint16_t* v = (prompt ? own.v : own.step_v).data() + token * row + column;
    PutToken(k, v, i % page_tokens, trace.head_dim, page_tokens,
             stream.tail.data() + static_cast<size_t>(i / page_tokens) * stream.unit_bytes());
  }
  const size_t complete =
      static_cast<size_t>((stream.rest_ + trace.num_steps) / page_tokens) * stream.unit_bytes();
  stream.units.insert(stream.units.end(), stream.tail.begin(),
                      stream.tail.begin() + static_cast<std::ptrdiff_t>(complete));

  const auto group_row = static_cast<size_t>(stream.group * trace.head_dim);
  const auto q_row = static_cast<size_t>(trace.num_q_heads * trace.head_dim);
  for (int s = 0; s < trace.num_steps; ++s) {
    const uint16_t* q =
        own.step_q.data() + static_cast<size_t>(s) * q_row + static_cast<size_t>(head) * group_row;
    stream.query.insert(stream.query.end(), q, q + group_row);
  }
  return stream;
}

Truth ComputeTruth(const Stream& stream, int step) {
  Truth truth;
  truth.num_pages = stream.num_pages(step);
  const auto pages = static_cast<size_t>(truth.num_pages);
  const auto group = static_cast<size_t>(stream.group);
  truth.page_lse.resize(group * pages);
  truth.lse.resize(group);
  truth.tail_lse.resize(group);
  truth.o.resize(group * static_cast<size_t>(stream.head_dim));
  const std::vector<float> q = QueryRows(stream, step);
  for (size_t g = 0; g < group; ++g) {
    const float* row = q.data() + g * static_cast<size_t>(stream.head_dim);
    for (size_t p = 0; p < pages; ++p)
      truth.page_lse[g * pages + p] =
          PageLse(stream, row, stream.unit(static_cast<int>(p)), stream.page_tokens);
    truth.tail_lse[g] = PageLse(stream, row, stream.tail_unit(step), stream.tail_tokens(step));
  }
  std::vector<UnitRef> all;
  for (int p = 0; p < truth.num_pages; ++p) all.push_back({stream.unit(p), stream.page_tokens});
  all.push_back({stream.tail_unit(step), stream.tail_tokens(step)});
  AttendUnits(stream, step, all, truth.o.data(), truth.lse.data());
  return truth;
}

Kept Evaluate(const Stream& stream, int step, const Truth& truth, std::span<const int32_t> chosen,
              AlwaysKept kept, std::vector<float>* output) {
  const int pages = truth.num_pages;
  const int sink = std::min(kept.n_sink, pages);
  const int first_window = std::max(sink, pages - kept.n_win);
  std::vector<UnitRef> attended;
  std::vector<uint8_t> is_chosen(static_cast<size_t>(pages), 0);
  for (const int32_t p : chosen) {
    KVD_CHECK(p >= sink && p < first_window);
    is_chosen[static_cast<size_t>(p)] = 1;
  }
  for (int p = 0; p < pages; ++p) {
    if (p < sink || p >= first_window || is_chosen[static_cast<size_t>(p)])
      attended.push_back({stream.unit(p), stream.page_tokens});
  }
  attended.push_back({stream.tail_unit(step), stream.tail_tokens(step)});

  const auto group = static_cast<size_t>(stream.group);
  const auto dim = static_cast<size_t>(stream.head_dim);
  std::vector<float> o(group * dim);
  std::vector<float> lse(group);
  AttendUnits(stream, step, attended, o.data(), lse.data());
  Kept result;
  result.mass_worst = result.selectable_worst = 1;
  double error = 0, norm = 0;
  for (size_t g = 0; g < group; ++g) {
    double selectable = 0, taken = 0;
    for (int p = sink; p < first_window; ++p) {
      const double mass =
          std::exp(static_cast<double>(
                       truth.page_lse[g * static_cast<size_t>(pages) + static_cast<size_t>(p)]) -
                   truth.lse[g]);
      selectable += mass;
      if (is_chosen[static_cast<size_t>(p)]) taken += mass;
    }
    const double share = selectable > 0 ? taken / selectable : 1;
    const double mass = std::min(1.0, std::exp(static_cast<double>(lse[g]) - truth.lse[g]));
    result.mass += mass / static_cast<double>(group);
    result.selectable += share / static_cast<double>(group);
    result.mass_worst = std::min(result.mass_worst, mass);
    result.selectable_worst = std::min(result.selectable_worst, share);
    for (size_t d = 0; d < dim; ++d) {
      const double want = truth.o[g * dim + d];
      error += (o[g * dim + d] - want) * (o[g * dim + d] - want);
      norm += want * want;
    }
  }
  result.output_error = norm > 0 ? std::sqrt(error / norm) : 0;
  if (output) *output = std::move(o);
  return result;
}

std::vector<int32_t> OracleSelect(const Truth& truth, int group, int num_select, AlwaysKept kept) {
  const auto pages = static_cast<size_t>(truth.num_pages);
  std::vector<float> share(pages, kNegInf);
  for (size_t p = 0; p < pages; ++p) {
    double sum = 0;
    for (size_t g = 0; g < static_cast<size_t>(group); ++g)
      sum += std::exp(static_cast<double>(truth.page_lse[g * pages + p]) - truth.lse[g]);
    share[p] = static_cast<float>(std::log(sum));
  }
  return TopPages(share, num_select, kept);
}

int SelectedPages(int budget_tokens, int page_tokens, AlwaysKept kept) {
  return std::max(0, budget_tokens / page_tokens - kept.n_sink - kept.n_win - 1);
}

}  // namespace kvd::bench
