from __future__ import annotations

import numpy as np
import pytest

from tests.engine.harness import Driver, greedy
from tests.fakes import ScriptedModel
from tlserve.engine.pooling import pool_embedding
from tlserve.engine.request import GenRequest


def pooling(prompt: list[int], *, priority: int = 0) -> GenRequest:
    return GenRequest(tuple(prompt), 0, is_pooling=True, priority=priority)


def test_the_embedding_is_the_unit_mean() -> None:
    hidden = np.array([[1.0, 0.0], [3.0, 4.0], [2.0, 2.0]], np.float32)
    assert pool_embedding(hidden) == pytest.approx(np.array([2.0, 2.0]) / np.sqrt(8.0))
    assert pool_embedding(hidden).dtype == np.float32


def test_the_embedding_of_zeros_is_zeros() -> None:
    assert pool_embedding(np.zeros((2, 3), np.float32)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("prefill_chunk", [0, 1, 3, 7])
def test_the_engine_gives_the_bits_of_pool_embedding(prefill_chunk: int) -> None:
    driver = Driver(ScriptedModel(), prefill_chunk=prefill_chunk, prefix_cache="radix")
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [3]]
    driver.add(greedy(prompts[1], 20))
    ids = [driver.add(pooling(prompt)) for prompt in prompts]
    driver.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = pool_embedding(driver.model.hidden_of(prompt))
        assert driver.pooled[request_id].embedding.tobytes() == expected.tobytes()
        assert driver.pooled[request_id].num_cached_tokens == 0


def test_a_preempted_pooling_request_starts_its_sum_again() -> None:
    driver = Driver(ScriptedModel(num_blocks=10), prefill_chunk=2)
    driver.add(greedy([1] * 7, 24, priority=5))
    driver.step()
    request_id = driver.add(pooling([2] * 28))
    driver.run()
    assert driver.engine.stats().num_preemptions == 1
    expected = pool_embedding(driver.model.hidden_of([2] * 28))
    assert driver.pooled[request_id].embedding.tobytes() == expected.tobytes()
