"""``make bench-cache``: what a shared prefix saves, and that evicting a block costs the same in a large pool."""

from __future__ import annotations

import time

import numpy as np

from tests.bench.groups import Context, Group, Samples
from tests.bench.http_groups import load
from tests.bench.results import Row
from tests.bench.servers import our_server
from tlserve.engine.kv_cache import KvCache
from tlserve.engine.request import GenRequest, RequestId
from tlserve.engine.state import RequestState

SHARED = ("--requests", "20", "--shared-prefix", "1500", "--prompt-tokens", "1520", "--max-tokens", "8")
SMALL, LARGE = 1_000, 100_000  # blocks
PROMPT_BLOCKS = 64
BLOCK_SIZE = 16
NUM_TIMED = 200  # prompts


def measure(context: Context) -> Samples:
    return {
        "cache-ttft": (_ttft(context, "radix"), _ttft(context, "off")),
        "cache-evict": (eviction_microseconds(LARGE), eviction_microseconds(SMALL)),
    }


def _ttft(context: Context, prefix_cache: str) -> float:
    """Milliseconds, the median of 20 requests one after the other; the first of them fills the cache."""
    with our_server(context.model, threads=context.threads, num_blocks=512, prefix_cache=prefix_cache) as server:
        median: float = load(server, *SHARED)["ttft_ms"]["p50"]
        return median


def eviction_microseconds(num_blocks: int) -> float:
    """Time of an admission for each block that it evicts, in a pool full of other prompts."""
    cache = KvCache(
        num_blocks, BLOCK_SIZE, prefix_cache="radix", num_slots=1, max_model_len=(PROMPT_BLOCKS + 1) * BLOCK_SIZE
    )
    draw = np.random.default_rng(0)
    number = 0
    while cache.blocks.num_free >= PROMPT_BLOCKS:
        _use(cache, draw, number)
        number += 1
    before = cache.blocks.num_evictions
    seconds = sum(_use(cache, draw, number + extra) for extra in range(NUM_TIMED))
    return seconds * 1e6 / (cache.blocks.num_evictions - before)


def _use(cache: KvCache, draw: np.random.Generator, number: int) -> float:
    """Admit a prompt that nobody has asked before, compute it and let it go; seconds of the admission."""
    prompt = tuple(draw.integers(50_000, size=PROMPT_BLOCKS * BLOCK_SIZE).tolist())
    state = RequestState.new(RequestId(number), GenRequest(prompt=prompt, max_tokens=1))
    start = time.perf_counter()
    assert cache.admit(state, headroom=0)
    seconds = time.perf_counter() - start
    state.num_computed_tokens = state.num_tokens
    cache.publish(state)
    cache.release(state)
    return seconds


CACHE = Group(
    (
        Row(
            "cache-ttft",
            "20 requests with 1,500 tokens in common: time to first token, p50",
            "ms",
            "at most",
            0.1,
            theirs='prefix_cache = "off"',
            digits=1,
        ),
        Row(
            "cache-evict",
            "evicting a block of a pool of 100,000",
            "µs",
            theirs="of a pool of 1,000",
            digits=2,
        ),
    ),
    measure,
    f"trio-tlserve load --endpoint completions {' '.join(SHARED)}; tests/bench/cache.py",
    needs_peer=False,
)
