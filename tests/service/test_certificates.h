// Real certificates for tests, made by the openssl program in a directory of their own.

#ifndef LOCKS_KVD_TESTS_SERVICE_TEST_CERTIFICATES_H_
#define LOCKS_KVD_TESTS_SERVICE_TEST_CERTIFICATES_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "proto/config.pb.h"

namespace kvd::testing {

class TestCertificates {
 public:
  TestCertificates() {
    std::string pattern = ::testing::TempDir() + "/kvd_certs_XXXXXX";
    directory_ = mkdtemp(pattern.data());
    MakeCa("ca");
    MakeCa("other_ca");
    Issue("server", "ca", "DNS:localhost,IP:127.0.0.1");
  }
  ~TestCertificates() { Run("rm -rf " + directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  // <name>.pem and <name>.key, signed by `ca`, with the SANs as openssl writes them. `days` of -1:
  // expired.
  void Issue(const std::string& name, const std::string& ca, const std::string& sans,
             int days = 2) const {
    std::ofstream(Path(name + ".ext")) << "subjectAltName=" << sans << "\n";
    Run("openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=" +
        name + " -keyout " + Path(name + ".key") + " -out " + Path(name + ".csr"));
    const std::string sign = "-in " + Path(name + ".csr") + " -out " + Path(name + ".pem");
    const std::string by = " -CA " + Path(ca + ".pem") + " -CAkey " + Path(ca + ".key") +
                           " -CAcreateserial -extfile " + Path(name + ".ext");
    Run("openssl x509 -req " + sign + by + " -days " + std::to_string(days));
  }

  locks_kvd::v1::TlsConfig Server() const {
    locks_kvd::v1::TlsConfig tls;
    tls.set_certificate_file(Path("server.pem"));
    tls.set_key_file(Path("server.key"));
    tls.set_ca_file(Path("ca.pem"));
    return tls;
  }

  // A channel that trusts our CA and shows certificate `name`; none if empty.
  std::shared_ptr<grpc::Channel> Channel(int port, const std::string& name) const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = Read(Path("ca.pem"));
    if (!name.empty()) {
      options.pem_cert_chain = Read(Path(name + ".pem"));
      options.pem_private_key = Read(Path(name + ".key"));
    }
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port),
                                     grpc::SslCredentials(options), arguments);
  }

  static std::string Read(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

 private:
  void MakeCa(const std::string& name) const {
    Run("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
        "/CN=" +
        name + " -keyout " + Path(name + ".key") + " -out " + Path(name + ".pem"));
  }
  static void Run(const std::string& command) {
    ASSERT_EQ(std::system((command + " 2>/dev/null").c_str()), 0) << command;
  }
  std::string directory_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_TEST_CERTIFICATES_H_
