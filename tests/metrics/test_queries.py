"""Dashboard and alerts ask for what is there. ``make metrics`` asks a real Prometheus as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.listed import LISTED, unknown_metrics
from tests.metrics.queries import ALERTS, DASHBOARD, DOCS, PANELS, Query, all_queries, operands

QUERIES = list(all_queries())
FILES = [path for path in sorted((DOCS / "deploy").rglob("*")) if path.is_file()]
# Labels that Prometheus adds, and the one of buckets.
OF_PROMETHEUS = {"job", "instance", "le"}


def matchers(text: str) -> list[tuple[str, str, str]]:
    """(series, label, value) of each matcher of a query, alternatives one by one."""
    return [
        (series, label, value)
        for series, inside in re.findall(r"(\w+)\{([^}]*)\}", text)
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', inside)
        for value in values.split("|")
    ]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.source)
def test_every_metric_of_a_query_exists(query: Query) -> None:
    assert unknown_metrics(query.text) == set()
    assert re.search(r"\b(tl_engine|process|up)", query.text)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.source)
def test_every_label_of_a_query_exists(query: Query) -> None:
    labels: dict[str, dict[str, Any]] = {item["name"]: item.get("labels", {}) for item in LISTED}
    for series, label, value in matchers(query.text):
        if label not in OF_PROMETHEUS:
            listed = labels[series][label]
            assert not isinstance(listed, list) or value in listed, f"{series} has no {label} {value}"
    known = OF_PROMETHEUS.union(*labels.values())
    grouped = {name for names in re.findall(r"(?:by|on) \(([^)]*)\)", query.text) for name in re.findall(r"\w+", names)}
    assert grouped <= known
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_metric_of_a_deployment_file_exists(path: Path) -> None:
    assert unknown_metrics(path.read_text()) == set()


def test_the_dashboard_can_be_imported_next_to_any_data_source() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    used = [item["datasource"] for panel in PANELS for item in [panel, *panel["targets"]]]
    assert {source["uid"] for source in used} == {"${datasource}"}
    assert all('instance=~"$instance"' in query["expr"] for panel in PANELS for query in panel["targets"])


def test_no_two_panels_share_a_place_or_an_id() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
    # Either it has to last, or its expression looks back over a time itself and one case is enough.
    assert "for" in rule or re.search(r"(increase|changes)\(", rule["expr"])


def test_the_operands_of_a_comparison_are_what_it_compares() -> None:
    query = Query("", "sum(rate(a[5m])) / b > 0.8 and on (job, instance) c")
    assert [operand.text for operand in operands(query)] == ["sum(rate(a[5m])) / b", "c"]
    assert [operand.text for operand in operands(Query("", "a > 0 and rate(b[2m]) == 0"))] == ["a", "rate(b[2m])"]
