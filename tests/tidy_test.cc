// Goal: the rules of STYLE.md that a program can check. Method: read every tracked source file as
// text. Prints long files and functions; fails on everything else it finds.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

const fs::path kRoot = KVD_SOURCE_DIR;
const std::vector<std::string> kFolders = {"kernels", "proto", "service",
                                           "client",  "tests", "bench"};

struct SourceFile {
  std::string path;  // relative to the root
  std::string text;
  std::vector<std::string> lines;
  std::string extension() const { return fs::path(path).extension(); }
  std::string folder() const { return path.substr(0, path.find('/')); }
};

std::string ReadText(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

const std::vector<SourceFile>& Sources() {
  static const auto* files = [] {
    auto* out = new std::vector<SourceFile>;
    for (const std::string& folder : kFolders) {
      for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
        const std::string extension = entry.path().extension();
        if (!entry.is_regular_file()) continue;
        static const std::set<std::string> extensions = {".h",   ".cc",    ".cu", ".cuh",
                                                         ".inc", ".proto", ".py"};
        if (extensions.count(extension) == 0) continue;
        SourceFile file = {fs::relative(entry.path(), kRoot).string(), ReadText(entry.path()), {}};
        std::istringstream in(file.text);
        for (std::string line; std::getline(in, line);) file.lines.push_back(line);
        out->push_back(std::move(file));
      }
    }
    std::sort(out->begin(), out->end(),
              [](const auto& a, const auto& b) { return a.path < b.path; });
    return out;
  }();
  return *files;
}

// Calls `check(file, line number, line)` for every line of the files that `wanted` accepts and
// returns what it complains about.
template <class Wanted, class Check>
std::vector<std::string> Complaints(Wanted wanted, Check check) {
  std::vector<std::string> complaints;
  for (const SourceFile& file : Sources()) {
    if (!wanted(file)) continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string complaint = check(file, file.lines[i]);
      if (!complaint.empty())
        complaints.push_back(file.path + ":" + std::to_string(i + 1) + ": " + complaint);
    }
  }
  return complaints;
}

bool IsCpp(const SourceFile& file) {
  return file.extension() != ".proto" && file.extension() != ".py";
}

TEST(TidyTest, IncludesOfOursGoOneWay) {
  const std::map<std::string, std::set<std::string>> forbidden = {
      {"kernels", {"proto", "service", "client", "tests", "bench"}},
      {"proto", {"service", "client", "tests", "bench"}},
      {"service", {"client", "tests", "bench"}},
      {"client", {"service", "tests", "bench"}},
  };
  EXPECT_THAT(
      Complaints([&](const SourceFile& f) { return IsCpp(f) && forbidden.count(f.folder()) > 0; },
                 [&](const SourceFile& f, const std::string& line) -> std::string {
                   if (line.rfind("#include \"", 0) != 0) return "";
                   const std::string folder = line.substr(10, line.find('/') - 10);
                   return forbidden.at(f.folder()).count(folder) ? "may not include " + folder + "/"
                                                                 : "";
                 }),
      testing::IsEmpty());
}

TEST(TidyTest, EachLibraryHasOneDoor) {
  // Which product files may include a library's headers, as a pattern of the path.
  const std::vector<std::pair<std::regex, std::regex>> doors = {
      {std::regex(R"(<uc[pst]/)"), std::regex(R"(^proto/ucx_|^bench/)")},
      {std::regex(R"(<spdlog/)"), std::regex(R"(^service/|^client/locksctl)")},
      {std::regex(R"(<prometheus/)"), std::regex(R"(^proto/metrics_text\.cc)")},
      {std::regex(R"(<CivetServer|<civetweb)"), std::regex(R"(^service/metrics\.cc)")},
      {std::regex(R"(<openssl/)"), std::regex(R"(^proto/page_key\.cc|^service/auth\.cc)")},
      {std::regex(R"([<"]hwy/)"), std::regex(R"(^kernels/simd\.)")},
      {std::regex(R"(<cuda\.h>)"), std::regex(R"(^(proto/gpu_memory\.cc|client/gpu_scope\.h))")},
      {std::regex(R"(<nccl\.h>)"), std::regex(R"(^service/nccl_communicator\.cc)")},
  };
  EXPECT_THAT(
      Complaints([](const SourceFile& f) { return IsCpp(f) && f.folder() != "tests"; },
                 [&](const SourceFile& f, const std::string& line) -> std::string {
                   if (line.rfind("#include", 0) != 0) return "";
                   for (const auto& [library, door] : doors) {
                     if (std::regex_search(line, library) && !std::regex_search(f.path, door))
                       return "library behind another door: " + line;
                   }
                   return "";
                 }),
      testing::IsEmpty());
}

