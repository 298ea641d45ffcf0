"""``make bench-spec``: prompt lookup on text that repeats its prompt, and on text that does not."""

from __future__ import annotations

import time
from typing import Any

from tests.bench.groups import Context, Group, Samples
from tests.bench.results import Row
from tlserve.cli.load_prompts import Prompts
from tlserve.config import ServeConfig
from tlserve.engine.request import GenRequest, SamplingParams
from tlserve.loading import Loaded, load, silent

NUM_PROMPTS = 4
NUM_GENERATED = 256
LOOKUP = {"method": "prompt_lookup"}
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)


def measure(context: Context) -> Samples:
    keys: dict[str, Any] = {"threads": context.threads, "num_blocks": 256, "max_num_seqs": 4}
    plain = load(ServeConfig.for_model(context.model, **keys), silent)
    without = _rates(plain)
    lookup = load(ServeConfig.for_model(context.model, speculative=LOOKUP, **keys), silent)
    with_lookup = _rates(lookup)
    return {
        "spec-repeating": (with_lookup[0], without[0]),
        "spec-other": (with_lookup[1], without[1]),
    }


def _rates(loaded: Loaded) -> tuple[float, float]:
    """Decoded tokens/s, one stream at a time: of a passage that the prompt holds three times, and of random text."""
    try:
        # A small model that has read a passage three times goes on to repeat it.
        repeating = [(Prompts(seed, 48).text(0) + ". ") * 3 for seed in range(NUM_PROMPTS)]
        other = [Prompts(seed, 96).text(0) for seed in range(NUM_PROMPTS)]
        _rate(loaded, repeating[:1], GREEDY)  # warms up
        return _rate(loaded, repeating, GREEDY), _rate(loaded, other, SAMPLED)
    finally:
        loaded.close()


def _rate(loaded: Loaded, prompts: list[str], params: SamplingParams) -> float:
    seconds = 0.0
    num_tokens = 0
    for seed, prompt in enumerate(prompts):
        ids = loaded.chat_encoder.tokenizer.encode(prompt, add_special_tokens=True)
        request = GenRequest(prompt=tuple(ids), max_tokens=NUM_GENERATED, params=params, seed=seed)
        loaded.engine.add_request(request)
        while not loaded.engine.step():
            pass  # the prompt and its first token are not what is measured
        start = time.perf_counter()
        while loaded.engine.has_work():
            num_tokens += len(loaded.engine.step())
        seconds += time.perf_counter() - start
    return num_tokens / seconds


SPEC = Group(
    (
        Row(
            "spec-repeating",
            "prompt lookup, text that repeats its prompt",
            "tokens/s",
            "at least",
            1.5,
            theirs="without speculation",
        ),
        Row(
            "spec-other",
            "prompt lookup, random text",
            "tokens/s",
            "at least",
            0.97,
            theirs="without speculation",
        ),
    ),
    measure,
    "tests/bench/spec.py",
    needs_peer=False,
)
