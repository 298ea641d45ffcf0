"""What the engine's stats look like to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Stats = Mapping[str, int]  # the engine's stats by the names of their fields


class EngineMetrics(Collector):
    """Reads one snapshot of the stats for each scrape, so that the figures of a page belong together."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        blocks = GaugeMetricFamily(
            "tl_engine_kv_blocks", "KV blocks by state; used ones are held by a live request.", labels=["state"]
        )
        blocks.add_metric(["free"], stats["num_blocks_free"])
        blocks.add_metric(["used"], stats["num_blocks_used"])
        blocks.add_metric(["cached"], stats["num_blocks_cached"])
        yield blocks
        yield GaugeMetricFamily("tl_engine_queue_depth", "Requests that wait to run.", stats["num_waiting"])
        yield GaugeMetricFamily("tl_engine_active_sequences", "Requests that run.", stats["num_running"])
        yield GaugeMetricFamily(
            "tl_engine_batch_tokens", "Tokens computed by the last step.", stats["num_batch_tokens"]
        )
        yield GaugeMetricFamily(
            "tl_engine_prefix_cache_hit_ratio",
            "Prompt tokens found in the prefix cache over prompt tokens asked for.",
            stats["prefix_tokens_hit"] / max(stats["prefix_tokens_asked"], 1),
        )
        yield _tokens(stats)
        for name, documentation, value in (
            ("preemptions", "Requests that gave their blocks back to resume later.", stats["num_preemptions"]),
            ("kv_evictions", "Cached KV blocks taken for another use.", stats["num_kv_evictions"]),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", stats["prefix_tokens_hit"]),
            ("prefix_cache_asked_tokens", "Prompt tokens looked up in the prefix cache.", stats["prefix_tokens_asked"]),
            ("spec_drafted_tokens", "Draft tokens proposed.", stats["spec_tokens_drafted"]),
            ("spec_accepted_tokens", "Draft tokens that the model drew itself.", stats["spec_tokens_accepted"]),
        ):
            yield CounterMetricFamily(f"tl_engine_{name}", documentation, value)


def _tokens(stats: Stats) -> Metric:
    """The kinds are disjoint, so that they can be added up: a prompt is what was computed and what was cached."""
    tokens = CounterMetricFamily(
        "tl_engine_tokens",
        "Tokens of prompts, computed or found in the prefix cache, and tokens generated.",
        labels=["kind"],
    )
    tokens.add_metric(["prompt_computed"], stats["num_prompt_tokens"] - stats["prefix_tokens_hit"])
    tokens.add_metric(["prompt_cached"], stats["prefix_tokens_hit"])
    tokens.add_metric(["generated"], stats["num_generated_tokens"])
    return tokens
