// The decode steps that decode_bench times: one case is a number of sequences of one length, with
// their pages in a daemon's GPU arena or all in the worker.
//
// Thread safety: one thread. Only built with KVD_CUDA.

#ifndef LOCKS_KVD_BENCH_DECODE_CASES_H_
#define LOCKS_KVD_BENCH_DECODE_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/decode_pool.h"
#include "client/decode_batch.h"
#include "client/kv_client.h"

namespace kvd::bench {

struct DecodeCase {
  std::string name;  // "llama 4 x 128K"
  int batch = 1;
  // of each sequence: row n has pages [n num_pages, (n + 1) num_pages) of the prompt
  int num_pages = 0;
};

struct StepOptionsOfBench {
  BatchMode mode = BatchMode::kCaptured;
  StepOptions step;
  int steps = 32;      // of each loop
  float drift = .99f;  // correlation of a query with the step before's, while the cache churns
};

// One way of running steps: the same queries all the time (warm), or drifting ones.
struct LoopFigures {
  double step_us = 0;   // one after another, nobody waits: all of a step, its host's part beside
  double graph_us = 0;  // the layers alone, from an idle GPU
  double host_us = 0;   // the caller's thread: BeginStep, launch, EndStep
  double hit_rate = 0;  // of the page cache
  uint64_t failed = 0;  // units that were not there
};

struct CaseFigures {
  LoopFigures warm;
  LoopFigures drifting;
  ScanMode scan = ScanMode::kFull;
  double open_ms = 0;        // OpenSequence, one sequence
  double gpu_bytes = 0;      // that the driver gave for the sequences and the batch
  double counted_bytes = 0;  // mirrors, caches, workspace by their own count
  double formula_bytes = 0;  // records and page cache
  // Of two steps, the first and one after a few drifting ones: [L][N][...].
  struct Output {
    std::vector<uint16_t> q;
    std::vector<float> o;
    std::vector<float> lse;
  };
  std::vector<Output> outputs;
};

// With the pages in the pool.
absl::StatusOr<CaseFigures> RunPoolCase(const DecodeCase& c, const StepOptionsOfBench& options,
                                        const DecodePool& pool, KvClient& client);

// With all KV in the worker; options.step.scan full or progressive. `problems`: what a check of
// sampled heads found.
absl::StatusOr<CaseFigures> RunLocalCase(const DecodeCase& c, const StepOptionsOfBench& options,
                                         const WorkerShape& shape,
                                         std::vector<std::string>* problems);

// How far two runs of one case are apart; empty if they agree.
std::string CompareOutputs(const CaseFigures& a, const CaseFigures& b);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_DECODE_CASES_H_
