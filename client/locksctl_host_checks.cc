#include "client/locksctl_host_checks.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/locksctl_tool.h"

namespace kvd {
namespace {

namespace fs = std::filesystem;
using Result = Check::Result;

constexpr int64_t kMemlockForRdma = int64_t{64} << 20;
// Certificates and logs of two hosts are compared by their clocks.
constexpr absl::Duration kMaxSkew = absl::Seconds(30);

std::vector<std::string> Names(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

std::string Bytes(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : absl::StrCat(limit, " bytes");
}

std::string DescribeLife(absl::Time expiry, absl::Time now) {
  const std::string when = absl::FormatTime("%Y-%m-%d %H:%M:%SZ", expiry, absl::UTCTimeZone());
  return absl::StrCat(expiry <= now ? "expired at " : "expires at ", when);
}

// As openssl writes it: "notAfter=2027-01-31 09:30:00Z".
absl::StatusOr<absl::Time> ExpiryOf(const std::string& pem) {
  absl::StatusOr<std::string> line =
      RunTool({"openssl", "x509", "-noout", "-enddate", "-dateopt", "iso_8601"}, pem);
  if (!line.ok()) return line.status();
  absl::string_view text = *line;
  absl::ConsumePrefix(&text, "notAfter=");
  absl::ConsumeSuffix(&text, "\n");
  absl::Time expiry;
  std::string error;
  if (!absl::ParseTime("%Y-%m-%d %H:%M:%SZ", text, &expiry, &error)) {
    return absl::FailedPreconditionError(
        absl::StrCat("openssl: expected a date, got '", text, "': ", error));
  }
  return expiry;
}

}  // namespace

Check CheckMemlock(int64_t wanted) {
  Check check = {.name = "memlock", .about = "this process"};
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  check.found = absl::StrCat("limit ", Bytes(limit.rlim_cur));
  const bool rdma = !Names("/sys/class/infiniband").empty();
  const int64_t needed = wanted > 0 ? wanted : kMemlockForRdma;
  const bool enough =
      limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= static_cast<rlim_t>(needed);
  if (enough) return check;
  check.result = wanted > 0 || rdma ? Result::kFailed : Result::kSkipped;
  if (check.result == Result::kSkipped) {
    absl::StrAppend(&check.found, "; not applicable: no RDMA device");
    return check;
  }
  check.todo = absl::StrCat("raise it to at least ", needed,
                            " bytes: LimitMEMLOCK of the unit, `ulimit -l`, or limits.conf");
  return check;
}

Check CheckGpus(const std::string& root) {
  Check check = {.name = "gpu", .about = "this host"};
  const std::vector<std::string> gpus = Names(fs::path(root) / "proc/driver/nvidia/gpus");
  if (gpus.empty()) {
    check.result = Result::kSkipped;
    check.found = "not applicable: no GPU";
    return check;
  }
  std::vector<std::string> closed;
  for (size_t i = 0; i < gpus.size(); ++i) {
    const std::string device = (fs::path(root) / absl::StrCat("dev/nvidia", i)).string();
    if (access(device.c_str(), R_OK | W_OK) != 0) {
      closed.push_back(absl::StrCat(device, ": ", std::strerror(errno)));
    }
  }
  check.found = absl::StrCat(gpus.size(), " GPUs");
  if (closed.empty()) return check;
  check.result = Result::kFailed;
  absl::StrAppend(&check.found, ", not visible: ", absl::StrJoin(closed, "; "));
  check.todo = "give the process every GPU of the host (container runtime, device cgroup, group)";
  return check;
}

std::vector<std::string> PairsWithoutPeerAccess(const std::string& topology, int* num_gpus) {
  std::vector<std::string> pairs;
  *num_gpus = 0;
  for (const absl::string_view line : absl::StrSplit(topology, '\n')) {
    // A row of the matrix: "GPU0 X OK"; its head line, "GPU0 GPU1" between escape sequences, is
    // none.
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.size() < 2 || !absl::StartsWith(words[0], "GPU") || absl::StartsWith(words[1], "GPU"))
      continue;
    const auto row = static_cast<size_t>((*num_gpus)++);
    for (size_t column = row + 1; column + 1 < words.size(); ++column) {
      if (words[column + 1] == "OK") continue;
      pairs.push_back(absl::StrCat(words[0], "-GPU", column, " ", words[column + 1]));
    }
  }
  return pairs;
}

Check CheckPeerAccess() {
  Check check = {.name = "peer_access", .about = "this host"};
  const absl::StatusOr<std::string> topology = RunTool({"nvidia-smi", "topo", "-p2p", "r"});
  int num_gpus = 0;
  const std::vector<std::string> pairs =
      topology.ok() ? PairsWithoutPeerAccess(*topology, &num_gpus) : std::vector<std::string>();
  if (num_gpus < 2) {
    check.result = Result::kSkipped;
    check.found =
        topology.ok() ? "not applicable: fewer than two GPUs" : "not applicable: no nvidia-smi";
    return check;
  }
  check.found = absl::StrCat(num_gpus, " GPUs");
  if (pairs.empty()) return check;
  check.result = Result::kFailed;
  absl::StrAppend(&check.found, ", no access: ", absl::StrJoin(pairs, ", "));
  check.todo =
      "give daemon and worker GPUs that reach each other (nvidia-smi topo -m), or use the ucx path";
  return check;
}

Check CheckCertificate(const std::string& about, const std::string& pem, absl::Duration least_left,
                       absl::Time now) {
  Check check = {.name = "certificate", .about = about};
  const absl::StatusOr<absl::Time> expiry = ExpiryOf(pem);
  if (!expiry.ok()) {
    const bool no_tool = absl::IsNotFound(expiry.status());
    check.result = no_tool ? Result::kSkipped : Result::kFailed;
    check.found = std::string(expiry.status().message());
    check.todo = no_tool ? "install openssl to check it" : "expected a PEM certificate";
    return check;
  }
  check.found = DescribeLife(*expiry, now);
  if (*expiry > now + least_left) return check;
  check.result = Result::kFailed;
  check.todo = *expiry <= now ? "issue a new one; files are read again without a restart"
                              : absl::StrCat("renew it: less than ",
                                             absl::ToInt64Hours(least_left) / 24, " days are left");
  return check;
}

Check CheckCertificateFile(const std::string& file, absl::Duration least_left, absl::Time now) {
  std::ifstream in(file, std::ios::binary);
  const std::string pem((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (in && !pem.empty()) return CheckCertificate(file, pem, least_left, now);
  return {.name = "certificate",
          .about = file,
          .result = Result::kFailed,
          .found = "cannot be read",
          .todo = "check the path and its permissions"};
}

Check CheckSocketDirectory(const std::string& socket_path) {
  const std::string directory = fs::path(socket_path).parent_path().string();
  Check check = {.name = "socket_dir", .about = directory};
  struct stat info = {};
  if (stat(directory.c_str(), &info) != 0) {
    check.result = Result::kFailed;
    check.found = std::strerror(errno);
    check.todo = "mount the daemon's data.socket_dir at the same path, and let this user into it";
    return check;
  }
  check.found = absl::StrFormat("mode %04o", info.st_mode & 07777u);
  if ((info.st_mode & S_IRWXO) != 0) {
    check.result = Result::kFailed;
    check.todo = "close it to others: chmod 0750 or 0770, with the workers' group";
    return check;
  }
  if (access(socket_path.c_str(), R_OK | W_OK) != 0) {
    check.result = Result::kFailed;
    absl::StrAppend(&check.found, "; the socket: ", std::strerror(errno));
    check.todo = "add this user to the directory's group; the shared path is not possible without";
  }
  return check;
}

Check CheckClock(const std::string& about, absl::Duration ahead) {
  Check check = {.name = "clock", .about = about};
  check.found = absl::StrCat("the daemon is ", absl::ToInt64Milliseconds(ahead), " ms ahead");
  if (absl::AbsDuration(ahead) <= kMaxSkew) return check;
  check.result = Result::kFailed;
  check.todo = "synchronise both clocks (chrony, NTP): certificates are judged by them";
  return check;
}

}  // namespace kvd
