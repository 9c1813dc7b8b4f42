#include "service/log_setup.h"

#include <gtest/gtest.h>

namespace kvd {
namespace {

TEST(LogSetupTest, EventLineBecomesNamedFields) {
  EXPECT_EQ(LogFieldsJson("session_attached session=3 tenant=acme"),
            R"("event":"session_attached","session":"3","tenant":"acme")");
  EXPECT_EQ(LogFieldsJson("stop"), R"("event":"stop")");
  EXPECT_EQ(LogFieldsJson(""), R"("event":"")");
}

TEST(LogSetupTest, QuotedValueStaysOneFieldWhateverItHolds) {
  const std::string hostile = "a\" tenant=root \\ \n}";
  EXPECT_EQ(LogFieldsJson("attach client=" + LogQuote(hostile) + " x=1"),
            "\"event\":\"attach\",\"client\":\"a\\\" tenant=root \\\\ \\u000a}\",\"x\":\"1\"");
}

TEST(LogSetupTest, UnfinishedQuoteDoesNotRunAway) {
  EXPECT_EQ(LogFieldsJson("a b=\"c d"), "\"event\":\"a\",\"b\":\"\\\"c d\"");
  EXPECT_EQ(LogFieldsJson("a b=\\"), "\"event\":\"a\",\"b\":\"\\\\\"");
}

}  // namespace
}  // namespace kvd
