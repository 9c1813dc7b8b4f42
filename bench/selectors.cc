#include "bench/selectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "kernels/score.h"

namespace kvd::bench {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

std::vector<float> KeyRows(const Stream& stream, int page) {
  std::vector<uint16_t> bits(static_cast<size_t>(stream.page_tokens * stream.head_dim));
  std::memcpy(bits.data(), stream.unit(page), bits.size() * 2);
  std::vector<float> keys(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) keys[i] = FromKv(stream.dtype, bits[i]);
  return keys;
}

int TotalPages(const Stream& stream) {
  return static_cast<int>(stream.units.size() / stream.unit_bytes());
}

// Scores a page by a linear form or an envelope of its keys.
class EnvelopeScorer final : public PageScorer {
 public:
  EnvelopeScorer(const Stream& stream, bool envelope)
      : envelope_(envelope), dim_(static_cast<size_t>(stream.head_dim)) {
    for (int p = 0; p < TotalPages(stream); ++p) AddPage(KeyRows(stream, p));
  }

  std::vector<float> Score(const Stream& stream, int step) const override {
    const auto pages = static_cast<size_t>(stream.num_pages(step));
    const auto group = static_cast<size_t>(stream.group);
    std::vector<float> out(group * pages);
    for (size_t g = 0; g < group; ++g) {
      float q[256];
      for (size_t d = 0; d < dim_; ++d)
        q[d] = FromKv(stream.dtype, stream.step_query(step)[g * dim_ + d]);
      for (size_t p = 0; p < pages; ++p) out[g * pages + p] = ScorePage(stream, q, p);
    }
    return out;
  }

 private:
  void AddPage(const std::vector<float>& keys) {
    const size_t tokens = keys.size() / dim_;
    for (size_t d = 0; d < dim_; ++d) {
      float low = keys[d], high = keys[d], sum = 0;
      for (size_t t = 0; t < tokens; ++t) {
        const float x = keys[t * dim_ + d];
        low = std::min(low, x);
        high = std::max(high, x);
        sum += x;
      }
      if (envelope_) {
        low_.push_back(low);
        high_.push_back(high);
      } else {
        low_.push_back(sum / static_cast<float>(tokens));
      }
    }
  }

  // Quest: an upper bound of the largest logit. Centroid: Jensen's lower bound of the page's lse.
  float ScorePage(const Stream& stream, const float* q, size_t page) const {
    const float* low = low_.data() + page * dim_;
    double sum = 0;
    if (envelope_) {
      const float* high = high_.data() + page * dim_;
      for (size_t d = 0; d < dim_; ++d) sum += std::max(q[d] * low[d], q[d] * high[d]);
      return static_cast<float>(sum * stream.softmax_scale);
    }
    for (size_t d = 0; d < dim_; ++d) sum += q[d] * low[d];
    return static_cast<float>(sum * stream.softmax_scale + std::log(stream.page_tokens));
  }

  bool envelope_;
  size_t dim_;
  std::vector<float> low_;   // [P, D]; the mean for the centroid
  std::vector<float> high_;  // [P, D]; Quest only
};

// A head's scores with its own offset, or offset and spread, taken off.
std::vector<double> Normalise(std::span<const float> score, Combine combine) {
  std::vector<double> out(score.begin(), score.end());
  const double peak = *std::max_element(out.begin(), out.end());
  if (combine == Combine::kShare) {
    double sum = 0;
    for (const double x : out) sum += std::exp(x - peak);
    for (double& x : out) x = std::exp(x - peak) / sum;
  } else if (combine == Combine::kZ) {
    const double mean =
        std::accumulate(out.begin(), out.end(), 0.0) / static_cast<double>(out.size());
    double variance = 0;
    for (const double x : out) variance += (x - mean) * (x - mean);
    const double deviation = std::sqrt(variance / static_cast<double>(out.size()));
    for (double& x : out) x = deviation > 0 ? (x - mean) / deviation : 0;
  }
  return out;
}

}  // namespace

