#include "client/page_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace kvd {
namespace {

void Fail(PutOutcome& outcome, const absl::Status& status) {
  outcome.state = PutOutcome::State::kFailed;
  if (outcome.status.ok()) outcome.status = status;
}

// The state of a page over its shards: the worst of them.
void Combine(PutOutcome& outcome, PutOutcome::State state, bool first_shard) {
  outcome.state = first_shard ? state : std::max(outcome.state, state);
}

}  // namespace

// Outcomes and bytes are written by the job's own thread only.
struct PageWriter::Job {
  std::shared_ptr<Attachment> attachment;
  std::vector<size_t> pages;  // positions in the request
  LeasedSlots leases;
  std::vector<PutOutcome>* outcomes = nullptr;
  int64_t bytes_sent = 0;
};

struct PageWriter::Batch {
  Job* job;
  std::span<const size_t> pages;  // positions in the request
  std::vector<uint8_t>* staging;
  PutOutcome& outcome(size_t i) { return (*job->outcomes)[i]; }
};

PutReport PageWriter::Write(const PoolView& view, std::span<const PlacedPage> pages,
                            const SlotReader& read) const {
  PutReport report;
  report.pages.resize(pages.size());
  std::vector<Job> jobs(view.attachments.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    report.pages[i].daemon = pages[i].daemon;
    report.pages[i].slots.resize(static_cast<size_t>(shape_.num_shards()));
    jobs[static_cast<size_t>(pages[i].daemon)].pages.push_back(i);
  }
  std::vector<Job*> work;
  for (size_t d = 0; d < jobs.size(); ++d) {
    Job& job = jobs[d];
    if (job.pages.empty()) continue;
    job.attachment = view.attachments[d];
    job.outcomes = &report.pages;
    job.leases = LeasedSlots(&pool_.channel(static_cast<int>(d)), job.attachment);
    work.push_back(&job);
  }
  RunInParallel(static_cast<int>(work.size()),
                [&](int i) { WriteJob(*work[static_cast<size_t>(i)], pages, read); });
  for (Job* job : work) {
    report.bytes_sent += job->bytes_sent;
    report.leases.push_back(std::move(job->leases));
  }
  for (const PutOutcome& outcome : report.pages) {
    switch (outcome.state) {
      case PutOutcome::State::kNew:
        ++report.num_new;
        break;
      case PutOutcome::State::kHit:
        ++report.num_hit;
        break;
      case PutOutcome::State::kPending:
        ++report.num_pending;
        break;
      case PutOutcome::State::kFailed:
        ++report.num_failed;
        report.first_failure.Update(outcome.status);
        break;
    }
  }
  return report;
}

void PageWriter::WriteJob(Job& job, std::span<const PlacedPage> pages,
                          const SlotReader& read) const {
  const size_t per_batch = std::clamp<size_t>(kStagingBytes / shape_.slot.slot_bytes(), 1, 4096);
  std::vector<uint8_t> staging;
  absl::Status stop;  // the daemon is lost or full: the rest is not tried
  for (size_t at = 0; at < job.pages.size(); at += per_batch) {
    const size_t count = std::min(per_batch, job.pages.size() - at);
    Batch batch = {&job, {job.pages.data() + at, count}, &staging};
    int num_shards_done = 0;
    for (int s = 0; s < shape_.num_shards() && stop.ok(); ++s) {
      stop = WriteShard(batch, s, pages, read);
      // A full daemon took the pages before the one that it refused.
      const bool tried = stop.ok() || stop.code() == absl::StatusCode::kResourceExhausted;
      num_shards_done += tried ? 1 : 0;
    }
    if (stop.ok()) continue;
    const bool batch_settled = num_shards_done == shape_.num_shards();
    for (size_t i = batch_settled ? at + count : at; i < job.pages.size(); ++i) {
      Fail((*job.outcomes)[job.pages[i]], stop);
    }
    return;
  }
}

