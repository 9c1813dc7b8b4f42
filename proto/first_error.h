// The first complaint of a protobuf text parser, with its place.
//
// Thread safety: compatible.

#ifndef LOCKS_KVD_PROTO_FIRST_ERROR_H_
#define LOCKS_KVD_PROTO_FIRST_ERROR_H_

#include <google/protobuf/io/tokenizer.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace kvd {

class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (text_.empty())
      text_ = absl::StrCat("line ", line + 1, ", column ", column + 1, ": ", message);
  }
  void AddWarning(int, int, const std::string&) override {}
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_FIRST_ERROR_H_
