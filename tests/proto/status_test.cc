#include "proto/status.h"

#include <gtest/gtest.h>

namespace kvd {
namespace {

TEST(StatusTest, EveryCodeCrossesBothWaysWithItsMessage) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(static_cast<int>(ToGrpc(status).error_code()), code);
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
  EXPECT_EQ(ToGrpc(absl::AbortedError("x")).error_code(), grpc::StatusCode::ABORTED);
}

TEST(StatusTest, ContextStandsBeforeTheMessageAndOkStaysOk) {
  EXPECT_EQ(Annotate(absl::NotFoundError("page 3"), "kv-1"), absl::NotFoundError("kv-1: page 3"));
  EXPECT_TRUE(Annotate(absl::OkStatus(), "kv-1").ok());
}

absl::StatusOr<int> Double(absl::StatusOr<int> value) {
  KVD_ASSIGN_OR_RETURN(const int got, std::move(value));
  KVD_RETURN_IF_ERROR(got > 100 ? absl::OutOfRangeError("large") : absl::OkStatus());
  return 2 * got;
}

TEST(StatusTest, MacrosPassErrorsOn) {
  EXPECT_EQ(*Double(4), 8);
  EXPECT_EQ(Double(absl::CancelledError("no")).status(), absl::CancelledError("no"));
  EXPECT_EQ(Double(101).status(), absl::OutOfRangeError("large"));
}

}  // namespace
}  // namespace kvd
