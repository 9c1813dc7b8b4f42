// The least that UCX can do for a list of units, as a yardstick: a plain gather, then one active message.
// No session, no lease, no generation, no deadline; both ends poll all the time.

#ifndef LOCKS_KVD_BENCH_PLAIN_UCX_H_
#define LOCKS_KVD_BENCH_PLAIN_UCX_H_

#include <sys/types.h>

#include <memory>
#include <span>
#include <vector>

#include "proto/pool.pb.h"
#include "proto/wire.h"

namespace kvd::bench {

// A server process that maps the arena of `offer`, and this process's connection to it.
class PlainUcx {
 public:
  explicit PlainUcx(const locks_kvd::v1::AttachReply& offer);
  ~PlainUcx();

  // Fetches the units into buffer() one after another, in messages of `message_bytes`.
  void Fetch(std::span<const FetchEntry> entries, size_t unit_bytes, size_t message_bytes);
  const uint8_t* buffer() const;
  // Between measurements the server must not take a core.
  void Pause();
  void Resume();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Call first in main(): serves, and ends the process, if `argv` asks for it.
void ServePlainUcxIfAsked(int argc, char** argv);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_PLAIN_UCX_H_
