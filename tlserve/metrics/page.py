"""Everything that one server measures, and the page that shows it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Histogram, Info, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tlserve.metrics.accept import preferred
from tlserve.metrics.engine import EngineMetrics, Stats
from tlserve.metrics.requests import RequestMetrics

# Seconds: the steps of a tiny model take a tenth of a millisecond, a long prompt on a large one takes many seconds.
STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

OPEN_METRICS = "application/openmetrics-text"


class Metrics:
    """The metrics of one server; nothing is shared between servers of a process but the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._step_duration = Histogram(
            "tl_engine_step_duration_seconds",
            "Time of one step of the engine.",
            buckets=STEP_SECONDS,
            registry=self._registry,
        )
        self.requests = RequestMetrics(self._registry)

    def observe_step(self, seconds: float) -> None:
        """Count a step of the engine."""
        self._step_duration.observe(seconds)

    def add_engine(self, stats: Callable[[], Stats], *, instruction_set: str, model: Mapping[str, str]) -> None:
        """Show an engine once it is loaded: its ``stats`` at each scrape, and what it is."""
        self._registry.register(EngineMetrics(stats))
        build = {
            "version": version("trio-tlserve"),
            "python": platform.python_version(),
            "instruction_set": instruction_set,
        }
        Info("tl_engine_build", "The program that serves.", registry=self._registry).info(build)
        Info("tl_engine_model", "The model that is served.", registry=self._registry).info(dict(model))

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its Content-Type: OpenMetrics with exemplars when ``accept`` asks for it, else plain text."""
        encode, content_type = choose_encoder(preferred(accept))
        is_open = content_type.startswith(OPEN_METRICS)
        return encode(self._registry if is_open else _WithoutCreated(self._registry)), content_type


class _WithoutCreated(Collector):
    """Leaves out when each series began: only OpenMetrics has a place for it, in text it would be one more gauge."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield metric
