#include "service/ucx_mover.h"

#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<UcxMover>> UcxMover::Make(const Arena* arena, UcxWorker* worker,
                                                         const std::string& remote_address,
                                                         const Incarnation& incarnation,
                                                         const SessionToken& session,
                                                         absl::Duration timeout) {
  std::unique_ptr<UcxMover> mover(new UcxMover(arena, timeout));
  KVD_ASSIGN_OR_RETURN(mover->channel_,
                       IngestChannel::Connect(worker, remote_address, incarnation, session,
                                              arena->memory().shape().slot.unit_bytes, timeout));
  return mover;
}

absl::StatusOr<std::vector<uint64_t>> UcxMover::Move(std::span<const MovedPage> pages) {
  const SlotLayout& slot = arena_.memory().shape().slot;
  if (staging_.size() < pages.size()) staging_.resize(pages.size());
  std::vector<IngestUnit> units;
  std::vector<IngestUnit> records;
  std::vector<uint64_t> summary_checksums;
  for (size_t i = 0; i < pages.size(); ++i) {
    const PageStore::PageBytes page = arena_.store().ReadPage(pages[i].slot, &staging_[i]);
    summary_checksums.push_back(page.summary_checksum);
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head) {
        units.push_back({pages[i].ticket, static_cast<uint16_t>(layer), static_cast<uint16_t>(head),
                         page.units + slot.unit_offset(layer, head)});
      }
    }
    records.push_back({pages[i].ticket, 0, 0, page.records});
  }
  KVD_RETURN_IF_ERROR(channel_->Send(units, timeout_));
  KVD_RETURN_IF_ERROR(channel_->SendRecords(records, slot.summary_bytes(), timeout_));
  return summary_checksums;
}

}  // namespace kvd
