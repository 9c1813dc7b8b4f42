// How fast chosen units come from another process, on each path, beside what bounds it.
//
// usage: fetch_bench [--units=512] [--repetitions=N] [--json=FILE]
// A child process serves a 1 GiB host arena of 8 KiB units; this one fetches random lists of them
// and checks every byte. Limits, measured in the same run and interleaved with what they bound:
//   shared  memcpy of the same pieces out of the same mapping
//   ucx     a plain gather in the child followed by one UCX active message of that many bytes

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/report.h"
#include "client/shared_fetcher.h"
#include "client/ucx_fetcher.h"
#include "proto/fd_channel.h"
#include "proto/status.h"
#include "proto/ucx_link.h"
#include "tests/support/data_plane.h"

ABSL_FLAG(int, units, 512, "units a list");
ABSL_FLAG(int, repetitions, 200, "lists timed for each figure");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

constexpr uint64_t kArenaBytes = uint64_t{1} << 30;

KvGeometry BenchGeometry() {
  KvGeometry geometry;
  geometry.num_layers = 8;
  geometry.num_q_heads = 32;
  geometry.num_kv_heads = 8;
  geometry.head_dim = 128;
  geometry.softmax_scale = 0.088388f;
  return geometry;
}

void PinTo(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core % static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), &set);
  sched_setaffinity(0, sizeof(set), &set);
}

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

// --- the child: a daemon's data plane, and the reference answer ----------------------------------

// Answers a request with a plain gather of `count` pieces and one message: what ucx is compared
// with.
class PlainAnswer final : public UcxReceiver, public UcxSend {
 public:
  PlainAnswer(UcxWorker* worker, const ArenaMemory* memory) : worker_(worker), memory_(memory) {}

  void OnMessage(const MessageHeader& request, UcxPayload&) override {
    UcxEndpoint* peer = worker_->FindPeer(request.session, ChannelOf(request.request));
    if (peer == nullptr || busy_) return;
    const ArenaShape& shape = memory_->shape();
    buffer_.resize(request.count * shape.slot.unit_bytes);
    for (uint32_t i = 0; i < request.count; ++i) {
      const auto slot = static_cast<uint32_t>(random_() % shape.num_slots);
      const int layer = static_cast<int>(random_() % static_cast<unsigned>(shape.slot.num_layers));
      std::memcpy(buffer_.data() + i * shape.slot.unit_bytes, memory_->unit(slot, layer, 0),
                  shape.slot.unit_bytes);
    }
    header = request;
    header.type = MessageType::kIngestAck;
    busy_ = true;
    worker_->Send(peer, *this, buffer_);
  }
  void OnSent(bool) override { busy_ = false; }

 private:
  UcxWorker* worker_;
  const ArenaMemory* memory_;
  std::mt19937 random_{1};
  std::vector<uint8_t> buffer_;
  bool busy_ = false;
};

void WriteWhole(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd, at, bytes);
    if (n <= 0) _exit(1);
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

