// locksctl certs dev: a CA and one certificate a role, for development and tests.
//
// The openssl program makes them: the library has one door in the client, and this is not worth a
// second.

#include <arpa/inet.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_output.h"
#include "client/locksctl_tool.h"
#include "client/locksctl_verbs.h"

namespace kvd {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kDays = 30;

// Names go into openssl's configuration: nothing but what a host or tenant needs.
bool IsPlainName(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_' || c == ':' || c == '*';
  });
}

std::string SanOf(const std::string& host) {
  uint8_t address[16];
  const bool numeric = inet_pton(AF_INET, host.c_str(), address) == 1 ||
                       inet_pton(AF_INET6, host.c_str(), address) == 1;
  return absl::StrCat(",", numeric ? "IP:" : "DNS:", host);
}

class CertificateMaker {
 public:
  CertificateMaker(fs::path folder, int64_t days)
      : folder_(std::move(folder)), days_(absl::StrCat(days)) {}

  absl::Status MakeCa() const {
    std::vector<std::string> command = NewKey("ca", "locks-kvd development CA");
    command.insert(command.end(), {"-x509", "-days", days_, "-out", Path("ca.pem"), "-addext",
                                   "basicConstraints=critical,CA:TRUE", "-addext",
                                   "keyUsage=critical,keyCertSign,cRLSign"});
    return RunTool(command).status();
  }

  absl::Status Issue(const std::string& name, const std::string& sans,
                     const std::string& usage) const {
    std::vector<std::string> request = NewKey(name, absl::StrCat("locks-kvd ", name));
    const absl::StatusOr<std::string> csr = RunTool(request);
    if (!csr.ok()) return csr.status();
    const std::string extensions = Path(absl::StrCat(name, ".ext"));
    const std::string requests = Path(absl::StrCat(name, ".csr"));
    std::ofstream(extensions) << "subjectAltName=" << sans << "\nextendedKeyUsage=" << usage
                              << "\nkeyUsage=critical,digitalSignature\n";
    std::ofstream(requests) << *csr;
    const absl::Status signed_status =
        RunTool({"openssl", "x509", "-req", "-in", requests, "-CA", Path("ca.pem"), "-CAkey",
                 Path("ca.key"), "-CAcreateserial", "-days", days_, "-extfile", extensions, "-out",
                 Path(absl::StrCat(name, ".pem"))})
            .status();
    for (const std::string& file : {extensions, requests, Path("ca.srl")}) fs::remove(file);
    return signed_status;
  }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

 private:
  std::vector<std::string> NewKey(const std::string& name, const std::string& subject) const {
    return {"openssl",
            "req",
            "-new",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            Path(absl::StrCat(name, ".key")),
            "-subj",
            absl::StrCat("/CN=", subject)};
  }

  const fs::path folder_;
  const std::string days_;
};

absl::Status MakeAll(const CertificateMaker& maker, const LocksctlOptions& options,
                     const std::string& tenant) {
  std::string hosts = "URI:locks-kvd://daemon,DNS:localhost,IP:127.0.0.1,IP:::1";
  for (const std::string& host : options.hosts) absl::StrAppend(&hosts, SanOf(host));
  KVD_RETURN_IF_ERROR(maker.MakeCa());
  KVD_RETURN_IF_ERROR(maker.Issue("server", hosts, "serverAuth,clientAuth"));
  KVD_RETURN_IF_ERROR(
      maker.Issue("client", absl::StrCat("URI:locks-kvd://client/", tenant), "clientAuth"));
  KVD_RETURN_IF_ERROR(maker.Issue("admin", "URI:locks-kvd://admin", "clientAuth"));
  std::ofstream context(maker.Path("context.textproto"));
  context << "# For locksctl --context. Workers use client.pem, daemons server.pem.\n";
  for (const std::string& daemon : options.daemons) context << "daemons: \"" << daemon << "\"\n";
  context << "tls { ca_file: \"ca.pem\" certificate_file: \"admin.pem\" key_file: \"admin.key\" }\n"
          << "tenant: \"" << tenant << "\"\n";
  context.close();
  if (context) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(maker.Path("context.textproto"), ": cannot be written"));
}

ExitCode Usage(const std::string& problem) {
  std::cerr << "locksctl: " << problem << "\n";
  return ExitCode::kUsage;
}

}  // namespace

ExitCode RunCerts(const LocksctlOptions& options) {
  const std::string tenant = options.tenant.empty() ? "dev" : options.tenant;
  if (options.out.empty()) return Usage("certs dev needs --out DIR");
  if (!IsPlainName(tenant))
    return Usage(absl::StrCat("--tenant: not a plain name: '", tenant, "'"));
  for (const std::string& host : options.hosts) {
    if (!IsPlainName(host)) return Usage(absl::StrCat("--host: not a host: '", host, "'"));
  }
  const CertificateMaker maker(options.out, options.days > 0 ? options.days : kDays);
  if (!options.yes && fs::exists(maker.Path("ca.key"))) {
    return Usage(absl::StrCat(options.out,
                              " holds a CA already: add --yes to replace it, or "
                              "choose another folder"));
  }
  umask(077);  // keys are nobody else's
  std::error_code error;
  fs::create_directories(options.out, error);
  if (error) return Usage(absl::StrCat("--out ", options.out, ": ", error.message()));
  if (const absl::Status made = MakeAll(maker, options, tenant); !made.ok()) return Complain(made);
  Table table = {{"file", "role"}, {}};
  const std::pair<const char*, std::string> files[] = {
      {"ca.pem", "ca"},
      {"server.pem", "daemon"},
      {"client.pem", absl::StrCat("client/", tenant)},
      {"admin.pem", "admin"},
      {"context.textproto", "locksctl --context"}};
  for (const auto& [name, role] : files) table.rows.push_back({maker.Path(name), role});
  std::cout << Render(table, options.output);
  return ExitCode::kOk;
}

}  // namespace kvd
