// Where members come from: a file, or DNS.
//
// Thread safety: one thread looks; Cancel from any. Errors: those of
// MembershipCallbacks::on_problem.

#ifndef LOCKS_KVD_PROTO_MEMBERSHIP_SOURCE_H_
#define LOCKS_KVD_PROTO_MEMBERSHIP_SOURCE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/config.pb.h"
#include "proto/membership.h"

namespace kvd {

Member MemberOf(const locks_kvd::v1::MemberEntry& entry);

// The members that the protobuf text of a MemberList names, unchecked. kInvalidArgument with line
// and column; `name` is the text's own in messages.
absl::StatusOr<std::vector<Member>> MembersOfText(const std::string& text, absl::string_view name);

class MemberSource {
 public:
  virtual ~MemberSource() = default;
  // What the provider says now, unchecked. Blocking: up to 10 s.
  virtual absl::StatusOr<std::vector<Member>> Look() = 0;
  // Ends a Look, and all later ones, with kCancelled.
  virtual void Cancel() = 0;
};

absl::StatusOr<std::unique_ptr<MemberSource>> MakeFileSource(const std::string& path);
// kInvalidArgument: malformed name or server.
absl::StatusOr<std::unique_ptr<MemberSource>> MakeDnsSource(
    const std::string& dns_name, const std::vector<std::string>& servers);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_MEMBERSHIP_SOURCE_H_
