// What a fetch server must survive and refuse: a peer that speaks UCX but not our protocol, lists
// beyond a limit, deadlines that have passed, and garbage on the TCP port itself.

#include "service/fetch_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>

#include "absl/time/clock.h"
#include "client/ucx_fetcher.h"
#include "proto/ucx_link.h"
#include "tests/service/fetch_unit.h"
#include "tests/support/data_plane.h"

namespace kvd {
namespace {

std::unique_ptr<UcxWorker> ClientWorker() {
  UcxOptions options;
  options.devices = "lo";
  auto worker = UcxWorker::Make(options);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

// A client that sends what it is told, and keeps the headers of the answers.
class RawClient final : public UcxReceiver {
 public:
  RawClient(UcxWorker* worker, const locks_kvd::v1::AttachReply& offer) : worker_(worker) {
    auto link = UcxLink::Connect(worker, offer.ucx().worker_address(), IncarnationOf(offer),
                                 TokenOf(offer), this, absl::Seconds(5));
    EXPECT_TRUE(link.ok()) << link.status();
    link_ = *std::move(link);
  }
  ~RawClient() override { link_.reset(); }

  MessageHeader Header(MessageType type) { return link_->Header(type, ++number_); }

  // Sends and waits until it has left.
  void Send(const MessageHeader& header, std::vector<uint8_t> payload) {
    struct Message final : UcxSend {
      bool sent = false;
      void OnSent(bool) override { sent = true; }
    } message;
    message.header = header;
    worker_->Run([&] { link_->Send(message, payload); });
    bool sent = false;
    while (!sent) worker_->Run([&] { sent = message.sent; });
  }
  // The next answer; count 0 and status kOk if none comes in time.
  MessageHeader Answer(std::chrono::milliseconds limit = std::chrono::seconds(5)) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!came_.wait_for(lock, limit, [&] { return !answers_.empty(); })) return {};
    const MessageHeader answer = answers_.front();
    answers_.erase(answers_.begin());
    return answer;
  }
  void OnMessage(const MessageHeader& header, UcxPayload&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    answers_.push_back(header);
    came_.notify_one();
  }

 private:
  UcxWorker* worker_;
  std::unique_ptr<UcxLink> link_;
  uint64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable came_;
  std::vector<MessageHeader> answers_;
};

std::vector<uint8_t> Payload(const std::vector<FetchEntry>& entries) {
  std::vector<uint8_t> bytes(entries.size() * sizeof(FetchEntry));
  std::memcpy(bytes.data(), entries.data(), bytes.size());
  return bytes;
}

class FetchServerTest : public testing::Test {
 protected:
  void Start(const TestDaemon::Options& options = {}) {
    daemon_ = std::make_unique<TestDaemon>(options);
    offer_ = daemon_->Attach();
    page_ = daemon_->PutPage(offer_, 1, 1);
    worker_ = ClientWorker();
    client_ = std::make_unique<RawClient>(worker_.get(), offer_);
  }
  void TearDown() override {
    client_.reset();
    worker_.reset();
  }
  FetchEntry Good() const { return {page_.slot, 1, 1, page_.generation}; }
  MessageHeader Request(uint32_t count) {
    MessageHeader header = client_->Header(MessageType::kFetch);
    header.count = count;
    header.deadline_us = 5000000;
    return header;
  }
  void ExpectGoodClientServed() {
    const SlotLayout slot = ShapeOf(offer_).slot;
    const std::unique_ptr<UcxWorker> worker = ClientWorker();
    auto fetcher =
        UcxFetcher::Connect(worker.get(), offer_.ucx().worker_address(), IncarnationOf(offer_),
                            TokenOf(offer_), slot, absl::Seconds(5));
    ASSERT_TRUE(fetcher.ok()) << fetcher.status();
    const FetchedUnit unit = FetchUnit(**fetcher, slot.unit_bytes, Good(), absl::Seconds(5));
    EXPECT_EQ(unit.code, absl::StatusCode::kOk);
    EXPECT_EQ(unit.bytes, UnitBytes(slot, 1, 1, 1, 1));
  }
  void ExpectIdle() {
    for (int i = 0; i < 200 && daemon_->fetches->num_in_flight() > 0; ++i)
      absl::SleepFor(absl::Milliseconds(10));
    EXPECT_EQ(daemon_->fetches->num_in_flight(), 0u);
  }

