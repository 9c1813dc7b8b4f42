#include "service/log_setup.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/json_text.h"

namespace kvd {
namespace {

// Takes the next word off `line`: up to a space, or to the end of its quoted part.
absl::string_view TakeWord(absl::string_view* line) {
  size_t end = 0;
  bool quoted = false;
  for (; end < line->size() && (quoted || (*line)[end] != ' '); ++end) {
    if ((*line)[end] == '\\') ++end;
    if (end < line->size() && (*line)[end] == '"' && (end == 0 || (*line)[end - 1] != '\\'))
      quoted = !quoted;
  }
  end = std::min(end, line->size());
  const absl::string_view word = line->substr(0, end);
  line->remove_prefix(std::min(end + 1, line->size()));
  return word;
}

class FieldsFlag final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    const std::string fields = LogFieldsJson({message.payload.data(), message.payload.size()});
    out.append(fields.data(), fields.data() + fields.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override {
    return std::make_unique<FieldsFlag>();
  }
};

}  // namespace

std::string LogQuote(absl::string_view value) {
  return absl::StrCat("\"", absl::CHexEscape(value.substr(0, 512)), "\"");
}

std::string LogFieldsJson(absl::string_view line) {
  std::string out = absl::StrCat("\"event\":", JsonQuote(TakeWord(&line)));
  while (!line.empty()) {
    const absl::string_view word = TakeWord(&line);
    const size_t equals = word.find('=');
    if (equals == absl::string_view::npos) continue;
    absl::string_view value = word.substr(equals + 1);
    std::string unquoted(value);
    if (value.size() >= 2 && value.front() == '"' && value.back() == '"') {
      unquoted.clear();
      absl::CUnescape(value.substr(1, value.size() - 2), &unquoted);
    }
    absl::StrAppend(&out, ",", JsonQuote(word.substr(0, equals)), ":", JsonQuote(unquoted));
  }
  return out;
}

void SetUpLogging(const locks_kvd::v1::LogConfig& config) {
  const bool text =
      config.format() == "text" || (config.format().empty() && isatty(STDERR_FILENO) == 1);
  auto formatter = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  formatter->add_flag<FieldsFlag>('Q');
  formatter->set_pattern(text ? "%Y-%m-%dT%H:%M:%S.%eZ %l %v"
                              : "{\"time\":\"%Y-%m-%dT%H:%M:%S.%eZ\",\"level\":\"%l\",%Q}");
  auto logger = std::make_shared<spdlog::logger>("locks-kvd",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::move(formatter));
  logger->set_level(spdlog::level::from_str(config.level()));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace kvd
