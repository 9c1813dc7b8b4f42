// A GPU worker in a process of its own, for tests that freeze it: it opens a prompt of MarkedPrompt
// that is in the pool and decodes it with a captured step. Takes one command a line, answers one
// line:
//   step COUNT   runs steps                 -> stepped CODE WRONG_HEADS MISSES FAILED MISSING_PAGES
// usage: gpu_worker_process DAEMON PROMPT_ID PAGES

#include <cstdio>
#include <iostream>
#include <sstream>

#include "tests/system/gpu_worker.h"

namespace kvd::testing {
namespace {

constexpr int kMaxTokens = 4096;

std::string Steps(GpuWorker& worker, int count) {
  absl::Status first;
  int wrong = 0;
  uint64_t misses = 0, failed = 0;
  for (int i = 0; i < count; ++i) {
    first.Update(worker.Step());
    wrong += worker.WrongHeads();
    misses += worker.batch().report().misses;
    failed += worker.batch().report().failed;
  }
  std::ostringstream answer;
  answer << "stepped " << absl::StatusCodeToString(first.code()) << " " << wrong << " " << misses
         << " " << failed << " " << worker.sequence(0).MissingPages().size();
  return answer.str();
}

int Run(int argc, char** argv) {
  if (argc != 4) return 2;
  const Prompt prompt =
      MarkedPrompt(static_cast<uint32_t>(std::stoul(argv[2])), std::stoi(argv[3]), 3, 2000);
  BatchOptions options = CoveringBatch(BatchMode::kCaptured, 1, kMaxTokens);
  options.step.budget = prompt.num_pages / 2;  // so that every step misses some
  options.step.cache_ratio = 1;
  auto worker = GpuWorker::Make(GpuOptions(argv[1], PathKind::kPeer), options);
  absl::Status status = worker.status();
  if (status.ok()) status = (*worker)->Join(prompt).status();
  std::printf("%s\n", status.ok() ? "joined" : status.ToString().c_str());
  std::fflush(stdout);
  if (!status.ok()) return 1;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    int count = 0;
    words >> verb >> count;
    std::printf("%s\n", verb == "step" ? Steps(**worker, count).c_str() : "unknown");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvd::testing

int main(int argc, char** argv) { return kvd::testing::Run(argc, argv); }