// Returns an error if nothing more is to be tried at this daemon.
absl::Status PageWriter::WriteShard(Batch& batch, int shard_pos, std::span<const PlacedPage> pages,
                                    const SlotReader& read) const {
  using Reply = locks_kvd::v1::ReserveReply;
  Attachment& attachment = *batch.job->attachment;
  locks_kvd::v1::ReserveRequest request;
  request.set_shard(shape_.shards[static_cast<size_t>(shard_pos)]);
  for (const size_t i : batch.pages) {
    request.mutable_pages()->mutable_keys()->append(pages[i].key.begin(), pages[i].key.end());
    request.mutable_pages()->add_page_idx(pages[i].page_idx);
    request.mutable_pages()->add_placement_words(pages[i].word);
  }
  const auto leasing = attachment.leases.Leasing();
  KVD_ASSIGN_OR_RETURN(const Reply reply,
                       pool_.channel(attachment.daemon).Reserve(attachment, std::move(request)));
  if (static_cast<size_t>(reply.results_size()) != batch.pages.size()) {
    return absl::InternalError(absl::StrCat("reserve at ", attachment.address, ": ",
                                            batch.pages.size(), " results expected, got ",
                                            reply.results_size()));
  }
  std::vector<size_t> fresh;
  std::vector<uint64_t> tickets;
  absl::Status full;
  for (size_t n = 0; n < batch.pages.size(); ++n) {
    const size_t i = batch.pages[n];
    const Reply::Result& result = reply.results(static_cast<int>(n));
    PutOutcome& outcome = batch.outcome(i);
    const bool first = shard_pos == 0;
    switch (result.state()) {
      case Reply::STATE_NEW:
        Combine(outcome, PutOutcome::State::kNew, first);
        fresh.push_back(i);
        tickets.push_back(result.ticket());
        break;
      case Reply::STATE_HIT: {
        Combine(outcome, PutOutcome::State::kHit, first);
        const SlotRef slot = {result.slot(), result.generation()};
        outcome.slots[static_cast<size_t>(shard_pos)] = slot;
        batch.job->leases.Add({&slot, 1});
        break;
      }
      case Reply::STATE_PENDING:
        Combine(outcome, PutOutcome::State::kPending, first);
        break;
      default:
        full = absl::ResourceExhaustedError(
            absl::StrCat(attachment.address, ": ", reply.full_reason()));
        Fail(outcome, full);
    }
  }
  if (!fresh.empty()) {
    SealNew(batch, shard_pos, fresh, tickets, SendNew(batch, shard_pos, fresh, tickets, read));
  }
  return full;
}

absl::Status PageWriter::SendNew(Batch& batch, int shard_pos, std::span<const size_t> fresh,
                                 std::span<const uint64_t> tickets, const SlotReader& read) const {
  Attachment& attachment = *batch.job->attachment;
  if (attachment.ingest == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        attachment.address, ": put needs UCX on both ends; set use_ucx here and data.ucx there"));
  }
  const SlotLayout& slot = shape_.slot;
  batch.staging->resize(fresh.size() * slot.slot_bytes());
  KVD_RETURN_IF_ERROR(read(fresh, shard_pos, batch.staging->data()));
  std::vector<IngestUnit> units;
  units.reserve(fresh.size() * slot.num_units());
  for (size_t n = 0; n < fresh.size(); ++n) {
    for (int layer = 0; layer < shape_.num_layers(); ++layer) {
      for (int h = 0; h < slot.shard_heads; ++h) {
        uint8_t* unit = batch.staging->data() + n * slot.slot_bytes() + slot.unit_offset(layer, h);
        units.push_back({tickets[n], static_cast<uint16_t>(layer), static_cast<uint16_t>(h), unit});
      }
    }
  }
  KVD_RETURN_IF_ERROR(attachment.ingest->Send(units, send_timeout_));
  batch.job->bytes_sent += static_cast<int64_t>(batch.staging->size());
  return absl::OkStatus();
}

// Seals also after a failed send: complete pages are visible then, and the reservations of the
// others are given back instead of staying pending until they expire.
void PageWriter::SealNew(Batch& batch, int shard_pos, std::span<const size_t> fresh,
                         std::span<const uint64_t> tickets, const absl::Status& sent) const {
  Attachment& attachment = *batch.job->attachment;
  locks_kvd::v1::SealRequest request;
  for (const uint64_t ticket : tickets) request.add_tickets(ticket);
  auto reply = pool_.channel(attachment.daemon).Seal(attachment, std::move(request));
  if (reply.ok() && static_cast<size_t>(reply->results_size()) != fresh.size()) {
    reply = absl::InternalError(absl::StrCat("seal at ", attachment.address, ": ", fresh.size(),
                                             " results expected, got ", reply->results_size()));
  }
  for (size_t n = 0; n < fresh.size(); ++n) {
    PutOutcome& outcome = batch.outcome(fresh[n]);
    if (!reply.ok()) {
      Fail(outcome, sent.ok() ? reply.status() : sent);
      continue;
    }
    const auto& result = reply->results(static_cast<int>(n));
    if (result.code() != 0) {
      const absl::Status refused(
          static_cast<absl::StatusCode>(result.code()),
          absl::StrCat("seal at ", attachment.address, ": ", result.message()));
      Fail(outcome, sent.ok() ? refused : sent);
      continue;
    }
    const SlotRef slot = {result.slot(), result.generation()};
    outcome.slots[static_cast<size_t>(shard_pos)] = slot;
    batch.job->leases.Add({&slot, 1});
  }
}

}  // namespace kvd
