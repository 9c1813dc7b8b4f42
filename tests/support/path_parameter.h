// Names of the test cases that run on each path: a suite's case, then "shared" or "ucx".

#ifndef LOCKS_KVD_TESTS_SUPPORT_PATH_PARAMETER_H_
#define LOCKS_KVD_TESTS_SUPPORT_PATH_PARAMETER_H_

#include <gtest/gtest.h>

#include <string>

#include "client/fetcher.h"

namespace kvd::testing {

inline std::string PathParameterName(const ::testing::TestParamInfo<PathKind>& info) {
  const absl::string_view name = PathName(info.param);
  return std::string(name.data(), name.size());
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_PATH_PARAMETER_H_
