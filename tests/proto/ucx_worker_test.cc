// Active messages between two workers of this process, over loopback TCP: every size, held and
// dropped payloads, tasks from many threads, peers that go away, and greetings that nobody should
// trust.

#include "proto/ucx_worker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "kernels/checksum.h"
#include "proto/ucx_link.h"

namespace kvd {
namespace {

std::vector<uint8_t> Bytes(size_t size, uint64_t seed) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<uint8_t>(Mix64(seed + i / 8) >> (i % 8 * 8));
  return bytes;
}

std::unique_ptr<UcxWorker> MakeWorker(bool read_from_sender = false) {
  UcxOptions options;
  options.devices = "lo";
  options.read_from_sender = read_from_sender;
  auto worker = UcxWorker::Make(options);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

// Waits for `condition`, which is evaluated on the worker's progress thread.
bool Eventually(UcxWorker& worker, const std::function<bool()>& condition) {
  for (int i = 0; i < 5000; ++i) {
    bool met = false;
    worker.Run([&] { met = condition(); });
    if (met) return true;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return false;
}

enum class Mode { kReceive, kHold, kDrop };

// Takes messages in one of three ways. Its fields belong to the progress thread: look at them by
// Eventually.
struct Inbox final : UcxReceiver {
  struct Part final : UcxReceive {
    MessageHeader header;
    std::vector<uint8_t> bytes;
    bool done = false;
    bool failed = false;
    void OnReceived(bool ok) override { (ok ? done : failed) = true; }
  };
  explicit Inbox(Mode mode_in) : mode(mode_in) {}
  void OnMessage(const MessageHeader& header, UcxPayload& payload) override {
    ++seen;
    if (mode == Mode::kHold) held.push_back({header, payload.Hold()});
    if (mode == Mode::kReceive) Receive(header, payload);
  }
  void Receive(const MessageHeader& header, UcxPayload& payload) {
    parts.push_back(std::make_unique<Part>());
    parts.back()->header = header;
    parts.back()->bytes.resize(payload.bytes());
    payload.ReceiveInto(parts.back()->bytes.data(), *parts.back());
  }
  void ReceiveHeld() {
    for (auto& [header, payload] : held) Receive(header, payload);
    held.clear();
  }
  bool Has(uint64_t request, const std::vector<uint8_t>& bytes) const {
    return std::any_of(parts.begin(), parts.end(), [&](const auto& part) {
      return part->header.request == request && part->done && part->bytes == bytes;
    });
  }

  const Mode mode;
  size_t seen = 0;
  std::vector<std::unique_ptr<Part>> parts;
  std::vector<std::pair<MessageHeader, UcxPayload>> held;
};

// A message, its payload and what became of it.
struct Outgoing final : UcxSend {
  std::vector<uint8_t> payload;
  bool sent = false;
  bool failed = false;
  void OnSent(bool ok) override { (ok ? sent : failed) = true; }
};

class UcxWorkerTest : public testing::Test {
 protected:
  void SetUp() override {
    incarnation_.fill(1);
    token_.fill(2);
    daemon_ = MakeWorker(true);
    daemon_->AcceptPeers([this](const MessageHeader& header) {
      return TokensEqual(header.session, token_) ? absl::OkStatus()
                                                 : absl::AbortedError("a stranger");
    });
    client_ = MakeWorker();
  }
  void Connect(UcxReceiver* answers) {
    auto link = UcxLink::Connect(client_.get(), daemon_->address(), incarnation_, token_, answers,
                                 absl::Seconds(10));
    ASSERT_TRUE(link.ok()) << link.status();
    link_ = *std::move(link);
  }
  std::unique_ptr<Outgoing> Send(MessageType type, uint64_t number, std::vector<uint8_t> payload) {
    auto message = std::make_unique<Outgoing>();
    message->header = link_->Header(type, number);
    message->payload = std::move(payload);
    client_->Run([&] { link_->Send(*message, message->payload); });
    return message;
  }

  Incarnation incarnation_;
  SessionToken token_;
  std::unique_ptr<UcxWorker> daemon_;
  std::unique_ptr<UcxWorker> client_;
  std::unique_ptr<UcxLink> link_;
};

TEST_F(UcxWorkerTest, MessagesOfEverySizeArriveWholeBothWays) {
  Inbox at_daemon(Mode::kReceive);
  Inbox at_client(Mode::kReceive);
  daemon_->SetReceiver(MessageType::kIngest, &at_daemon);
  Connect(&at_client);
  uint64_t number = 0;
  for (const size_t size : {0u, 1u, 63u, 64u, 1000u, 8191u, 8192u, 8193u, 65536u, 262208u, 1u << 20,
                            (4u << 20) + 64u}) {
    ++number;
    const std::vector<uint8_t> payload = Bytes(size, number);
    const auto message = Send(MessageType::kIngest, number, payload);
    ASSERT_TRUE(Eventually(*daemon_, [&] {
      return at_daemon.Has(message->header.request, payload);
    })) << size;
    ASSERT_TRUE(Eventually(*client_, [&] { return message->sent; })) << size;
    Outgoing answer;
    answer.header = message->header;
    answer.header.type = MessageType::kIngestAck;
    answer.payload = payload;
    daemon_->Run([&] {
      UcxEndpoint* peer = daemon_->FindPeer(token_, ChannelOf(answer.header.request));
      ASSERT_NE(peer, nullptr);
      daemon_->Send(peer, answer, answer.payload);
    });
    ASSERT_TRUE(Eventually(*client_, [&] { return at_client.Has(answer.header.request, payload); }))
        << size;
    ASSERT_TRUE(Eventually(*daemon_, [&] { return answer.sent; })) << size;
    EXPECT_FALSE(at_client.Has(answer.header.request, Bytes(size + 1, number)));
  }
  daemon_->SetReceiver(MessageType::kIngest, nullptr);
  link_.reset();
}

TEST_F(UcxWorkerTest, HeldPayloadsArriveWhenThereIsRoomAndDroppedOnesLetTheirSenderGo) {
  Inbox inbox(Mode::kHold);
  daemon_->SetReceiver(MessageType::kIngest, &inbox);
  Inbox none(Mode::kDrop);
  Connect(&none);
  const std::vector<uint8_t> small = Bytes(100, 1);
  const std::vector<uint8_t> large = Bytes(1 << 20, 2);
  const auto a = Send(MessageType::kIngest, 1, small);
  const auto b = Send(MessageType::kIngest, 2, large);
  ASSERT_TRUE(Eventually(*daemon_, [&] { return inbox.seen == 2; }));
  daemon_->Run([&] { inbox.ReceiveHeld(); });
  EXPECT_TRUE(Eventually(*daemon_, [&] { return inbox.Has(a->header.request, small); }));
  EXPECT_TRUE(Eventually(*daemon_, [&] { return inbox.Has(b->header.request, large); }));
  const auto c = Send(MessageType::kIngest, 3, large);
  ASSERT_TRUE(Eventually(*daemon_, [&] { return inbox.seen == 3; }));
  daemon_->Run([&] { inbox.held.clear(); });
  EXPECT_TRUE(Eventually(*client_, [&] { return c->sent; }));
  Inbox dropping(Mode::kDrop);
  daemon_->SetReceiver(MessageType::kIngest, &dropping);
  const auto d = Send(MessageType::kIngest, 4, large);
  EXPECT_TRUE(Eventually(*client_, [&] { return d->sent; }));
  daemon_->SetReceiver(MessageType::kIngest, nullptr);
  link_.reset();
}

TEST_F(UcxWorkerTest, AnswersGoToTheirChannelAndTheirIncarnationOnly) {
  Inbox mine(Mode::kReceive);
  Inbox other(Mode::kReceive);
  Connect(&mine);
  auto second = UcxLink::Connect(client_.get(), daemon_->address(), incarnation_, token_, &other,
                                 absl::Seconds(10));
  ASSERT_TRUE(second.ok()) << second.status();
  Outgoing answers[3];
  for (Outgoing& answer : answers) answer.header = link_->Header(MessageType::kFetchReply, 7);
  answers[0].header.incarnation[0] ^= 1;             // of a daemon that had this address before
  answers[1].header.request += uint64_t{100} << 48;  // of no channel
  daemon_->Run([&] {
    UcxEndpoint* peer =
        daemon_->FindPeer(token_, ChannelOf(link_->Header(MessageType::kFetch, 0).request));
    ASSERT_NE(peer, nullptr);
    for (Outgoing& answer : answers) daemon_->Send(peer, answer, {});
  });
  EXPECT_TRUE(Eventually(*client_, [&] { return mine.seen == 1; }));
  client_->Run([&] { EXPECT_EQ(mine.seen, 1u); });
  client_->Run([&] { EXPECT_EQ(other.seen, 0u); });
  link_.reset();
}

// Every task runs, those of one thread in their order, whether the progress thread sleeps or spins.
TEST_F(UcxWorkerTest, TasksOfManyThreadsRunOnceAndInOrder) {
  constexpr int kThreads = 4;
  constexpr int kTasks = 2000;
  struct Task final : UcxTask {
    std::vector<int>* log;
    int number;
    void RunOnProgressThread() override { log->push_back(number); }
  };
  std::vector<int> logs[kThreads];
  std::vector<Task> tasks[kThreads];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    tasks[t].resize(kTasks);
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i) {
        tasks[t][static_cast<size_t>(i)].log = &logs[t];
        tasks[t][static_cast<size_t>(i)].number = i;
        client_->Post(tasks[t][static_cast<size_t>(i)]);
        if (i % 500 == 0) absl::SleepFor(absl::Milliseconds(2));  // let it fall asleep
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<int>& log : logs) {
    EXPECT_TRUE(Eventually(*client_, [&] { return log.size() == kTasks; }));
    client_->Run([&] { EXPECT_TRUE(std::is_sorted(log.begin(), log.end())); });
  }
}

TEST_F(UcxWorkerTest, LongTurnsOfTheThreadAreCounted) {
  const double before = client_->stalls().sum_seconds();
  client_->Run([] { absl::SleepFor(absl::Milliseconds(20)); });
  client_->Run([] {});  // the turn of the one before is over
  EXPECT_GE(client_->stalls().sum_seconds() - before, 0.02);
}

// The daemon need not have noticed that the client closed its end: a long message on what is left
// of the old connection would never be fetched.
TEST_F(UcxWorkerTest, AConnectionThatIsOpenedAgainCarriesLongMessages) {
  for (uint64_t round = 1; round <= 5; ++round) {
    Inbox inbox(Mode::kReceive);
    Connect(&inbox);
    Outgoing answer;
    answer.header = link_->Header(MessageType::kFetchReply, round);
    answer.payload = Bytes(1 << 20, round);
    daemon_->Run([&] {
      UcxEndpoint* peer = daemon_->FindPeer(token_, ChannelOf(answer.header.request));
      ASSERT_NE(peer, nullptr);
      daemon_->Send(peer, answer, answer.payload);
    });
    EXPECT_TRUE(Eventually(*client_, [&] {
      return inbox.Has(answer.header.request, answer.payload);
    })) << round;
    EXPECT_TRUE(Eventually(*daemon_, [&] { return answer.sent; })) << round;
    client_->Run([&] { link_->Abort(); });
    link_.reset();
  }
}

TEST_F(UcxWorkerTest, APeerThatGoesAwayFailsTheEndpointAndANewOneCanConnect) {
  Inbox none(Mode::kDrop);
  Connect(&none);
  daemon_.reset();
  std::vector<std::unique_ptr<Outgoing>> messages;
  bool failed = false;
  for (uint64_t i = 0; i < 2000 && !failed; ++i) {
    messages.push_back(Send(MessageType::kIngest, i, Bytes(100, i)));
    client_->Run([&] { failed = link_->failed(); });
    absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_TRUE(failed);
  const auto after = Send(MessageType::kIngest, 1, Bytes(100, 1));
  client_->Run([&] { EXPECT_TRUE(after->failed); });
  link_.reset();
  SetUp();
  Connect(&none);
  link_.reset();
}

TEST_F(UcxWorkerTest, AbortEndsWhatIsInFlight) {
  Inbox inbox(Mode::kHold);
  daemon_->SetReceiver(MessageType::kIngest, &inbox);
  Inbox none(Mode::kDrop);
  Connect(&none);
  const auto message =
      Send(MessageType::kIngest, 1, Bytes(1 << 20, 1));  // waits until it is received
  ASSERT_TRUE(Eventually(*daemon_, [&] { return inbox.seen == 1; }));
  client_->Run([&] { EXPECT_FALSE(message->sent); });
  client_->Run([&] { link_->Abort(); });
  EXPECT_TRUE(Eventually(*client_, [&] { return message->failed || message->sent; }));
  daemon_->Run([&] { inbox.held.clear(); });
  daemon_->SetReceiver(MessageType::kIngest, nullptr);
  link_.reset();
}

TEST_F(UcxWorkerTest, StrangersGetNoEndpoint) {
  Inbox none(Mode::kDrop);
  SessionToken stranger = token_;
  stranger[0] ^= 1;
  EXPECT_EQ(UcxLink::Connect(client_.get(), daemon_->address(), incarnation_, stranger, &none,
                             absl::Milliseconds(200))
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(daemon_->num_malformed(), 1u);
  daemon_->Run([&] { EXPECT_EQ(daemon_->FindPeer(stranger, 1), nullptr); });
}

// UCX itself would end the daemon's process on a peer's address that it cannot parse.
TEST_F(UcxWorkerTest, AGreetingWithADamagedAddressIsCountedAndHarmsNobody) {
  Inbox none(Mode::kDrop);
  Connect(&none);
  std::string damaged = client_->address();
  damaged[damaged.size() - 3] ^= 1;
  uint64_t malformed = 0;
  std::vector<std::unique_ptr<Outgoing>> sent;  // live until they have left
  for (const std::string& address :
       {std::string("x"), std::string(200, '\0'), damaged, client_->address().substr(1),
        std::string(20000, 'x'), std::string()}) {
    sent.push_back(Send(MessageType::kHello, 0, {address.begin(), address.end()}));
    ++malformed;
    EXPECT_TRUE(Eventually(*daemon_, [&] { return daemon_->num_malformed() == malformed; }))
        << address.size();
  }
  Inbox inbox(Mode::kReceive);
  daemon_->SetReceiver(MessageType::kIngest, &inbox);
  sent.push_back(Send(MessageType::kIngest, 9, {}));
  EXPECT_TRUE(Eventually(*daemon_, [&] { return inbox.seen == 1; }));
  daemon_->SetReceiver(MessageType::kIngest, nullptr);
  link_.reset();
}

TEST(UcxOptionsTest, ADeviceThatIsNotThereIsRefusedByName) {
  UcxOptions options;
  options.devices = "nodevice0";
  const absl::Status status = UcxWorker::Make(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("nodevice0"), absl::string_view::npos) << status;
}

TEST(UcxOptionsTest, TransportsAreThoseOfTheNetworkUnlessNamed) {
  const std::unique_ptr<UcxWorker> worker = MakeWorker();
  EXPECT_EQ(worker->transports().find("posix"), std::string::npos);
  EXPECT_EQ(worker->transports().rfind("tcp", 0), 0u);
}

}  // namespace
}  // namespace kvd
