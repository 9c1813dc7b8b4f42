#include "client/locksctl_output.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/json_text.h"

namespace kvd {
namespace {

std::string RenderJson(const Table& table) {
  std::string out = "[";
  for (size_t r = 0; r < table.rows.size(); ++r) {
    absl::StrAppend(&out, r == 0 ? "\n" : ",\n", "  {");
    for (size_t c = 0; c < table.columns.size(); ++c) {
      const Cell& cell = table.rows[r][c];
      absl::StrAppend(&out, c == 0 ? "" : ", ", JsonQuote(table.columns[c]), ": ",
                      cell.quoted ? JsonQuote(cell.text) : cell.text);
    }
    out += "}";
  }
  return out + "\n]\n";
}

// A client's name must not steer the operator's terminal.
std::string Printable(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = '?';
  }
  return text;
}

}  // namespace

Cell::Cell(double number) : text(absl::StrFormat("%.1f", number)), quoted(false) {}

std::string Render(const Table& table, OutputForm form) {
  if (form == OutputForm::kJson) return RenderJson(table);
  std::vector<size_t> widths;
  for (size_t c = 0; c < table.columns.size(); ++c) {
    size_t width = table.columns[c].size();
    for (const auto& row : table.rows) width = std::max(width, row[c].text.size());
    widths.push_back(width);
  }
  std::string out;
  const auto add = [&](size_t c, const std::string& text) {
    const bool last = c + 1 == table.columns.size();
    absl::StrAppend(&out, text, last ? "\n" : std::string(widths[c] - text.size() + 2, ' '));
  };
  for (size_t c = 0; c < table.columns.size(); ++c) add(c, table.columns[c]);
  for (const auto& row : table.rows) {
    for (size_t c = 0; c < table.columns.size(); ++c) add(c, Printable(row[c].text));
  }
  return out;
}

}  // namespace kvd
