// What counting costs: nanoseconds an event, the best of five runs, latencies spread over the
// buckets. The bar is 20 ns an event. usage: metrics_bench

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "client/stats.h"
#include "proto/metrics_text.h"

namespace kvd {
namespace {

constexpr int kEvents = 2'000'000;
constexpr int kRuns = 5;

template <typename Event>
void Print(const char* what, Event event) {
  double best = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kEvents; ++i) event(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count() / kEvents);
  }
  std::printf("%-58s %6.2f ns\n", what, best);
}

int Main() {
  // 0.1 us to 100 ms: no branch predictor learns them.
  std::array<int64_t, 4096> latencies;
  uint64_t state = 1;
  for (int64_t& ns : latencies) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    ns = int64_t{100} << (state >> 40) % 21;
  }
  StepCounter step_counter;
  Counter counter;
  StepHistogram step_histogram;
  LatencyHistogram histogram;
  StepTotals totals;
  PathTotals path;
  Print("StepCounter::Add (one writer)", [&](int) { step_counter.Add(1); });
  Print("Counter::Add (any writer)", [&](int) { counter.Add(1); });
  Print("StepHistogram::Observe (one writer)",
        [&](int i) { step_histogram.Observe(latencies[static_cast<size_t>(i) % 4096]); });
  Print("LatencyHistogram::Observe (any writer)", [&](int i) {
    histogram.Observe(absl::Nanoseconds(latencies[static_cast<size_t>(i) % 4096]));
  });
  Print("a list of units: two histograms, one counter", [&](int i) {
    const int64_t ns = latencies[static_cast<size_t>(i) % 4096];
    path.seconds.Observe(ns);
    path.post_seconds.Observe(ns / 2);
    path.bytes.Add(ns);
  });
  Print("a whole step: AddStep", [&](int i) {
    const int64_t ns = latencies[static_cast<size_t>(i) % 4096];
    totals.AddStep({ns, ns, ns, ns, ns, ns}, true, -1);
  });
  Print("two readings of the clock, for comparison", [&](int) {
    const auto a = std::chrono::steady_clock::now();
    const auto b = std::chrono::steady_clock::now();
    step_counter.Add((b - a).count());
  });
  // Printed, so that no event is optimised away.
  const int64_t counted = step_counter.value() + totals.steps.value();
  std::printf("counted: %lld\n", static_cast<long long>(counted));
  return 0;
}

}  // namespace
}  // namespace kvd

int main() { return kvd::Main(); }
