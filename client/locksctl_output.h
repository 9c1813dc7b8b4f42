// Tables for people and the same rows as JSON for programs.
//
// Thread safety: plain values.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_OUTPUT_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_OUTPUT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "client/locksctl_options.h"

namespace kvd {

// A value: text, or a number or truth value that JSON does not quote.
struct Cell {
  Cell(std::string value)
      : text(std::move(value)), quoted(true) {}           // NOLINT: rows read as literals
  Cell(const char* value) : text(value), quoted(true) {}  // NOLINT
  Cell(int64_t number) : text(std::to_string(number)), quoted(false) {}  // NOLINT
  Cell(double number);                                                   // NOLINT: one decimal
  Cell(bool truth) : text(truth ? "true" : "false"), quoted(false) {}    // NOLINT

  // A JSON value as it stands.
  static Cell Json(std::string value) {
    Cell cell(std::move(value));
    cell.quoted = false;
    return cell;
  }

  std::string text;
  bool quoted;
};

struct Table {
  std::vector<std::string> columns;  // also the JSON names
  std::vector<std::vector<Cell>> rows;
};

// A table with aligned columns, or one JSON array of objects; both end with a newline. In a table
// control characters of what daemons and clients call themselves are shown as '?'.
std::string Render(const Table& table, OutputForm form);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_OUTPUT_H_