  std::unique_ptr<TestDaemon> daemon_;
  locks_kvd::v1::AttachReply offer_;
  TestPage page_;
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<RawClient> client_;
};

TEST_F(FetchServerTest, MalformedRequestsAreAnsweredInvalidAndCounted) {
  Start();
  const struct {
    const char* what;
    uint32_t count;
    uint8_t flags;
    std::vector<FetchEntry> entries;
    size_t cut;
  } cases[] = {
      {"no entries", 0, 0, {}, 0},
      {"fewer entries than it says", 2, 0, {Good()}, 0},
      {"more entries than it says", 1, 0, {Good(), Good()}, 0},
      {"a cut entry", 1, 0, {Good()}, 3},
      {"unknown flags", 1, 0x80, {Good()}, 0},
      {"a slot out of range", 1, 0, {{0xFFFFFFFFu, 0, 0, 2}}, 0},
      {"a layer out of range", 1, 0, {{page_.slot, 0xFFFF, 0, 2}}, 0},
      {"a head out of range", 1, 0, {{page_.slot, 0, 0xFFFF, 2}}, 0},
  };
  uint64_t malformed = 0;
  for (const auto& c : cases) {
    MessageHeader header = Request(c.count);
    header.flags = c.flags;
    std::vector<uint8_t> payload = Payload(c.entries);
    payload.resize(payload.size() - c.cut);
    client_->Send(header, payload);
    const MessageHeader answer = client_->Answer();
    EXPECT_EQ(answer.status, WireStatus::kInvalid) << c.what;
    EXPECT_EQ(answer.request, header.request) << c.what;
    EXPECT_EQ(daemon_->fetches->num_malformed(), ++malformed) << c.what;
  }
  ExpectIdle();
  ExpectGoodClientServed();
}

TEST_F(FetchServerTest, AWishForGpuMemoryIsAnsweredFromHostMemoryWhereThereIsNoOther) {
  Start();
  MessageHeader wish = Request(1);
  wish.flags = kFlagGpuMemory;
  client_->Send(wish, Payload({Good()}));
  const MessageHeader answer = client_->Answer();
  EXPECT_EQ(answer.status, WireStatus::kOk);
  EXPECT_EQ(answer.count, 1u);
  EXPECT_EQ(answer.flags, 0) << "a piece in host memory must not be taken for one without a bitmap";
  ExpectGoodClientServed();
}

TEST_F(FetchServerTest, RandomEntriesHarmNobody) {
  Start();
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<uint8_t> payload(random() % 3000);
    for (uint8_t& b : payload) b = static_cast<uint8_t>(random());
    MessageHeader header = Request(static_cast<uint32_t>(payload.size() / sizeof(FetchEntry)));
    header.flags = static_cast<uint8_t>(random() % 3);
    header.deadline_us = static_cast<uint32_t>(random());
    client_->Send(header, payload);
    EXPECT_NE(client_->Answer().status, WireStatus::kOk);
  }
  ExpectIdle();
  ExpectGoodClientServed();
}

TEST_F(FetchServerTest, AHugeCountIsRefusedBeforeAnythingIsAllocated) {
  Start();
  client_->Send(Request(0xFFFFFFFFu), Payload({Good()}));
  EXPECT_EQ(client_->Answer().status, WireStatus::kInvalid);  // its length does not fit
  client_->Send(Request(65537), std::vector<uint8_t>(65537 * sizeof(FetchEntry)));
  EXPECT_EQ(client_->Answer().status, WireStatus::kExhausted);
  EXPECT_EQ(daemon_->fetches->num_refused(), 1u);
  ExpectGoodClientServed();
}

