#include "service/session_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/service/pool_fixture.h"

namespace kvd {
namespace {

using testing::PoolFixture;
namespace v1 = locks_kvd::v1;

class SessionStreamTest : public PoolFixture {
 protected:
  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::SessionPing, v1::SessionEvent>> rpc;
    uint64_t next_ping = 1;

    bool Ping(const v1::SessionRef& session) {
      v1::SessionPing ping;
      *ping.mutable_session() = session;
      ping.set_sequence_number(next_ping++);
      return rpc->Write(ping);
    }
    v1::SessionEvent Read() {
      v1::SessionEvent event;
      EXPECT_TRUE(rpc->Read(&event));
      return event;
    }
    // The stream's end, whatever was still to be read.
    grpc::Status End() {
      v1::SessionEvent event;
      while (rpc->Read(&event)) {
      }
      return rpc->Finish();
    }
  };
  std::unique_ptr<Stream> Open() {
    auto stream = std::make_unique<Stream>();
    stream->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    stream->rpc = stub_->Session(&stream->context);
    return stream;
  }
};

TEST_F(SessionStreamTest, PingsAreAcknowledgedInOrderAndKeepTheSessionAlive) {
  const v1::SessionRef session = Attached();
  auto stream = Open();
  for (uint64_t i = 1; i <= 4; ++i) {
    clock_.Advance(absl::Seconds(4));
    ASSERT_TRUE(stream->Ping(session));
    const v1::SessionEvent event = stream->Read();
    EXPECT_EQ(event.ping_ack().sequence_number(), i);
    EXPECT_EQ(event.sequence_number(), i);
    EXPECT_EQ(event.incarnation(), std::string(16, 7));
    EXPECT_EQ(sessions_->EndSilent().size(), 0u);
  }
  stream->rpc->WritesDone();
  EXPECT_TRUE(stream->End().ok());
  EXPECT_EQ(sessions_->size(), 1u) << "the stream's end does not end the session";
  clock_.Advance(absl::Seconds(5));
  EXPECT_EQ(sessions_->EndSilent().size(), 1u) << "its TTL does";
}

TEST_F(SessionStreamTest, LostSessionEndsItsStreamWithAborted) {
  const v1::SessionRef session = Attached();
  auto stream = Open();
  ASSERT_TRUE(stream->Ping(session));
  stream->Read();
  pool_->TickStreams();
  clock_.Advance(absl::Seconds(5));
  sessions_->EndSilent();
  pool_->TickStreams();
  EXPECT_EQ(stream->End().error_code(), grpc::StatusCode::ABORTED);
}

TEST_F(SessionStreamTest, StreamThatNamesNoSessionIsEnded) {
  auto stream = Open();
  grpc::Status status;
  std::thread reader([&] { status = stream->End(); });
  // The handler may still be on its way: tick until the stream is seen.
  while (metrics_.rpc_requests[static_cast<size_t>(Rpc::kSession)][4].value() == 0) {
    clock_.Advance(absl::Seconds(5));
    pool_->TickStreams();
    std::this_thread::yield();
  }
  reader.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(SessionStreamTest, BadPingsEndTheStream) {
  const v1::SessionRef first = Attached();
  const v1::SessionRef second = Attached();
  v1::SessionRef restarted = first;
  restarted.set_incarnation(std::string(16, 9));
  auto stream = Open();
  ASSERT_TRUE(stream->Ping(restarted));
  EXPECT_EQ(stream->End().error_code(), grpc::StatusCode::ABORTED);
  stream = Open();
  ASSERT_TRUE(stream->Ping(v1::SessionRef()));
  EXPECT_EQ(stream->End().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  stream = Open();
  ASSERT_TRUE(stream->Ping(first));
  stream->Read();
  ASSERT_TRUE(stream->Ping(second));
  EXPECT_EQ(stream->End().error_code(), grpc::StatusCode::INVALID_ARGUMENT)
      << "one stream, one session";
}

TEST_F(SessionStreamTest, EverySessionLearnsOfADrainOnceEarlyOrLate) {
  const v1::SessionRef session = Attached();
  auto early = Open();
  ASSERT_TRUE(early->Ping(session));
  early->Read();
  pool_->StartDraining("maintenance");
  v1::SessionEvent event = early->Read();
  EXPECT_EQ(event.draining().reason(), "maintenance");
  EXPECT_EQ(event.sequence_number(), 2u);
  pool_->StartDraining("maintenance");
  ASSERT_TRUE(early->Ping(session));
  EXPECT_TRUE(early->Read().has_ping_ack()) << "told once";
  auto late = Open();
  ASSERT_TRUE(late->Ping(session));
  EXPECT_TRUE(late->Read().has_ping_ack());
  EXPECT_EQ(late->Read().draining().reason(), "maintenance");
}

TEST_F(SessionStreamTest, EvictionsOfReleasedPagesComeWithTheAnswerToAPing) {
  const v1::SessionRef session = Attached();
  auto stream = Open();
  ASSERT_TRUE(stream->Ping(session));
  EXPECT_TRUE(stream->Read().has_ping_ack());
  const PageLocation gone = testing::PutPage(arena_.get(), IdOf(session), 0);
  ASSERT_TRUE(arena_->Release(IdOf(session), std::vector<PageLocation>{gone}).ok());
  for (int page = 1; page < 7; ++page)
    testing::PutPage(arena_.get(), IdOf(session), page);  // of 6 slots
  ASSERT_TRUE(stream->Ping(session));
  EXPECT_TRUE(stream->Read().has_ping_ack());
  const v1::SessionEvent event = stream->Read();
  ASSERT_EQ(event.evicted().slots_size(), 1);
  EXPECT_EQ(event.evicted().slots(0), gone.slot);
  EXPECT_EQ(event.evicted().generations(0), gone.generation);
  EXPECT_EQ(event.sequence_number(), 3u);
  ASSERT_TRUE(stream->Ping(session));
  EXPECT_TRUE(stream->Read().has_ping_ack()) << "told once";
}

TEST_F(SessionStreamTest, StoppingDaemonEndsEveryStream) {
  const v1::SessionRef session = Attached();
  auto stream = Open();
  ASSERT_TRUE(stream->Ping(session));
  stream->Read();
  pool_->EndStreams();
  EXPECT_EQ(stream->End().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(SessionStreamTest, ManyStreamsComeAndGo) {
  const v1::SessionRef session = Attached();
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  std::thread ticker([&] {
    while (!stop) {
      pool_->TickStreams();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        auto stream = Open();
        EXPECT_TRUE(stream->Ping(session));
        stream->Read();
        if (i % 2 == 0) {
          stream->context.TryCancel();
        } else {
          stream->rpc->WritesDone();
        }
        stream->End();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  ticker.join();
}

}  // namespace
}  // namespace kvd
