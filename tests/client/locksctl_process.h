// locksctl as a process, for tests of what it prints and of its exit codes.

#ifndef LOCKS_KVD_TESTS_CLIENT_LOCKSCTL_PROCESS_H_
#define LOCKS_KVD_TESTS_CLIENT_LOCKSCTL_PROCESS_H_

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"

namespace kvd::testing {

struct Ran {
  int code;
  std::string output;
};

// Runs `locksctl <arguments>` by the shell, without the user's own context; `before` comes before
// the program. Standard error goes with the output, or nowhere.
inline Ran Locksctl(const std::string& arguments, const std::string& before = "",
                    bool with_errors = true) {
  const std::string command = absl::StrCat("HOME=/nonexistent ", before, " ", KVD_LOCKSCTL_BINARY,
                                           " ", arguments, with_errors ? " 2>&1" : " 2>/dev/null");
  FILE* pipe = popen(command.c_str(), "r");
  std::array<char, 4096> bytes;
  std::string output;
  for (size_t n; (n = fread(bytes.data(), 1, bytes.size(), pipe)) > 0;) {
    output.append(bytes.data(), n);
  }
  return {WEXITSTATUS(pclose(pipe)), output};
}

// What `-o json` prints: the contract is an array of objects.
class JsonRows {
 public:
  // Runs a verb and parses what it printed; a failure to parse fails the test.
  static JsonRows Of(const std::string& arguments, int expected_code = 0) {
    const Ran ran = Locksctl(arguments + " -o json", "", /*with_errors=*/false);
    EXPECT_EQ(ran.code, expected_code) << arguments << "\n" << ran.output;
    return JsonRows(ran.output);
  }
  explicit JsonRows(const std::string& text) {
    const auto parsed = google::protobuf::util::JsonStringToMessage(text, &rows_);
    EXPECT_TRUE(parsed.ok()) << parsed.ToString() << "\n" << text;
  }

  int size() const { return rows_.values_size(); }
  std::string text(int row, const std::string& key) const { return at(row, key).string_value(); }
  double number(int row, const std::string& key) const { return at(row, key).number_value(); }
  bool truth(int row, const std::string& key) const { return at(row, key).bool_value(); }
  const google::protobuf::Value& at(int row, const std::string& key) const {
    static const google::protobuf::Value kNone;
    if (row >= size()) {
      ADD_FAILURE() << "row " << row << " of " << size();
      return kNone;
    }
    const auto& fields = rows_.values(row).struct_value().fields();
    const auto found = fields.find(key);
    EXPECT_TRUE(found != fields.end()) << "no key " << key;
    return found == fields.end() ? kNone : found->second;
  }
  // The first row whose `key` is `value`; -1 if there is none.
  int Find(const std::string& key, const std::string& value) const {
    for (int row = 0; row < size(); ++row) {
      if (text(row, key) == value) return row;
    }
    return -1;
  }

 private:
  google::protobuf::ListValue rows_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_LOCKSCTL_PROCESS_H_
