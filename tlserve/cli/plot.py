"""Pictures of measurements. matplotlib belongs to the [bench] extra and is only imported when one is wanted."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

from tlserve.cli.load_target import Answer


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="PNG", help="also draw the figures into this file; needs the [bench] extra")


def check_option(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the command before it has measured anything when it could not draw."""
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]' in the sources")


def plot_load(path: str, answers: Sequence[Answer]) -> None:
    """How time to first token and time between tokens are distributed, and tokens/s over the run."""
    complete = [answer for answer in answers if answer.error is None and answer.events]
    figure, (first, between, over_time) = _subplots(3)
    first.hist([answer.ttft * 1000 for answer in complete], bins=40)
    first.set(title="time to first token", xlabel="ms", ylabel="requests")
    between.hist([gap * 1000 for answer in complete for gap in answer.gaps], bins=80, log=True)
    between.set(title="between tokens", xlabel="ms", ylabel="events")
    start = min((answer.start for answer in complete), default=0.0)
    moments = [moment - start for answer in complete for moment in answer.events]
    over_time.hist(moments, bins=max(1, int(max(moments, default=1.0))), histtype="step")
    over_time.set(title="events with text", xlabel="seconds", ylabel="events in about a second")
    figure.savefig(path)


def plot_bench(path: str, tests: Sequence[dict[str, Any]], batches: Sequence[dict[str, Any]]) -> None:
    """Tokens/s of the single tests as bars, and of the batched ones over the number of streams."""
    figure, (single, batched) = _subplots(2)
    single.bar(
        [test["test"] for test in tests],
        [test["avg_ts"] for test in tests],
        yerr=[test["stddev_ts"] for test in tests],
    )
    single.set(title="one stream", ylabel="tokens/s")
    streams = [batch["pl"] for batch in batches]
    for key, label in (("speed_pp", "prompt"), ("speed_tg", "decode")):
        batched.plot(streams, [batch[key] for batch in batches], marker="o", label=label)
    batched.set(title="batched", xlabel="streams", ylabel="tokens/s")
    batched.legend()
    figure.savefig(path)


def _subplots(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot there is no backend to choose and no global state

    figure = Figure(figsize=(5 * count, 4), layout="constrained")
    return figure, figure.subplots(1, count)
