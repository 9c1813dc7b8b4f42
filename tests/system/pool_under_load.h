// Real daemons that follow one members file, a client with sequences in them, and threads that
// fetch these all the time.

#ifndef LOCKS_KVD_TESTS_SYSTEM_POOL_UNDER_LOAD_H_
#define LOCKS_KVD_TESTS_SYSTEM_POOL_UNDER_LOAD_H_

#include <google/protobuf/text_format.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/kv_client.h"
#include "proto/config.pb.h"
#include "proto/placement.h"
#include "proto/pool.grpc.pb.h"
#include "tests/client/engine_cache.h"
#include "tests/support/daemon_process.h"

namespace kvd::testing {

class PoolUnderLoad {
 protected:
  static constexpr int kPages = 70;      // of a sequence: three stripes
  static constexpr int kSequences = 12;  // 36 stripes
  static constexpr int kTail = 5;
  static constexpr int kDecoded = 200;

  virtual ~PoolUnderLoad() = default;
  // Where and how daemon `d` runs.
  virtual DaemonSpec SpecOf(size_t) { return {}; }
  virtual std::vector<std::string> PrefixOf(size_t) { return {}; }
  virtual void Adjust(locks_kvd::v1::DaemonConfig*) {}
  virtual void Adjust(ClientOptions*) {}

