"""The panels of the dashboard as one picture, drawn by matplotlib from what Prometheus has."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.metrics.prometheus import Series

COLUMNS = 4
DPI = 64
# Grafana's names of units -> what values are multiplied by, and what the axis says.
UNITS = {"s": (1e3, "ms"), "percentunit": (100, "%"), "bytes": (2**-20, "MiB"), "reqps": (1, "1/s"), "ops": (1, "1/s")}


@dataclass(frozen=True)
class Line:
    name: str
    series: Series

    @classmethod
    def of(cls, legend: str, series: Series) -> Line:
        """With the labels of the series put into Grafana's legend format."""
        return cls(re.sub(r"{{(\w+)}}", lambda match: series.labels.get(match[1], ""), legend), series)


def draw(title: str, panels: list[tuple[dict[str, Any], list[Line]]], file: Path) -> None:
    """Draw each panel's lines; ``panels`` are the dashboard's own."""
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.2 * rows), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, (panel, lines) in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, lines)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(file)


def _draw_panel(axis: Axes, panel: dict[str, Any], lines: list[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    factor, unit = UNITS.get(defaults["unit"], (1, ""))
    lines = [line for line in lines if any(line.series.values)] or lines  # a legend of what there was
    start = min((line.series.times[0] for line in lines), default=0.0)
    times = sorted({at for line in lines for at in line.series.times})
    below = [0.0] * len(times)
    for line in lines:
        values = dict(zip(line.series.times, line.series.values, strict=True))
        heights = [factor * values.get(at, math.nan) for at in times]
        seconds = [at - start for at in times]
        if defaults["custom"]["stacking"]["mode"] == "normal":
            above = [low + (0.0 if math.isnan(height) else height) for low, height in zip(below, heights, strict=True)]
            axis.fill_between(seconds, below, above, label=line.name, alpha=0.6)
            below = above
        else:
            axis.plot(seconds, heights, label=line.name)
    axis.set_title(panel["title"])
    axis.set_xlabel("s")
    axis.set_ylabel(unit)
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])  # room for the legend
    axis.grid(alpha=0.3)
    if lines:
        axis.legend(fontsize="small", loc="upper left", framealpha=0.5)
