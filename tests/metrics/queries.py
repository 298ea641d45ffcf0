"""The queries that docs/deploy and docs/metrics.md give to people, one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD_FILE = DOCS / "deploy" / "grafana-dashboard.json"
ALERTS_FILE = DOCS / "deploy" / "prometheus-alerts.yaml"
PAGE = DOCS / "metrics.md"

DASHBOARD: dict[str, Any] = json.loads(DASHBOARD_FILE.read_text())
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS_FILE.read_text())["groups"] for rule in group["rules"]
]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

_COMPARISON = re.compile(r"\s(?:and(?: on \([^)]*\))?|[<>]=?|==)\s")


@dataclass(frozen=True)
class Query:
    source: str  # what shows it
    text: str
    legend: str = ""  # how Grafana names its series


def panel_queries(panel: dict[str, Any]) -> list[Query]:
    return [Query(panel["title"], target["expr"], target["legendFormat"]) for target in panel["targets"]]


def all_queries() -> Iterator[Query]:
    for panel in PANELS:
        yield from panel_queries(panel)
    for rule in ALERTS:
        yield Query(rule["alert"], rule["expr"])
    section = PAGE.read_text().split("## What to look at first")[1].split("\n## ")[0]
    for text in re.findall(r"^\|[^|]*\|\s*`([^`]*)`", section, re.MULTILINE):
        yield Query(PAGE.name, text)


def operands(query: Query) -> list[Query]:
    """What a query compares: the alert itself has no data while all is well, these always have."""
    parts = _COMPARISON.split(query.text)
    return [Query(query.source, part, query.legend) for part in parts if not re.fullmatch(r"\s*[\d.]+\s*", part)]
