// A daemon with arenas on a GPU: over UCX, and what it tells those who attach.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "client/ucx_fetcher.h"
#include "proto/ingest_channel.h"
#include "proto/pool.grpc.pb.h"
#include "service/peer_session.h"
#include "service/server.h"
#include "tests/service/server_fixture.h"
#include "tests/support/data_plane.h"
#include "tests/support/gpu.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;
using ::testing::Contains;
using ::testing::HasSubstr;

class GpuServingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = testing::WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

std::unique_ptr<UcxWorker> ClientWorker() {
  UcxOptions options;
  options.devices = "lo";
  auto worker = UcxWorker::Make(options);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

// Items of one list, fetched; each destination was 0xEE before.
struct Fetched {
  Fetched(Fetcher* fetcher, const std::vector<FetchEntry>& entries, size_t item_bytes,
          bool summaries = false)
      : item(item_bytes), bytes(entries.size() * item_bytes, 0xEE), valid(entries.size(), 0xEE) {
    std::vector<uint8_t*> destinations;
    for (size_t i = 0; i < entries.size(); ++i)
      destinations.push_back(bytes.data() + i * item_bytes);
    FetchList list;
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = absl::Seconds(5);
    if (summaries) {
      fetcher->FetchSummaries(list);
    } else {
      fetcher->Start(list);
      fetcher->Wait(list);
    }
    code = list.code;
  }
  bool Holds(size_t i, const std::vector<uint8_t>& want) const {
    return std::memcmp(bytes.data() + i * item, want.data(), want.size()) == 0;
  }
  size_t item;
  std::vector<uint8_t> bytes, valid;
  absl::StatusCode code;
};

TEST_F(GpuServingTest, UnitsComeInByIngestAndGoOutByFetchOverUcx) {
  TestDaemon::Options options;
  options.place = OnGpu(0);
  options.bytes = 64 << 20;
  TestDaemon daemon(options);
  const v1::AttachReply offer = daemon.Attach();
  const SlotLayout slot = daemon.arena->memory().shape().slot;
  const auto worker = ClientWorker();
  auto ingest =
      IngestChannel::Connect(worker.get(), offer.ucx().worker_address(), IncarnationOf(offer),
                             TokenOf(offer), slot.unit_bytes, absl::Seconds(5));
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  constexpr uint64_t kPages = 64;  // 2 MiB: several pieces
  std::vector<std::vector<uint8_t>> contents;
  std::vector<IngestUnit> units;
  std::vector<uint64_t> tickets;
  for (uint64_t page = 0; page < kPages; ++page) {
    tickets.push_back(daemon.Reserve(offer, page));
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head)
        contents.push_back(UnitBytes(slot, page, 3, layer, head));
    }
  }
  for (size_t i = 0; i < contents.size(); ++i) {
    const auto unit = static_cast<int>(i % slot.num_units());
    units.push_back({tickets[i / slot.num_units()], static_cast<uint16_t>(unit / slot.shard_heads),
                     static_cast<uint16_t>(unit % slot.shard_heads), contents[i].data()});
  }
  std::reverse(units.begin(), units.end());
  ASSERT_TRUE((*ingest)->Send(units, absl::Seconds(5)).ok());
  std::vector<FetchEntry> entries;
  for (const uint64_t ticket : tickets) {
    const auto sealed = daemon.arena->Seal(daemon.Session(offer).id, Ticket{ticket});
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    for (size_t u = 0; u < slot.num_units(); ++u) {
      const auto heads = static_cast<size_t>(slot.shard_heads);
      entries.push_back({sealed->location.slot, static_cast<uint16_t>(u / heads),
                         static_cast<uint16_t>(u % heads), sealed->location.generation});
    }
  }
  std::vector<FetchEntry> asked = entries;
  for (size_t i = 0; i < asked.size(); i += 7) asked[i].generation += 2;  // never sealed
  auto fetcher = UcxFetcher::Connect(worker.get(), offer.ucx().worker_address(),
                                     IncarnationOf(offer), TokenOf(offer), slot, absl::Seconds(5));
  ASSERT_TRUE(fetcher.ok()) << fetcher.status();
  const Fetched fetched(fetcher->get(), asked, slot.unit_bytes);
  ASSERT_EQ(fetched.code, absl::StatusCode::kOk);
  for (size_t i = 0; i < asked.size(); ++i) {
    EXPECT_EQ(fetched.valid[i], i % 7 == 0 ? 0 : 1) << i;
    EXPECT_EQ(fetched.Holds(i, contents[i]), i % 7 != 0) << i;
    EXPECT_FALSE(fetched.Holds(i, contents[(i + 1) % contents.size()])) << i;
  }
  std::vector<FetchEntry> slots;
  for (size_t i = 0; i < entries.size(); i += slot.num_units()) slots.push_back(entries[i]);
  slots[1].generation += 2;
  const Fetched records(fetcher->get(), slots, slot.summary_bytes(), /*summaries=*/true);
  for (size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQ(records.valid[i], i == 1 ? 0 : 1) << i;
    if (i == 1) continue;
    StagingBuffer staging;
    const PageStore::PageBytes page = daemon.arena->store().ReadPage(slots[i].slot, &staging);
    EXPECT_EQ(std::memcmp(records.bytes.data() + i * records.item, page.records, records.item), 0);
    EXPECT_EQ(Checksum64(page.records, slot.summary_bytes()), page.summary_checksum);
  }
}

