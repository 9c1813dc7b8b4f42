// A string as JSON text, for the one-line logs of the daemon and the tables of `locksctl`. Whole
// documents are written by protobuf's own JSON form.
//
// Thread safety: pure function.

#ifndef LOCKS_KVD_PROTO_JSON_TEXT_H_
#define LOCKS_KVD_PROTO_JSON_TEXT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace kvd {

// `text` in double quotes; quotes, backslashes and control characters escaped, other bytes as they
// are.
std::string JsonQuote(absl::string_view text);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_JSON_TEXT_H_
