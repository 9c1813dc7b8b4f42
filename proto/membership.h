// Who is in the pool: a versioned view from a static list, a watched file or DNS.
//
// The last good view is kept for ever: an answer that is empty, malformed, names a member twice or
// cannot be read is counted, reported once (until an answer was good again) and never applied.
// There is no master; members of one pool may see different views for a while, and liveness is the
// sessions' business, not this one's.
// Thread safety: safe. Owns one thread, for file and DNS.

#ifndef LOCKS_KVD_PROTO_MEMBERSHIP_H_
#define LOCKS_KVD_PROTO_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvd {

inline constexpr int kMaxMembers = 4096;

struct Member {
  // Stable identity that placement hashes; the control address if the provider gives no other.
  std::string name;
  std::string address;  // host:port of the control plane, [v6]:port
  double weight = 1;    // relative capacity; > 0 and <= 1e6
  friend bool operator==(const Member&, const Member&) = default;
};

struct MembershipView {
  uint64_t version = 0;         // grows with each change that was accepted, from 1
  std::vector<Member> members;  // sorted by name, no duplicates, never empty
};

// Fills in missing names (the address), sorts by name and checks. kInvalidArgument: no member or
// more than kMaxMembers, a malformed address or name, a name or an address twice, a weight out of
// range.
absl::StatusOr<std::vector<Member>> CheckMembers(std::vector<Member> members);

struct MembershipOptions {  // exactly one source
  std::vector<Member> static_members;
  // Read again every `poll`; protobuf text of MemberList (config.proto), at most 4 MiB. Replace it
  // by rename. A file that is being written is not taken: a new text counts when it reads the same
  // twice, 100 ms apart.
  std::string file;
  // "host:port": each A and AAAA record is a member at that port, named by that address.
  // "_service._proto.name": each SRV record is a member, named by its target, "host:port". SRV
  // weights and priorities are not used: resolvers fill them in. Relative names are completed as
  // resolv.conf says; /etc/hosts is not read. Everybody in a pool asks for the same name: another
  // Service of the same pods gives them other names. A daemon with addresses of both families is
  // two members unless SRV names it.
  std::string dns_name;
  // address:port, at most 3; empty: those of /etc/resolv.conf.
  std::vector<std::string> dns_servers;
  absl::Duration poll = absl::Seconds(5);  // of file and DNS, with jitter of a fifth
  // At most one change in this time. A view that goes back and forth is held longer each time, up
  // to 64 times this; meanwhile the last view is kept.
  absl::Duration min_interval = absl::Seconds(1);
  // How long Make waits for a source that is not there yet, asking every second: DNS records of a
  // pool that starts appear after its daemons.
  absl::Duration initial_wait = absl::Seconds(10);
};

// Called on the Membership's thread with no lock held; they must not destroy the Membership. Either
// may be empty.
struct MembershipCallbacks {
  // View() returns `view` by now. Not called for the first view.
  std::function<void(std::shared_ptr<const MembershipView> view)> on_change;
  // The first refused answer after a good one, or one refused for another reason: kNotFound (no
  // such file or DNS name), kUnavailable (not readable; no DNS server answers; an empty answer),
  // kInvalidArgument (malformed, or CheckMembers), kResourceExhausted (more changes than
  // min_interval allows).
  std::function<void(const absl::Status& problem)> on_problem;
};

struct MembershipFigures {
  uint64_t accepted = 0;  // updates that became a view
  uint64_t refused = 0;   // answers that were not applied
  absl::Duration age;     // of the last good answer, changed or not; zero of a static list
};

class Membership {
 public:
  // Blocking: until the first good answer, at most initial_wait and one look. Errors:
  // kInvalidArgument (options, or an answer that no waiting mends); what on_problem names, of the
  // last look.
  static absl::StatusOr<std::unique_ptr<Membership>> Make(MembershipOptions options,
                                                          MembershipCallbacks callbacks);
  // Joins; a look in flight is cut short.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // Never null. Blocking: never.
  std::shared_ptr<const MembershipView> View() const;
  MembershipFigures Figures() const;

 private:
  struct State;
  explicit Membership(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_MEMBERSHIP_H_
