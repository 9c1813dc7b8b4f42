#include "proto/ucx_context.h"

#include <uct/api/uct.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Only transports of the network: shared-memory ones would map or read another process's memory.
// "ib" is named only where there is a device, since UCX warns about names that it cannot use.
std::string NetworkTransports() {
  std::error_code error;
  const bool has_device = !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
  return has_device ? "tcp,ib" : "tcp";
}

// True if the library that runs can copy to and from a GPU, and between the GPU memories of two
// processes.
bool HasCuda() {
  uct_component_h* components = nullptr;
  unsigned count = 0;
  if (uct_query_components(&components, &count) != UCS_OK) return false;
  int found = 0;
  for (unsigned i = 0; i < count; ++i) {
    uct_component_attr_t attr = {};
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME;
    if (uct_component_query(components[i], &attr) != UCS_OK) continue;
    const absl::string_view name = attr.name;
    found += name == "cuda_cpy" || name == "cuda_ipc" ? 1 : 0;
  }
  uct_release_component_list(components);
  return found == 2;
}

bool NamesCuda(absl::string_view transports) { return absl::StrContains(transports, "cuda"); }

// Settings of UCX's TCP carry its name from 1.17 on.
std::string TcpSetting(const char* name) {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return absl::StrCat(major > 1 || minor >= 17 ? "TCP_" : "", name);
}

absl::Status Configure(const UcxOptions& options, ucp_config_t* config) {
  const std::string transports = UcxTransports(options);
  std::vector<std::pair<std::string, std::string>> settings = {
      {"TLS", transports},
      {"NET_DEVICES", options.devices.empty() ? "all" : options.devices},
      {"RNDV_SCHEME", options.read_from_sender ? "get_zcopy" : "auto"},
      {TcpSetting("PORT_RANGE"), options.port_range.empty() ? "0" : options.port_range},
      // UCX's own defaults, and never what the environment says: a process whose TCP receive
      // segment is smaller than its peer's is ended by UCX with the first long message.
      {TcpSetting("RX_SEG_SIZE"), "64k"},
      {TcpSetting("TX_SEG_SIZE"), "8k"},
  };
  // UCX's cache of memory types misses what a CUDA runtime inside the program allocates, and takes
  // it for host memory: asking the driver costs a microsecond, for messages that name GPU memory
  // alone. For all of this process's UCX.
  if (NamesCuda(transports)) settings.emplace_back("MEMTYPE_CACHE", "n");
  for (const auto& [name, value] : settings) {
    if (const ucs_status_t status = ucp_config_modify(config, name.c_str(), value.c_str());
        status != UCS_OK) {
      return UcxError(absl::StrCat("cannot set ", name, "=", value), status);
    }
  }
  return absl::OkStatus();
}

// Allocates as pieces are allocated and asks UCX what that is. Up to 1.22 UCX passes over the
// memory type that a message names and looks for itself; what it takes for host memory it copies
// with the CPU, which ends the process.
bool KnowsGpuMemory(ucp_context_h context, int gpu) {
  uint8_t* const memory = AllocateExportable(gpu, kGpuGranule);
  if (memory == nullptr) return false;
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory;
  params.length = kGpuGranule;
  ucp_mem_h mapped = nullptr;
  ucp_mem_attr_t attr = {};
  attr.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  bool knows = false;
  if (ucp_mem_map(context, &params, &mapped) == UCS_OK) {
    knows = ucp_mem_query(mapped, &attr) == UCS_OK && attr.mem_type == UCS_MEMORY_TYPE_CUDA;
    ucp_mem_unmap(context, mapped);
  }
  FreeExportable(gpu, memory);
  return knows;
}

}  // namespace

std::string UcxTransports(const UcxOptions& options) {
  if (!options.transports.empty()) return options.transports;
  return absl::StrCat(NetworkTransports(),
                      options.gpu >= 0 && HasCuda() ? ",cuda_copy,cuda_ipc" : "");
}

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  return absl::FailedPreconditionError(
      absl::StrCat("UCX: ", what, ": ", ucs_status_string(status)));
}

absl::StatusOr<ucp_context_h> MakeUcxContext(const UcxOptions& options) {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return UcxError("cannot read its configuration", status);
  }
  absl::Status configured = Configure(options, config);
  ucp_context_h context = nullptr;
  ucs_status_t status = UCS_OK;
  if (configured.ok()) {
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    status = ucp_init(&params, config, &context);
  }
  ucp_config_release(config);
  KVD_RETURN_IF_ERROR(configured);
  if (status != UCS_OK) {
    return UcxError(
        absl::StrCat("cannot start with devices '", options.devices, "', transports '",
                     options.transports, "': name devices of this host or leave both empty"),
        status);
  }
  return context;
}

bool HasGpuMemory(const UcxOptions& options, ucp_context_h context) {
  if (options.gpu < 0 || !NamesCuda(UcxTransports(options))) return false;
  ucp_context_attr_t attr = {};
  attr.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  return ucp_context_query(context, &attr) == UCS_OK &&
         (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0 &&
         KnowsGpuMemory(context, options.gpu);
}

}  // namespace kvd
