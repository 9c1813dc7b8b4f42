// A small line chart as SVG: recall over budget.
//
// Thread safety: pure function.

#ifndef LOCKS_KVD_BENCH_PLOT_H_
#define LOCKS_KVD_BENCH_PLOT_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace kvd::bench {

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // (budget in tokens, recall 0..1), budgets rising
};

// Budgets on a logarithmic axis, recall from the lowest value (rounded down to a tenth) to 1.
absl::Status WriteRecallPlot(const std::string& path, const std::string& title,
                             const std::vector<PlotSeries>& series);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_PLOT_H_
