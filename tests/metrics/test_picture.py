"""The picture of the panels, drawn wherever the tests run; what it shows is for people to judge."""

from __future__ import annotations

import math
from pathlib import Path

from tests.metrics.picture import Line, draw
from tests.metrics.prometheus import Series
from tests.metrics.queries import PANELS


def test_each_panel_of_the_dashboard_can_be_drawn(tmp_path: Path) -> None:
    """Also where a series begins later than another, has gaps, or there is none."""
    times = [100.0 + second for second in range(5)]
    lines = [
        Line("all", Series({}, times, [1.0, 2.0, math.nan, 3.0, 4.0])),
        Line("late", Series({}, times[2:], [5.0, 6.0, 7.0])),
    ]
    panels = [panel for panel in PANELS if panel["type"] == "timeseries"]
    draw("panels", [(panel, lines[: number % 3]) for number, panel in enumerate(panels)], tmp_path / "panels.png")
    assert (tmp_path / "panels.png").read_bytes().startswith(b"\x89PNG")


def test_a_legend_is_filled_in_as_grafana_does() -> None:
    series = Series({"state": "free", "instance": "a:1"}, [0.0], [1.0])
    assert [Line.of(legend, series).name for legend in ("{{state}}", "open, {{instance}}", "p50", "{{none}}")] == [
        "free",
        "open, a:1",
        "p50",
        "",
    ]
