#include "client/sequence.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/record_fetch.h"
#include "proto/placement.h"
#include "proto/status.h"

namespace kvd {
namespace {

void SetSources(const PoolView& view, SequencePages* pages) {
  for (size_t d = 0; d < view.attachments.size(); ++d) {
    if (view.attachments[d] != nullptr) pages->SetSource(static_cast<int>(d), view.attachments[d]);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sequence>> Sequence::Open(const SequenceContext& context,
                                                         std::span<const PageKey> keys,
                                                         const PageKey& private_root,
                                                         absl::Duration fetch_timeout,
                                                         const SequenceOptions& options) {
  const WorkerShape& shape = *context.shape;
  KVD_RETURN_IF_ERROR(Validate(options.step, shape.num_layers()));
  const int page_tokens = shape.geometry.page_tokens;
  const int64_t capacity = (options.max_tokens + page_tokens - 1) / page_tokens;
  if (capacity < static_cast<int64_t>(keys.size()) || capacity < 1 || capacity > kMaxPages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_tokens must hold the prompt's ", keys.size(), " pages of ", page_tokens,
        " tokens and be at most ", int64_t{kMaxPages} * page_tokens, ", got ", options.max_tokens));
  }
  auto sequence = std::unique_ptr<Sequence>(new Sequence(context, options));
  sequence->fetch_timeout_ = fetch_timeout;
  const PoolView view = context.pool->View();
  if (view.live.empty()) return absl::UnavailableError("no daemon of the pool is attached");
  KVD_ASSIGN_OR_RETURN(sequence->pages_,
                       SequencePages::Make(shape, static_cast<int>(capacity), options.step.n_sink,
                                           options.step.n_win, Pool::kMaxDaemons));
  if (shape.place.on_gpu()) {
    sequence->batch_totals_ = std::make_unique<StepTotals>();
    sequence->batch_fetch_totals_ = std::make_unique<FetchTotals>();
  } else {
    KVD_ASSIGN_OR_RETURN(sequence->step_, DecodeStep::Plan(sequence->pages_.get(), options.step));
  }
  const std::vector<PlacedPage> placed = view.Place(keys);
  KVD_ASSIGN_OR_RETURN(MatchedPages matched, context.pool->Match(view, placed, MatchMode::kPrefix));
  KVD_RETURN_IF_ERROR(sequence->Fill(view, placed, std::move(matched)));

  Sequence& s = *sequence;
  s.prompt_keys_.assign(keys.begin(), keys.begin() + s.num_open_pages_);
  PageKey parent = private_root;
  for (int p = s.num_open_pages_; p < static_cast<int>(capacity); ++p) {
    // The nonce in the root makes the key unique; the page's place stands in for its tokens.
    const std::vector<uint32_t> place(static_cast<size_t>(page_tokens), static_cast<uint32_t>(p));
    parent = NextPageKey(parent, place);
    s.private_keys_.push_back(parent);
  }
  s.next_to_seal_ = s.num_woken_ = s.num_open_pages_;
  context.sealer->Add(sequence.get());
  const FetchTotals* fetched =
      s.step_ != nullptr ? &s.step_->fetch_totals() : s.batch_fetch_totals_.get();
  context.metrics->Add(
      {&s.totals(), fetched, options.step.loss, s.mirror_bytes(), s.cache_bytes()});
  return sequence;
}

Sequence::~Sequence() {
  context_.sealer->Remove(this);
  if (step_ != nullptr || batch_totals_ != nullptr) context_.metrics->Remove(&totals());
}

PageKey Sequence::key(int page) const {
  const auto p = static_cast<size_t>(page);
  return p < prompt_keys_.size() ? prompt_keys_[p] : private_keys_[p - prompt_keys_.size()];
}

absl::Status Sequence::Fill(const PoolView& view, std::span<const PlacedPage> placed,
                            MatchedPages matched) {
  leases_ = std::move(matched.leases);
  SetSources(view, pages_.get());
  const auto shards = static_cast<size_t>(context_.shape->num_shards());
  std::vector<RecordRequest> requests;
  for (int p = 0; p < matched.num_pages; ++p) {
    const auto idx = static_cast<size_t>(p);
    requests.push_back({p, matched.daemons[idx], {matched.slots.data() + idx * shards, shards}});
  }
  const std::vector<uint8_t> mirrored =
      FetchRecords(view, requests, fetch_timeout_, pages_->mirror(), *context_.shape);
  // A page without its record cannot be scanned: the sequence ends before it.
  const auto gap = std::find(mirrored.begin(), mirrored.end(), uint8_t{0});
  num_open_pages_ = static_cast<int>(gap - mirrored.begin());
  context_.metrics->CountUnusedHits(static_cast<uint64_t>(mirrored.end() - gap));
  for (int p = 0; p < num_open_pages_; ++p) {
    const RecordRequest& request = requests[static_cast<size_t>(p)];
    pages_->SetPage(p, request.daemon, request.slots);
    SetHome(p, view.attachments[static_cast<size_t>(request.daemon)]);
  }
  pages_->SetNumPages(num_open_pages_);
  if (view.replicas > 1) KVD_RETURN_IF_ERROR(FindAlternates(view, placed));
  return FetchLocalPages(view);
}

// Leases each open page at its second holder too, where that has it already.
absl::Status Sequence::FindAlternates(const PoolView& view, std::span<const PlacedPage> placed) {
  std::vector<PlacedPage> second;
  for (int p = 0; p < num_open_pages_; ++p) {
    for (const int holder : view.Holders(placed[static_cast<size_t>(p)].word, /*only_live=*/true)) {
      if (holder == pages_->daemon_of(p)) continue;
      second.push_back(placed[static_cast<size_t>(p)]);
      second.back().daemon = holder;
      break;
    }
  }
  KVD_ASSIGN_OR_RETURN(MatchedPages matched,
                       context_.pool->Match(view, second, MatchMode::kAtDaemon));
  const auto shards = static_cast<size_t>(context_.shape->num_shards());
  for (size_t i = 0; i < second.size(); ++i) {
    if (matched.found[i] == 0) continue;
    pages_->SetAlternate(static_cast<int>(second[i].page_idx), second[i].daemon,
                         {matched.slots.data() + i * shards, shards});
  }
  for (LeasedSlots& leases : matched.leases) leases_.push_back(std::move(leases));
  return absl::OkStatus();
}

// Sinks and window: the units that are attended in every step.
absl::Status Sequence::FetchLocalPages(const PoolView& view) {
  std::vector<UnitRequest> requests;
  const WorkerShape& shape = *context_.shape;
  const auto add = [&](int page, auto destination) {
    for (int layer = 0; layer < shape.num_layers(); ++layer) {
      for (int head = 0; head < shape.num_heads(); ++head) {
        const SlotRef& slot = pages_->slot_of(page, shape.shard_pos(head));
        requests.push_back({pages_->daemon_of(page),
                            {.slot = slot.slot,
                             .layer = static_cast<uint16_t>(layer),
                             .head = static_cast<uint16_t>(shape.head_in_shard(head)),
                             .generation = slot.generation},
                            destination(layer, head)});
      }
    }
  };
  for (int p = 0; p < pages_->num_sinks(); ++p) {
    add(p, [&](int layer, int head) { return pages_->sink_unit(p, layer, head); });
  }
  for (int p = pages_->first_ring_page(); p < pages_->num_pages(); ++p) {
    add(p, [&](int layer, int head) { return pages_->ring_unit(p, layer, head); });
  }
  return FetchUnits(view, requests, fetch_timeout_);
}

absl::Status Sequence::AppendTail(std::span<const EngineKv> layers, int64_t first_token,
                                  int count) {
  KVD_RETURN_IF_ERROR(CheckBetweenSteps("AppendTail"));
  const absl::Status status = pages_->AppendTail(layers, first_token, count);
  WakeSealer();
  return status;
}

absl::Status Sequence::CheckBetweenSteps(absl::string_view what) const {
  if (step_ == nullptr || step_->next_layer() == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " between steps only: layer ", step_->next_layer(), " is next"));
}

absl::Status Sequence::Run(int layer, const StepInput& input, const StepOutput& output) {
  if (step_ == nullptr) {
    return absl::FailedPreconditionError(
        "the client has a GPU: this sequence's steps are run by a DecodeBatch it joins");
  }
  const absl::Status status = step_->Run(layer, input, output);
  if (step_->next_layer() == 0) WakeSealer();
  return status;
}

void Sequence::WakeSealer() {
  const int complete = pages_->complete_pages();
  if (complete == num_woken_) return;
  num_woken_ = complete;
  context_.sealer->Wake();
}

absl::StatusOr<RepairReport> Sequence::Repair(std::span<const int> pages) {
  KVD_RETURN_IF_ERROR(CheckBetweenSteps("Repair"));
  std::vector<int> wanted;
  for (const int p : pages) {
    if (p < 0 || p >= pages_->num_pages()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "page ", p, " is not a sealed page: expected 0 to ", pages_->num_pages() - 1));
    }
    if (!pages_->is_selectable(p)) wanted.push_back(p);
  }
  RepairReport report;
  if (wanted.empty()) return report;
  const PoolView view = context_.pool->View();
  if (view.live.empty()) return absl::UnavailableError("no daemon of the pool is attached");
  std::vector<PlacedPage> placed;
  for (const int p : wanted) {
    placed.push_back(view.PlaceOne(key(p), p, key(p / kStripePages * kStripePages)));
  }
  KVD_ASSIGN_OR_RETURN(MatchedPages matched, context_.pool->Match(view, placed, MatchMode::kEach));
  SetSources(view, pages_.get());
  const auto shards = static_cast<size_t>(context_.shape->num_shards());
  std::vector<RecordRequest> requests;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (matched.found[i] == 0) continue;
    requests.push_back(
        {wanted[i], matched.daemons[i], {matched.slots.data() + i * shards, shards}});
  }
  const std::vector<uint8_t> mirrored =
      FetchRecords(view, requests, fetch_timeout_, pages_->mirror(), *context_.shape);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (mirrored[i] == 0) continue;
    pages_->SetPage(requests[i].page, requests[i].daemon, requests[i].slots);
    SetHome(requests[i].page, view.attachments[static_cast<size_t>(requests[i].daemon)]);
  }
  {
    const std::lock_guard<std::mutex> lock(homes_mutex_);
    for (LeasedSlots& leases : matched.leases) leases_.push_back(std::move(leases));
  }
  for (const int p : wanted) {
    if (pages_->is_selectable(p)) {
      ++report.num_repaired;
    } else {
      report.still_missing.push_back(p);
    }
  }
  return report;
}