  void StartDaemon(uint32_t replicas = 1, uint64_t arena_bytes = uint64_t{64} << 20,
                   const std::string& model = "model") {
    DaemonSpec spec = SpecOf(daemons_.size());
    spec.geometry = geometry_;
    spec.arena_bytes = arena_bytes;
    spec.model = model;
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    auto& cluster = *config.mutable_cluster();
    cluster.set_name(absl::StrCat("d", daemons_.size()));
    cluster.set_members_file(MembersFile());
    cluster.set_poll_ms(100);
    cluster.set_replicas(replicas);
    Adjust(&config);
    auto daemon = DaemonProcess::StartUnder(PrefixOf(daemons_.size()), std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemons_.push_back(*std::move(daemon));
  }
  std::string MembersFile() const { return dir_.path() + "/members"; }
  void WriteMembers(const std::vector<size_t>& daemons) {
    locks_kvd::v1::MemberList list;
    for (const size_t d : daemons) {
      auto* member = list.add_members();
      member->set_name(absl::StrCat("d", d));
      member->set_address(daemons_[d]->address());
    }
    std::string text;
    google::protobuf::TextFormat::PrintToString(list, &text);
    std::ofstream(MembersFile() + ".new") << text;
    std::filesystem::rename(MembersFile() + ".new", MembersFile());
  }

  void Connect() {
    ClientOptions options;
    options.members_file = MembersFile();
    options.members_poll = absl::Milliseconds(100);
    options.tenant = "test";
    options.model = "model";
    options.geometry = geometry_;
    options.weights_id = "weights";
    options.rope = "theta=10000";
    options.required_path = path_;
    options.best_path = path_;
    options.ucx_devices = "lo";
    Adjust(&options);
    auto client = KvClient::Make(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  // Sequences with keys of their own over the same data.
  void PutAll() {
    const int64_t tokens = int64_t{kPages} * geometry_.page_tokens + kTail + kDecoded;
    data_ = SequenceData::Random(geometry_, tokens, 1);
    engine_ = std::make_unique<EngineCache>(data_);
    for (int s = 0; s < kSequences; ++s) {
      std::vector<uint32_t> ids(static_cast<size_t>(kPages * geometry_.page_tokens));
      std::iota(ids.begin(), ids.end(), static_cast<uint32_t>(s * 1000000));
      keys_.push_back(client_->PageKeys(ids));
      auto report =
          client_->Put({.keys = keys_.back(), .num_pages = kPages, .layers = engine_->layers()});
      ASSERT_TRUE(report.ok()) << report.status();
      ASSERT_EQ(report->num_new, kPages) << report->first_failure;
    }
    expected_ = client_->FetchPages(keys_[0])->units;
  }

  // Sealed pages of a daemon.
  uint32_t PagesAt(size_t daemon) {
    auto stub = locks_kvd::v1::Pool::NewStub(
        grpc::CreateChannel(daemons_[daemon]->address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    locks_kvd::v1::StatsReply reply;
    return stub->Stats(&context, {}, &reply).ok() ? reply.arenas(0).slots_sealed() : 0;
  }
  static bool WaitFor(const std::function<bool()>& condition) {
    for (int i = 0; i < 3000; ++i) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

  // Fetches whole sequences over and over until stopped. Every byte that comes is compared, of
  // short answers too.
  struct Load {
    std::atomic<bool> stop{false};
    std::atomic<int> num_fetched{0};
    std::atomic<int> num_short{0};
    std::atomic<int> num_failed{0};
    std::atomic<int> num_wrong{0};
    std::atomic<int64_t> longest_ms{0};
    std::mutex mutex;
    std::string first_short;
    std::string first_failure;
    std::vector<std::thread> threads;
    ~Load() { Stop(); }
    void Stop() {
      stop = true;
      for (std::thread& thread : threads) thread.join();
      threads.clear();
    }
  };
  void StartLoad(Load* load) {
    for (size_t t = 0; t < 3; ++t) {
      load->threads.emplace_back([this, load, t] {
        for (size_t i = t; !load->stop; ++i) {
          const absl::Time start = absl::Now();
          const auto fetched = client_->FetchPages(keys_[i % keys_.size()]);
          const int64_t took = absl::ToInt64Milliseconds(absl::Now() - start);
          if (took > load->longest_ms) load->longest_ms = took;
          ++load->num_fetched;
          if (fetched.ok() &&
              !std::equal(fetched->units.begin(), fetched->units.end(), expected_.begin())) {
            ++load->num_wrong;
          }
          if (!fetched.ok() || fetched->num_pages != kPages) {
            ++(fetched.ok() ? load->num_short : load->num_failed);
            const std::lock_guard<std::mutex> lock(load->mutex);
            std::string& problem = fetched.ok() ? load->first_short : load->first_failure;
            if (problem.empty()) {
              problem = fetched.ok() ? absl::StrCat(fetched->num_pages, " pages")
                                     : fetched.status().ToString();
            }
          }
        }
      });
    }
  }
  static void ExpectClean(Load& load) {
    load.Stop();
    EXPECT_GT(load.num_fetched, 10);
    EXPECT_EQ(load.num_failed, 0) << load.first_failure;
    EXPECT_EQ(load.num_short, 0) << load.first_short;
    EXPECT_EQ(load.num_wrong, 0);
  }

  // Opens a sequence of which daemon 0 owns pages.
  std::unique_ptr<Sequence> Open(const StepOptions& step) {
    std::vector<PlacedMember> members;
    for (size_t d = 0; d < daemons_.size(); ++d) members.push_back({absl::StrCat("d", d), 1});
    const Placement placement(members);
    const auto is_at_first = [&](const std::vector<PageKey>& keys) {
      const std::vector<int> owners = PlacePages(keys, placement);
      return std::count(owners.begin(), owners.end(), 0) > 0;
    };
    const auto keys = std::find_if(keys_.begin(), keys_.end(), is_at_first);
    EXPECT_NE(keys, keys_.end());
    if (keys == keys_.end()) return nullptr;
    auto sequence =
        client_->OpenSequence(*keys, {.max_tokens = data_.num_tokens + 100, .step = step});
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    if (!sequence.ok()) return nullptr;
    EXPECT_EQ((*sequence)->num_open_pages(), kPages);
    EXPECT_TRUE((*sequence)
                    ->AppendTail(engine_->layers(), int64_t{kPages} * geometry_.page_tokens, kTail)
                    .ok());
    return *std::move(sequence);
  }

  PathKind path_ = PathKind::kUcx;
  static constexpr uint32_t kAll = kPages * kSequences;
  KvGeometry geometry_ = SmallGeometry();
  TempDir dir_;
  std::vector<std::unique_ptr<DaemonProcess>> daemons_;
  std::unique_ptr<KvClient> client_;
  SequenceData data_;
  std::unique_ptr<EngineCache> engine_;
  std::vector<std::vector<PageKey>> keys_;
  std::vector<uint8_t> expected_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SYSTEM_POOL_UNDER_LOAD_H_
