#include "proto/membership_source.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <google/protobuf/text_format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/address.h"
#include "proto/arena_memory.h"
#include "proto/dns_client.h"
#include "proto/first_error.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr size_t kMaxFileBytes = 4 << 20;
constexpr auto kSettle = std::chrono::milliseconds(100);
constexpr absl::Duration kDnsTimeout = absl::Seconds(5);  // a question; A and AAAA are two

absl::Status Unreadable(const std::string& path) {
  const int error = errno;
  const std::string text = absl::StrCat("members file ", path, ": ", std::strerror(error));
  return error == ENOENT ? absl::NotFoundError(text) : absl::UnavailableError(text);
}

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  // Without O_NONBLOCK the open of a FIFO would wait for its writer.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return Unreadable(path);
  struct stat status;
  if (fstat(file.get(), &status) != 0) return Unreadable(path);
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("members file ", path, ": not a regular file"));
  }
  std::string text;
  while (text.size() <= kMaxFileBytes) {
    const size_t had = text.size();
    text.resize(had + (64 << 10));
    const ssize_t got = read(file.get(), text.data() + had, text.size() - had);
    if (got < 0) return Unreadable(path);
    text.resize(had + static_cast<size_t>(got));
    if (got == 0) return text;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("members file ", path, ": over ", kMaxFileBytes, " bytes"));
}

class FileSource final : public MemberSource {
 public:
  explicit FileSource(std::string path) : path_(std::move(path)) {}

  absl::StatusOr<std::vector<Member>> Look() override {
    KVD_ASSIGN_OR_RETURN(std::string text, ReadWhole(path_));
    // Half a text may be a good text of fewer members: a new one counts when it has stopped
    // changing.
    if (text != last_text_) {
      KVD_RETURN_IF_ERROR(Settle());
      KVD_ASSIGN_OR_RETURN(const std::string again, ReadWhole(path_));
      if (again != text) {
        return absl::UnavailableError(
            absl::StrCat("members file ", path_, ": is being written: replace it by rename"));
      }
      last_text_ = std::move(text);
    }
    return MembersOfText(last_text_, path_);
  }

  void Cancel() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }

 private:
  absl::Status Settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, kSettle, [this] { return cancelled_; }))
      return absl::CancelledError("members file");
    return absl::OkStatus();
  }

  const std::string path_;
  std::string last_text_;  // read the same twice; of the thread that looks
  std::mutex mutex_;       // of what follows
  std::condition_variable changed_;
  bool cancelled_ = false;
};

class DnsSource final : public MemberSource {
 public:
  // A service: host is its whole name and port is not used.
  DnsSource(Address name, bool is_service, std::unique_ptr<DnsClient> client)
      : name_(std::move(name)), is_service_(is_service), client_(std::move(client)) {}

  absl::StatusOr<std::vector<Member>> Look() override {
    std::vector<Member> members;
    if (is_service_) {
      KVD_RETURN_IF_ERROR(AskFor(DnsType::kSrv, &members).status());
      return members;
    }
    // Half of two answers is no answer: the other half's members would seem to have left.
    KVD_ASSIGN_OR_RETURN(const bool has_v4, AskFor(DnsType::kA, &members));
    KVD_ASSIGN_OR_RETURN(const bool has_v6, AskFor(DnsType::kAaaa, &members));
    if (!has_v4 && !has_v6)
      return absl::NotFoundError(absl::StrCat("DNS: no such name: ", name_.host));
    return members;
  }

  void Cancel() override { client_->Cancel(); }

 private:
  // False if there is no such name.
  absl::StatusOr<bool> AskFor(DnsType type, std::vector<Member>* members) {
    auto found = client_->Ask(name_.host, type, name_.port, kDnsTimeout);
    if (absl::IsNotFound(found.status()) && !is_service_) return false;
    KVD_RETURN_IF_ERROR(found.status());
    for (const Address& address : *found) {
      const std::string text = address.ToString();
      members->push_back({text, text, 1});
    }
    return true;
  }

  const Address name_;
  const bool is_service_;
  const std::unique_ptr<DnsClient> client_;
};

}  // namespace

Member MemberOf(const locks_kvd::v1::MemberEntry& entry) {
  return {entry.name(), entry.address(), entry.has_weight() ? entry.weight() : 1};
}

absl::StatusOr<std::vector<Member>> MembersOfText(const std::string& text, absl::string_view name) {
  locks_kvd::v1::MemberList list;
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (!parser.ParseFromString(text, &list)) {
    return absl::InvalidArgumentError(absl::StrCat("members file ", name, ": ", error.text()));
  }
  std::vector<Member> members;
  for (const auto& entry : list.members()) members.push_back(MemberOf(entry));
  return members;
}

absl::StatusOr<std::unique_ptr<MemberSource>> MakeFileSource(const std::string& path) {
  return std::make_unique<FileSource>(path);
}

absl::StatusOr<std::unique_ptr<MemberSource>> MakeDnsSource(
    const std::string& dns_name, const std::vector<std::string>& servers) {
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<DnsClient> client, DnsClient::Make(servers));
  if (dns_name.starts_with('_')) {
    return std::make_unique<DnsSource>(Address{dns_name, 0}, true, std::move(client));
  }
  KVD_ASSIGN_OR_RETURN(Address name, Address::Parse(dns_name));
  in_addr v4;
  const bool is_address =
      name.host.find(':') != std::string::npos || inet_pton(AF_INET, name.host.c_str(), &v4) == 1;
  if (is_address || name.port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("members DNS name '", dns_name,
                     "': expected a name and a port, or _service._proto.name; addresses belong "
                     "into the static list"));
  }
  return std::make_unique<DnsSource>(std::move(name), false, std::move(client));
}

}  // namespace kvd