// A daemon with an arena in host memory and one on the GPU.
v1::DaemonConfig TwoArenas(const testing::ScratchDirectory& directory) {
  v1::DaemonConfig config = testing::TinyConfig(directory.path(), 12);
  *config.add_arenas() = config.arenas(0);
  config.mutable_arenas(1)->set_model("on-gpu");
  config.mutable_arenas(1)->set_gpu(0);
  return config;
}

TEST_F(GpuServingTest, EachArenaIsOfferedByThePathOfItsMemoryAndItsDescriptorsAreTheArenas) {
  testing::ScratchDirectory directory;
  const v1::DaemonConfig config = TwoArenas(directory);
  ASSERT_THAT(ConfigProblems(config), ::testing::IsEmpty());
  EXPECT_THAT(PrintConfig(config), HasSubstr("gpu: 0"));
  auto server = Server::Start(config);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto stub = v1::Pool::NewStub(grpc::CreateChannel((*server)->ready().control_address(),
                                                          grpc::InsecureChannelCredentials()));
  const auto attach = [&](const std::string& model) {
    v1::AttachRequest request;
    request.set_protocol_min(kProtocolVersion);
    request.set_protocol_max(kProtocolVersion);
    request.set_tenant("acme");
    request.set_model(model);
    request.set_layout_fingerprint(LayoutFingerprint(testing::TinyGeometry()));
    const Fingerprint fingerprint = ModelFingerprint(testing::TinyGeometry(), "w", "");
    request.set_model_fingerprint(fingerprint.data(), fingerprint.size());
    grpc::ClientContext context;
    v1::AttachReply reply;
    const grpc::Status status = stub->Attach(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  };
  const v1::AttachReply host = attach("tiny"), gpu = attach("on-gpu");
  EXPECT_TRUE(host.has_shared());
  EXPECT_FALSE(host.has_peer());
  EXPECT_FALSE(gpu.has_shared());
  ASSERT_TRUE(gpu.has_peer());
  EXPECT_EQ(gpu.peer().gpu_uuid(), *GpuUuid(0));
  EXPECT_EQ(gpu.peer().host_id(), host.shared().host_id());
  DescriptorRequest request;
  request.incarnation = IncarnationOf(gpu);
  request.session = TokenOf(gpu);
  auto descriptors = ReceiveDescriptors(gpu.peer().socket_path(), request, absl::Seconds(5));
  ASSERT_TRUE(descriptors.ok()) << descriptors.status();
  const auto memory = ArenaMemory::MapGpu(ShapeOf(gpu), *std::move(descriptors), 0);
  ASSERT_TRUE(memory.ok()) << memory.status();
  uint64_t word = 0;
  KVD_CUDA_OK(cudaMemcpy(&word, (*memory)->unit(0, 1, 0) + 8, 8, cudaMemcpyDeviceToHost));
  EXPECT_EQ(word, CanaryWord(IncarnationOf(gpu), (*memory)->shape().slot.unit_bytes / 8 + 1));
  grpc::ClientContext context;
  v1::StatsReply stats;
  ASSERT_TRUE(stub->Stats(&context, {}, &stats).ok());
  EXPECT_FALSE(stats.arenas(0).has_gpu());
  EXPECT_TRUE(stats.arenas(1).has_gpu());
  EXPECT_THAT(stats.paths(), Contains(HasSubstr("peer: yes: GPU 0 ")));
}

TEST_F(GpuServingTest, PagesMoveBetweenHostAndGpuAndArriveWhole) {
  testing::ScratchDirectory directory;
  auto server = Server::Start(TwoArenas(directory));
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string address = (*server)->ready().control_address();
  const auto admin =
      v1::Admin::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  const auto worker = ClientWorker();
  SteadyClock clock;
  for (const bool to_gpu : {true, false}) {
    ArenaOptions options = testing::TinyOptions(12, &clock);
    options.model = to_gpu ? "on-gpu" : "tiny";
    options.model_fingerprint = ModelFingerprint(options.geometry, "w", "");
    if (!to_gpu) options.place = OnGpu(0);
    const std::shared_ptr<Arena> from = testing::MakeArena(std::move(options));
    from->BeginSession(SessionId{1});
    for (int page = 0; page < 10; ++page) (void)testing::PutPage(from.get(), SessionId{1}, page);
    auto session = PeerSession::Open(address, {}, from, worker.get(), absl::Seconds(5));
    ASSERT_TRUE(session.ok()) << session.status();
    const std::vector<SealedCopy> pages = from->SealedPages();
    ASSERT_EQ(pages.size(), 10u);
    std::vector<CopyOutcome> outcomes(pages.size());
    uint64_t bytes = 0;
    ASSERT_TRUE((*session)->Copy(pages, outcomes, &bytes).ok());
    EXPECT_THAT(outcomes, ::testing::Each(CopyOutcome::kCopied));
    v1::VerifyRequest request;
    request.set_tenant("acme");
    request.set_model(to_gpu ? "on-gpu" : "tiny");
    v1::VerifyReply verified;
    grpc::ClientContext context;
    ASSERT_TRUE(admin->Verify(&context, request, &verified).ok());
    EXPECT_EQ(verified.pages(), 10u);
    EXPECT_EQ(verified.failures_size(), 0);
  }
}

TEST_F(GpuServingTest, AGpuThatIsNotThereIsNamedWithHowManyThereAre) {
  testing::ScratchDirectory directory;
  v1::DaemonConfig config = testing::TinyConfig(directory.path(), 3);
  config.mutable_arenas(0)->set_gpu(NumGpus());
  const auto server = Server::Start(config);
  EXPECT_EQ(server.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(server.status().message(), HasSubstr("arenas[0].gpu: expected a GPU from 0 to "));
}

}  // namespace
}  // namespace kvd
