// Sets spdlog up: one line an event, as JSON for machines or as text for a terminal.
//
// Events are written straight with spdlog, as a name and key=value pairs:
//   spdlog::info("session_attached session={} tenant={} client={}", id, tenant, LogQuote(name));
// JSON lines hold the same as named fields. Never logged: tokens, page keys, contents.

#ifndef LOCKS_KVD_SERVICE_LOG_SETUP_H_
#define LOCKS_KVD_SERVICE_LOG_SETUP_H_

#include <string>

#include "absl/strings/string_view.h"
#include "proto/config.pb.h"

namespace kvd {

// Writes to standard error. REQUIRES: a checked configuration.
void SetUpLogging(const locks_kvd::v1::LogConfig& config);

// A value that may hold anything, as one quoted word.
std::string LogQuote(absl::string_view value);

// The JSON fields of one event line: "event":"<name>","<key>":"<value>",...
std::string LogFieldsJson(absl::string_view line);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_LOG_SETUP_H_
