// Fetches of random units between two processes, beside what bounds them in the same run: a memcpy of the
// same pieces (shared path), and a plain gather followed by one UCX active message (ucx path).
//
// Goal: shared >= 0.8 of memcpy; ucx >= 0.8 of the plain message and at least twice as fast as single
// requests. Method: a daemon's data plane and a worker, each on a core of its own; every round draws a new
// list and measures every way once, so that a disturbance meets all of them; medians; all bytes are checked.

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/plain_ucx.h"
#include "bench/report.h"
#include "client/path.h"
#include "client/shared_fetcher.h"
#include "kernels/check.h"
#include "proto/ucx_worker.h"
#include "tests/support/data_plane.h"

ABSL_FLAG(std::string, json, "", "write the figures to this file");
ABSL_FLAG(int, rounds, 60, "rounds that are measured, after a tenth as many that are not");
ABSL_FLAG(int, units, 512, "units of one list");
ABSL_FLAG(int, pages, 512, "pages of 2 MiB in the arena");

namespace kvd::bench {
namespace {

void PinTo(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (core >= 0) {
    CPU_SET(static_cast<size_t>(core), &set);
  } else {
    for (size_t i = 0; i < std::thread::hardware_concurrency(); ++i) CPU_SET(i, &set);
  }
  sched_setaffinity(0, sizeof(set), &set);
}

double Microseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

std::unique_ptr<Fetcher> Open(const locks_kvd::v1::AttachReply& offer, UcxWorker* worker, PathKind path) {
  PathOptions options;
  options.best = path;
  options.required = path;
  auto chosen = ChoosePath(offer, ShapeOf(offer), worker, options);
  if (!chosen.ok()) std::fprintf(stderr, "%s\n", chosen.status().ToString().c_str());
  KVD_CHECK(chosen.ok() && chosen->report.path == path);
  std::printf("path %-6s canary %.2f GB/s\n", std::string(PathName(path)).c_str(),
              chosen->report.canary_bytes_per_second / 1e9);
  return std::move(chosen->fetcher);
}

class Bench {
 public:
  Bench(ChildDaemon* daemon, UcxWorker* worker, size_t num_units)
      : daemon_(daemon), slot_(ShapeOf(daemon->offer).slot), entries_(num_units), pages_(num_units),
        destinations_(num_units), valid_(num_units), plain_(daemon->offer) {
    buffer_.Reserve(num_units * slot_.unit_bytes);
    for (size_t i = 0; i < num_units; ++i) destinations_[i] = buffer_.data() + i * slot_.unit_bytes;
    shared_ = Open(daemon->offer, worker, PathKind::kShared);
    ucx_ = Open(daemon->offer, worker, PathKind::kUcx);
    DescriptorRequest request;
    request.incarnation = IncarnationOf(daemon->offer);
    request.session = TokenOf(daemon->offer);
    memory_ = *ArenaMemory::MapShared(
        ShapeOf(daemon->offer), *ReceiveDescriptors(daemon->offer.shared().socket_path(), request, absl::Seconds(5)));
    plain_.Pause();
  }

  void Round(bool measured) {
    Draw();
    Measure(memcpy_us_, measured, [&] { Copy(); });
    Measure(shared_us_, measured, [&] { Fetch(*shared_); });
    Measure(ucx_us_, measured, [&] { Fetch(*ucx_); });
    Measure(single_us_, measured, [&] { FetchSingly(); });
    plain_.Resume();
    MeasurePlain(plain_4m_us_, measured, size_t{4} << 20);
    MeasurePlain(plain_1m_us_, measured, size_t{1} << 20);
    plain_.Pause();
  }

  void Report(Report& report) const {
    const double memcpy_us = Median(memcpy_us_);
    const double plain_us = Median(plain_4m_us_);
    const std::string list = absl::StrCat(entries_.size(), "x", slot_.unit_bytes / 1024, "KiB");
    report.Add({absl::StrCat("memcpy_", list), memcpy_us, "us", 0, 0});
    report.Add({absl::StrCat("shared_fetch_", list), Median(shared_us_), "us", memcpy_us,
                memcpy_us / Median(shared_us_)});
    report.Add({absl::StrCat("plain_ucx_one_message_", list), plain_us, "us", 0, 0});
    report.Add({absl::StrCat("plain_ucx_1MiB_messages_", list), Median(plain_1m_us_), "us", 0, 0});
    report.Add({absl::StrCat("ucx_fetch_", list), Median(ucx_us_), "us", plain_us, plain_us / Median(ucx_us_)});
    report.Add({absl::StrCat("ucx_single_requests_", list), Median(single_us_), "us", Median(ucx_us_),
                Median(single_us_) / Median(ucx_us_)});
    report.Check("bytes", wrong_ == 0, absl::StrCat(wrong_, " wrong units"));
  }

