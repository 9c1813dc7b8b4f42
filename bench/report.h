// Figures of a benchmark, printed as a table and written as JSON with the commit and the machine.
//
// Thread safety: compatible.

#ifndef LOCKS_KVD_BENCH_REPORT_H_
#define LOCKS_KVD_BENCH_REPORT_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace kvd::bench {

// One measured figure beside what bounds it.
struct Figure {
  std::string name;
  double value = 0;
  std::string unit;
  double limit = 0;  // the bound measured in the same run, in the same unit; 0 if there is none
  double ratio = 0;  // what a target compares, 0 if nothing does
};

class Report {
 public:
  // `bench` names the program. Reads the machine from /proc/cpuinfo; the commit from `git
  // rev-parse` in the current directory ("unknown" outside a checkout), with "+" appended if the
  // tree has changes.
  explicit Report(std::string bench);

  // For a program that runs outside its checkout, or whose figures are another device's than the
  // CPU's.
  void SetCommit(std::string commit) { commit_ = std::move(commit); }
  void SetMachine(std::string machine) { machine_ = std::move(machine); }

  void Add(Figure figure) { figures_.push_back(std::move(figure)); }
  // Records a check of the output; prints it if it failed.
  void Check(const std::string& name, bool ok, const std::string& detail);
  bool all_ok() const;

  void PrintTable() const;
  // What a benchmark ends with: prints the table, writes it to `json` unless that is empty, and
  // returns the exit status.
  int Finish(const std::string& json) const;
  // Writes {bench, commit, machine, date, figures: [...], checks: [...]} to `path`, whole and at
  // once.
  absl::Status WriteJson(const std::string& path) const;

 private:
  std::string bench_;
  std::string commit_;
  std::string machine_;
  std::vector<Figure> figures_;
  struct Checked {
    std::string name;
    bool ok;
    std::string detail;
  };
  std::vector<Checked> checks_;
};

// Median of `values`. REQUIRES: not empty.
double Median(std::vector<double> values);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_REPORT_H_
