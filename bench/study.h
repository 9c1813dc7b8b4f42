// What a selection of pages is worth: exact attention of real or synthetic streams, and the recall
// and output error of any set of pages against it.
//
// A stream is one (layer, KV head): the pages of a prompt, then the tokens of decode steps. At step
// t the attention sees num_pages(t) complete pages and the tail, the step's own token included.
// Pages whose last token is of an earlier step count as complete (a client seals them off the
// critical path).
// Thread safety: immutable after Make; Truth is a plain value.

#ifndef LOCKS_KVD_BENCH_STUDY_H_
#define LOCKS_KVD_BENCH_STUDY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "bench/kv_trace.h"
#include "kernels/layout.h"

namespace kvd::bench {

// Pages that are always attended, besides the tail.
struct AlwaysKept {
  int n_sink = 1;
  int n_win = 1;
};

class Stream {
 public:
  // `foreign`: traces whose pages (the first left out of each) are put behind the first page of
  // this one, as distractors; same model, layers and heads.
  static Stream Make(const KvTrace& trace, int layer, int head, int page_tokens,
                     std::span<const KvTrace> foreign = {});

  int head_dim = 0;
  int group = 0;
  int page_tokens = 0;
  KvDtype dtype = KvDtype::kBf16;
  float softmax_scale = 0;
  float logit_softcap = 0;
  int num_steps = 0;
  int prompt_pages = 0;         // foreign ones included
  std::vector<uint8_t> units;   // every page that is complete at the last step
  std::vector<uint8_t> tail;    // unit-laid pages of all step tokens, the prompt's rest in front
  std::vector<uint16_t> query;  // [steps, G, D]

  size_t unit_bytes() const { return MakeUnitLayout(head_dim, page_tokens).bytes; }
  const uint8_t* unit(int page) const {
    return units.data() + static_cast<size_t>(page) * unit_bytes();
  }
  const uint16_t* step_query(int step) const {
    return query.data() + static_cast<size_t>(step) * static_cast<size_t>(group * head_dim);
  }
  int num_pages(int step) const { return prompt_pages + (rest_ + step) / page_tokens; }
  int tail_tokens(int step) const { return (rest_ + step) % page_tokens + 1; }
  // The unit that holds the tail at `step`.
  const uint8_t* tail_unit(int step) const {
    return tail.data() + static_cast<size_t>((rest_ + step) / page_tokens) * unit_bytes();
  }

 private:
  int rest_ = 0;  // prompt tokens after the last complete page
};

// Exact attention of one step of a stream.
struct Truth {
  int num_pages = 0;
  std::vector<float> page_lse;  // [G, P]
  std::vector<float> lse;       // [G] over everything attention sees
  std::vector<float> tail_lse;  // [G]
  std::vector<float> o;         // [G, D]
};
Truth ComputeTruth(const Stream& stream, int step);

// What a set of chosen pages keeps of a step's attention.
struct Kept {
  double mass = 0;        // mean over the group of the mass in A (always kept, chosen, tail)
  double mass_worst = 0;  // worst head
  double selectable = 0;  // sum of the chosen pages' mass over that of all selectable pages, mean
  double selectable_worst = 0;
  double output_error = 0;  // |o_A - o| / |o| over the group's outputs laid side by side
};
// `output`, if not null, receives the attention over those pages, [G, D].
Kept Evaluate(const Stream& stream, int step, const Truth& truth, std::span<const int32_t> chosen,
              AlwaysKept kept, std::vector<float>* output = nullptr);

// Pages chosen by the exact page lse: the most mean mass that K pages can hold (share over all
// tokens).
std::vector<int32_t> OracleSelect(const Truth& truth, int group, int num_select, AlwaysKept kept);

// K of a budget of attended tokens: b = B (K + n_sink + n_win + 1); 0 if the budget holds none.
int SelectedPages(int budget_tokens, int page_tokens, AlwaysKept kept);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_STUDY_H_
