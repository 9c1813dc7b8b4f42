// The destination of bulk moves against callers that are wrong, hostile, gone or silent.

#include "service/move_receiver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/status.h"
#include "service/mover.h"
#include "tests/service/move_fixture.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;
using testing::Eventually;
using ::testing::HasSubstr;
using testing::MoveDaemon;
using testing::StandInLibrary;

// One call of Pool.Move that says whatever the test wants.
struct RawMove {
  explicit RawMove(v1::Pool::Stub* stub) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream = stub->Move(&context);
  }
  bool Say(const v1::MoveRequest& request) { return stream->Write(request); }
  v1::MoveReply::State Hear() {
    v1::MoveReply reply;
    return stream->Read(&reply) ? reply.state() : v1::MoveReply::STATE_UNSPECIFIED;
  }
  absl::Status End() {
    stream->WritesDone();
    return FromGrpc(stream->Finish());
  }
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::MoveRequest, v1::MoveReply>> stream;
};

class MoveReceiverTest : public ::testing::Test {
 protected:
  MoveReceiverTest() {
    auto attached = daemon_.data.sessions->Attach(daemon_.data.arena, "mover", SessionKind::kMover);
    EXPECT_TRUE(attached.ok());
    id_ = attached->id;
    token_ = attached->token;
    session_.set_token(token_.data(), token_.size());
    session_.set_incarnation(daemon_.data.incarnation.data(), daemon_.data.incarnation.size());
    stub_ =
        v1::Pool::NewStub(grpc::CreateChannel(daemon_.address, grpc::InsecureChannelCredentials()));
  }
  v1::MoveRequest Hello() const {
    v1::MoveRequest request;
    *request.mutable_hello()->mutable_session() = session_;
    request.mutable_hello()->set_library("stand-in 1");
    request.mutable_hello()->set_device("gpu-a");
    return request;
  }
  v1::MoveRequest Join(const std::string& id) const {
    v1::MoveRequest request;
    request.mutable_join()->set_communicator_id(id);
    return request;
  }
  static v1::MoveRequest Pages(const std::vector<uint64_t>& tickets) {
    v1::MoveRequest request;
    request.mutable_pages()->mutable_tickets()->Add(tickets.begin(), tickets.end());
    return request;
  }
  // Up to the point where pages may be named. The other end of the communicator is this test's
  // link.
  std::unique_ptr<RawMove> Joined() {
    auto move = std::make_unique<RawMove>(stub_.get());
    EXPECT_TRUE(move->Say(Hello()));
    EXPECT_EQ(move->Hear(), v1::MoveReply::STATE_WILLING);
    const std::string id = *source_library_->MakeId();
    EXPECT_TRUE(move->Say(Join(id)));
    MoveLink::Options options;
    options.library = source_library_;
    options.id = id;
    link_ = std::make_unique<MoveLink>(std::move(options));
    EXPECT_EQ(move->Hear(), v1::MoveReply::STATE_JOINED);
    return move;
  }
  // Reservations of the mover's session.
  std::vector<uint64_t> Reserve(int first, int count) {
    std::vector<uint64_t> tickets;
    for (int page = first; page < first + count; ++page) {
      PageKey key = {};
      key[0] = static_cast<uint8_t>(page);
      const auto page_idx = static_cast<uint32_t>(page);
      const auto reserved = daemon_.data.arena->Reserve(id_, {&key, 1}, {&page_idx, 1}, 0);
      EXPECT_EQ(reserved->pages[0].state, ReserveOutcome::State::kNew);
      tickets.push_back(static_cast<uint64_t>(reserved->pages[0].ticket));
    }
    return tickets;
  }
  void ExpectRefused(const v1::MoveRequest& request, absl::StatusCode code,
                     const std::string& why) {
    RawMove move(stub_.get());
    (void)move.Say(request);  // it may be refused by then
    const absl::Status status = move.End();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
  void ExpectPagesRefused(const v1::MoveRequest& request, absl::StatusCode code,
                          const std::string& why) {
    const std::unique_ptr<RawMove> move = Joined();
    EXPECT_TRUE(move->Say(request));
    const absl::Status status = move->End();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_TRUE(Eventually([&] { return library_->counts.alive == 0; }));
  }

  std::shared_ptr<StandInLibrary> library_ = std::make_shared<StandInLibrary>("gpu-b");
  std::shared_ptr<StandInLibrary> source_library_ = std::make_shared<StandInLibrary>("gpu-a");
  MoveDaemon daemon_{library_, absl::Minutes(2)};
  SessionId id_;
  SessionToken token_;
  v1::SessionRef session_;
  std::unique_ptr<v1::Pool::Stub> stub_;
  std::unique_ptr<MoveLink> link_;
};

TEST_F(MoveReceiverTest, RefusesCallersThatAreNoMovers) {
  v1::MoveRequest worker = Hello();
  *worker.mutable_hello()->mutable_session() = daemon_.offer.session();
  ExpectRefused(worker, absl::StatusCode::kPermissionDenied, "expected a mover's session");
  v1::MoveRequest unknown = Hello();
  unknown.mutable_hello()->mutable_session()->set_token(std::string(16, 'x'));
  ExpectRefused(unknown, absl::StatusCode::kAborted, "session");
  v1::MoveRequest short_token = Hello();
  short_token.mutable_hello()->mutable_session()->set_token("x");
  ExpectRefused(short_token, absl::StatusCode::kInvalidArgument, "token");
  EXPECT_EQ(library_->counts.alive, 0);
}

TEST_F(MoveReceiverTest, RefusesStepsOutOfOrderAndIdsThatAreNone) {
  ExpectRefused({}, absl::StatusCode::kInvalidArgument, "expected hello first");
  ExpectRefused(Join("communicator 1"), absl::StatusCode::kInvalidArgument, "expected hello first");
  ExpectRefused(Pages({1}), absl::StatusCode::kInvalidArgument, "expected hello first");
  for (const v1::MoveRequest& second : {Hello(), Pages({1}), v1::MoveRequest()}) {
    RawMove move(stub_.get());
    ASSERT_TRUE(move.Say(Hello()));
    ASSERT_EQ(move.Hear(), v1::MoveReply::STATE_WILLING);
    ASSERT_TRUE(move.Say(second));
    EXPECT_EQ(move.End().code(), absl::StatusCode::kInvalidArgument);
  }
  for (const std::string& id :
       {std::string(), std::string("garbage"), std::string(1 << 20, '\xff')}) {
    RawMove move(stub_.get());
    ASSERT_TRUE(move.Say(Hello()));
    ASSERT_EQ(move.Hear(), v1::MoveReply::STATE_WILLING);
    ASSERT_TRUE(move.Say(Join(id)));
    EXPECT_EQ(move.End().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(Eventually([&] { return library_->counts.alive == 0; }));
}

TEST_F(MoveReceiverTest, ReceivesOnlyIntoReservationsOfTheCallersSession) {
  ExpectPagesRefused(Pages({}), absl::StatusCode::kInvalidArgument, "1 to 1024 tickets, got 0");
  ExpectPagesRefused(Pages(std::vector<uint64_t>(kMaxMovedPages + 1)),
                     absl::StatusCode::kInvalidArgument, "got 1025");
  ExpectPagesRefused(Hello(), absl::StatusCode::kInvalidArgument, "expected pages");
  const std::vector<uint64_t> mine = Reserve(0, 2);
  ExpectPagesRefused(Pages({mine[0], mine[1], mine[0]}), absl::StatusCode::kInvalidArgument,
                     "one twice");
  ExpectPagesRefused(Pages({mine[0], 0}), absl::StatusCode::kNotFound, "unknown ticket");
  ExpectPagesRefused(Pages({~uint64_t{0}}), absl::StatusCode::kNotFound, "unknown ticket");
  // A worker's reservation in the same arena.
  const uint64_t foreign = daemon_.data.Reserve(daemon_.offer, 77);
  ExpectPagesRefused(Pages({mine[0], foreign}), absl::StatusCode::kNotFound, "another session's");
  EXPECT_EQ(library_->counts.receiving, 0);
}

TEST_F(MoveReceiverTest, ASourceThatDiesInTheMiddleIsNoticedAtOnceAndItsSlotsComeBack) {
  const std::vector<uint64_t> tickets = Reserve(0, 3);
  const std::unique_ptr<RawMove> move = Joined();
  ASSERT_TRUE(move->Say(Pages(tickets)));
  ASSERT_EQ(move->Hear(), v1::MoveReply::STATE_RECEIVING);
  move->context.TryCancel();  // what its death does to the connection
  EXPECT_TRUE(Eventually([&] { return library_->counts.aborted == 1; }));
  daemon_.data.sessions->Lose(token_, daemon_.data.incarnation);
  EXPECT_TRUE(Eventually([&] { return daemon_.Stats().slots_reserved == 0; }));
  EXPECT_EQ(daemon_.Stats().slots_quarantined, 3u);
  EXPECT_EQ(daemon_.Stats().slots_sealed, 0u);
}

TEST_F(MoveReceiverTest, AMoveEndsWithItsSession) {
  const std::vector<uint64_t> tickets = Reserve(0, 2);
  const std::unique_ptr<RawMove> idle = Joined();
  daemon_.pool->TickStreams();
  EXPECT_EQ(library_->counts.aborted, 0);
  daemon_.data.sessions->Lose(token_, daemon_.data.incarnation);
  daemon_.pool->TickStreams();
  EXPECT_EQ(idle->Hear(), v1::MoveReply::STATE_UNSPECIFIED);
  EXPECT_EQ(idle->End().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return library_->counts.aborted == 1; }));
}

TEST_F(MoveReceiverTest, ACallThatSaysNothingIsEnded) {
  RawMove silent(stub_.get());
  ASSERT_TRUE(Eventually([&] { return daemon_.moves->num_moves() == 1; }));
  daemon_.pool->TickStreams();
  EXPECT_EQ(daemon_.moves->num_moves(), 1u);
  daemon_.clock.Advance(daemon_.data.sessions->ttl());
  daemon_.pool->TickStreams();
  EXPECT_EQ(silent.End().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return daemon_.moves->num_moves() == 0; }));
}

