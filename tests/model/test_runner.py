"""The whole forward pass: against the plain reference, and its bits against itself however the work is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.model.containers import write_safetensors
from tests.model.gguf_models import random_weights
from tests.model.test_golden import GOLDEN, golden_checkpoint
from tests.reference import ReferenceModel
from tlserve.config import EngineConfig, SpeculativeConfig
from tlserve.errors import ConfigError
from tlserve.model.batch import Batch
from tlserve.model.checkpoint import Checkpoint, open_checkpoint
from tlserve.model.memory import available_memory, check_fits, num_kv_blocks
from tlserve.model.runner import Runner, load_runner

FIXTURES = Path(__file__).parents[2] / "fixtures"
FAMILIES = ["tiny-llama", "tiny-llama-bias", "tiny-qwen2", "tiny-qwen3"]
TOKENS: list[int] = GOLDEN["tokens"]
Floats = NDArray[np.float32]


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"num_blocks": 40, "threads": 1, "max_num_seqs": 8, "max_batch_tokens": 64} | changes)


def batch_of(
    pieces: Sequence[tuple[Sequence[int], int]], tables: Sequence[Sequence[int]], *, hidden: bool = False
) -> Batch:
    """A step over pieces (tokens, position of the first), one per request; every row's logits are wanted."""
    tokens = [token for piece, _ in pieces for token in piece]
    positions = [start + i for piece, start in pieces for i in range(len(piece))]
    rows = [row for row, (piece, _) in enumerate(pieces) for _ in piece]
    wanted = np.arange(len(tokens), dtype=np.int32)
    return Batch(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        request_rows=np.array(rows, np.int32),
        block_tables=np.array(tables, np.int32),
        logits_rows=wanted[:0] if hidden else wanted,
        hidden_rows=wanted if hidden else wanted[:0],
    )


def logits_in_steps(runner: Runner, tokens: Sequence[int], step: int, table: Sequence[int]) -> Floats:
    """Logits after each token of one request that is read ``step`` tokens at a time."""
    parts = []
    for start in range(0, len(tokens), step):
        piece = tokens[start : start + step]
        for first in range(0, len(piece), 8):  # logits rows are limited to one a request
            out = runner.forward(_only(batch_of([(piece, start)], [table]), first))
            parts.append(out.logits.copy())
    return np.concatenate(parts)


def _only(batch: Batch, first: int) -> Batch:
    """The same step, with logits of eight rows; computing a step again gives the same cache."""
    return Batch(
        batch.token_ids,
        batch.positions,
        batch.request_rows,
        batch.block_tables,
        batch.logits_rows[first : first + 8],
        batch.hidden_rows,
    )


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return open_checkpoint(FIXTURES / request.param)


Load = Callable[..., Runner]


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads runners that are closed at the end."""
    loaded: list[Runner] = []

    def load(checkpoint: Checkpoint, **changes: Any) -> Runner:
        loaded.append(load_runner(checkpoint, config(**changes)))
        return loaded[-1]

    yield load
    for runner in loaded:
        runner.close()


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_float_logits_are_the_references(case: str, tmp_path: Path, load: Load) -> None:
    """Every family and kind of rope, in f32 to 1e-4 of the largest logit."""
    checkpoint = golden_checkpoint(case, tmp_path)
    expected = ReferenceModel(checkpoint).logits(TOKENS)
    got = logits_in_steps(load(checkpoint, weights="f32", kv_dtype="f32"), TOKENS, 64, range(4))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


# Heads whose rows fill no whole tile alone, and sizes that no vector divides.
ODD_SHAPES = {
    "one head of keys": (4, 1, 24, 64, 96),
    "two heads to a tile and a half": (8, 2, 12, 96, 64),
    "tiny heads": (16, 1, 2, 64, 96),
    "nothing divides": (5, 5, 6, 30, 17),
}


def odd_checkpoint(directory: Path, shape: tuple[int, int, int, int, int]) -> Checkpoint:
    """``shape``: heads, heads of keys, head size, hidden size, intermediate size."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size")
    tiny = json.loads((FIXTURES / "tiny-llama" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(tiny | dict(zip(names, shape, strict=True))))
    config = open_checkpoint(FIXTURES / "tiny-llama").config
    num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size = shape
    config = replace(
        config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )
    write_safetensors(directory / "model.safetensors", random_weights(config, seed=1))
    return open_checkpoint(directory)


@pytest.mark.parametrize("shape", ODD_SHAPES.values(), ids=ODD_SHAPES)
def test_odd_shapes_have_the_references_logits_however_they_are_cut(
    shape: tuple[int, int, int, int, int], tmp_path: Path, load: Load
) -> None:
    checkpoint = odd_checkpoint(tmp_path, shape)
    expected = ReferenceModel(checkpoint).logits(TOKENS)
    got = logits_in_steps(load(checkpoint, weights="f32", kv_dtype="f32"), TOKENS, 64, range(4))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    for weights in ("f32", "q8"):
        one, many = load(checkpoint, weights=weights), load(checkpoint, weights=weights, threads=3)
        whole = logits_in_steps(one, TOKENS, 64, range(4))
        for step in (1, 7, 64):
            assert logits_in_steps(many, TOKENS, step, range(4, 8)).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("weights", "tolerance"), [("auto", 1e-4), ("q8", 0.2), ("q4", 0.9)])
