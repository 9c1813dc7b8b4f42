#include "service/auth.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <ctime>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr char kScheme[] = "locks-kvd://";
constexpr unsigned kReloadSeconds = 1;

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using UniqueBio = std::unique_ptr<BIO, Deleter<BIO_free_all>>;
using UniqueX509 = std::unique_ptr<X509, Deleter<X509_free>>;
using UniqueKey = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY_free>>;

absl::Status FileProblem(const std::string& file, absl::string_view expected,
                         absl::string_view todo) {
  ERR_clear_error();
  return absl::FailedPreconditionError(
      absl::StrCat("control.tls: ", file, ": expected ", expected, ": ", todo));
}

absl::StatusOr<UniqueX509> ReadCertificate(const std::string& file) {
  const UniqueBio bio(BIO_new_file(file.c_str(), "r"));
  if (bio == nullptr)
    return FileProblem(file, "a readable file", "check the path and its permissions");
  UniqueX509 certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  if (certificate == nullptr) return FileProblem(file, "a PEM certificate", "it holds none");
  return certificate;
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm tm = {};
  if (ASN1_TIME_to_tm(time, &tm) != 1) return absl::InfinitePast();
  return absl::FromTimeT(timegm(&tm));
}

bool IsLoopbackPeer(absl::string_view peer) {
  return absl::StartsWith(peer, "ipv4:127.") || absl::StartsWith(peer, "ipv6:%5B::1%5D") ||
         absl::StartsWith(peer, "ipv6:[::1]") || absl::StartsWith(peer, "ipv6:%5B::ffff:127.") ||
         absl::StartsWith(peer, "unix:") || absl::StartsWith(peer, "inproc");
}

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kClient:
      return "client";
    case Role::kAdmin:
      return "admin";
    case Role::kDaemon:
      return "daemon";
  }
  return "unknown";
}

}  // namespace

absl::StatusOr<PeerIdentity> ParseIdentityUri(absl::string_view uri) {
  PeerIdentity identity{.authenticated = true, .tenant = ""};
  absl::string_view rest = uri;
  if (absl::ConsumePrefix(&rest, kScheme)) {
    if (rest == "admin") {
      identity.role = Role::kAdmin;
      return identity;
    }
    if (rest == "daemon") {
      identity.role = Role::kDaemon;
      return identity;
    }
    if (absl::ConsumePrefix(&rest, "client/") && !rest.empty() && !absl::StrContains(rest, '/')) {
      identity.tenant = std::string(rest);
      return identity;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "certificate SAN \"", uri,
      "\": expected locks-kvd://client/<tenant>, locks-kvd://admin or locks-kvd://daemon"));
}

absl::StatusOr<PeerIdentity> IdentifyPeer(const grpc::ServerContextBase& context, bool tls) {
  if (!tls) {
    return PeerIdentity{
        .authenticated = false, .loopback = IsLoopbackPeer(context.peer()), .tenant = ""};
  }
  const auto auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) {
    return absl::UnauthenticatedError(
        "no client certificate: present one that chains to the daemon's CA");
  }
  std::vector<std::string> uris;
  for (const grpc::string_ref& uri : auth->FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
    if (uri.starts_with(kScheme)) uris.emplace_back(uri.data(), uri.size());
  }
  if (uris.size() != 1) {
    return absl::UnauthenticatedError(
        absl::StrCat("client certificate: expected exactly one URI SAN "
                     "locks-kvd://client/<tenant>, locks-kvd://admin or "
                     "locks-kvd://daemon, got ",
                     uris.size(), ": issue a certificate with one"));
  }
  const absl::StatusOr<PeerIdentity> identity = ParseIdentityUri(uris[0]);
  if (!identity.ok()) return absl::UnauthenticatedError(identity.status().message());
  return identity;
}

absl::StatusOr<std::string> ClientTenant(const PeerIdentity& peer,
                                         absl::string_view requested_tenant) {
  if (!peer.authenticated) {
    if (!requested_tenant.empty()) return std::string(requested_tenant);
    return absl::InvalidArgumentError(
        "tenant: expected a name, got nothing: without certificates the request names the tenant");
  }
  if (peer.role != Role::kClient) {
    return absl::PermissionDeniedError(absl::StrCat(
        "role: expected client, got ", RoleName(peer.role), ": use a certificate of the tenant"));
  }
  if (!requested_tenant.empty() && requested_tenant != peer.tenant) {
    return absl::PermissionDeniedError(absl::StrCat("tenant: the certificate is for ", peer.tenant,
                                                    ", the request asks for ", requested_tenant));
  }
  return peer.tenant;
}

absl::StatusOr<std::string> MoverTenant(const PeerIdentity& peer,
                                        absl::string_view requested_tenant) {
  if (peer.authenticated && peer.role != Role::kDaemon) {
    return absl::PermissionDeniedError(
        absl::StrCat("role: expected daemon, got ", RoleName(peer.role),
                     ": only another daemon brings copies of pages"));
  }
  if (!requested_tenant.empty()) return std::string(requested_tenant);
  return absl::InvalidArgumentError(
      "tenant: expected a name, got nothing: a mover names the tenant");
}

absl::Status CheckAdmin(const PeerIdentity& peer) {
  if (peer.authenticated) {
    if (peer.role == Role::kAdmin) return absl::OkStatus();
    return absl::PermissionDeniedError(
        absl::StrCat("role: expected admin, got ", RoleName(peer.role),
                     ": use a certificate with the SAN locks-kvd://admin"));
  }
  if (peer.loopback) return absl::OkStatus();
  return absl::PermissionDeniedError(
      "without certificates Admin is served to this host only: call from it, or set control.tls");
}

absl::StatusOr<std::vector<std::pair<std::string, absl::Time>>> CheckTlsFiles(
    const locks_kvd::v1::TlsConfig& tls, absl::Time now) {
  KVD_ASSIGN_OR_RETURN(const UniqueX509 certificate, ReadCertificate(tls.certificate_file()));
  KVD_ASSIGN_OR_RETURN(const UniqueX509 ca, ReadCertificate(tls.ca_file()));
  const UniqueBio bio(BIO_new_file(tls.key_file().c_str(), "r"));
  if (bio == nullptr)
    return FileProblem(tls.key_file(), "a readable file", "check the path and its permissions");
  const UniqueKey key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr));
  if (key == nullptr)
    return FileProblem(tls.key_file(), "a PEM private key without passphrase", "it holds none");
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return FileProblem(tls.key_file(), absl::StrCat("the key of ", tls.certificate_file()),
                       "it belongs to another certificate");
  }
  std::vector<std::pair<std::string, absl::Time>> expiries = {
      {tls.certificate_file(), ToTime(X509_get0_notAfter(certificate.get()))},
      {tls.ca_file(), ToTime(X509_get0_notAfter(ca.get()))}};
  for (const auto& [file, expiry] : expiries) {
    if (expiry <= now) {
      return FileProblem(
          file, "a certificate that is still valid",
          absl::StrCat("it expired at ", absl::FormatTime(expiry, absl::UTCTimeZone())));
    }
  }
  return expiries;
}

std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(const locks_kvd::v1::TlsConfig& tls) {
  auto provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      tls.key_file(), tls.certificate_file(), tls.ca_file(), kReloadSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace kvd
