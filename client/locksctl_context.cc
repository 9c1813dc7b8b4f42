#include "client/locksctl_context.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/config.pb.h"

namespace kvd {
namespace {

// Keeps the first problem of a text.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (text_.empty()) text_ = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

void Fill(const std::string& value, std::string* target) {
  if (target->empty()) *target = value;
}

}  // namespace

absl::Status ApplyContext(const std::string& file, bool must_exist, LocksctlOptions* options) {
  std::ifstream in(file, std::ios::binary);
  if (!in) {
    if (!must_exist) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--context ", file, ": cannot be read: check the path and its permissions"));
  }
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  locks_kvd::v1::LocksctlContext context;
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (!parser.ParseFromString(text, &context)) {
    return absl::InvalidArgumentError(absl::StrCat("context ", file, ":", error.text(),
                                                   ": expected LocksctlContext as protobuf text"));
  }
  const std::filesystem::path folder = std::filesystem::path(file).parent_path();
  const auto path = [&folder](const std::string& name) {
    return name.empty() ? name : (folder / name).string();
  };
  if (options->daemons.empty()) {
    options->daemons.assign(context.daemons().begin(), context.daemons().end());
  }
  if (options->tls.empty()) {
    options->tls.ca_file = path(context.tls().ca_file());
    options->tls.certificate_file = path(context.tls().certificate_file());
    options->tls.key_file = path(context.tls().key_file());
  }
  Fill(context.tenant(), &options->tenant);
  Fill(context.model(), &options->model);
  Fill(context.identity().weights_id(), &options->weights_id);
  Fill(context.identity().rope(), &options->rope);
  Fill(context.salt(), &options->salt);
  return absl::OkStatus();
}

}  // namespace kvd
