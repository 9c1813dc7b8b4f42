#include "client/kv_client.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/engine_pages.h"
#include "client/record_fetch.h"
#include "client/step_options.h"
#include "proto/address.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"
#include "proto/ucx_worker.h"

namespace kvd {
namespace {

bool AllOnLoopback(const std::vector<std::string>& daemons) {
  return std::all_of(daemons.begin(), daemons.end(), [](const std::string& text) {
    const absl::StatusOr<Address> address = Address::Parse(text);
    return address.ok() && address->IsLoopback();
  });
}

// 128 random bits: no two sequences, in any process, share decoded pages.
std::string SequenceNonce() {
  std::random_device random;
  std::string nonce;
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = random();
    nonce.append(reinterpret_cast<const char*>(&word), sizeof(word));
  }
  return nonce;
}

// Once more if a daemon was lost on the way: its pages may have another holder, and it is not asked
// again.
template <typename Call>
auto DespiteLoss(const Call& call) {
  auto result = call();
  return absl::IsUnavailable(result.status()) ? call() : std::move(result);
}

}  // namespace

KvClient::KvClient(ClientOptions options, WorkerShape shape)
    : options_(std::move(options)),
      shape_(std::move(shape)),
      fingerprint_(ModelFingerprint(shape_.geometry, options_.weights_id, options_.rope)) {}

KvClient::~KvClient() = default;

absl::StatusOr<std::unique_ptr<KvClient>> KvClient::Make(ClientOptions options) {
  if (options.model.empty()) return absl::InvalidArgumentError("model: name the arena's model");
  for (const absl::Duration timeout : {options.control_timeout, options.fetch_timeout}) {
    if (timeout > absl::ZeroDuration() && timeout <= kMaxTimeout) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("control_timeout and fetch_timeout must be above 0 and at most ",
                     absl::FormatDuration(kMaxTimeout), ", got ", absl::FormatDuration(timeout)));
  }
  KVD_ASSIGN_OR_RETURN(WorkerShape shape, WorkerShape::Make(options.geometry, options.shards));
  if (options.gpu >= 0) {
    if (options.gpu >= NumGpus()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "gpu: ", options.gpu, " is wanted and ", NumGpus(),
          " are visible: is this library built with CUDA, and does the process see the GPU?"));
    }
    shape.place = OnGpu(options.gpu);
  }
  auto client = std::unique_ptr<KvClient>(new KvClient(std::move(options), std::move(shape)));
  const ClientOptions& o = client->options_;
  if (o.use_ucx) {
    UcxOptions ucx;
    ucx.devices = o.ucx_devices.empty() && !o.daemons.empty() && AllOnLoopback(o.daemons)
                      ? "lo"
                      : o.ucx_devices;
    ucx.gpu = o.gpu;
    KVD_ASSIGN_OR_RETURN(client->ucx_, UcxWorker::Make(ucx));
  }
  KVD_ASSIGN_OR_RETURN(client->pool_, Pool::Make(&o, &client->shape_, client->ucx_.get()));
  client->writer_ =
      std::make_unique<PageWriter>(client->pool_.get(), &client->shape_, o.control_timeout);
  client->sealer_ = std::make_unique<TailSealer>([pool = client->pool_.get()] { pool->Upkeep(); });
  return client;
}

std::vector<PageKey> KvClient::PageKeys(std::span<const uint32_t> tokens,
                                        absl::string_view extra) const {
  return kvd::PageKeys(RootKey(fingerprint_, options_.salt, extra), tokens,
                       shape_.geometry.page_tokens);
}

