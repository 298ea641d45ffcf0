"""``python -m tests.metrics.cost``: what metrics cost the event loop, for a step, for a request, and for a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable

from tlserve.http.access import Outcome, RequestRecord
from tlserve.metrics.page import Metrics

ROUNDS = 7  # the best of which counts: what is measured is the work, not the machine's other work
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
SERVED = RequestRecord(
    server="api",
    request_id="0123456789abcdef",
    method="POST",
    route="/v1/chat/completions",
    status=200,
    duration=0.5,
    outcome=Outcome.COMPLETE,
    notes={
        "queue_seconds": 0.01,
        "first_token_seconds": 0.2,
        "token_seconds": 0.03,
        "prompt_tokens": 70,
        "completion_tokens": 90,
        "finish": "length",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    },
)


def microseconds(work: Callable[[], object], times: int) -> float:
    """Of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / times


def main() -> None:
    metrics = Metrics()
    for what, work, times in (
        ("a step", lambda: metrics.observe_step(0.004), 20_000),
        ("a request", lambda: metrics.requests.observe(SERVED), 2_000),
        ("a page of text", lambda: metrics.page(), 50),
        ("a page of OpenMetrics", lambda: metrics.page(OPEN_METRICS), 50),
    ):
        print(f"{what:<22} {microseconds(work, times):8.1f} microseconds")


if __name__ == "__main__":
    main()
