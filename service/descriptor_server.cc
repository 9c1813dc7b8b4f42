#include "service/descriptor_server.h"

#include <utility>
#include <vector>

#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Make(
    const std::string& socket_path, const SessionTable* sessions) {
  auto lookup = [sessions](const DescriptorRequest& request) -> absl::StatusOr<std::vector<int>> {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session,
                         sessions->Find(request.session, request.incarnation));
    std::vector<int> descriptors;
    for (const UniqueFd& fd : session.arena->memory().descriptors())
      descriptors.push_back(fd.get());
    return descriptors;
  };
  KVD_ASSIGN_OR_RETURN(auto listener, DescriptorListener::Make(socket_path, std::move(lookup)));
  return std::unique_ptr<DescriptorServer>(new DescriptorServer(std::move(listener)));
}

}  // namespace kvd