absl::StatusOr<PutReport> KvClient::Put(const PutRequest& request) {
  const int num_keys = static_cast<int>(request.keys.size());
  if (request.first_page < 0 || request.num_pages < 0 ||
      request.num_pages > num_keys - request.first_page) {
    return absl::InvalidArgumentError(absl::StrCat("pages [", request.first_page, ", ",
                                                   request.first_page, " + ", request.num_pages,
                                                   ") are not among the ", num_keys, " keys"));
  }
  if (static_cast<int>(request.layers.size()) != shape_.num_layers()) {
    return absl::InvalidArgumentError(absl::StrCat("layers: one EngineKv a pooled layer: expected ",
                                                   shape_.num_layers(), ", got ",
                                                   request.layers.size()));
  }
  const PoolView view = pool_->View();
  if (view.live.empty()) return absl::UnavailableError("no daemon of the pool is attached");
  const std::vector<PlacedPage> all = view.Place(request.keys);
  const std::span<const PlacedPage> pages(all.data() + request.first_page,
                                          static_cast<size_t>(request.num_pages));
  const EnginePages source(shape_, request.layers, request.first_token);
  return writer_->Write(view, pages,
                        [&](std::span<const size_t> wanted, int shard_pos, uint8_t* slots) {
                          return source.Read(wanted, shard_pos, slots);
                        });
}

absl::StatusOr<std::unique_ptr<Sequence>> KvClient::OpenSequence(std::span<const PageKey> keys,
                                                                 const SequenceOptions& options) {
  const SequenceContext context = {pool_.get(), &shape_, writer_.get(), sealer_.get(), &metrics_};
  const PageKey root = RootKey(fingerprint_, options_.salt, SequenceNonce());
  return DespiteLoss(
      [&] { return Sequence::Open(context, keys, root, options_.fetch_timeout, options); });
}

absl::StatusOr<FetchedPages> KvClient::FetchPages(std::span<const PageKey> keys) {
  return DespiteLoss([&] { return FetchOnce(keys); });
}

absl::StatusOr<FetchedPages> KvClient::FetchOnce(std::span<const PageKey> keys) {
  const PoolView view = pool_->View();
  if (view.live.empty()) return absl::UnavailableError("no daemon of the pool is attached");
  const std::vector<PlacedPage> placed = view.Place(keys);
  KVD_ASSIGN_OR_RETURN(const MatchedPages matched, pool_->Match(view, placed, MatchMode::kPrefix));
  FetchedPages fetched;
  fetched.num_pages = matched.num_pages;
  const size_t page_bytes = shape_.page_bytes();
  fetched.units.resize(static_cast<size_t>(matched.num_pages) * page_bytes);
  const auto shards = static_cast<size_t>(shape_.num_shards());
  std::vector<UnitRequest> requests;
  for (size_t p = 0; p < static_cast<size_t>(matched.num_pages); ++p) {
    for (int layer = 0; layer < shape_.num_layers(); ++layer) {
      for (int head = 0; head < shape_.num_heads(); ++head) {
        const SlotRef& slot =
            matched.slots[p * shards + static_cast<size_t>(shape_.shard_pos(head))];
        requests.push_back({matched.daemons[p],
                            {.slot = slot.slot,
                             .layer = static_cast<uint16_t>(layer),
                             .head = static_cast<uint16_t>(shape_.head_in_shard(head)),
                             .generation = slot.generation},
                            fetched.units.data() + p * page_bytes +
                                shape_.unit_idx(layer, head) * shape_.unit_bytes()});
      }
    }
  }
  KVD_RETURN_IF_ERROR(FetchUnits(view, requests, options_.fetch_timeout));
  return fetched;
}

std::string KvClient::MetricsText() const {
  std::vector<ChannelView> views;
  for (int d = 0; d < pool_->num_daemons(); ++d) {
    const PoolChannel& channel = pool_->channel(d);
    const std::shared_ptr<Attachment> attachment = channel.attachment();
    ChannelView view = {channel.address(), channel.figures(), std::nullopt};
    if (attachment != nullptr && !attachment->lost.load()) view.path = attachment->path.path;
    views.push_back(std::move(view));
  }
  return metrics_.Text(views);
}

std::vector<DaemonView> KvClient::Daemons() const {
  std::vector<DaemonView> views;
  for (int d = 0; d < pool_->num_daemons(); ++d) {
    const PoolChannel& channel = pool_->channel(d);
    DaemonView view;
    view.address = channel.address();
    if (const std::shared_ptr<Attachment> attachment = channel.attachment()) {
      view.attached = !attachment->lost.load();
      view.draining = attachment->draining.load();
      view.incarnation = absl::BytesToHexString(attachment->session().incarnation());
      view.path = attachment->path;
    }
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace kvd
