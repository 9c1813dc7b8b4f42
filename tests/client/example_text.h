// Examples of documents: a test compiles and runs them, and compares its own lines with the
// document's.
//
// Thread safety: pure functions of files.

#ifndef LOCKS_KVD_TESTS_CLIENT_EXAMPLE_TEXT_H_
#define LOCKS_KVD_TESTS_CLIENT_EXAMPLE_TEXT_H_

#include <fstream>
#include <string>

namespace kvd::testing {

// The lines after the first that contains `begin`, up to the next that contains `end`, without
// `indentation` blanks at their beginnings. Empty if there are none.
inline std::string ExampleOf(const std::string& path, const std::string& begin,
                             const std::string& end, size_t indentation = 0) {
  std::ifstream file(path);
  std::string line;
  std::string example;
  bool inside = false;
  while (std::getline(file, line)) {
    if (inside && line.find(end) != std::string::npos) break;
    if (inside) example += (line.size() < indentation ? line : line.substr(indentation)) + "\n";
    if (line.find(begin) != std::string::npos) inside = true;
  }
  return example;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_EXAMPLE_TEXT_H_
