#include "bench/plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvd::bench {
namespace {

constexpr double kWidth = 720, kHeight = 420, kLeft = 60, kRight = 190, kTop = 40, kBottom = 50;
constexpr const char* kColours[] = {"#222222", "#0067a5", "#2b9348", "#e08e0b",
                                    "#c0392b", "#7d3c98", "#5f6a6a"};

struct Axes {
  double x_low, x_high, y_low;
  double X(double budget) const {
    return kLeft + (std::log2(budget) - x_low) / (x_high - x_low) * (kWidth - kLeft - kRight);
  }
  double Y(double recall) const {
    return kTop + (1 - recall) / (1 - y_low) * (kHeight - kTop - kBottom);
  }
};

Axes Fit(const std::vector<PlotSeries>& series) {
  Axes axes = {1e9, -1e9, 0.9};
  for (const PlotSeries& s : series) {
    for (const auto& [budget, recall] : s.points) {
      axes.x_low = std::min(axes.x_low, std::log2(budget));
      axes.x_high = std::max(axes.x_high, std::log2(budget));
      axes.y_low = std::min(axes.y_low, std::floor(recall * 10) / 10);
    }
  }
  if (axes.x_high <= axes.x_low) axes.x_high = axes.x_low + 1;
  return axes;
}

std::string Frame(const Axes& axes, const std::string& title) {
  std::string svg = absl::StrFormat("<text x='%g' y='24' font-size='15'>%s</text>\n", kLeft, title);
  for (double y = axes.y_low; y < 1.001; y += 0.1) {
    absl::StrAppendFormat(&svg, "<line x1='%g' x2='%g' y1='%g' y2='%g' stroke='#dddddd'/>\n", kLeft,
                          kWidth - kRight, axes.Y(y), axes.Y(y));
    absl::StrAppendFormat(&svg, "<text x='%g' y='%g' text-anchor='end'>%.1f</text>\n", kLeft - 8,
                          axes.Y(y) + 4, y);
  }
  for (double x = axes.x_low; x < axes.x_high + 0.01; x += 1) {
    absl::StrAppendFormat(&svg, "<text x='%g' y='%g' text-anchor='middle'>%g</text>\n",
                          axes.X(std::exp2(x)), kHeight - kBottom + 20, std::exp2(x));
  }
  absl::StrAppendFormat(&svg, "<text x='%g' y='%g' text-anchor='middle'>attended tokens</text>\n",
                        (kLeft + kWidth - kRight) / 2, kHeight - 10);
  return svg;
}

}  // namespace

absl::Status WriteRecallPlot(const std::string& path, const std::string& title,
                             const std::vector<PlotSeries>& series) {
  const Axes axes = Fit(series);
  std::string svg = absl::StrFormat(
      "<svg xmlns='http://www.w3.org/2000/svg' width='%g' height='%g' font-family='sans-serif' "
      "font-size='12'>\n"
      "<rect width='100%%' height='100%%' fill='white'/>\n",
      kWidth, kHeight);
  absl::StrAppend(&svg, Frame(axes, title));
  for (size_t i = 0; i < series.size(); ++i) {
    const char* colour = kColours[i % std::size(kColours)];
    std::string line;
    for (const auto& [budget, recall] : series[i].points)
      absl::StrAppendFormat(&line, "%.1f,%.1f ", axes.X(budget), axes.Y(recall));
    absl::StrAppendFormat(
        &svg, "<polyline points='%s' fill='none' stroke='%s' stroke-width='2'/>\n", line, colour);
    for (const auto& [budget, recall] : series[i].points)
      absl::StrAppendFormat(&svg, "<circle cx='%.1f' cy='%.1f' r='3' fill='%s'/>\n", axes.X(budget),
                            axes.Y(recall), colour);
    const double y = kTop + 10 + 20 * static_cast<double>(i);
    absl::StrAppendFormat(
        &svg,
        "<rect x='%g' y='%g' width='14' height='4' fill='%s'/><text x='%g' y='%g'>%s</text>\n",
        kWidth - kRight + 16, y - 5, colour, kWidth - kRight + 36, y, series[i].name);
  }
  std::ofstream out(path);
  out << svg << "</svg>\n";
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
}

}  // namespace kvd::bench