std::vector<int32_t> TopPages(std::span<const float> score, int num_select, AlwaysKept kept) {
  std::vector<int32_t> pages;
  for (int p = kept.n_sink; p < static_cast<int>(score.size()) - kept.n_win; ++p)
    pages.push_back(p);
  const auto take = std::min(pages.size(), static_cast<size_t>(std::max(0, num_select)));
  std::partial_sort(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(take), pages.end(),
                    [&](int32_t a, int32_t b) {
                      const float x = score[static_cast<size_t>(a)],
                                  y = score[static_cast<size_t>(b)];
                      return x != y ? x > y : a < b;
                    });
  pages.resize(take);
  std::sort(pages.begin(), pages.end());
  return pages;
}

std::unique_ptr<PageScorer> MakeQuest(const Stream& stream) {
  return std::make_unique<EnvelopeScorer>(stream, true);
}
std::unique_ptr<PageScorer> MakeCentroid(const Stream& stream) {
  return std::make_unique<EnvelopeScorer>(stream, false);
}

std::vector<int32_t> SelectByScore(std::span<const float> score, int group, Combine combine,
                                   int num_select, AlwaysKept kept) {
  const size_t pages = score.size() / static_cast<size_t>(group);
  std::vector<float> total(pages, combine == Combine::kMax ? kNegInf : 0);
  for (size_t g = 0; g < static_cast<size_t>(group); ++g) {
    const std::vector<double> head = Normalise(score.subspan(g * pages, pages), combine);
    for (size_t p = 0; p < pages; ++p) {
      const auto x = static_cast<float>(head[p]);
      total[p] = combine == Combine::kMax ? std::max(total[p], x) : total[p] + x;
    }
  }
  return TopPages(total, num_select, kept);
}

LocksSelector::LocksSelector(const Stream& stream, const LocksOptions& options, const float* metric)
    : options_(options),
      layout_(MakeSummaryLayout(stream.head_dim, stream.page_tokens, options.rank)) {
  const auto pages = static_cast<size_t>(TotalPages(stream));
  coarse_.resize(pages * layout_.coarse_bytes);
  fine_.resize(pages * layout_.fine_bytes);
  for (size_t p = 0; p < pages; ++p) {
    ref::Summarize({stream.head_dim, stream.page_tokens, options.rank, stream.dtype,
                    options.rotated, options.encoder, stream.unit(static_cast<int>(p)),
                    options.encoder == Encoder::kE1S ? metric : nullptr,
                    coarse_.data() + p * layout_.coarse_bytes,
                    fine_.data() + p * layout_.fine_bytes});
  }
}

namespace {

// The argument structs that the kernels take, for one stream and one step.
struct ScoreCall {
  std::vector<uint16_t> query;
  const uint8_t* coarse;
  const uint8_t* fine;
  int64_t capacity;
  int32_t num_pages;
  std::vector<float> lse;
  ScoreArgs args = {};