def test_other_precisions_stay_near_the_reference(
    checkpoint: Checkpoint, weights: str, tolerance: float, load: Load
) -> None:
    """Float files keep their own precision and are computed in f32; the others lose what their bits lose."""
    expected = ReferenceModel(checkpoint).logits(TOKENS)
    got = logits_in_steps(load(checkpoint, weights=weights, kv_dtype="f32"), TOKENS, 64, range(4))
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
@pytest.mark.parametrize("step", [1, 7, 16])
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(
    checkpoint: Checkpoint, weights: str, step: int, load: Load
) -> None:
    runner = load(checkpoint, weights=weights)
    whole = logits_in_steps(runner, TOKENS, 64, range(4))
    assert logits_in_steps(runner, TOKENS, step, range(4, 8)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_bits_do_not_depend_on_batch_mates(checkpoint: Checkpoint, weights: str, load: Load) -> None:
    """A decode among prompts and other decodes gives what it gives alone."""
    runner = load(checkpoint, weights=weights)
    tables = [[5, 1], [2, 9], [0, 7], [8, 3]]
    alone = logits_in_steps(runner, TOKENS[:20], 20, tables[0])
    for row in (1, 3):
        runner.forward(batch_of([(TOKENS[row : row + 9], 0)], [tables[row]], hidden=True))
    mixed = [([3], 9), (TOKENS[:20], 0), (TOKENS[30:37], 0), ([4], 9)]
    order = [tables[1], tables[0], tables[2], tables[3]]
    out = runner.forward(_only(batch_of(mixed, order), 13))
    assert out.logits.tobytes() == alone[12:20].tobytes()


@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_bits_do_not_depend_on_threads(checkpoint: Checkpoint, weights: str, load: Load) -> None:
    one = logits_in_steps(load(checkpoint, weights=weights), TOKENS, 64, range(4))
    for threads in (2, 3):
        many = load(checkpoint, weights=weights, threads=threads)
        for _ in range(3):
            assert logits_in_steps(many, TOKENS, 64, range(4)).tobytes() == one.tobytes()


@pytest.mark.parametrize("block_size", [16, 32])
def test_bits_do_not_depend_on_which_blocks_hold_a_request(checkpoint: Checkpoint, block_size: int, load: Load) -> None:
    plain = logits_in_steps(load(checkpoint), TOKENS, 64, range(4))
    runner = load(checkpoint, block_size=block_size)
    assert logits_in_steps(runner, TOKENS, 64, [31, 7, 22, 11]).tobytes() == plain.tobytes()


def test_hidden_states_are_the_references(checkpoint: Checkpoint, load: Load) -> None:
    expected = ReferenceModel(checkpoint).hidden(TOKENS[:32])
    runner = load(checkpoint, weights="f32", kv_dtype="f32")
    out = runner.forward(batch_of([(TOKENS[:32], 0)], [range(2)], hidden=True))
    assert out.logits.shape == (0, runner.vocab_size)
    assert np.abs(out.hidden - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_step_larger_than_the_buffers_is_our_bug(load: Load) -> None:
    runner = load(open_checkpoint(FIXTURES / "tiny-llama"))
    with pytest.raises(AssertionError, match="max_batch_tokens"):
        runner.forward(batch_of([([1] * 65, 0)], [range(5)], hidden=True))
    with pytest.raises(AssertionError, match="logits rows"):
        runner.forward(batch_of([([1] * 9, 0)], [range(1)]))
    with pytest.raises(AssertionError, match="max_num_seqs"):
        runner.forward(batch_of([([1], 0)] * 9, [[0]] * 9, hidden=True))


def test_drafts_have_rows_of_their_own(load: Load) -> None:
    """With speculation a request may want logits of each draft and one more."""
    speculative = SpeculativeConfig(method="prompt_lookup", num_tokens=3)
    runner = load(open_checkpoint(FIXTURES / "tiny-llama"), speculative=speculative, max_num_seqs=2)
    assert runner.forward(batch_of([([1] * 8, 0)], [range(1)])).logits.shape == (8, 257)


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len = 4096: the model supports up to 2048"):
        load_runner(open_checkpoint(FIXTURES / "tiny-llama"), config(max_model_len=4096))


def test_fingerprint_names_whatever_changes_the_numbers(load: Load) -> None:
    llama, qwen = open_checkpoint(FIXTURES / "tiny-llama"), open_checkpoint(FIXTURES / "tiny-qwen2")
    prints = [
        load(llama).fingerprint,
        load(llama, weights="q8").fingerprint,
        load(llama, kv_dtype="f32").fingerprint,
        load(qwen).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert load(llama, threads=2, num_blocks=7).fingerprint == prints[0]


def test_loading_reports_its_progress() -> None:
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(FIXTURES / "tiny-llama")
    with closing(load_runner(checkpoint, config(), lambda *report: seen.append(report))):
        stages = list(dict.fromkeys(what for what, _, _ in seen))
    assert stages == ["kernels", "weights"]
    for stage in stages:
        reports = [(done, total) for what, done, total in seen if what == stage]
        assert reports == sorted(reports)
        assert reports[-1][0] == reports[-1][1] > 0


def test_bigram_gives_the_rows_of_its_table(load: Load) -> None:
    checkpoint = open_checkpoint(FIXTURES / "succ")
    runner = load(checkpoint)
    expected = ReferenceModel(checkpoint).logits([5, 7, 2])
    assert runner.forward(batch_of([([5, 7, 2], 0)], [[0]])).logits.tobytes() == expected.tobytes()
    assert runner.forward(batch_of([([5, 7, 2], 0)], [[0]], hidden=True)).hidden.tobytes() == expected.tobytes()
    assert runner.hidden_size == runner.vocab_size


def blocks(available: int, **changes: Any) -> int:
    return num_kv_blocks(
        EngineConfig(**changes), block_bytes=1 << 20, max_model_len=160, available=available * (1 << 20)
    )


def test_cache_holds_every_request_at_full_length_where_memory_allows() -> None:
    assert blocks(10_000, max_num_seqs=4) == 40
    assert blocks(60, max_num_seqs=4) == 30  # half of what is free


def test_configured_cache_size_is_kept() -> None:
    assert blocks(1000, num_blocks=7) == 7
    assert blocks(1000, kv_cache_mb=9) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 20}, r"num_blocks = 20: needs 20\.0 MiB of memory, and 10\.0 MiB are free"),
        ({"kv_cache_mb": 20}, r"kv_cache_mb = 20: needs 20\.0 MiB of memory, and 10\.0 MiB are free"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_with_the_sizes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blocks(10, **changes)


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one KV block takes 1\.0 MiB"):
        blocks(1)


def test_weights_that_do_not_fit_are_refused_with_the_sizes() -> None:
    check_fits("the weights", 1)
    with pytest.raises(ConfigError, match=r"the weights need 1048576\.0 MiB of memory, and .* MiB are free"):
        check_fits("the weights", 1 << 40)


def test_some_memory_is_available() -> None:
    assert available_memory() > 1 << 20
