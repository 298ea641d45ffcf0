"""docs/metrics.yaml, and which metrics a text names that are not in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

LISTED: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parents[2] / "docs" / "metrics.yaml").read_text())
# The series of a histogram are named after it.
SERIES = {item["name"] for item in LISTED} | {
    f"{item['name']}_{part}" for item in LISTED if item["type"] == "histogram" for part in ("bucket", "sum", "count")
}


def unknown_metrics(text: str) -> set[str]:
    """What ``text`` calls by a metric's name and no server has."""
    return set(re.findall(r"\b(?:tl_engine|process)_[a-z_]+", text)) - SERIES
