"""The plan of the memory is what a loaded model takes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from tlserve.config import EngineConfig
from tlserve.errors import ConfigError
from tlserve.model.checkpoint import open_checkpoint
from tlserve.model.plan import plan_memory
from tlserve.model.runner import ModelRunner
from tlserve.model.weights import load_weights

FIXTURES = Path(__file__).parents[2] / "fixtures"
MIB = 1 << 20


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("weights", ["auto", "q4"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_it_has_the_bytes_of_the_arrays(
    name: str, weights: Literal["auto", "q4"], kv_dtype: Literal["f16", "f32"]
) -> None:
    checkpoint = open_checkpoint(FIXTURES / name)
    config = EngineConfig(num_blocks=5, threads=1, max_model_len=100, weights=weights, kv_dtype=kv_dtype)
    (plan,) = plan_memory((checkpoint, config))
    packed = load_weights(checkpoint, config.weights, plan.max_model_len, {"f16": 2, "f32": 4}[kv_dtype])
    assert packed.arena.nbytes + packed.cosines.nbytes + packed.sines.nbytes == plan.weights_bytes
    with closing(ModelRunner(checkpoint, config, plan, lambda what, done, total: None)) as runner:
        work = runner._work
        assert work.kv.nbytes == plan.kv_bytes
        assert sum(np.asarray(array).nbytes for array in work) - work.kv.nbytes == plan.buffers_bytes
    assert plan.total_bytes == plan.weights_bytes + plan.buffers_bytes + plan.kv_bytes


def test_a_model_and_its_draft_model_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same blocks, so each token costs what it takes in both caches."""
    monkeypatch.setattr("tlserve.model.plan.available_memory", lambda: 16 * MIB)
    models = [(open_checkpoint(FIXTURES / name), EngineConfig()) for name in ("tiny-llama", "tiny-qwen2")]
    plans = plan_memory(*models)
    assert plans[0].num_blocks == plans[1].num_blocks > 0
    fixed = sum(plan.weights_bytes + plan.buffers_bytes for plan in plans)
    taken = sum(plan.kv_bytes for plan in plans)
    assert taken <= (16 * MIB - fixed) // 2 < taken + sum(plan.block_bytes for plan in plans)


@pytest.mark.parametrize(
    ("available", "what"), [(100_000, "the weights need"), (MIB, "the weights and the buffers of a step need")]
)
def test_what_does_not_fit_is_named(available: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlserve.model.plan.available_memory", lambda: available)
    with pytest.raises(ConfigError, match=what):
        plan_memory((open_checkpoint(FIXTURES / "tiny-llama"), EngineConfig()))
