"""What a long prompt costs the streams that run beside it: their time between tokens, with and without one."""

from __future__ import annotations

import statistics
import time

import numpy as np

from tests.bench.groups import Context, Group, Samples
from tests.bench.results import Row
from tlserve.config import ServeConfig
from tlserve.engine.engine import Engine
from tlserve.engine.request import GenRequest, SamplingParams
from tlserve.loading import load, silent

PROMPT = 4_000
NUM_STREAMS = (1, 16)
NUM_STEPS = 40  # timed in each state
GREEDY = SamplingParams(temperature=0.0)


def measure(context: Context) -> Samples:
    config = ServeConfig.for_model(
        context.model, threads=context.threads, num_blocks=1024, max_num_seqs=20, prefix_cache="off"
    )
    loaded = load(config, silent)
    try:
        return {f"stall-{count}": _step_times(loaded.engine, count) for count in NUM_STREAMS}
    finally:
        loaded.close()


def _step_times(engine: Engine, num_streams: int) -> tuple[float, float]:
    """Median milliseconds of a step in which a prompt is read, and of one with the streams alone."""
    draw = np.random.default_rng(0)

    def request(num_tokens: int, max_tokens: int) -> GenRequest:
        return GenRequest(tuple(draw.integers(3, 40_000, num_tokens).tolist()), max_tokens, GREEDY)

    for _ in range(num_streams):
        engine.add_request(request(128, 4 * NUM_STEPS))
    while engine.stats().num_batch_tokens != num_streams:
        engine.step()
    alone = _median_step(engine)
    engine.add_request(request(PROMPT, 1))
    beside = _median_step(engine)
    engine.abort_all()
    return beside, alone


def _median_step(engine: Engine) -> float:
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


STALL = Group(
    tuple(
        Row(
            f"stall-{count}",
            f"a step of {count} stream{'s' if count > 1 else ''} while a prompt of {PROMPT:,} is read",
            "ms",
            "at most",
            2.5,
            theirs="the same step without it",
            digits=1,
        )
        for count in NUM_STREAMS
    ),
    measure,
    "tests/bench/stall.py",
    needs_peer=False,
)