TEST(TidyTest, OnlyMainsReadFlagsAndTheEnvironment) {
  EXPECT_THAT(Complaints(
                  [](const SourceFile& f) {
                    return IsCpp(f) && f.folder() != "tests" && f.folder() != "bench" &&
                           f.path != "service/main.cc" && f.path.rfind("client/locksctl", 0) != 0;
                  },
                  [](const SourceFile&, const std::string& line) -> std::string {
                    const bool environment = line.find("getenv(") != std::string::npos ||
                                             line.find("setenv(") != std::string::npos;
                    return environment || line.find("ABSL_FLAG(") != std::string::npos
                               ? "flag or environment"
                               : "";
                  }),
              testing::IsEmpty());
}

// True if `word` stands in `line` with no letter, digit or underscore on either side.
bool HasWord(const std::string& line, const std::string& word) {
  const auto in_word = [&](size_t i) {
    return i < line.size() && (std::isalnum(static_cast<unsigned char>(line[i])) || line[i] == '_');
  };
  for (size_t at = line.find(word); at != std::string::npos; at = line.find(word, at + 1)) {
    if (!(at > 0 && in_word(at - 1)) && !in_word(at + word.size())) return true;
  }
  return false;
}

// Words of the field that mean something else here (ARCHITECTURE.md, glossary). Names of libraries
// and CUDA's thread block are fine.
TEST(TidyTest, BannedWordsAreAbsent) {
  const std::vector<std::string> banned = {"block",  "blocks",   "chunk",  "chunks",
                                           "sketch", "sketches", "digest", "digests",
                                           "pull",   "pulls",    "pulled"};
  const std::vector<std::string> fine = {"thread block", ".digest()", "CTA"};
  EXPECT_THAT(Complaints([](const SourceFile& f) { return f.path != "tests/tidy_test.cc"; },
                         [&](const SourceFile&, const std::string& original) -> std::string {
                           for (const std::string& name : fine) {
                             if (original.find(name) != std::string::npos) return "";
                           }
                           std::string line = original;
                           for (char& c : line)
                             c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
                           if (line.rfind("#include", 0) == 0) return "";
                           for (const std::string& word : banned) {
                             if (HasWord(line, word)) return original;
                           }
                           return "";
                         }),
              testing::IsEmpty());
}

TEST(TidyTest, EveryHeaderOpensWithItsContract) {
  std::vector<std::string> complaints;
  for (const SourceFile& file : Sources()) {
    if (file.extension() != ".h") continue;
    if (file.lines.empty() || file.lines[0].rfind("// ", 0) != 0)
      complaints.push_back(file.path + ": no contract");
    std::string guard = "LOCKS_KVD_" + file.path;
    for (char& c : guard) c = c == '/' || c == '.' ? '_' : static_cast<char>(std::toupper(c));
    if (file.text.find("#ifndef " + guard + "_\n") == std::string::npos)
      complaints.push_back(file.path + ": expected the guard " + guard + "_");
  }
  EXPECT_THAT(complaints, testing::IsEmpty());
}

