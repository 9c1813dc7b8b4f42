#include "client/step_options.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"

namespace kvd {

int StepOptions::candidates() const {
  return num_candidates > 0 ? num_candidates : std::max(16 * std::min(budget, kMaxPages), 1024);
}

absl::Status Validate(const StepOptions& options, int num_layers) {
  const auto out_of_range = [](const char* field, int got, int low, int high) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " must be from ", low, " to ", high, ", got ", got));
  };
  if (options.budget < 0 || options.budget > kMaxPages) {
    return out_of_range("budget", options.budget, 0, kMaxPages);
  }
  if (options.n_sink < 0 || options.n_sink > 64) {
    return out_of_range("n_sink", options.n_sink, 0, 64);
  }
  if (options.n_win < 0 || options.n_win > 1024) {
    return out_of_range("n_win", options.n_win, 0, 1024);
  }
  if (options.num_candidates < 0 || options.num_candidates > kMaxPages) {
    return out_of_range("num_candidates", options.num_candidates, 0, kMaxPages);
  }
  if (options.num_candidates > 0 && options.num_candidates < options.budget) {
    return absl::InvalidArgumentError(absl::StrCat("num_candidates (", options.num_candidates,
                                                   ") must not be below budget (", options.budget,
                                                   ")"));
  }
  if (!(options.cache_ratio >= 1) || options.cache_ratio > 1000) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache_ratio must be from 1 to 1000, got ", options.cache_ratio));
  }
  if (options.fetch_timeout <= absl::ZeroDuration() || options.fetch_timeout > kMaxTimeout) {
    return absl::InvalidArgumentError(absl::StrCat("fetch_timeout must be above 0 and at most ",
                                                   absl::FormatDuration(kMaxTimeout), ", got ",
                                                   absl::FormatDuration(options.fetch_timeout)));
  }
  if (options.failover_after < absl::ZeroDuration() ||
      options.failover_after > options.fetch_timeout) {
    return absl::InvalidArgumentError(
        absl::StrCat("failover_after must be from 0 to fetch_timeout (",
                     absl::FormatDuration(options.fetch_timeout), "), got ",
                     absl::FormatDuration(options.failover_after)));
  }
  for (const int layer : options.dense_layers) {
    if (layer < 0 || layer >= num_layers) {
      return out_of_range("dense_layers", layer, 0, num_layers - 1);
    }
  }
  return absl::OkStatus();
}

}  // namespace kvd
