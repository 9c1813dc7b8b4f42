#include "bench/report.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/check.h"

namespace kvd::bench {
namespace {

std::string FirstLineOf(const char* command) {
  std::string line;
  if (FILE* pipe = popen(command, "r")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof(buffer), pipe)) line = buffer;
    pclose(pipe);
  }
  while (!line.empty() && line.back() == '\n') line.pop_back();
  return line;
}

std::string Machine() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string model = "unknown CPU";
  bool avx512 = false;
  for (std::string line; std::getline(cpuinfo, line);) {
    if (absl::StartsWith(line, "model name") && line.find(": ") != std::string::npos)
      model = line.substr(line.find(": ") + 2);
    if (absl::StartsWith(line, "flags") && absl::StrContains(line, "avx512bw")) avx512 = true;
  }
  return absl::StrCat(model, ", ", std::thread::hardware_concurrency(), " cores",
                      avx512 ? ", AVX-512" : "");
}

std::string Commit() {
  std::string commit = FirstLineOf("git rev-parse --short=12 HEAD 2>/dev/null");
  if (commit.empty()) return "unknown";
  const bool changed =
      !FirstLineOf("git status --porcelain --untracked-files=no 2>/dev/null").empty();
  return absl::StrCat(commit, changed ? "+" : "");
}

}  // namespace

Report::Report(std::string bench)
    : bench_(std::move(bench)), commit_(Commit()), machine_(Machine()) {}

void Report::Check(const std::string& name, bool ok, const std::string& detail) {
  if (!ok) std::printf("CHECK FAILED: %s: %s\n", name.c_str(), detail.c_str());
  checks_.push_back({name, ok, detail});
}

bool Report::all_ok() const {
  return std::all_of(checks_.begin(), checks_.end(), [](const Checked& check) { return check.ok; });
}

void Report::PrintTable() const {
  std::printf("%s  commit %s  machine %s\n", bench_.c_str(), commit_.c_str(), machine_.c_str());
  std::printf("%-56s %14s %-8s %14s %8s\n", "figure", "value", "unit", "limit", "ratio");
  for (const Figure& f : figures_)
    std::printf("%-56s %14.4g %-8s %14.4g %8.3f\n", f.name.c_str(), f.value, f.unit.c_str(),
                f.limit, f.ratio);
}

int Report::Finish(const std::string& json) const {
  PrintTable();
  if (const absl::Status written = json.empty() ? absl::OkStatus() : WriteJson(json);
      !written.ok()) {
    std::fprintf(stderr, "%s: %s\n", bench_.c_str(), written.ToString().c_str());
    return 1;
  }
  return all_ok() ? 0 : 1;
}

absl::Status Report::WriteJson(const std::string& path) const {
  google::protobuf::Struct root;
  auto& fields = *root.mutable_fields();
  fields["bench"].set_string_value(bench_);
  fields["commit"].set_string_value(commit_);
  fields["machine"].set_string_value(machine_);
  fields["date"].set_string_value(absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone()));
  auto* list = fields["figures"].mutable_list_value();
  for (const Figure& f : figures_) {
    auto& item = *list->add_values()->mutable_struct_value()->mutable_fields();
    item["name"].set_string_value(f.name);
    item["value"].set_number_value(f.value);
    item["unit"].set_string_value(f.unit);
    item["limit"].set_number_value(f.limit);
    item["ratio"].set_number_value(f.ratio);
  }
  auto* checks = fields["checks"].mutable_list_value();
  for (const Checked& check : checks_) {
    auto& item = *checks->add_values()->mutable_struct_value()->mutable_fields();
    item["name"].set_string_value(check.name);
    item["ok"].set_bool_value(check.ok);
    item["detail"].set_string_value(check.detail);
  }
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  if (!google::protobuf::util::MessageToJsonString(root, &json, options).ok())
    return absl::InternalError(absl::StrCat(path, ": a figure cannot be written as JSON"));
  const std::string temporary = path + ".tmp";
  std::ofstream out(temporary);
  out << json;
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(temporary, path, error);
  if (!out || error) return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  KVD_CHECK(!values.empty());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace kvd::bench
