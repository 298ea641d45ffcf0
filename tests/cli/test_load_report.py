"""Figures from answers that are written down by hand."""

from __future__ import annotations

import pytest

from tlserve.cli.load_report import percentiles, summarise, table
from tlserve.cli.load_target import Answer


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.001], (1, 1, 1)),
        ([0.0, 0.1], (50, 90, 99)),
        ([n / 1000 for n in range(101)], (50, 90, 99)),
        ([0.003, 0.001, 0.002], (2, 2.8, 2.98)),
    ],
)
def test_percentiles_lie_between_neighbours_in_milliseconds(
    seconds: list[float], expected: tuple[float, float, float]
) -> None:
    assert percentiles(seconds) == dict(zip(("p50", "p90", "p99"), expected, strict=True))


def test_there_are_no_percentiles_of_nothing() -> None:
    assert percentiles([]) is None


def answer(start: float, *events: float, error: str | None = None) -> Answer:
    return Answer(
        start=start,
        end=events[-1] if events else start,
        events=list(events),
        prompt_tokens=10,
        completion_tokens=len(events),
        error=error,
    )


def test_a_summary_counts_complete_answers_over_the_whole_time() -> None:
    summary = summarise(
        [answer(0, 1, 2, 3), answer(1, 1.5, 4), answer(0.5, error="429"), answer(2, 3, error="timeout")]
    )
    assert (summary["num_requests"], summary["num_complete"]) == (4, 2)
    assert summary["errors"] == {"429": 1, "timeout": 1}
    assert (summary["seconds"], summary["completion_tokens"], summary["tokens_per_second"]) == (4, 5, 1.25)
    assert summary["ttft_ms"]["p50"] == 750  # of 1 s and 0.5 s
    assert summary["itl_ms"]["p50"] == 1000  # of 1, 1 and 2.5 s
    assert summary["latency_ms"]["p50"] == 3000


def test_a_run_without_a_request_has_a_summary_too() -> None:
    summary = summarise([])
    assert (summary["seconds"], summary["tokens_per_second"], summary["itl_ms"]) == (0, 0, None)
    assert "-" in table(summary)
