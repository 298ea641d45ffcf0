"""Scripted bigrams say their scripts, border by border, through the tokenizer that comes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from tests.model.scripted import write_scripted
from tests.reference import ReferenceModel
from tlserve.model.checkpoint import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"


def spoken(directory: Path, prompt: str, num_tokens: int) -> list[str]:
    """The tokens after the prompt's last one, each as its spelling in the vocabulary."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = ReferenceModel(open_checkpoint(directory)).greedy(tokenizer.encode(prompt).ids, num_tokens)
    return [str(tokenizer.id_to_token(token)) for token in tokens]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("P", ["sky", "?", "<eos>"]),
        ("Q", ["DEF", "GH", "<eos>"]),
        ("S", ["a", "b", "<stop>", "c", "d", "<eos>"]),
        ("W", ["ĠIt", "Ġwas", "Ġthe", "Ġbest", "Ġof", "Ġtimes", ",", "<eos>"]),
        ("L", ["loop", "loop", "loop"]),
        ("no script: $", ["<eos>"]),
    ],
)
def test_the_committed_scripts(prompt: str, tokens: list[str]) -> None:
    assert spoken(FIXTURES / "scripted", prompt, len(tokens)) == tokens


def test_bytes_of_characters_are_tokens_of_their_own() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(FIXTURES / "scripted" / "tokenizer.json"))
    model = ReferenceModel(open_checkpoint(FIXTURES / "scripted"))
    tokens = model.greedy(tokenizer.encode("U").ids, 12)
    assert tokens == [*"😀ď漢é".encode(), open_checkpoint(FIXTURES / "scripted").config.vocab_size - 1]
    assert tokenizer.decode(tokens) == "😀ď漢é"


def test_a_test_may_write_its_own(tmp_path: Path) -> None:
    ids = write_scripted(tmp_path, [["A", "hello", " wörld"]])
    assert spoken(tmp_path, "A", 3) == ["hello", "ĠwÃ¶rld", "<eos>"]
    assert open_checkpoint(tmp_path).config.eos_token_ids == {max(ids.values()) + 1}


def test_a_token_with_two_successors_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="b'x' has two successors"):
        write_scripted(tmp_path, [["A", "x", "y"], ["B", "x", "z"]])
