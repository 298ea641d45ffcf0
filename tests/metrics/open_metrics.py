"""OpenMetrics to and from text by prometheus_client, whose functions for it have no types."""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics import exposition, parser


def write_open_metrics(registry: CollectorRegistry) -> bytes:
    return cast(bytes, exposition.generate_latest(registry))  # type: ignore[no-untyped-call]


def parse_open_metrics(page: bytes) -> list[Metric]:
    """Raises ValueError for anything that the format forbids."""
    return list(parser.text_string_to_metric_families(page.decode()))  # type: ignore[no-untyped-call]
