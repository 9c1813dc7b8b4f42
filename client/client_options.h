// What a worker tells the client library: the pool, the model, who it is, and its limits.
//
// Thread safety: plain values.

#ifndef LOCKS_KVD_CLIENT_CLIENT_OPTIONS_H_
#define LOCKS_KVD_CLIENT_CLIENT_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/fetcher.h"
#include "kernels/layout.h"
#include "proto/grpc_channel.h"

namespace kvd {

// Something an operator wants to know.
struct ClientEvent {
  enum class Kind {
    kPathChosen,      // detail: the path, its canary rate, why not a better one
    kDaemonLost,      // its pages are missing from now on; detail: why
    kDaemonBack,      // attached again, as a stranger without our pages
    kDaemonDraining,  // it takes no new pages
    kMembersProblem,  // the list of members cannot be had or is wrong: the last good one stays
  };
  Kind kind;
  std::string daemon;  // host:port
  std::string detail;
};
absl::string_view EventName(ClientEvent::Kind kind);

struct ClientOptions {
  // Who the daemons are, in one of three ways, the same in every worker: host:port of each; a file
  // with the protobuf text of a MemberList, read again when it changes; or DNS, "host:port" or
  // "_service._proto.name".
  std::vector<std::string> daemons;
  std::string members_file;
  std::string members_dns;
  absl::Duration members_poll = absl::Seconds(5);  // of file and DNS
  // How long pages are also looked for where they were placed before the members changed.
  absl::Duration placement_grace = absl::Seconds(60);
  bool allow_partial = false;  // start although some daemons cannot be reached (one must)
  std::string tenant;          // without certificates only
  std::string model;           // arena's model name
  KvGeometry geometry;
  std::string weights_id;  // ModelIdentity, as the daemons' configuration has it
  std::string rope;
  std::string salt;              // of page keys: workers with another salt share nothing
  std::vector<uint32_t> shards;  // that this worker holds; empty: all
  // GPU (CUDA ordinal) that holds mirrors, page caches and local pages, and on which a DecodeBatch
  // runs; -1: the host.
  int gpu = -1;
  TlsFiles tls;
  std::optional<PathKind> required_path;  // refuse anything slower
  std::optional<PathKind> best_path;      // try nothing faster: to measure or test a slower path
  bool use_ucx = true;                    // false: no ucx path, and no Put
  std::string ucx_devices;  // see UcxOptions; "lo" if every daemon is on loopback and this is empty
  std::string client_name = "kvd-client";
  absl::Duration control_timeout = absl::Seconds(5);
  absl::Duration fetch_timeout = absl::Seconds(1);  // of what opening a sequence fetches, a list
  // Called from the client's threads; must not call back into the client, nor wait for long.
  std::function<void(const ClientEvent&)> on_event;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_CLIENT_OPTIONS_H_