bool ReadWhole(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = read(fd, at, bytes);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

[[noreturn]] void Serve(int to_parent, int from_parent) {
  PinTo(0);
  TestDaemon::Options options;
  options.geometry = BenchGeometry();
  options.bytes = kArenaBytes;
  {
    TestDaemon daemon(options);
    const locks_kvd::v1::AttachReply offer = daemon.Attach();
    const uint64_t num_pages = ShapeOf(offer).num_slots - 1;  // one slot is the canary's
    std::vector<TestPage> pages;
    for (uint64_t p = 0; p < num_pages; ++p) {
      pages.push_back(daemon.PutPage(offer, p, 1));
      if (p % 64 == 0)
        std::fprintf(stderr, "\rfetch_bench: filling the arena %3.0f%%",
                     100.0 * static_cast<double>(p) / static_cast<double>(num_pages));
    }
    std::fprintf(stderr, "\n");
    PlainAnswer plain(daemon.worker.get(), &daemon.arena->memory());
    daemon.worker->SetReceiver(MessageType::kIngest, &plain);
    const std::string text = offer.SerializeAsString();
    const uint64_t sizes[2] = {text.size(), pages.size()};
    WriteWhole(to_parent, sizes, sizeof(sizes));
    WriteWhole(to_parent, text.data(), text.size());
    WriteWhole(to_parent, pages.data(), pages.size() * sizeof(TestPage));
    char byte;
    while (read(from_parent, &byte, 1) > 0) {
    }
    daemon.worker->SetReceiver(MessageType::kIngest, nullptr);
  }
  _exit(0);
}

// --- this process --------------------------------------------------------------------------------

// One list, its destinations and what it must bring.
struct Fetch {
  std::vector<FetchEntry> entries;
  std::vector<uint64_t> page;
  std::vector<uint8_t> memory;
  std::vector<uint8_t*> destinations;
  std::vector<uint8_t> valid;
  FetchList list;
};

class FetchBench {
 public:
  FetchBench(locks_kvd::v1::AttachReply offer, std::vector<TestPage> pages)
      : offer_(std::move(offer)), pages_(std::move(pages)), shape_(ShapeOf(offer_)) {}

  absl::Status Connect() {
    KVD_ASSIGN_OR_RETURN(shared_memory_, MapArena());
    KVD_ASSIGN_OR_RETURN(auto memory, MapArena());
    TouchEveryUnit(*shared_memory_);
    TouchEveryUnit(*memory);
    shared_ = std::make_unique<SharedFetcher>(std::move(memory));
    UcxOptions options;
    options.devices = "lo";
    KVD_ASSIGN_OR_RETURN(worker_, UcxWorker::Make(options));
    const std::string& address = offer_.ucx().worker_address();
    KVD_ASSIGN_OR_RETURN(ucx_, UcxFetcher::Connect(worker_.get(), address, IncarnationOf(offer_),
                                                   TokenOf(offer_), shape_.slot, absl::Seconds(5)));
    KVD_ASSIGN_OR_RETURN(link_, UcxLink::Connect(worker_.get(), address, IncarnationOf(offer_),
                                                 TokenOf(offer_), &answer_, absl::Seconds(5)));
    return absl::OkStatus();
  }

  void Run(Report* report) {
    const int units = absl::GetFlag(FLAGS_units), repetitions = absl::GetFlag(FLAGS_repetitions);
    std::vector<double> copy, shared, plain, ucx, single;
    int64_t wrong = 0, missing = 0, checked = 0;
    const auto check = [&](const Fetch& fetch) {
      for (size_t i = 0; i < fetch.entries.size(); ++i) {
        const FetchEntry& e = fetch.entries[i];
        if (!fetch.valid[i]) ++missing;
        const std::vector<uint8_t> want = UnitBytes(shape_.slot, fetch.page[i], 1, e.layer, e.head);
        if (fetch.valid[i] && std::memcmp(want.data(), fetch.destinations[i], want.size()) != 0)
          ++wrong;
        ++checked;
      }
    };
    Fetch copied, mapped, fetch;
    for (int r = 0; r < repetitions; ++r) {
      // A list of its own for each, so that none finds its pieces in the cache; in turns of who
      // goes first.
      for (Fetch* next : {&copied, &mapped, &fetch}) Renew(next, units);
      const bool verify = r % 20 == 0;  // making the expected bytes takes far longer than the fetch
      if (r % 2 == 0) copy.push_back(TimeCopy(copied));
      shared.push_back(TimeFetch(*shared_, mapped));
      if (r % 2 != 0) copy.push_back(TimeCopy(copied));
      if (verify) check(mapped);
      ucx.push_back(TimeFetch(*ucx_, fetch));
      if (verify) check(fetch);
      plain.push_back(TimePlain(units));
      if (r % 10 == 0) single.push_back(TimeSingles(fetch));
      if (r % 10 == 0) std::fprintf(stderr, "\rfetch_bench: %3d%%", 100 * r / repetitions);
    }
    std::fprintf(stderr, "\rfetch_bench: 100%%\n");
    const double bytes = static_cast<double>(units) * static_cast<double>(shape_.slot.unit_bytes);
    const auto rate = [&](std::vector<double> seconds) {
      return bytes / Median(std::move(seconds)) / 1e9;
    };
    const auto name = [&](const char* what) {
      return absl::StrCat("fetch/", what, "/", units, "x8KiB");
    };
    report->Add({name("memcpy"), rate(copy), "GB/s", 0, 0});
    report->Add({name("shared"), rate(shared), "GB/s", rate(copy), rate(shared) / rate(copy)});
    report->Add({name("shared_us"), Median(shared) * 1e6, "us", Median(copy) * 1e6, 0});
    report->Add({name("plain_gather_and_one_message"), rate(plain), "GB/s", 0, 0});
    report->Add({name("ucx"), rate(ucx), "GB/s", rate(plain), rate(ucx) / rate(plain)});
    report->Add({name("ucx_us"), Median(ucx) * 1e6, "us", Median(plain) * 1e6, 0});
    report->Add({name("ucx_single_requests"), rate(single), "GB/s", 0, 0});
    report->Add({name("ucx_over_single_requests"), rate(ucx) / rate(single), "times", 2,
                 rate(ucx) / rate(single)});
    report->Check("every byte of the checked lists", wrong == 0 && missing == 0 && checked > 0,
                  absl::StrCat(wrong, " wrong and ", missing, " missing of ", checked, " units"));
    report->Check("every reference message came", answer_.failures == 0,
                  absl::StrCat(answer_.failures.load(), " did not"));
  }

 private:
  // Takes the reference's one message.
  struct Answer final : UcxReceiver, UcxReceive {
    void OnMessage(const MessageHeader&, UcxPayload& payload) override {
      buffer.resize(payload.bytes());
      payload.ReceiveInto(buffer.data(), *this);
    }
    void OnReceived(bool ok) override {
      if (!ok) ++failures;
      done.store(true, std::memory_order_release);
    }
    std::vector<uint8_t> buffer;
    std::atomic<bool> done{false};
    std::atomic<int> failures{0};
  };
  // Sends the reference's request from the progress thread.
  struct Request final : UcxTask, UcxSend {
    explicit Request(UcxLink* to) : link(to) {}
    void RunOnProgressThread() override { link->Send(*this, {}); }
    void OnSent(bool) override { sent.store(true, std::memory_order_release); }
    UcxLink* link;
    std::atomic<bool> sent{false};
  };

  absl::StatusOr<std::unique_ptr<ArenaMemory>> MapArena() const {
    DescriptorRequest request;
    request.incarnation = IncarnationOf(offer_);
    request.session = TokenOf(offer_);
    KVD_ASSIGN_OR_RETURN(
        std::vector<UniqueFd> descriptors,
        ReceiveDescriptors(offer_.shared().socket_path(), request, absl::Seconds(5)));
    return ArenaMemory::MapShared(shape_, std::move(descriptors));
  }

  // The first touch of a mapped page is a page fault, which a worker pays once, not with each list.
  void TouchEveryUnit(const ArenaMemory& memory) const {
    constexpr size_t kPageBytes = 4096;  // of the operating system
    for (uint32_t slot = 0; slot < shape_.num_slots; ++slot) {
      const uint8_t* at = memory.unit(slot, 0, 0);
      for (size_t i = 0; i < shape_.slot.slot_bytes(); i += kPageBytes)
        *static_cast<const volatile uint8_t*>(at + i);
    }
  }

  // A new random list into the memory of the last one, as a decode step has it.
  void Renew(Fetch* fetch, int units) {
    const size_t unit_bytes = shape_.slot.unit_bytes;
    fetch->memory.resize(static_cast<size_t>(units) * unit_bytes);
    fetch->valid.assign(static_cast<size_t>(units), 0);
    fetch->entries.clear();
    fetch->page.clear();
    fetch->destinations.clear();
    for (int i = 0; i < units; ++i) {
      const TestPage& page = pages_[random_() % pages_.size()];
      fetch->entries.push_back(
          {page.slot,
           static_cast<uint16_t>(random_() % static_cast<unsigned>(shape_.slot.num_layers)),
           static_cast<uint16_t>(random_() % static_cast<unsigned>(shape_.slot.shard_heads)),
           page.generation});
      fetch->page.push_back(page.page);
      fetch->destinations.push_back(fetch->memory.data() + static_cast<size_t>(i) * unit_bytes);
    }
    fetch->list.deadline = absl::Seconds(5);
  }

  double TimeCopy(const Fetch& fetch) const {
    const absl::Time start = absl::Now();
    for (size_t i = 0; i < fetch.entries.size(); ++i) {
      const FetchEntry& e = fetch.entries[i];
      std::memcpy(fetch.destinations[i], shared_memory_->unit(e.slot, e.layer, e.head),
                  shape_.slot.unit_bytes);
    }
    return SecondsSince(start);
  }

  static double TimeRange(Fetcher& fetcher, Fetch& fetch, size_t first, size_t count) {
    fetch.list.entries = {fetch.entries.data() + first, count};
    fetch.list.destinations = fetch.destinations.data() + first;
    fetch.list.valid = fetch.valid.data() + first;
    const absl::Time start = absl::Now();
    fetcher.Start(fetch.list);
    fetcher.Wait(fetch.list);
    return SecondsSince(start);
  }
  static double TimeFetch(Fetcher& fetcher, Fetch& fetch) {
    return TimeRange(fetcher, fetch, 0, fetch.entries.size());
  }

  double TimeSingles(Fetch& fetch) {
    double seconds = 0;
    for (size_t i = 0; i < fetch.entries.size(); ++i) seconds += TimeRange(*ucx_, fetch, i, 1);
    return seconds;
  }

  double TimePlain(int units) {
    Request request(link_.get());
    request.header = link_->Header(MessageType::kIngest, ++number_);
    request.header.count = static_cast<uint32_t>(units);
    answer_.done = false;
    const absl::Time start = absl::Now();
    worker_->Post(request);
    while (!answer_.done.load(std::memory_order_acquire) ||
           !request.sent.load(std::memory_order_acquire)) {
      if (SecondsSince(start) > 5) {
        ++answer_.failures;
        break;
      }
      sched_yield();  // the progress thread shares this core
    }
    return SecondsSince(start);
  }

  const locks_kvd::v1::AttachReply offer_;
  const std::vector<TestPage> pages_;
  const ArenaShape shape_;
  std::mt19937 random_{7};
  uint64_t number_ = 0;
  std::unique_ptr<ArenaMemory> shared_memory_;
  std::unique_ptr<SharedFetcher> shared_;
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<UcxFetcher> ucx_;
  Answer answer_;
  std::unique_ptr<UcxLink> link_;
};

int Main() {
  int up[2], down[2];
  if (pipe(up) != 0 || pipe(down) != 0) return 1;
  const pid_t child = fork();  // before any thread or UCX
  if (child == 0) {
    close(up[0]);
    close(down[1]);
    Serve(up[1], down[0]);
  }
  close(up[1]);
  close(down[0]);
  PinTo(1);
  Report report("fetch_bench");
  uint64_t sizes[2];
  absl::Status status = absl::UnavailableError("the serving process ended");
  if (ReadWhole(up[0], sizes, sizeof(sizes))) {
    std::string text(sizes[0], '\0');
    std::vector<TestPage> pages(sizes[1]);
    locks_kvd::v1::AttachReply offer;
    if (ReadWhole(up[0], text.data(), text.size()) &&
        ReadWhole(up[0], pages.data(), pages.size() * sizeof(TestPage)) &&
        offer.ParseFromString(text)) {
      FetchBench bench(offer, std::move(pages));
      status = bench.Connect();
      if (status.ok()) bench.Run(&report);
    }
  }
  close(down[1]);
  waitpid(child, nullptr, 0);
  report.Check("connected", status.ok(), status.ToString());
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("fetch_bench [--units=512] [--repetitions=N] [--json=FILE]");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
