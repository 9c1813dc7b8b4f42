#include "proto/grpc_channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace kvd {
namespace {

// A Match of 131,072 pages answers with at most 15 bytes a page and shard; more is split by the
// caller.
constexpr int kMaxMessageBytes = 16 << 20;

absl::StatusOr<std::string> ReadPem(const std::string& path, const char* what) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file || text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("cannot read ", what, " '", path, "'"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenGrpcChannel(const std::string& address,
                                                               const TlsFiles& tls) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!tls.empty()) {
    if (tls.ca_file.empty() || tls.certificate_file.empty() || tls.key_file.empty()) {
      return absl::InvalidArgumentError(
          "TLS needs a CA file, a certificate file and a key file: give all three or none");
    }
    grpc::SslCredentialsOptions ssl;
    KVD_ASSIGN_OR_RETURN(ssl.pem_root_certs, ReadPem(tls.ca_file, "CA file"));
    KVD_ASSIGN_OR_RETURN(ssl.pem_cert_chain, ReadPem(tls.certificate_file, "certificate file"));
    KVD_ASSIGN_OR_RETURN(ssl.pem_private_key, ReadPem(tls.key_file, "key file"));
    credentials = grpc::SslCredentials(ssl);
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

}  // namespace kvd
