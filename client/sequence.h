// An open sequence: its pages leased and mirrored, its sinks, window and tail local, its decode
// step planned.
//
// Use: KvClient::OpenSequence, AppendTail for the prompt's rest, then Run for each layer of each
// token; a sequence of a client with a GPU joins a DecodeBatch instead, which runs its steps. A
// completed tail page is sealed to the pool by the client's sealer, under a key of its own: pages
// made by sparse decoding carry a random nonce, so no other sequence can match them.
// Thread safety: compatible: one thread at a time (the sealer beside it is ours). The client must
// outlive it. Hot path: Run; see decode_step.h. Nothing else here belongs into a step.

#ifndef LOCKS_KVD_CLIENT_SEQUENCE_H_
#define LOCKS_KVD_CLIENT_SEQUENCE_H_

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/decode_step.h"
#include "client/metrics.h"
#include "client/page_writer.h"
#include "client/pool.h"
#include "client/sequence_pages.h"
#include "client/step_options.h"
#include "client/tail_sealer.h"
#include "kernels/gather.h"

namespace kvd {

struct SequenceOptions {
  int64_t max_tokens = 0;  // prompt and what will be decoded; fixes the mirror's size
  StepOptions step;
};

struct RepairReport {
  int num_repaired = 0;
  std::vector<int> still_missing;  // not resident (yet)
};

// What sequences share with their client.
struct SequenceContext {
  Pool* pool;
  const WorkerShape* shape;
  const PageWriter* writer;
  TailSealer* sealer;
  ClientMetrics* metrics;
};

class Sequence final : public SealJob {
 public:
  ~Sequence() override;  // releases the leases; best effort, up to control_timeout
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Pages of the prompt that were resident when the sequence was opened: the tokens before
  // num_open_pages() * B need not be computed.
  int num_open_pages() const { return num_open_pages_; }
  int64_t num_tokens() const { return pages_->num_tokens(); }
  // Key of a page, decoded ones included: to put a missing page again.
  PageKey key(int page) const;

  // Appends tokens [first_token, first_token + count) of an engine's cache, one EngineKv a pooled
  // layer. Between steps only. kResourceExhausted: no room; the tokens before it were appended.
  absl::Status AppendTail(std::span<const EngineKv> layers, int64_t first_token, int count);

  // One layer of one token: see DecodeStep::Run. kFailedPrecondition where the client has a GPU.
  absl::Status Run(int layer, const StepInput& input, const StepOutput& output);

  // Sealed pages that cannot be chosen at the moment.
  std::vector<int> MissingPages() const { return pages_->MissingPages(); }
  // Looks for missing pages again, after they were put again or their daemon came back. Between
  // steps only. Blocking: up to a control and a fetch timeout. Errors: kUnavailable: no daemon is
  // attached.
  absl::StatusOr<RepairReport> Repair(std::span<const int> pages);

  const StepTotals& totals() const { return step_ != nullptr ? step_->totals() : *batch_totals_; }
  // REQUIRES: the client has no GPU.
  const LayerResult& result() const { return step_->result(); }
  const DecodeStep& step() const { return *step_; }
  // Completed pages that wait for their seal.
  int num_unsealed_pages() const { return pages_->complete_pages() - pages_->num_pages(); }
  // Bytes of this process that the sequence holds.
  size_t mirror_bytes() const { return pages_->mirror().bytes(); }
  size_t cache_bytes() const {
    return step_ != nullptr ? step_->cache().bytes() : 0;
  }  // else the batch has it

  bool SealCompletePages() override;
  void FollowMoves() override;

 private:
  friend class KvClient;
  friend class DecodeBatch;
  Sequence(const SequenceContext& context, const SequenceOptions& options)
      : context_(context), options_(options) {}
  static absl::StatusOr<std::unique_ptr<Sequence>> Open(const SequenceContext& context,
                                                        std::span<const PageKey> keys,
                                                        const PageKey& private_root,
                                                        absl::Duration fetch_timeout,
                                                        const SequenceOptions& options);
  absl::Status Fill(const PoolView& view, std::span<const PlacedPage> placed, MatchedPages matched);
  absl::Status FetchLocalPages(const PoolView& view);
  absl::Status FindAlternates(const PoolView& view, std::span<const PlacedPage> placed);
  void WakeSealer();
  bool SealBatch(int first, int count);
  // kFailedPrecondition in the middle of a step.
  absl::Status CheckBetweenSteps(absl::string_view what) const;
  // sequence_moves.cc: the sealer's thread.
  std::vector<int> PagesToFollow();
  void SettleMoves();
  void SetHome(int page, std::shared_ptr<Attachment> attachment);

  const SequenceContext context_;
  const SequenceOptions options_;
  absl::Duration fetch_timeout_;
  std::unique_ptr<SequencePages> pages_;
  std::unique_ptr<DecodeStep> step_;  // null on a GPU; then these two
  std::unique_ptr<StepTotals> batch_totals_;
  std::unique_ptr<FetchTotals> batch_fetch_totals_;
  int num_open_pages_ = 0;
  int num_woken_ = 0;                 // complete pages that the sealer was told of
  std::vector<PageKey> prompt_keys_;  // of the pages at open
  // [P_cap - open pages], computed at open: the sealer only reads
  std::vector<PageKey> private_keys_;

  std::mutex homes_mutex_;                          // guards what follows; never taken in a step
  std::vector<std::shared_ptr<Attachment>> homes_;  // [sealed pages] where each page was last found
  std::vector<LeasedSlots> leases_;

  // Sealer's thread (and the destructor, after it has let go).
  int next_to_seal_ = 0;
  absl::Time follow_at_ = absl::InfinitePast();
  // Of the batch that the step has not taken over yet.
  std::vector<LeasedSlots> moved_leases_;
  std::vector<std::pair<int, std::shared_ptr<Attachment>>> moved_homes_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_SEQUENCE_H_
