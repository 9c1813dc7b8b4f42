// A client in a process of its own, for tests that freeze it. Takes one command a line, answers one
// line:
//   put FIRST COUNT WRITE  puts pages and keeps their leases   -> put NEW FAILED
//   fetch                  everything that put made new, in the session that it was put in
//                                                              -> fetched CODE EXACT MISSING WRONG
//   churn                  puts pages for ever, in a thread    -> churning
//   forget                 gives up all leases                 -> forgot
// usage: client_process DAEMON shared|ucx

#include <cstdio>
#include <iostream>
#include <sstream>
#include <thread>

#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

constexpr uint64_t kChurnFirst = 5000;
constexpr uint64_t kChurnBatch = 8;
constexpr uint64_t kChurnBatches = 64;  // more pages than any arena here holds

class Client {
 public:
  explicit Client(std::unique_ptr<SystemWorker> worker)
      : worker_(std::move(worker)), attachment_(worker_->attachment()) {}
  ~Client() {
    stop_ = true;
    if (churn_.joinable()) churn_.join();
  }

  std::string Answer(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "put") {
      uint64_t first = 0, count = 0, write = 0;
      words >> first >> count >> write;
      return Put(first, count, write);
    }
    if (verb == "fetch") return Fetch();
    if (verb == "churn") {
      churn_ = std::thread([this] {
        for (uint64_t write = 1; !stop_; ++write) {
          worker_->Put(
              VersionsOf(kChurnFirst + write % kChurnBatches * kChurnBatch, kChurnBatch, write));
        }
      });
      return "churning";
    }
    if (verb == "forget") {
      held_.clear();
      return "forgot";
    }
    return "unknown";
  }

 private:
  std::string Put(uint64_t first, uint64_t count, uint64_t write) {
    const auto versions = VersionsOf(first, count, write);
    held_.push_back(worker_->Put(versions));
    const auto sealed = NewPages(versions, held_.back());
    pages_.insert(pages_.end(), sealed.begin(), sealed.end());
    std::ostringstream answer;
    answer << "put " << sealed.size() << " " << held_.back().num_failed;
    return answer.str();
  }
  std::string Fetch() {
    const Fetched fetched = worker_->Fetch(*attachment_->fetcher, pages_, absl::Seconds(10));
    std::ostringstream answer;
    answer << "fetched " << absl::StatusCodeToString(fetched.code) << " " << fetched.num_exact
           << " " << fetched.num_missing << " " << fetched.num_wrong;
    return answer.str();
  }

  std::unique_ptr<SystemWorker> worker_;
  std::shared_ptr<Attachment> attachment_;  // the first one, for ever
  std::vector<PutReport> held_;
  std::vector<SealedVersion> pages_;
  std::atomic<bool> stop_{false};
  std::thread churn_;
};

int Run(int argc, char** argv) {
  if (argc != 3) return 2;
  const PathKind path = std::string(argv[2]) == "ucx" ? PathKind::kUcx : PathKind::kShared;
  auto worker = SystemWorker::Make(OptionsFor({argv[1]}, path));
  if (!worker.ok()) {
    std::printf("%s\n", worker.status().ToString().c_str());
    return 1;
  }
  Client client(*std::move(worker));
  std::printf("attached\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::printf("%s\n", client.Answer(line).c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvd::testing

int main(int argc, char** argv) { return kvd::testing::Run(argc, argv); }
