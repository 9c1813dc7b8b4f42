// Who calls: roles and tenants from certificates, and the certificates themselves.
//
// With TLS a caller proves who it is by a certificate that chains to our CA and has one URI SAN of
// the form
//   locks-kvd://client/<tenant>   a worker of a tenant
//   locks-kvd://admin             an operator: Admin, and Stats of every tenant
//   locks-kvd://daemon            another daemon
// Without TLS nobody proves anything: the tenant is what the request says, and only loopback may
// call Admin. Certificates are read again while the daemon runs; sessions live on over a rotation.
// Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_AUTH_H_
#define LOCKS_KVD_SERVICE_AUTH_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/config.pb.h"

namespace grpc {
class ServerContextBase;
class ServerCredentials;
}  // namespace grpc

namespace kvd {

enum class Role { kClient, kAdmin, kDaemon };

struct PeerIdentity {
  bool authenticated = false;  // false: no TLS; role and tenant are then not known
  bool loopback = false;       // not authenticated: the call came from this host
  Role role = Role::kClient;
  std::string tenant;  // clients only
};

// The identity in one URI SAN; kInvalidArgument if it is not of the form above.
absl::StatusOr<PeerIdentity> ParseIdentityUri(absl::string_view uri);

// The caller of an RPC. kUnauthenticated if TLS is on and no identity, or more than one, is in the
// certificate.
absl::StatusOr<PeerIdentity> IdentifyPeer(const grpc::ServerContextBase& context, bool tls);

// Whose arena the caller may attach to. kPermissionDenied for a wrong role; kInvalidArgument if a
// caller without certificate names no tenant.
absl::StatusOr<std::string> ClientTenant(const PeerIdentity& peer,
                                         absl::string_view requested_tenant);
// The same for a daemon that brings copies of pages: it names the tenant.
absl::StatusOr<std::string> MoverTenant(const PeerIdentity& peer,
                                        absl::string_view requested_tenant);
// kPermissionDenied unless the caller may use Admin.
absl::Status CheckAdmin(const PeerIdentity& peer);

// Checks the three files: readable, PEM, key and certificate belong together, not expired. Returns
// each certificate file with its (first) expiry. kFailedPrecondition names the file.
absl::StatusOr<std::vector<std::pair<std::string, absl::Time>>> CheckTlsFiles(
    const locks_kvd::v1::TlsConfig& tls, absl::Time now);

// Credentials that ask for and verify a client's certificate, and read the files again every
// second.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(const locks_kvd::v1::TlsConfig& tls);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_AUTH_H_