// One that is being aborted counts until its library has let go.
TEST_F(MoveReceiverTest, MovesAreBounded) {
  library_->faults.never_quiet = true;
  {
    const std::unique_ptr<RawMove> move = Joined();
    move->context.TryCancel();
    (void)move->End();
  }
  ASSERT_TRUE(Eventually([&] { return library_->counts.aborted == 1; }));
  std::vector<std::unique_ptr<RawMove>> moves;
  for (size_t i = 1; i < MoveReceiver::kMaxMoves; ++i) {
    moves.push_back(std::make_unique<RawMove>(stub_.get()));
    ASSERT_TRUE(moves.back()->Say(Hello()));
    ASSERT_EQ(moves.back()->Hear(), v1::MoveReply::STATE_WILLING);
  }
  ExpectRefused(Hello(), absl::StatusCode::kResourceExhausted, "8 are under way");
  library_->faults.never_quiet = false;
  ASSERT_TRUE(Eventually([&] {
    daemon_.pool->TickStreams();
    return daemon_.moves->num_moves() == MoveReceiver::kMaxMoves - 1;
  }));
  RawMove again(stub_.get());
  ASSERT_TRUE(again.Say(Hello()));
  EXPECT_EQ(again.Hear(), v1::MoveReply::STATE_WILLING);
}

TEST_F(MoveReceiverTest, ADaemonThatStopsEndsItsMoves) {
  const std::unique_ptr<RawMove> move = Joined();
  daemon_.pool->EndStreams();
  EXPECT_EQ(move->Hear(), v1::MoveReply::STATE_UNSPECIFIED);
  EXPECT_FALSE(move->End().ok());
  ExpectRefused(Hello(), absl::StatusCode::kResourceExhausted, "moves");
}

}  // namespace
}  // namespace kvd
