// The choice of the scan, on models with known rates: no timing.

#include "client/scan_model.h"

#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

const WorkerShape& Shape() {
  static const WorkerShape shape = *WorkerShape::Make(SmallGeometry(), {});
  return shape;
}

TEST(ScanModelTest, BandwidthBoundScansAreProgressiveOnceTheyAreLong) {
  // One rate for all bytes, nothing else costs: progressive reads 144 + 480 C/P of 480 bytes a
  // page.
  const ScanModel model = {0, 1e9, 1e9, 1e18};
  EXPECT_EQ(ChooseScan(model, Shape(), 1024, 1024), ScanMode::kFull);
  EXPECT_EQ(ChooseScan(model, Shape(), 1100, 1024), ScanMode::kFull);
  EXPECT_EQ(ChooseScan(model, Shape(), 65536, 1024), ScanMode::kProgressive);
  const ScanEstimate estimate = EstimateScan(model, Shape(), 65536, 1024);
  EXPECT_NEAR(estimate.full_seconds, 2 * 65536 * 480 / 1e9, 1e-9);
  EXPECT_NEAR(estimate.progressive_seconds, 2 * (65536 * 144.0 + 1024 * 480) / 1e9, 1e-9);
}

TEST(ScanModelTest, AWinBelowTenPercentStaysFull) {
  // coarse at 144 / 0.95 / 480 of the full rate: progressive needs 95% of the full scan's time.
  ScanModel model = {0, 1e9, 0.144 / 0.95 / 0.480 * 1e9, 1e18};
  EXPECT_EQ(ChooseScan(model, Shape(), 1 << 20, 1), ScanMode::kFull);
  model.coarse_bytes_per_second *= 1.1;
  EXPECT_EQ(ChooseScan(model, Shape(), 1 << 20, 1), ScanMode::kProgressive);
}

TEST(ScanModelTest, LaunchesDecideShortScans) {
  const ScanModel model = {1e-3, 1e9, 1e9, 1e18};
  EXPECT_EQ(ChooseScan(model, Shape(), 2048, 256), ScanMode::kFull);
}

TEST(ScanModelTest, MeasuredRatesArePositive) {
  const ScanModel model = ScanModel::Measure(Shape());
  EXPECT_GT(model.full_bytes_per_second, 0);
  EXPECT_GT(model.coarse_bytes_per_second, 0);
  EXPECT_GT(model.select_pages_per_second, 0);
}

}  // namespace
}  // namespace kvd::testing
