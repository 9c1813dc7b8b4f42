// Files are written here byte by byte, from bench/trace/FORMAT.md, not with code of the project.

#include "kernels/query_metric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "kernels/rotate.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

constexpr size_t kLayers = 2, kHeads = 2, kDim = 64;
constexpr size_t kMatricesOffset = 320;  // 256 + 2 layer ids, rounded up to 64

KvGeometry Geometry(bool rotated) {
  KvGeometry g;
  g.num_layers = kLayers;
  g.num_q_heads = 4;
  g.num_kv_heads = kHeads;
  g.head_dim = kDim;
  g.rotated = rotated;
  g.softmax_scale = 0.125f;
  return g;
}

// Mean of q q' over 200 rows, distinct for every layer and head.
std::vector<float> UnrotatedMatrix(size_t idx) {
  const std::vector<uint16_t> bits = testing::RandomKv(200 * kDim, KvDtype::kFp16, 1.0f, 40 + idx);
  std::vector<float> s(kDim * kDim, 0.0f);
  for (size_t r = 0; r < 200; ++r) {
    for (size_t i = 0; i < kDim; ++i) {
      for (size_t j = 0; j < kDim; ++j)
        s[i * kDim + j] += FromFp16(bits[r * kDim + i]) * FromFp16(bits[r * kDim + j]) / 200.0f;
    }
  }
  return s;
}

class QueryMetricTest : public ::testing::Test {
 protected:
  QueryMetricTest() {
    bytes_.resize(kMatricesOffset + 4 * kLayers * kHeads * kDim * kDim + 8);
    std::memcpy(bytes_.data(), "KVDQMETR", 8);
    const uint32_t numbers[] = {1, 256, kLayers, kHeads, kDim, 200};
    std::memcpy(bytes_.data() + 8, numbers, sizeof(numbers));
    std::memcpy(bytes_.data() + 32, "test-model", 10);
    const uint32_t layer_ids[] = {5, 11};
    std::memcpy(bytes_.data() + 256, layer_ids, sizeof(layer_ids));
    for (size_t i = 0; i < kLayers * kHeads; ++i) {
      const std::vector<float> s = UnrotatedMatrix(i);
      std::memcpy(Matrix(i), s.data(), 4 * s.size());
    }
    Sign();
  }

  uint8_t* Matrix(size_t idx) { return bytes_.data() + kMatricesOffset + 4 * idx * kDim * kDim; }
  void SetElement(size_t idx, size_t i, size_t j, float x) {
    std::memcpy(Matrix(idx) + 4 * (i * kDim + j), &x, 4);
  }
  void Sign() {
    const uint64_t sum = Checksum64(bytes_.data(), bytes_.size() - 8);
    std::memcpy(bytes_.data() + bytes_.size() - 8, &sum, 8);
  }
  std::string Write() const {
    const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
    const std::string path = ::testing::TempDir() + "/query_metric_" + info->name();
    std::ofstream file(path, std::ios::binary);
    for (uint8_t byte : bytes_) file.put(static_cast<char>(byte));
    return path;
  }
  // What Load says; also checks that a refused file leaves the metric as it was.
  std::string LoadProblem(const KvGeometry& geometry = Geometry(true)) const {
    QueryMetric metric;
    const std::string problem = QueryMetric::Load(Write(), geometry, &metric);
    EXPECT_EQ(metric.empty(), !problem.empty());
    return problem;
  }

  std::vector<uint8_t> bytes_;
};

TEST_F(QueryMetricTest, UnrotatedMatrixIsTheFilesPlusTheRidge) {
  QueryMetric metric;
  ASSERT_EQ(QueryMetric::Load(Write(), Geometry(false), &metric), "");
  for (size_t idx = 0; idx < kLayers * kHeads; ++idx) {
    const std::vector<float> s = UnrotatedMatrix(idx);
    const float* got = metric.at(static_cast<int>(idx / kHeads), static_cast<int>(idx % kHeads));
    float trace = 0;
    for (size_t i = 0; i < kDim; ++i) trace += s[i * kDim + i];
    for (size_t i = 0; i < kDim; ++i) {
      for (size_t j = 0; j < kDim; ++j) {
        const float ridge = i == j ? 0.01f * trace / kDim : 0.0f;
        ASSERT_NEAR(got[i * kDim + j], s[i * kDim + j] + ridge, 1e-6f);
      }
    }
  }
}

