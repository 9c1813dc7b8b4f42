#!/usr/bin/env python3
"""Draws every query of the dashboard, as a real Prometheus answers it for a small pool, into deploy/docs/dashboard.png.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/dashboard_picture.py [FILE]
"""

import io
import itertools
import re
import sys
import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import PIL.Image  # noqa: E402

import monitoring  # noqa: E402

SECONDS = 40
COLUMNS = 6
MAX_SERIES = 12  # of one panel: the picture is to be small


def legend_of(target, labels):
    text = re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), target["legendFormat"]).strip()
    return re.sub(r"127\.0\.0\.1:", ":", text)


def draw(pool, start, end, axes, row, panel):
    axes.set_title(panel["title"], fontsize=6.5, pad=3)
    drawn, highest = 0, 0
    for target in panel["targets"]:
        expr = monitoring.without_variables(target["expr"], "10s")
        for series in pool.api("query_range", query=expr, start=start, end=end, step=1)["result"]:
            points = [(t - start, float(v)) for t, v in series["values"] if v != "NaN"]
            if points and drawn < MAX_SERIES:
                axes.plot(*zip(*points), linewidth=0.9, label=legend_of(target, series["metric"])[:30])
                drawn, highest = drawn + 1, max(highest, max(v for _, v in points))
    axes.set_xlim(0, end - start)
    axes.set_ylim(0, 1.3 * highest or 1)  # with room for the legend
    axes.tick_params(labelsize=4.5, length=1.5, pad=1)
    axes.yaxis.get_offset_text().set_fontsize(4.5)
    axes.set_ylabel(panel["fieldConfig"]["defaults"]["unit"], fontsize=4.5, labelpad=1)
    if drawn:
        axes.legend(fontsize=3.6, loc="best", frameon=False, handlelength=1, labelspacing=0.15)
    else:
        axes.text(0.5, 0.5, "no series here", ha="center", va="center", transform=axes.transAxes, fontsize=6)


def main(file):
    pool = monitoring.MonitoredPool()
    try:
        start = time.time()
        pool.scraped(SECONDS)
        end = time.time()
        rows = [(row, [panel for _, panel in group]) for row, group in itertools.groupby(monitoring.panels(), key=lambda p: p[0])]
        lines = [(row, panels[i:i + COLUMNS], i == 0) for row, panels in rows for i in range(0, len(panels), COLUMNS)]
        figure, grid = plt.subplots(len(lines), COLUMNS, figsize=(13, 1.3 * len(lines)), dpi=100)
        for (row, panels, first), line in zip(lines, grid):
            for axes, panel in itertools.zip_longest(line, panels):
                if panel is None:
                    axes.axis("off")
                else:
                    draw(pool, start, end, axes, row, panel)
            if first:
                line[0].annotate(row, (0, 1.28), xycoords="axes fraction", fontsize=8, fontweight="bold")
        figure.subplots_adjust(left=0.03, right=0.99, top=0.975, bottom=0.015, hspace=0.75, wspace=0.22)
        drawing = io.BytesIO()
        figure.savefig(drawing)
        PIL.Image.open(drawing).convert("RGB").quantize(48).save(file, optimize=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else monitoring.ROOT / "deploy" / "docs" / "dashboard.png")