TEST(TidyTest, LinesOfCodeHaveAtMost100Columns) {
  EXPECT_THAT(Complaints(IsCpp,
                         [](const SourceFile&, const std::string& line) -> std::string {
                           const auto columns = std::count_if(line.begin(), line.end(), [](char c) {
                             return (static_cast<unsigned char>(c) & 0xC0) != 0x80;  // of UTF-8
                           });
                           return columns > 100 ? std::to_string(columns) + " columns" : "";
                         }),
              testing::IsEmpty());
}

TEST(TidyTest, ProtoFieldsAreCommented) {
  std::vector<std::string> complaints;
  const std::regex field(R"(^\s+(optional |repeated )?[A-Za-z_.0-9]+ [a-z_0-9]+ = \d+;)");
  for (const SourceFile& file : Sources()) {
    if (file.extension() != ".proto") continue;
    for (size_t i = 1; i < file.lines.size(); ++i) {
      if (std::regex_search(file.lines[i], field) &&
          file.lines[i - 1].find("//") == std::string::npos)
        complaints.push_back(file.path + ":" + std::to_string(i + 1) + ": field without a comment");
    }
  }
  EXPECT_THAT(complaints, testing::IsEmpty());
}

TEST(TidyTest, TodosCarryAnIssueNumber) {
  EXPECT_THAT(Complaints([](const SourceFile& f) { return f.path != "tests/tidy_test.cc"; },
                         [&](const SourceFile&, const std::string& line) -> std::string {
                           const bool todo =
                               HasWord(line, "TODO") && line.find("TODO(#") == std::string::npos;
                           return todo || HasWord(line, "FIXME") ? line : "";
                         }),
              testing::IsEmpty());
}

// Every .cc and .cu stands in a CMakeLists.txt of its folder or above, and every unit has its test.
TEST(TidyTest, EverySourceIsBuilt) {
  std::vector<std::string> complaints;
  for (const SourceFile& file : Sources()) {
    if (file.extension() != ".cc" && file.extension() != ".cu") continue;
    bool listed = false;
    for (fs::path folder = fs::path(file.path).parent_path(); !listed && !folder.empty();
         folder = folder.parent_path()) {
      // A file; or its stem, or a test's unit, in a list of programs that are built alike.
      std::string name =
          fs::relative(kRoot / file.path, kRoot / folder).replace_extension().string();
      const std::string lists = ReadText(kRoot / folder / "CMakeLists.txt");
      listed = HasWord(lists, name);
      if (!listed && name.size() > 5 && name.ends_with("_test"))
        listed = HasWord(lists, name.substr(0, name.size() - 5));
    }
    if (!listed) complaints.push_back(file.path + ": in no CMakeLists.txt");
  }
  EXPECT_THAT(complaints, testing::IsEmpty());
}

// What the project contains stands alone.
TEST(TidyTest, NothingRefersToTheWorkplace) {
  const std::string shared = std::string("../") + "shared";
  std::vector<std::string> complaints;
  for (const SourceFile& file : Sources()) {
    if (file.text.find(shared) != std::string::npos ||
        file.text.find(std::string("design") + ".md") != std::string::npos ||
        file.text.find(std::string("method") + ".md") != std::string::npos)
      complaints.push_back(file.path);
  }
  EXPECT_THAT(complaints, testing::IsEmpty());
}

TEST(TidyTest, LongFilesAndFunctionsArePrinted) {
  for (const SourceFile& file : Sources()) {
    if (file.lines.size() > 400)
      std::printf("long file: %s, %zu lines\n", file.path.c_str(), file.lines.size());
    if (!IsCpp(file)) continue;
    const size_t limit = file.folder() == "kernels" ? 120 : 70;
    size_t start = 0;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      if (!line.empty() && line.back() == '{' && line[0] != ' ' &&
          line.rfind("namespace", 0) != 0 && line.find('(') != std::string::npos)
        start = i + 1;
      if (line == "}" && start > 0) {
        if (i + 1 - start > limit)
          std::printf("long function: %s:%zu, %zu lines\n", file.path.c_str(), start,
                      i + 1 - start);
        start = 0;
      }
    }
  }
  EXPECT_FALSE(Sources().empty());
}

}  // namespace