bool Sequence::SealCompletePages() {
  // Batches stay small: a page leaves the ring when its batch is done.
  while (next_to_seal_ < pages_->complete_pages()) {
    const int count = std::min(pages_->complete_pages() - next_to_seal_, TailRing::kSlackPages);
    if (!SealBatch(next_to_seal_, count)) return false;
  }
  return true;
}

// Writes pages [first, first + count), mirrors their records and hands them to the step, in order,
// up to the first that failed.
bool Sequence::SealBatch(int first, int count) {
  const PoolView view = context_.pool->View();
  if (view.live.empty()) {
    pages_->SetSealProblem(absl::StatusCode::kUnavailable);
    return false;
  }
  std::vector<PlacedPage> placed;
  for (int p = first; p < first + count; ++p) {
    placed.push_back(view.PlaceOne(key(p), p, key(p / kStripePages * kStripePages)));
  }
  const WorkerShape& shape = *context_.shape;
  std::vector<uint8_t> copies;  // of the pages, where the ring is on a GPU
  if (shape.place.on_gpu()) copies.resize(static_cast<size_t>(count) * shape.page_bytes());
  for (int p = 0; !copies.empty() && p < count; ++p) {
    const absl::Status read = pages_->ring().ReadPage(
        first + p, copies.data() + static_cast<size_t>(p) * shape.page_bytes());
    if (read.ok()) continue;
    pages_->SetSealProblem(read.code());
    return false;
  }
  const auto read = [&](std::span<const size_t> wanted, int shard_pos, uint8_t* slots) {
    for (const size_t i : wanted) {
      const uint8_t* page = copies.empty() ? pages_->ring().page(first + static_cast<int>(i))
                                           : copies.data() + i * shape.page_bytes();
      for (int layer = 0; layer < shape.num_layers(); ++layer) {
        // The shard's heads of a layer stand together in both.
        const size_t bytes = static_cast<size_t>(shape.slot.shard_heads) * shape.unit_bytes();
        std::memcpy(
            slots,
            page + shape.unit_idx(layer, shard_pos * shape.slot.shard_heads) * shape.unit_bytes(),
            bytes);
        slots += bytes;
      }
    }
    return absl::OkStatus();
  };
  PutReport report = context_.writer->Write(view, placed, read);
  std::vector<RecordRequest> requests;
  for (size_t i = 0; i < report.pages.size(); ++i) {
    const PutOutcome& outcome = report.pages[i];
    const bool sealed =
        outcome.state == PutOutcome::State::kNew || outcome.state == PutOutcome::State::kHit;
    if (!sealed) {
      pages_->SetSealProblem(outcome.state == PutOutcome::State::kPending
                                 ? absl::StatusCode::kUnavailable
                                 : outcome.status.code());
      break;
    }
    requests.push_back({first + static_cast<int>(i), outcome.daemon, outcome.slots});
  }
  const std::vector<uint8_t> mirrored =
      FetchRecords(view, requests, fetch_timeout_, pages_->mirror(), *context_.shape);
  for (size_t i = 0; i < requests.size() && mirrored[i] != 0; ++i) {
    const RecordRequest& request = requests[i];
    pages_->PushSealed({request.daemon,
                        view.attachments[static_cast<size_t>(request.daemon)],
                        {request.slots.begin(), request.slots.end()}});
    SetHome(request.page, view.attachments[static_cast<size_t>(request.daemon)]);
    ++next_to_seal_;
  }
  {
    const std::lock_guard<std::mutex> lock(homes_mutex_);
    for (LeasedSlots& leases : report.leases) leases_.push_back(std::move(leases));
  }
  const bool all = next_to_seal_ == first + count;
  if (all) pages_->SetSealProblem(absl::StatusCode::kOk);
  return all;
}

}  // namespace kvd
