// What a worker's model fixes of score's and attend's arguments: said once for the step on the
// host, the step on a GPU and the measurement of the scans, so that none can forget a field of the
// geometry.
//
// Thread safety: pure functions. The rest of the arguments is the caller's to set.

#ifndef LOCKS_KVD_CLIENT_STEP_ARGS_H_
#define LOCKS_KVD_CLIENT_STEP_ARGS_H_

#include <cstdint>

#include "client/worker_shape.h"
#include "kernels/attend.h"
#include "kernels/score.h"

namespace kvd {

// What both have. `query` [num_sequences, query heads, D], as the model has it.
template <typename Args>
Args ModelArgsOf(const WorkerShape& shape, int num_sequences, const uint16_t* query) {
  const KvGeometry& g = shape.geometry;
  Args args = {};
  args.num_sequences = num_sequences;
  args.num_kv_heads = shape.num_heads();
  args.group = g.group();
  args.head_dim = g.head_dim;
  args.page_tokens = g.page_tokens;
  args.dtype = g.dtype;
  args.softmax_scale = g.softmax_scale;
  args.logit_softcap = g.logit_softcap;
  args.query = query;
  return args;
}

// Score rotates the query itself where the records are rotated.
inline ScoreArgs ScoreArgsOf(const WorkerShape& shape, int num_sequences, const uint16_t* query) {
  auto args = ModelArgsOf<ScoreArgs>(shape, num_sequences, query);
  args.rank = shape.geometry.rank;
  args.rotate_query = shape.geometry.rotated;
  return args;
}

inline AttendArgs AttendArgsOf(const WorkerShape& shape, int num_sequences, const uint16_t* query) {
  return ModelArgsOf<AttendArgs>(shape, num_sequences, query);
}

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_STEP_ARGS_H_
