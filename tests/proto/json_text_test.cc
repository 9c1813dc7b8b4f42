#include "proto/json_text.h"

#include <gtest/gtest.h>

namespace kvd {
namespace {

TEST(JsonTextTest, PlainTextIsOnlyQuoted) { EXPECT_EQ(JsonQuote("tenant a/b"), "\"tenant a/b\""); }

TEST(JsonTextTest, QuotesBackslashesAndControlCharactersAreEscaped) {
  EXPECT_EQ(JsonQuote("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(JsonQuote(absl::string_view("\n\0\x1f", 3)), "\"\\u000a\\u0000\\u001f\"");
}

TEST(JsonTextTest, BytesAboveAsciiStayAsTheyAre) {
  EXPECT_EQ(JsonQuote("\xc3\xa9"), "\"\xc3\xa9\"");
}

}  // namespace
}  // namespace kvd