TEST_F(FetchServerTest, BytesInFlightOfASessionAreBounded) {
  TestDaemon::Options options;
  options.limits.bytes_in_flight_per_session = 8 * 4096;
  Start(options);
  client_->Send(Request(8), Payload(std::vector<FetchEntry>(8, Good())));
  EXPECT_EQ(client_->Answer().status, WireStatus::kOk);
  ExpectIdle();
  client_->Send(Request(9), Payload(std::vector<FetchEntry>(9, Good())));
  EXPECT_EQ(client_->Answer().status, WireStatus::kExhausted);
}

TEST_F(FetchServerTest, ARequestWhoseTimeIsOverIsAnsweredLate) {
  Start();
  MessageHeader header = Request(1);
  header.deadline_us = 0;
  client_->Send(header, Payload({Good()}));
  EXPECT_EQ(client_->Answer().status, WireStatus::kLate);
  ExpectIdle();
}

TEST_F(FetchServerTest, WrongTokensAndIncarnationsGetNoUnits) {
  Start();
  MessageHeader header = Request(1);
  header.session[3] ^= 1;
  client_->Send(header, Payload({Good()}));
  EXPECT_EQ(client_->Answer(std::chrono::milliseconds(100)).request,
            0u);  // a stranger: no answer at all
  header = Request(1);
  header.incarnation[3] ^= 1;
  client_->Send(header, Payload({Good()}));
  // Answered under the foreign incarnation, which the link ignores (guarantee G3).
  EXPECT_EQ(client_->Answer(std::chrono::milliseconds(100)).request, 0u);
  ASSERT_TRUE(daemon_->sessions->Detach(TokenOf(offer_), daemon_->incarnation).ok());
  client_->Send(Request(1), Payload({Good()}));
  EXPECT_EQ(client_->Answer().status, WireStatus::kAborted);
}

TEST_F(FetchServerTest, ADrainingServerRefuses) {
  Start();
  daemon_->fetches->Drain();
  client_->Send(Request(1), Payload({Good()}));
  EXPECT_EQ(client_->Answer().status, WireStatus::kUnavailable);
}

TEST_F(FetchServerTest, ASessionThatEndsInTheMiddleOfItsAnswerIsSafe) {
  TestDaemon::Options options;
  options.bytes = 64 << 20;
  Start(options);
  for (int round = 0; round < 20; ++round) {
    const locks_kvd::v1::AttachReply offer = daemon_->Attach();
    RawClient client(worker_.get(), offer);
    MessageHeader header = client.Header(MessageType::kFetch);
    header.count = 20000;  // 80 MB, in many pieces
    header.deadline_us = 5000000;
    client.Send(header, Payload(std::vector<FetchEntry>(20000, {0, 1, 1, 2})));
    ASSERT_TRUE(daemon_->sessions->Detach(TokenOf(offer), daemon_->incarnation).ok());
  }
  ExpectIdle();
  ExpectGoodClientServed();
}

// Noise on the TCP port of UCX: connections that send nothing, little, much or nearly valid bytes.
TEST_F(FetchServerTest, NoiseOnTheTcpPortHarmsNobody) {
  TestDaemon::Options options;
  options.port_range = "41350-41379";
  Start(options);
  std::mt19937 random(5);
  int connected = 0;
  for (uint16_t port = 41350; port < 41380; ++port) {
    for (const size_t bytes :
         {size_t{0}, size_t{1}, size_t{16}, size_t{64}, size_t{4096}, size_t{1} << 20}) {
      const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      sockaddr_in address = {};
      address.sin_family = AF_INET;
      address.sin_port = htons(port);
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) break;
      ++connected;
      std::vector<uint8_t> noise(bytes);
      for (uint8_t& b : noise) b = static_cast<uint8_t>(random());
      if (bytes > 0) send(socket.get(), noise.data(), noise.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      absl::SleepFor(absl::Milliseconds(5));
    }
  }
  ASSERT_EQ(connected, 6) << "the daemon's UCX port was not found in its range";
  ExpectGoodClientServed();
}

}  // namespace
}  // namespace kvd
