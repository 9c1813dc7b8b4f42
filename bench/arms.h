// The arms of a comparison: each one a name and a way to choose K pages of a stream at a step.
//
// Thread safety: an arm is immutable; it refers to its stream, which must outlive it.

#ifndef LOCKS_KVD_BENCH_ARMS_H_
#define LOCKS_KVD_BENCH_ARMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench/report.h"
#include "bench/study.h"

namespace kvd::bench {

inline constexpr int kBudgets[] = {64, 128, 256, 512, 1024, 2048};  // attended tokens

struct Arm {
  std::string name;
  std::function<std::vector<int32_t>(int step, const Truth& truth, int num_select)> select;
};

// The oracle, and Quest and the centroid under each combine rule ("quest/share", "quest/z",
// "quest/max").
std::vector<Arm> BaselineArms(const Stream& stream, AlwaysKept kept);

// LOCKS through the product's kernels: "locks-E0", "locks-E1", and with a metric "locks-E1S" and
// its progressive scan with C = max(16 K, min_candidates). `ablations` adds the unrotated format,
// rank 4 and the peak rule.
std::vector<Arm> LocksArms(const Stream& stream, const float* metric, AlwaysKept kept,
                           int min_candidates, bool ablations);

// Means over (step, KV head) of one arm at one budget, by layer.
class RecallTable {
 public:
  struct Row {
    double mass = 0, selectable = 0, output_error = 0;  // means
    double worst_layer = 0;  // lowest layer's selectable recall over the oracle's
  };
  explicit RecallTable(int num_layers) : num_layers_(num_layers) {}

  void Add(const std::string& arm, int budget, int layer, const Kept& kept);
  bool Has(const std::string& arm, int budget) const { return sums_.count({arm, budget}) > 0; }
  // REQUIRES: the arm and "oracle" were added at this budget, for the same (step, head) set.
  Row Get(const std::string& arm, int budget) const;
  std::vector<std::string> arms() const;
  // Name of the arm among those that start with `prefix` that keeps the most mass.
  std::string Best(const std::string& prefix, int budget) const;

 private:
  struct Sums {
    double mass = 0, selectable = 0, output_error = 0;
    int count = 0;
  };
  int num_layers_;
  std::map<std::pair<std::string, int>, std::vector<Sums>> sums_;  // [layer]
};

// One line an arm and budget: recalls, their ratio to the oracle's, worst layer, output error.
void PrintRecallTable(const RecallTable& table);

// The same as figures: "<prefix><arm>/b<budget>/mass", ".../selectable" (ratio: to the oracle's),
// ".../worst_layer" and ".../output_error".
void AddRecallFigures(const RecallTable& table, const std::string& prefix, Report* report);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_ARMS_H_
