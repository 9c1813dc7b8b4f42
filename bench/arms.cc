#include "bench/arms.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "bench/selectors.h"

namespace kvd::bench {

std::vector<Arm> BaselineArms(const Stream& stream, AlwaysKept kept) {
  std::vector<Arm> arms;
  arms.push_back({"oracle", [&stream, kept](int, const Truth& truth, int k) {
                    return OracleSelect(truth, stream.group, k, kept);
                  }});
  const std::pair<const char*, Combine> combines[] = {
      {"share", Combine::kShare}, {"z", Combine::kZ}, {"max", Combine::kMax}};
  const std::pair<const char*, std::shared_ptr<PageScorer>> scorers[] = {
      {"quest", MakeQuest(stream)}, {"centroid", MakeCentroid(stream)}};
  for (const auto& [scorer_name, scorer] : scorers) {
    for (const auto& [combine_name, combine] : combines) {
      arms.push_back(
          {absl::StrCat(scorer_name, "/", combine_name),
           [&stream, kept, scorer = scorer, combine = combine](int step, const Truth&, int k) {
             return SelectByScore(scorer->Score(stream, step), stream.group, combine, k, kept);
           }});
    }
  }
  return arms;
}

std::vector<Arm> LocksArms(const Stream& stream, const float* metric, AlwaysKept kept,
                           int min_candidates, bool ablations) {
  struct Variant {
    const char* name;
    LocksOptions options;
    bool progressive;
  };
  std::vector<Variant> variants = {
      {"locks-E0", {Encoder::kE0, true, 8, CombineRule::kShare}, false},
      {"locks-E1", {Encoder::kE1, true, 8, CombineRule::kShare}, false}};
  if (ablations) {
    variants.push_back(
        {"locks-E1-unrotated", {Encoder::kE1, false, 8, CombineRule::kShare}, false});
    variants.push_back({"locks-E1-R4", {Encoder::kE1, true, 4, CombineRule::kShare}, false});
  }
  if (metric) {
    variants.push_back({"locks-E1S", {Encoder::kE1S, true, 8, CombineRule::kShare}, false});
    variants.push_back(
        {"locks-E1S-progressive", {Encoder::kE1S, true, 8, CombineRule::kShare}, true});
    if (ablations)
      variants.push_back({"locks-E1S-peak", {Encoder::kE1S, true, 8, CombineRule::kPeak}, false});
  }
  std::vector<Arm> arms;
  for (const Variant& variant : variants) {
    auto selector = std::make_shared<LocksSelector>(stream, variant.options, metric);
    const bool progressive = variant.progressive;
    arms.push_back({variant.name, [&stream, selector, progressive, kept, min_candidates](
                                      int step, const Truth&, int k) {
                      if (!progressive) return selector->SelectFull(stream, step, k, kept);
                      return selector->SelectProgressive(stream, step, k,
                                                         std::max(16 * k, min_candidates), kept);
                    }});
  }
  return arms;
}

void RecallTable::Add(const std::string& arm, int budget, int layer, const Kept& kept) {
  std::vector<Sums>& by_layer = sums_[{arm, budget}];
  by_layer.resize(static_cast<size_t>(num_layers_));
  Sums& sums = by_layer[static_cast<size_t>(layer)];
  sums.mass += kept.mass;
  sums.selectable += kept.selectable;
  sums.output_error += kept.output_error;
  ++sums.count;
}

RecallTable::Row RecallTable::Get(const std::string& arm, int budget) const {
  const std::vector<Sums>& by_layer = sums_.at({arm, budget});
  const std::vector<Sums>& oracle = sums_.at({"oracle", budget});
  Row row;
  row.worst_layer = 1;
  int count = 0;
  for (size_t l = 0; l < by_layer.size(); ++l) {
    row.mass += by_layer[l].mass;
    row.selectable += by_layer[l].selectable;
    row.output_error += by_layer[l].output_error;
    count += by_layer[l].count;
    if (by_layer[l].count == 0 || oracle[l].count == 0) continue;
    const double mean = by_layer[l].selectable / by_layer[l].count;
    row.worst_layer = std::min(row.worst_layer, mean / (oracle[l].selectable / oracle[l].count));
  }
  row.mass /= count;
  row.selectable /= count;
  row.output_error /= count;
  return row;
}

std::vector<std::string> RecallTable::arms() const {
  std::set<std::string> names;
  for (const auto& [key, sums] : sums_) names.insert(key.first);
  return {names.begin(), names.end()};
}

std::string RecallTable::Best(const std::string& prefix, int budget) const {
  std::string best;
  for (const std::string& arm : arms()) {
    if (!absl::StartsWith(arm, prefix) || !Has(arm, budget)) continue;
    if (best.empty() || Get(arm, budget).mass > Get(best, budget).mass) best = arm;
  }
  return best;
}

void PrintRecallTable(const RecallTable& table) {
  std::printf("%-26s %6s %8s %9s %11s %9s %12s %9s\n", "arm", "b", "mass", "/ oracle", "selectable",
              "/ oracle", "worst layer", "o error");
  for (const int budget : kBudgets) {
    for (const std::string& arm : table.arms()) {
      if (!table.Has(arm, budget)) continue;
      const RecallTable::Row row = table.Get(arm, budget), oracle = table.Get("oracle", budget);
      std::printf("%-26s %6d %8.4f %9.4f %11.4f %9.4f %12.4f %9.4f\n", arm.c_str(), budget,
                  row.mass, row.mass / oracle.mass, row.selectable,
                  row.selectable / oracle.selectable, row.worst_layer, row.output_error);
    }
  }
}

void AddRecallFigures(const RecallTable& table, const std::string& prefix, Report* report) {
  for (const std::string& arm : table.arms()) {
    for (const int budget : kBudgets) {
      const RecallTable::Row row = table.Get(arm, budget), oracle = table.Get("oracle", budget);
      const std::string name = absl::StrCat(prefix, arm, "/b", budget);
      report->Add({name + "/mass", row.mass, "share", oracle.mass, row.mass / oracle.mass});
      report->Add({name + "/selectable", row.selectable, "share", oracle.selectable,
                   row.selectable / oracle.selectable});
      report->Add({name + "/worst_layer", row.worst_layer, "ratio", 1, row.worst_layer});
      report->Add({name + "/output_error", row.output_error, "ratio", oracle.output_error, 0});
    }
  }
}

}  // namespace kvd::bench