  ScoreCall(const Stream& stream, int step, const LocksOptions& options,
            const uint8_t* coarse_records, const uint8_t* fine_records)
      : query(static_cast<size_t>(stream.group * stream.head_dim)),
        coarse(coarse_records),
        fine(fine_records),
        capacity(TotalPages(stream)),
        num_pages(stream.num_pages(step)),
        lse(static_cast<size_t>(stream.group) * static_cast<size_t>(num_pages)) {
    if (options.rotated) {
      RotateQuery(stream.step_query(step), stream.group, stream.head_dim, stream.dtype,
                  query.data());
    } else {
      std::copy_n(stream.step_query(step), query.size(), query.begin());
    }
    args = {1,
            1,
            stream.group,
            stream.head_dim,
            stream.page_tokens,
            options.rank,
            stream.dtype,
            stream.softmax_scale,
            stream.logit_softcap,
            query.data(),
            &coarse,
            &fine,
            &capacity,
            &num_pages,
            num_pages,
            lse.data()};
  }
  ScoreCall(const ScoreCall&) = delete;
  ScoreCall& operator=(const ScoreCall&) = delete;
};

std::vector<int32_t> SelectPages(const ScoreCall& call, int group, CombineRule rule, int num_select,
                                 AlwaysKept kept, const std::vector<int32_t>* candidates) {
  std::vector<int32_t> pages(static_cast<size_t>(num_select));
  std::vector<float> log_norm(static_cast<size_t>(group));
  int32_t num_selected = 0;
  float threshold = 0;
  std::vector<uint8_t> scratch(SelectScratchBytes(call.num_pages) + 64);
  auto* aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  const int32_t num_candidates = candidates ? static_cast<int32_t>(candidates->size()) : 0;
  SelectArgs args = {};
  args.num_sequences = 1;
  args.num_kv_heads = 1;
  args.group = group;
  args.rule = rule;
  args.n_sink = kept.n_sink;
  args.n_win = kept.n_win;
  args.num_select = num_select;
  args.lse = call.lse.data();
  args.lse_stride = call.num_pages;
  args.num_pages = &call.num_pages;
  args.max_candidates = num_candidates;
  args.candidates = candidates ? candidates->data() : nullptr;
  args.num_candidates = candidates ? &num_candidates : nullptr;
  args.pages = pages.data();
  args.num_selected = &num_selected;
  args.threshold = &threshold;
  args.log_norm = log_norm.data();
  args.scratch = aligned;
  ref::Select(args);
  pages.resize(static_cast<size_t>(num_selected));
  return pages;
}

}  // namespace

std::vector<int32_t> LocksSelector::SelectFull(const Stream& stream, int step, int num_select,
                                               AlwaysKept kept) const {
  ScoreCall call(stream, step, options_, coarse_.data(), fine_.data());
  ref::ScoreFull(call.args);
  return SelectPages(call, stream.group, options_.rule, num_select, kept, nullptr);
}

std::vector<int32_t> LocksSelector::SelectProgressive(const Stream& stream, int step,
                                                      int num_select, int num_candidates,
                                                      AlwaysKept kept) const {
  ScoreCall call(stream, step, options_, coarse_.data(), fine_.data());
  ref::ScoreCoarse(call.args);
  std::vector<int32_t> candidates =
      SelectPages(call, stream.group, options_.rule, num_candidates, kept, nullptr);
  // The always-kept pages are refined too: their estimates are part of Z.
  std::vector<int32_t> refined = candidates;
  for (int p = 0; p < std::min<int>(kept.n_sink, call.num_pages); ++p) refined.push_back(p);
  for (int p = std::max<int>(kept.n_sink, call.num_pages - kept.n_win); p < call.num_pages; ++p)
    refined.push_back(p);
  std::sort(refined.begin(), refined.end());
  const auto count = static_cast<int32_t>(refined.size());
  ref::ScoreRefine({call.args, count, refined.data(), &count});
  return SelectPages(call, stream.group, options_.rule, num_select, kept, &candidates);
}

double LocksSelector::LseRms(const Stream& stream, int step, const Truth& truth) const {
  ScoreCall call(stream, step, options_, coarse_.data(), fine_.data());
  ref::ScoreFull(call.args);
  double rms = 0;
  const auto pages = static_cast<size_t>(call.num_pages);
  for (size_t g = 0; g < static_cast<size_t>(stream.group); ++g) {
    double sum = 0, squares = 0;
    for (size_t p = 0; p < pages; ++p) {
      const double e = static_cast<double>(call.lse[g * pages + p]) - truth.page_lse[g * pages + p];
      sum += e;
      squares += e * e;
    }
    const double mean = sum / static_cast<double>(pages);
    rms += std::max(0.0, squares / static_cast<double>(pages) - mean * mean) / stream.group;
  }
  return std::sqrt(rms);
}

}  // namespace kvd::bench