 private:
  void Draw() {
    std::uniform_int_distribution<size_t> page(0, daemon_->pages.size() - 1);
    std::uniform_int_distribution<int> layer(0, slot_.num_layers - 1);
    std::uniform_int_distribution<int> head(0, slot_.shard_heads - 1);
    for (size_t i = 0; i < entries_.size(); ++i) {
      pages_[i] = &daemon_->pages[page(random_)];
      entries_[i] = {pages_[i]->slot, static_cast<uint16_t>(layer(random_)), static_cast<uint16_t>(head(random_)),
                     pages_[i]->generation};
    }
  }
  void Copy() {
    for (size_t i = 0; i < entries_.size(); ++i) {
      const FetchEntry& entry = entries_[i];
      std::memcpy(destinations_[i], memory_->unit(entry.slot, entry.layer, entry.head), slot_.unit_bytes);
    }
  }
  FetchList List(size_t first, size_t count) {
    FetchList list;
    list.entries = {entries_.data() + first, count};
    list.destinations = destinations_.data() + first;
    list.valid = valid_.data() + first;
    list.deadline = absl::Seconds(10);
    return list;
  }
  void Fetch(Fetcher& fetcher) {
    FetchList list = List(0, entries_.size());
    fetcher.Start(list);
    fetcher.Wait(list);
    KVD_CHECK(list.code == absl::StatusCode::kOk && list.num_valid == static_cast<int64_t>(entries_.size()));
  }
  // The same units, each asked for by itself, eight requests in flight.
  void FetchSingly() {
    constexpr size_t kInFlight = 8;
    FetchList lists[kInFlight];
    for (size_t i = 0; i < entries_.size() + kInFlight; ++i) {
      FetchList& list = lists[i % kInFlight];
      if (i >= kInFlight) {
        ucx_->Wait(list);
        KVD_CHECK(list.num_valid == 1);
      }
      if (i >= entries_.size()) continue;
      list = List(i, 1);
      ucx_->Start(list);
    }
  }
  void Measure(std::vector<double>& times, bool measured, const std::function<void()>& work) {
    std::memset(buffer_.data(), 0xEE, entries_.size() * slot_.unit_bytes);
    const double us = Microseconds(work);
    if (measured) times.push_back(us);
    Check(buffer_.data());
  }
  void MeasurePlain(std::vector<double>& times, bool measured, size_t message_bytes) {
    const double us = Microseconds([&] { plain_.Fetch(entries_, slot_.unit_bytes, message_bytes); });
    if (measured) times.push_back(us);
    Check(plain_.buffer());
  }
  void Check(const uint8_t* units) {
    for (size_t i = 0; i < entries_.size(); ++i) {
      const std::vector<uint8_t> expected =
          UnitBytes(slot_, pages_[i]->page, pages_[i]->write, entries_[i].layer, entries_[i].head);
      if (std::memcmp(units + i * slot_.unit_bytes, expected.data(), expected.size()) != 0) ++wrong_;
    }
  }

  ChildDaemon* daemon_;
  SlotLayout slot_;
  std::mt19937_64 random_{1};
  std::vector<FetchEntry> entries_;
  std::vector<const TestPage*> pages_;
  std::vector<uint8_t*> destinations_;
  std::vector<uint8_t> valid_;
  StagingBuffer buffer_;
  std::unique_ptr<Fetcher> shared_;
  std::unique_ptr<Fetcher> ucx_;
  std::unique_ptr<ArenaMemory> memory_;
  PlainUcx plain_;
  std::vector<double> memcpy_us_;
  std::vector<double> shared_us_;
  std::vector<double> ucx_us_;
  std::vector<double> single_us_;
  std::vector<double> plain_4m_us_;
  std::vector<double> plain_1m_us_;
  int64_t wrong_ = 0;
};

int Main() {
  PinTo(0);  // inherited by the daemon and the plain server
  std::printf("filling the arena ...\n");
  ChildDaemon daemon(absl::GetFlag(FLAGS_pages), ChildKind::kLarge);
  UcxOptions options;
  options.devices = "lo";
  std::unique_ptr<UcxWorker> worker;
  {
    // The plain server is started by the constructor below, still on core 0.
    auto made = UcxWorker::Make(options);
    KVD_CHECK(made.ok());
    worker = *std::move(made);
  }
  worker->Run([] { PinTo(1); });
  Report report("fetch_bench");
  {
    Bench bench(&daemon, worker.get(), static_cast<size_t>(absl::GetFlag(FLAGS_units)));
    PinTo(1);
    const int rounds = absl::GetFlag(FLAGS_rounds);
    for (int i = -std::max(rounds / 10, 1); i < rounds; ++i) bench.Round(i >= 0);
    bench.Report(report);
  }
  report.PrintTable();
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) {
    if (const absl::Status status = report.WriteJson(path); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      return 1;
    }
  }
  return report.all_ok() ? 0 : 1;
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  kvd::RunAsChildDaemonIfAsked(argc, argv);
  kvd::bench::ServePlainUcxIfAsked(argc, argv);
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
