"""``trio-tlserve perplexity`` against the sum that the naive model gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.reference import ReferenceModel
from tlserve.cli import perplexity
from tlserve.cli.perplexity import Estimate, cut, negative_log_likelihoods
from tlserve.errors import ConfigError
from tlserve.model.checkpoint import open_checkpoint

TINY = Path(__file__).parents[2] / "fixtures" / "tiny-llama"
CTX_SIZE = 160  # the scored half is longer than one step of scoring
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    return path


def reference(ids: list[int]) -> Estimate:
    """The definition: token after token, in double precision, the second half of each whole chunk."""
    model = ReferenceModel(open_checkpoint(TINY), dtype=np.float64)
    estimate = Estimate()
    for start in range(0, len(ids) - CTX_SIZE + 1, CTX_SIZE):
        chunk = ids[start : start + CTX_SIZE]
        logits = model.logits(chunk)
        for position in range(CTX_SIZE // 2, CTX_SIZE - 1):
            row = logits[position] - logits[position].max()
            estimate.add(np.array([math.log(np.exp(row).sum()) - row[chunk[position + 1]]]))
    return estimate


def test_it_agrees_with_the_naive_model(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-dir", str(TINY), "-c", str(CTX_SIZE), "--kv-dtype", "f32", "--threads", "1", str(text_file)]
    assert perplexity.main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    expected = reference(list(TEXT.encode()))  # its tokenizer's ids are the bytes
    assert (figures["chunks"], figures["num_tokens"]) == (len(TEXT) // CTX_SIZE, expected.count)
    assert figures["ppl"] == pytest.approx(expected.ppl, rel=1e-4)
    assert figures["error"] == pytest.approx(expected.error, rel=1e-3)


def test_the_last_line_is_that_of_llama_perplexity(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-dir", str(TINY), "-c", "64", "--chunks", "2", "--threads", "1", str(text_file)]
    assert perplexity.main(arguments) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("Final estimate: PPL = ")
    assert " +/- " in line


def test_chunks_are_whole_and_begin_with_bos_where_there_is_one() -> None:
    assert [chunk.tolist() for chunk in cut(range(11), 4, None)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [chunk.tolist() for chunk in cut(range(11), 4, 99)] == [[99, 1, 2, 3], [99, 5, 6, 7]]


def test_a_text_of_less_than_two_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 tokens, and a context of 4 needs 8"):
        cut(range(7), 4, None)


def test_a_text_too_short_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "load", lambda *arguments: pytest.fail("loaded"))
    (tmp_path / "text").write_text("short")
    with pytest.raises(ConfigError, match="a context of 512 needs 1024 or more"):
        perplexity.main(["--model-dir", str(TINY), str(tmp_path / "text")])


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt"):
        perplexity.main(["--model-dir", str(TINY), str(tmp_path / "none.txt")])


@pytest.mark.parametrize("size", ["3", "0", "7", "x"])
def test_a_context_that_has_no_middle_is_refused(size: str) -> None:
    with pytest.raises(SystemExit):
        perplexity.main(["--model-dir", str(TINY), "-c", size, "text.txt"])


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    estimate = Estimate()
    estimate.add(negative_log_likelihoods(np.full((5, 32), 7.0, np.float32), np.arange(5, dtype=np.int32)))
    assert estimate.ppl == pytest.approx(32)
    assert estimate.error == pytest.approx(0, abs=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e30, 0.0], [0.0, -1e30]], np.float32)
    assert negative_log_likelihoods(logits, np.zeros(2, np.int32)).tolist() == [0.0, 0.0]
