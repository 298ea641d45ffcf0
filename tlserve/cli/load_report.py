"""From answers to figures, and from figures to a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tlserve.cli.load_target import Answer

PERCENTILES = (50, 90, 99)


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds below which a share of the values lies, interpolated between neighbours; None without values."""
    if not seconds:
        return None
    values = np.percentile(np.array(seconds) * 1000, PERCENTILES)
    return {f"p{share}": round(float(value), 3) for share, value in zip(PERCENTILES, values, strict=True)}


def summarise(answers: Sequence[Answer]) -> dict[str, Any]:
    """The figures of a run, as --json prints them. Only complete answers count for anything but ``errors``."""
    complete = [answer for answer in answers if answer.error is None]
    spoken = [answer for answer in complete if answer.events]
    seconds = max(answer.end for answer in answers) - min(answer.start for answer in answers) if answers else 0.0
    completion_tokens = sum(answer.completion_tokens for answer in complete)
    num_events = sum(len(answer.events) for answer in complete)

    def rate(count: int) -> float:
        return round(count / seconds, 3) if seconds else 0.0

    return {
        "num_requests": len(answers),
        "num_complete": len(complete),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(answer.prompt_tokens for answer in complete),
        "completion_tokens": completion_tokens,
        "num_events": num_events,
        "tokens_per_second": rate(completion_tokens),
        "events_per_second": rate(num_events),
        "requests_per_second": rate(len(complete)),
        "ttft_ms": percentiles([answer.ttft for answer in spoken]),
        "itl_ms": percentiles([gap for answer in spoken for gap in answer.gaps]),
        "latency_ms": percentiles([answer.end - answer.start for answer in complete]),
    }


def table(summary: dict[str, Any]) -> str:
    """The same for people."""
    errors = "".join(f", {count} x {error}" for error, count in sorted(summary["errors"].items()))
    mean_prompt = summary["prompt_tokens"] / max(1, summary["num_complete"])
    lines = [
        f"requests       {summary['num_complete']} of {summary['num_requests']} complete{errors}",
        f"time           {summary['seconds']:.2f} s, {summary['requests_per_second']:.2f} requests/s",
        f"prompt         {summary['prompt_tokens']} tokens, {mean_prompt:.1f} a request",
        f"output         {summary['completion_tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s",
        "",
        "milliseconds                 p50        p90        p99",
    ]
    for title, key in (
        ("time to first token", "ttft_ms"),
        ("between tokens", "itl_ms"),
        ("whole answer", "latency_ms"),
    ):
        values = summary[key]
        cells = [f"{values[f'p{share}']:10.2f}" if values else f"{'-':>10}" for share in PERCENTILES]
        lines.append(f"{title:<20} " + " ".join(cells))
    return "\n".join(lines)