TEST_F(QueryMetricTest, RotatedMatrixGivesRotatedVectorsTheSameForm) {
  QueryMetric metric, plain;
  ASSERT_EQ(QueryMetric::Load(Write(), Geometry(true), &metric), "");
  ASSERT_EQ(QueryMetric::Load(Write(), Geometry(false), &plain), "");
  std::vector<float> x;
  for (uint16_t bits : testing::RandomKv(kDim, KvDtype::kFp16, 1.0f, 9))
    x.push_back(FromFp16(bits));
  std::vector<float> rotated = x;
  Rotate(rotated.data(), 1, kDim);
  const auto form = [](const float* s, const std::vector<float>& v) {
    double sum = 0;
    for (size_t i = 0; i < kDim; ++i) {
      for (size_t j = 0; j < kDim; ++j) sum += static_cast<double>(v[i] * s[i * kDim + j] * v[j]);
    }
    return sum;
  };
  const double truth = form(plain.at(1, 0), x);
  EXPECT_NEAR(form(metric.at(1, 0), rotated), truth, 1e-4 * truth);
  EXPECT_GT(std::fabs(form(metric.at(1, 0), x) - truth), 1e-2 * truth)
      << "keys must be rotated too";
  EXPECT_GT(std::fabs(form(metric.at(1, 1), rotated) - truth), 1e-2 * truth)
      << "heads are distinct";
  EXPECT_GT(std::fabs(form(metric.at(0, 0), rotated) - truth), 1e-2 * truth)
      << "layers are distinct";
  for (size_t i = 0; i < kDim; ++i) {
    for (size_t j = 0; j < i; ++j)
      ASSERT_EQ(metric.at(1, 0)[i * kDim + j], metric.at(1, 0)[j * kDim + i]);
  }
}

TEST_F(QueryMetricTest, KeepsTheFilesChecksumForStats) {
  QueryMetric metric;
  ASSERT_EQ(QueryMetric::Load(Write(), Geometry(true), &metric), "");
  EXPECT_EQ(metric.file_checksum(), Checksum64(bytes_.data(), bytes_.size() - 8));
}

TEST_F(QueryMetricTest, RefusesAFileThatIsNotThere) {
  QueryMetric metric;
  EXPECT_THAT(QueryMetric::Load("/nonexistent/metric", Geometry(true), &metric),
              HasSubstr("/nonexistent/metric: cannot be opened"));
  EXPECT_TRUE(metric.empty());
}

TEST_F(QueryMetricTest, RefusesForeignHeadersNamingTheField) {
  const struct {
    size_t offset;
    const char* field;
  } kFields[] = {{0, "magic"},       {8, "version"},       {12, "header_bytes"},
                 {16, "num_layers"}, {20, "num_kv_heads"}, {24, "head_dim"}};
  for (const auto& field : kFields) {
    bytes_[field.offset] ^= 0x40;
    Sign();
    EXPECT_THAT(LoadProblem(), HasSubstr(field.field));
    bytes_[field.offset] ^= 0x40;
  }
  Sign();
  EXPECT_EQ(LoadProblem(), "");
}

TEST_F(QueryMetricTest, RefusesAnotherModelsFileWithBothNumbers) {
  KvGeometry geometry = Geometry(true);
  geometry.num_layers = 3;
  EXPECT_THAT(LoadProblem(geometry), HasSubstr("num_layers: expected 3, got 2"));
}

TEST_F(QueryMetricTest, RefusesCutAndLongFiles) {
  const std::vector<uint8_t> whole = bytes_;
  bytes_.push_back(0);
  EXPECT_THAT(LoadProblem(), HasSubstr("bytes (or more)"));
  for (size_t size : {size_t{0}, size_t{255}, size_t{256}, size_t{400}, whole.size() - 1}) {
    bytes_.assign(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THAT(LoadProblem(), HasSubstr("bytes: expected")) << size;
  }
}

TEST_F(QueryMetricTest, RefusesAFlippedBitAnywhere) {
  for (size_t at : {size_t{40}, size_t{257}, size_t{300}, kMatricesOffset + 5, bytes_.size() - 1}) {
    bytes_[at] ^= 1;
    EXPECT_THAT(LoadProblem(), HasSubstr("checksum")) << at;
    bytes_[at] ^= 1;
  }
}

TEST_F(QueryMetricTest, RefusesMatricesThatNoQueriesHave) {
  const auto refuses = [&](const char* why) {
    Sign();
    EXPECT_THAT(LoadProblem(), HasSubstr(why));
    const std::vector<float> s = UnrotatedMatrix(3);
    std::memcpy(Matrix(3), s.data(), 4 * s.size());
  };
  SetElement(3, 2, 2, std::nanf(""));
  refuses("layer 1, head 1 holds NaN or Inf");
  SetElement(3, 4, 7, INFINITY);
  refuses("holds NaN or Inf");
  SetElement(3, 4, 7, 0.9f);
  refuses("is not symmetric");
  SetElement(3, 4, 4, -1.0f);
  refuses("has a diagonal element below 0");
  SetElement(3, 4, 7, 50.0f);
  SetElement(3, 7, 4, 50.0f);
  refuses("is not positive semidefinite");
  std::memset(Matrix(3), 0, 4 * kDim * kDim);
  refuses("mean diagonal");
  for (size_t i = 0; i < kDim; ++i) SetElement(3, i, i, 1e30f);
  refuses("mean diagonal");
}

TEST_F(QueryMetricTest, TakesASemidefiniteMatrixOfRankOne) {
  for (size_t i = 0; i < kDim; ++i) {
    for (size_t j = 0; j < kDim; ++j) SetElement(0, i, j, i % 2 == j % 2 ? 3.0f : -3.0f);
  }
  Sign();
  EXPECT_EQ(LoadProblem(), "");
}

}  // namespace
}  // namespace kvd
